"""Offloading: a block's parameters are on the host or on disk, and on the device only while it computes.

Note [Freed memory]
~~~~~~~~~~~~~~~~~~~
glibc keeps blocks that were freed, up to 32 MiB each, for the next request. With a fixed threshold every larger
block is a mapping of its own, which goes back to the system when its tensor dies: the peak of the process falls by
6 to 20%, for a few page faults (`memory/process.py` has the measurement of it).

The threshold is the process's, so it is fixed while at least one wrapped model trains on the CPU, and set back to
what glibc starts with when the last is detached or dropped. Only its growth by itself, as large blocks are freed, ends
for good. Where the user has set it in the environment, it is left alone; other C libraries have no such thing.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from memscale._torch import FakeTensor
from memscale._util.interrupts import LateLock
from memscale.checkpointing.technique import SlicesStage
from memscale.execution_plan import StepTime, Tier
from memscale.memory.process import fix_malloc_threshold, restore_malloc_threshold
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


class LayerOffloading:
    """The technique ``"offloading"``."""

    name = "offloading"

    def options(self, block: BlockProfile, terms: CostTerms) -> Iterable[BlockOption]:
        """Yield what keeping a block's activations, and what keeping its parameters, off the device costs.

        With its parameters go gradients and optimizer state. Parameters are copied to the device twice, gradients back
        once, and the optimizer steps the masters. With prefetching, copies go both ways at once, and what takes no
        longer than the computation beside them is hidden. One option is for a block that is not recomputed, one for a
        block that is: that covers transfers, too.
        """
        if not terms.config.enable_offloading:
            return
        if block.large_saved_bytes and not block.has_own_checkpointing:
            yield from _kept_activations(block, terms)
        if not block.used_bytes:
            return
        rates, share = terms.rates, terms.working_share
        latency = rates.latency * max(1, block.parameter_count)
        fetch = _fetch_seconds(block, terms)
        gradients = share * block.gradient_bytes / terms.link[1] + latency
        on_device = rates.optimizer(block.gradient_bytes)
        on_host = terms.step_offloaded(block.gradient_bytes, block.optimizer_bytes, block.parameter_count)
        # Of the copies' time, what does not depend on their sizes.
        fixed = latency * (2 if terms.prefetch else 2 * max(1, block.calls) + 1)
        is_early = terms.steps_early(block, offloaded=True)
        for recomputed in (False, True):
            forward, backward = fetch, fetch + gradients
            cover = rates.backward(block) + rates.forward(block) * recomputed
            if terms.prefetch:
                forward = max(latency, fetch - rates.forward(block))
                backward = max(latency, max(fetch, gradients) - cover)
            time = StepTime(transfers=forward + backward - fixed, overhead=HOOK_SECONDS + fixed)
            if is_early:
                time += StepTime(transfers=terms.exposed_early(block, cover - max(fetch, gradients)))
            else:
                device_step, host_step = -on_device, max(on_host, on_device)
                time += StepTime(
                    device_step=device_step / terms.accumulated, host_step=host_step / terms.accumulated
                )
            yield BlockOption("offloading", time, target="parameters", reruns_forward=recomputed)

    def unsupported_reason(self, site: LayerSite) -> str | None:
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


def _fetch_seconds(block: BlockProfile, terms: CostTerms) -> float:
    """Return the seconds of copying a block's parameters to the device once for each of its calls."""
    latency = terms.rates.latency * max(1, block.parameter_count)
    return (terms.working_share * block.used_bytes / terms.link[0] + latency) * max(1, block.calls)


