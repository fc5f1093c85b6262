"""Tiled loss: the head returns lazy logits, of which a loss is computed some tokens at a time.

The mechanism is `memscale.tiling`; here the head of a model gets a forward. Parameters that are at
home elsewhere (offloading) are fetched when the loss is computed, for as long as that takes, and not before.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memscale._torch import graph_task_id, hooks_are_allowed
from memscale.checkpointing.conditions import parameter_behind
from memscale.observe.counters import Meter
from memscale.offload.mapped import MappedParameters
from memscale.profiler import find_head
from memscale.techniques.base import ModelSite
from memscale.techniques.forward import ForwardOverride, ForwardStage, Stage
from memscale.tiling import Head, LazyLogits, lazy_logits

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

__all__ = ["TileHeadStage", "TiledLoss"]

logger = logging.getLogger("memscale")


class TiledLoss:
    """What `Plan.loss` says, on a model."""

    def attach(self, site: ModelSite, log: UndoLog) -> None:
        settings = site.plan.loss
        if settings is None:
            return
        name, head, reason = find_head(site.model)
        foreign = None if head is None else _foreign_forward(head)
        if foreign is not None:
            head, reason = None, f"{name} has a forward of its own ({foreign}), put there by others"
        if head is None:
            if site.config is None or site.config.enable_logging:
                logger.warning("Head and loss are not tiled: %s.", reason)
            return
        device = site.device if site.homes.device is not None else None
        log.add_stage(head, TileHeadStage(settings.rows, device, site.homes.mapped, site.meter), name=name)


def _foreign_forward(head: nn.Module) -> str | None:
    """Name the class of a forward that others have put on the head, below the override of this library."""
    forward = vars(head).get("forward")
    # A tiled head can do without those of ours: it saves nothing, and fetches what it needs itself.
    if isinstance(forward, ForwardOverride):
        forward = forward.inner
    return None if forward is None else type(forward).__name__


class TileHeadStage(ForwardStage):
    """Makes a head's logits lazy. See Note [Lazy logits].

    Args:
        rows: How many tokens make a tile.
        device: Where it computes, if its parameters may be at home elsewhere.
        mapped: The parameters of the model that are at home on disk.
        meter: Told when backward comes by. Lazy logits do not pass the boundary by which others are seen.
    """

    order = Stage.TILE_HEAD

    def __init__(
        self, rows: int, device: torch.device | None, mapped: MappedParameters, meter: Meter
    ) -> None:
        self._rows = rows
        self._device = device
        self._mapped = mapped
        self._meter = meter

    def run(
        self, module: nn.Module, call_next: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if _in_static_graph():
            return call_next(*args, **kwargs)
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(hidden, torch.Tensor) or isinstance(hidden, LazyLogits) or not hooks_are_allowed():
            return call_next(*args, **kwargs)
        if self._device is not None and hidden.device.type == "cpu":
            hidden = hidden.to(self._device, non_blocking=True)
        # Inside an offloaded block the module has working copies when it runs, which must not be held on to.
        weight, bias = (
            None if each is None else parameter_behind(each)
            for each in (module._parameters["weight"], module._parameters["bias"])
        )
        if not isinstance(weight, nn.Parameter) or not isinstance(bias, (nn.Parameter, type(None))):
            return call_next(*args, **kwargs)  # other weights, by torch.func.functional_call
        dtype = _computed_in(hidden, weight)
        tensors = [each for each in (hidden, weight, bias) if each is not None]
        if dtype is None or hidden.dim() < 2 or not any(each.requires_grad for each in tensors):
            return call_next(*args, **kwargs)
        if hidden.requires_grad and not hidden.is_leaf:
            hidden.register_hook(self._seen_backward)  # type: ignore[no-untyped-call]
        return lazy_logits(hidden, Head(weight, bias, dtype, self._rows, self._borrowed))

    def _seen_backward(self, gradient: torch.Tensor) -> None:
        self._meter.backward_pass(graph_task_id())

    @contextlib.contextmanager
    def _borrowed(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        own = [each for each in parameters if isinstance(each, nn.Parameter)]
        self._mapped.begin(own)
        try:
            yield
        finally:
            self._mapped.end(own)


def _in_static_graph() -> bool:
    """Whether the model runs inside `DistributedDataParallel(static_graph=True)`.

    That puts a node of its own on every tensor that the model returns, to learn from backward when all gradients are
    there. Lazy logits are no such tensor: gradients would not be averaged.

    Private torch API: `DistributedDataParallel._active_ddp_module` (tried on torch 2.13).
    """
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    return active is not None and bool(active.static_graph)


def _computed_in(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype | None:
    """The type of the logits; None if the plain head would refuse."""
    kind = hidden.device.type
    is_cast = hidden.is_floating_point() and torch.float64 not in (hidden.dtype, weight.dtype)
    if is_cast and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype if weight.dtype is hidden.dtype else None
