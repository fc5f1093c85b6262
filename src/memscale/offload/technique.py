"""Offloading: a block's parameters live on the host or on disk, and are on the device only while it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memscale._torch import tree_map
from memscale.execution_plan import Tier
from memscale.observe.counters import Meter
from memscale.offload.arrival import arrived
from memscale.offload.cost import offload_options
from memscale.offload.mapped_technique import MappedStage
from memscale.offload.prefetch import Prefetcher
from memscale.offload.working import WorkingCopies, brought
from memscale.profiler.profile import BlockProfile
from memscale.techniques.base import LayerSite
from memscale.techniques.cost import BlockOption, CostTerms
from memscale.techniques.forward import ForwardStage, Stage, WeakModule

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

__all__ = ["FetchStage", "Offloading", "bring_inputs"]


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
            return  # what it saves goes down: see `transfers.py`
        for name, module in zip(site.layer.members, site.modules, strict=True):
            if site.device.type != "cpu":
                fetch = FetchStage(module, site.device, site.meter, recomputed=recomputed)
                log.add_stage(module, fetch, name=name)
            if home == "disk":
                log.add_stage(module, MappedStage(site.homes.mapped, recomputed=recomputed), name=name)


def _home_of(site: LayerSite) -> Tier:
    return "host" if site.layer.offloading is None else site.layer.offloading.to


class FetchStage(ForwardStage):
    """Fetches the parameters of a block that are at home. See Note [Home and working copy].

    Args:
        module: The module that this goes on.
        device: Where it computes.
        meter: Counts what is moved.
        recomputed: Whether it runs inside a recomputed region, which saves nothing.
    """

    order = Stage.FETCH_PARAMETERS
    in_evaluation = True  # the parameters are at home then as well

    _prefetcher: Prefetcher | None = None

    def __init__(self, module: nn.Module, device: torch.device, meter: Meter, *, recomputed: bool) -> None:
        self._module = WeakModule(module)
        self._device = device
        self.meter = meter
        self._recomputed = recomputed
        # By the parameters' ids: what the last pass had them in, and what backward asks for.
        self._types: dict[int, torch.dtype] = {}
        self._refetched: dict[int, torch.dtype] = {}

    def run(
        self, module: nn.Module, call_next: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        args, kwargs = bring_inputs(args, kwargs, self._device)
        prefetcher = self._prefetcher
        source = None if prefetcher is None else _Ahead(prefetcher, self)
        copies = WorkingCopies(list(module.modules()), self._device, source, self.meter)
        self._types = {id(parameter): dtype for parameter, dtype in copies.wanted()}
        try:
            with copies.in_place():
                if prefetcher is not None:
                    prefetcher.reached(self, again=True)
                if self._recomputed or not torch.is_grad_enabled():
                    self._refetched = self._types
                    return call_next(*args, **kwargs)
                with copies.not_saved():
                    output = call_next(*args, **kwargs)
                self._refetched = copies.refetched
                return output
        except Exception:
            if prefetcher is not None:
                prefetcher.forget()
            raise

    def fetched_ahead_by(self, prefetcher: Prefetcher | None) -> None:
        """Take what was fetched ahead, from now on."""
        self._prefetcher = prefetcher

    def needs(self, *, in_backward: bool) -> list[tuple[nn.Parameter, torch.dtype]]:
        """Return the parameters to prefetch, and in which type; none if the module has been replaced."""
        module = self._module()
        if module is None:
            return []
        wanted = WorkingCopies(list(module.modules()), self._device).wanted()
        # As the last pass had them: autocast may be off where a pass begins.
        types = self._refetched if in_backward else self._types
        if not in_backward and not types:
            return wanted
        return [(parameter, types[id(parameter)]) for parameter, _ in wanted if id(parameter) in types]

    def bring(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter's values on the device."""
        copy = brought(values, self._device, dtype)
        self.meter.up("parameters", "host", copy.nbytes)
        return copy


class _Ahead:
    """Where the working copies of a layer come from if the next ones are fetched ahead."""

    def __init__(self, prefetcher: Prefetcher, layer: FetchStage) -> None:
        self._prefetcher = prefetcher
        self._layer = layer

    def copy_of(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        return arrived(
            parameter, self._values_of(parameter, dtype), self._prefetcher.engine, self._layer.meter
        )

    def again(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        values = self._values_of(parameter, dtype)
        self._prefetcher.reached(self._layer, again=False)
        return values

    def _values_of(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        with self._layer.meter.timing("offloading"):
            values = self._prefetcher.take(self._layer, parameter, dtype)
            return self._layer.bring(parameter.detach(), dtype) if values is None else values


def bring_inputs(args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> tuple[Any, Any]:
    """Return the arguments of a call with the tensors that are still on the host brought to the device."""

    def brought(leaf: Any) -> Any:
        if (
            isinstance(leaf, torch.Tensor)
            and leaf.device.type == "cpu"
            and not isinstance(leaf, nn.Parameter)
        ):
            return leaf.to(device, non_blocking=True)
        return leaf

    return tree_map(brought, (args, kwargs)) if device.type != "cpu" else (args, kwargs)