def _kept_activations(block: BlockProfile, terms: CostTerms) -> Iterator[BlockOption]:
    """Yield what offloading all that a block saves costs: with its parameters on the device, and with them offloaded.

    Its input is among it. In backward, activations and parameters come the same way, one after the other.
    """
    nbytes = block.large_saved_bytes
    for parameters_offloaded in (False, True):
        taken = _fetch_seconds(block, terms) if parameters_offloaded else 0.0
        time = activation_time(
            nbytes + block.boundary_bytes,
            terms,
            (terms.rates.forward(block), max(0.0, terms.rates.backward(block) - taken)),
            count=block.large_saved_count + 1,
        )
        yield BlockOption(
            "offloading",
            time + StepTime(overhead=HOOK_SECONDS),
            held_bytes=block.saved_bytes - nbytes,
            returned_bytes=nbytes // max(1, block.calls),
        )


def activation_time(
    nbytes: int, terms: CostTerms, cover: tuple[float, float] = (0.0, 0.0), count: int = 1
) -> StepTime:
    """Return the time of copying `count` activations to their tier and back.

    With prefetching, less `cover`: the time of the computation beside each of the two.
    """
    h2d, d2h = terms.link
    in_forward, in_backward = cover if terms.prefetch else (0.0, 0.0)
    exposed = max(0.0, nbytes / d2h - in_forward) + max(0.0, nbytes / h2d - in_backward)
    return StepTime(transfers=exposed, overhead=2 * terms.rates.latency * count)


class Transfers:
    """Offloads what layers save for backward, where the plan says so; and prefetches what they will need.

    It is attached around the recomputation of blocks: what that keeps, the inputs, is what is offloaded.
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
            store = site.placement.store if tier == "disk" else None
            room = _room_on_host(site) if tier == "host" else None
            tiers[tier] = Activations(
                engine, site.device, store=store, capacity=room, logs=site.logs, meter=site.meter
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
    """Return what the host has for activations beside parameters, gradients and state; None if it is simulated."""
    simulated = any(isinstance(each, FakeTensor) for each in site.model.parameters())
    if simulated and site.placement.host_capacity is None:
        return None
    masters = site.placement.host_masters()
    trained = [each for each in masters if each.requires_grad]
    optimizer = site.plan.optimizer
    eight_bit = optimizer is not None and optimizer.eight_bit
    moments = 0.5 if eight_bit else 2.0  # bytes of Adam's state for each byte of a parameter
    state = 0
    if optimizer is None or optimizer.state != "disk":
        there = {id(each) for each in trained} | ids_with_state_on_host(site.model, site.plan)
        parameters = (each for each in site.model.parameters() if each.requires_grad)
        state = sum(each.nbytes for each in parameters if id(each) in there)
    taken = sum(each.nbytes for each in (*masters, *trained)) + int(moments * state)
    return max(0, site.placement.host_room() - taken)


# ---------------------------------------------------------------------- freed memory

THRESHOLD = 2**20  # as good as 64 KiB, with fewer page faults

_holders = 0  # models that have it now


class FreedMemory:
    """Has freed tensors return to the system while a plan is on a model that trains on the CPU."""

    def attach(self, site: ModelSite, log: UndoLog) -> None:
        plan = site.plan
        whole = [each for each in (plan.optimizer, plan.loss, plan.precision) if each is not None]
        does_anything = bool(whole) or any(layer.techniques for layer in plan.layers)
        simulated = any(isinstance(each, FakeTensor) for each in site.model.parameters())
        if site.device.type == "cpu" and does_anything and not simulated:
            log.add(_Held())


class _Held:
    """One model's share in the fixed threshold, until it is undone or dropped."""

    def __init__(self) -> None:
        _counting.submit(1)
        self.undo = weakref.finalize(self, _counting.submit, -1)
        self.undo.atexit = False


def _count(change: int) -> None:
    global _holders
    before, _holders = _holders, _holders + change
    set_by_user = "MALLOC_MMAP_THRESHOLD_" in os.environ
    set_by_user |= "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if not set_by_user and _holders and not before:
        fix_malloc_threshold(THRESHOLD)
    elif not set_by_user and before and not _holders:
        restore_malloc_threshold()


_counting: LateLock[int] = LateLock(_count)  # models are dropped in finalizers, too
