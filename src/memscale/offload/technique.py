"""Offloading: a block's parameters live on the host or on disk, and are on the device only while it computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memscale._util.trees import Tree
from memscale.checkpointing.technique import SlicesStage
from memscale.execution_plan import LayerPlan, Tier
from memscale.offload.activations import Activations, OffloadActivationsStage
from memscale.offload.cost import offload_options
from memscale.offload.fetch import FetchStage
from memscale.offload.mapped import MappedStage
from memscale.offload.prefetch import Prefetcher
from memscale.profiler.profile import BlockProfile
from memscale.techniques.base import LayerSite, ModelSite
from memscale.techniques.cost import BlockOption, CostTerms
from memscale.techniques.forward import override_of
from memscale.tiers.engine import Engine, async_settings

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

__all__ = ["Offloading", "Transfers"]


class Offloading:
    """The technique ``"offloading"``."""

    name = "offloading"

    def options(self, block: BlockProfile, terms: CostTerms) -> Iterable[BlockOption]:
        return offload_options(block, terms)

    def unsupported_reason(self, site: LayerSite) -> str | None:
        if any(isinstance(module, torch.jit.ScriptModule) for module in site.modules):
            return "it is a scripted module, whose forward cannot be replaced"
        inner = (each for module in site.modules for each in module.modules())
        if _home_of(site) != "device" and any(isinstance(each, nn.RNNBase) for each in inner):
            return (
                "its recurrent layers keep their weights in one buffer of their own, which must not be moved"
            )
        return None

    def attach(self, site: LayerSite, log: UndoLog) -> None:
        recomputed = "checkpointing" in site.layer.techniques
        home = _home_of(site)
        if home == "device":
            return  # only what it saves is offloaded, by `Transfers`
        for name, module in zip(site.layer.members, site.modules, strict=True):
            if site.device.type != "cpu":
                fetch = FetchStage(module, site.device, site.meter, recomputed=recomputed)
                log.add_stage(module, fetch, name=name)
            if home == "disk":
                log.add_stage(module, MappedStage(site.homes.mapped, recomputed=recomputed), name=name)


def _home_of(site: LayerSite) -> Tier:
    return "host" if site.layer.offloading is None else site.layer.offloading.to


class Transfers:
    """Offloads what layers save for backward, where the plan says so; and prefetches what they will need.

    It goes on after all blocks have theirs, and so around their recomputation: what that keeps, the inputs, is what
    goes down.
    """

    def attach(self, site: ModelSite, log: UndoLog) -> None:
        engine = Engine(async_settings(site.plan, site.config))
        if engine.is_async:
            _attach_prefetcher(site, log, engine)
        _attach_activations(site, log, engine)


# ---------------------------------------------------------------------- parameters


def _attach_prefetcher(site: ModelSite, log: UndoLog, engine: Engine) -> None:
    streamed = {id(module): stage for module, stage in log.stages() if isinstance(stage, FetchStage)}
    if not streamed:
        return
    segments: list[list[FetchStage]] = []  # what backward runs again as one
    for layer in site.plan.layers:
        modules = (site.model.get_submodule(name) for name in layer.members)
        members = [streamed[id(module)] for module in modules if id(module) in streamed]
        chained = layer.checkpointing is not None and layer.checkpointing.chained
        if "checkpointing" not in layer.techniques:
            segments += [[member] for member in members]
        elif chained and segments:
            segments[-1] += members
        else:
            segments.append(members)
    in_forward = [forward for segment in segments for forward in segment]
    in_backward = [forward for segment in reversed(segments) for forward in segment]
    prefetcher = Prefetcher(engine, site.device, in_forward, in_backward)
    log.add(prefetcher)
    for forward in in_forward:
        forward.prefetcher = prefetcher
    log.add_forward_pre_hook(site.model, _BeginPass(prefetcher))
    log.add_forward_hook(site.model, _EndPass(prefetcher))


class _BeginPass:
    """A hook before the model's forward."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher

    def __call__(self, model: nn.Module, args: Any, kwargs: Any = None) -> None:
        if not torch.compiler.is_compiling():
            self._prefetcher.begin_forward()


class _EndPass:
    """A hook after the model's forward, also after one that failed: then there is no output."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        prefetcher = self._prefetcher
        if torch.compiler.is_compiling():
            return
        prefetcher.end_forward(complete=output is not None)

        def begin(*gradients: Any) -> None:
            prefetcher.begin_backward()

        if output is not None and torch.is_grad_enabled():
            for tensor in Tree.of(output).tensors():
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(begin)


# ---------------------------------------------------------------------- activations


def _attach_activations(site: ModelSite, log: UndoLog, engine: Engine) -> None:
    logs = site.config is None or site.config.enable_logging
    on_host: Activations | None = None
    on_disk: Activations | None = None
    for layer in site.plan.layers:
        if layer.offloading is None or not layer.offloading.activations:
            continue
        if site.device.type == "cpu" or layer.offloading.to == "disk":
            on_disk = on_disk or Activations(
                engine, site.device, store=site.homes.store, logs=logs, meter=site.meter
            )
            activations = on_disk
        else:
            capacity = _room_on_host(site)
            on_host = on_host or Activations(
                engine, site.device, capacity=capacity, logs=logs, meter=site.meter
            )
            activations = on_host
        _attach_to(layer, site, log, activations)


def _attach_to(layer: LayerPlan, site: ModelSite, log: UndoLog, activations: Activations) -> None:
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
            log.add_stage(module, OffloadActivationsStage(activations), name=name)


def _room_on_host(site: ModelSite) -> int | None:
    """Return what ``max_cpu_offload_gb`` leaves for activations beside parameters, gradients and state."""
    cap = None if site.config is None else site.config.max_cpu_offload_bytes
    if cap is None:
        return None
    on_disk = {id(parameter) for parameter in site.homes.on_disk}
    parameters = list(site.model.parameters())
    at_home = [each for each in parameters if each.device.type == "cpu" and id(each) not in on_disk]
    trained = [each for each in at_home if each.requires_grad]
    optimizer = site.plan.optimizer
    eight_bit = optimizer is not None and optimizer.eight_bit
    moments = 0.5 if eight_bit else 2.0  # bytes of Adam's state for each byte of a parameter
    if optimizer is None or optimizer.state == "device":  # beside their parameters
        state = sum(each.nbytes for each in trained)
    elif optimizer.state == "host":
        state = sum(each.nbytes for each in parameters if each.requires_grad)
    else:
        state = 0
    taken = sum(each.nbytes for each in at_home) + sum(each.nbytes for each in trained) + int(moments * state)
    return max(0, cap - taken)
