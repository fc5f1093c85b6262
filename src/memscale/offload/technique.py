"""Offloading: a block's parameters are on the host or on disk, and on the device only while it computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from memscale.checkpointing.technique import SlicesStage
from memscale.execution_plan import Tier
from memscale.offload.activations import Activations, OffloadActivationsStage
from memscale.offload.layer import OffloadedLayer
from memscale.offload.prefetch import Prefetcher
from memscale.optimizer.placement import ids_with_state_on_host
from memscale.profiler.profile import BlockProfile
from memscale.techniques.base import LayerSite, ModelSite
from memscale.techniques.cost import HOOK_SECONDS, BlockOption, CostTerms
from memscale.techniques.forward import override_of
from memscale.tiers.engine import Engine, async_settings

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

__all__ = ["Offloading", "Transfers", "activation_seconds"]


class Offloading:
    """The technique ``"offloading"``."""

    name = "offloading"

    def options(self, block: BlockProfile, terms: CostTerms) -> Iterable[BlockOption]:
        """Yield what keeping a block's parameters, gradients and optimizer state off the device costs.

        Its parameters are copied to the device twice (forward and backward), its gradients back once, and the
        optimizer steps the masters. With prefetching, copies go both ways at once, and only that remains which takes
        longer than the computation beside it. One option is for a block that is not recomputed, one for a block that
        is: recomputation covers transfers as well.
        """
        if not terms.config.enable_offloading or not block.used_bytes:
            return
        rates, share, calls = terms.rates, terms.working_share, max(1, block.calls)
        latency = rates.latency * max(1, block.parameter_count)
        h2d, d2h = terms.link
        fetch = (share * block.used_bytes / h2d + latency) * calls
        gradients = share * block.gradient_bytes / d2h + latency
        stepping = rates.optimizer_below(block.gradient_bytes, fused=terms.config.fused_host_step)
        stepping -= rates.optimizer(block.gradient_bytes)
        for recomputed in (False, True):
            forward, backward = fetch, fetch + gradients
            if terms.prefetch:
                cover = rates.backward(block) + rates.forward(block) * recomputed
                forward = max(latency, fetch - rates.forward(block))
                backward = max(latency, max(fetch, gradients) - cover)
            seconds = HOOK_SECONDS + forward + backward + max(0.0, stepping)
            yield BlockOption("offloading", seconds, target="parameters", reruns_forward=recomputed)

    def unsupported_reason(self, site: LayerSite) -> str | None:
        if any(isinstance(module, torch.jit.ScriptModule) for module in site.modules):
            return "it is a scripted module, whose forward cannot be replaced"
        inner = (each for module in site.modules for each in module.modules())
        if _tier_of(site) != "device" and any(isinstance(each, nn.RNNBase) for each in inner):
            return (
                "its recurrent layers keep their weights in one buffer of their own, which must not be moved"
            )
        return None

    def attach(self, site: LayerSite, log: UndoLog) -> None:
        tier = _tier_of(site)
        if tier == "device" or (tier == "host" and site.device.type == "cpu"):
            return  # only what it saves is offloaded, by `Transfers`
        recomputed = "checkpointing" in site.layer.techniques
        for name, module in zip(site.layer.members, site.modules, strict=True):
            layer = OffloadedLayer(module, site.placement, site.device, site.meter, recomputed=recomputed)
            log.add_stage(module, layer, name=name)


def _tier_of(site: LayerSite) -> Tier:
    return "host" if site.layer.offloading is None else site.layer.offloading.to


def activation_seconds(nbytes: int, terms: CostTerms, cover: float = 0.0) -> float:
    """Return the time of copying activations to their tier and back.

    With prefetching, what takes no longer than `cover` seconds each way is hidden.
    """
    h2d, d2h = terms.link
    hidden = cover if terms.prefetch else 0.0
    return max(0.0, nbytes / d2h - hidden) + max(0.0, nbytes / h2d - hidden) + 2 * terms.rates.latency


class Transfers:
    """Offloads what layers save for backward, where the plan says so; and prefetches what they will need.

    It is attached after all blocks have theirs, and so around their recomputation: what that keeps, the inputs, is
    what is offloaded.
    """

    def attach(self, site: ModelSite, log: UndoLog) -> None:
        engine = Engine(async_settings(site.plan, site.config), site.placement.pinned)
        if engine.is_async and site.device.type != "cpu":
            _attach_prefetcher(site, log, engine)
        _attach_activations(site, log, engine)


def _attach_prefetcher(site: ModelSite, log: UndoLog, engine: Engine) -> None:
    offloaded = {id(module): stage for module, stage in log.stages() if isinstance(stage, OffloadedLayer)}
    if not offloaded:
        return
    segments: list[list[OffloadedLayer]] = []  # what backward runs again as one
    for layer in site.plan.layers:
        modules = (site.model.get_submodule(name) for name in layer.members)
        members = [offloaded[id(module)] for module in modules if id(module) in offloaded]
        chained = layer.checkpointing is not None and layer.checkpointing.chained
        if "checkpointing" not in layer.techniques:
            segments += [[member] for member in members]
        elif chained and segments:
            segments[-1] += members
        else:
            segments.append(members)
    in_forward = [each for segment in segments for each in segment]
    in_backward = [each for segment in reversed(segments) for each in segment]
    prefetcher = Prefetcher(engine, site.device, in_forward, in_backward)
    log.add(prefetcher)
    for each in in_forward:
        each.prefetcher = prefetcher
    log.add_forward_pre_hook(site.model, prefetcher.before_forward)
    log.add_forward_hook(site.model, prefetcher.after_forward)


def _attach_activations(site: ModelSite, log: UndoLog, engine: Engine) -> None:
    tiers: dict[Tier, Activations] = {}
    for layer in site.plan.layers:
        if layer.offloading is None or not layer.offloading.activations:
            continue
        tier: Tier = "disk" if site.device.type == "cpu" or layer.offloading.to == "disk" else "host"
        if tier not in tiers:
            store, capacity = (site.placement.store, None) if tier == "disk" else (None, _room_on_host(site))
            tiers[tier] = Activations(
                engine, site.device, store=store, capacity=capacity, logs=site.logs, meter=site.meter
            )
        names: Sequence[str] = layer.members
        container = names[0].rpartition(".")[0]
        override = override_of(site.model.get_submodule(container))
        is_sliced = override is not None and override.find(SlicesStage) is not None
        if len(names) > 1 and is_sliced and "checkpointing" in layer.techniques:
            names = [container]  # its slices are run, and recomputed, by the container
        for name in names:
            module = site.model.get_submodule(name)
            override = override_of(module)
            if override is None or override.find(OffloadActivationsStage) is None:
                log.add_stage(module, OffloadActivationsStage(tiers[tier]), name=name)


def _room_on_host(site: ModelSite) -> int | None:
    """Return what ``max_cpu_offload_gb`` leaves for activations beside parameters, gradients and state."""
    cap = None if site.config is None else site.config.max_cpu_offload_bytes
    if cap is None:
        return None
    on_disk = {id(parameter) for parameter in site.placement.on_disk}
    parameters = list(site.model.parameters())
    masters = [each for each in parameters if each.device.type == "cpu" and id(each) not in on_disk]
    trained = [each for each in masters if each.requires_grad]
    optimizer = site.plan.optimizer
    eight_bit = optimizer is not None and optimizer.eight_bit
    moments = 0.5 if eight_bit else 2.0  # bytes of Adam's state for each byte of a parameter
    state = 0
    if optimizer is None or optimizer.state != "disk":
        there = {id(each) for each in trained} | ids_with_state_on_host(site.model, site.plan)
        state = sum(each.nbytes for each in parameters if each.requires_grad and id(each) in there)
    taken = sum(each.nbytes for each in (*masters, *trained)) + int(moments * state)
    return max(0, cap - taken)
