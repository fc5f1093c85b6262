"""Tiled loss: the head returns lazy logits, of which a loss is computed some tokens at a time.

The mechanism is `memscale.tiling`; here the head of a model is found, and gets a forward. Parameters that are at
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

from memscale._torch import graph_task_id, hooks_are_allowed, is_traceable_wrapper_subclass
from memscale.checkpointing.conditions import parameter_behind
from memscale.observe.counters import Meter
from memscale.offload.mapped_parameters import MappedParameters
from memscale.profiler.blocks import find_blocks
from memscale.techniques.base import Scene
from memscale.techniques.forward import ReplacedForward
from memscale.tiling import Head, LazyLogits, lazy_logits

if TYPE_CHECKING:
    from memscale.techniques.undo_log import Record

__all__ = ["HeadForward", "TiledLoss", "find_head"]

logger = logging.getLogger("memscale")


class TiledLoss:
    """What `Plan.loss` says, on a model."""

    def attach(self, scene: Scene, record: Record) -> None:
        settings = scene.plan.loss
        if settings is None:
            return
        name, head, objection = find_head(scene.model)
        if head is None:
            if scene.config is None or scene.config.enable_logging:
                logger.warning("Head and loss are not tiled: %s.", objection)
            return
        device = scene.device if scene.homes.device is not None else None
        forward = HeadForward(head, settings.rows, device, scene.homes.mapped, scene.meter)
        record.set_attribute(head, "forward", forward, name=name)


def find_head(model: nn.Module) -> tuple[str, nn.Linear | None, str]:
    """The linear layer that makes the logits: its name, itself, and, if there is none to be tiled, the reason.

    It is what the model calls its output embeddings, as Hugging Face's models do; else it is outside of the
    repeated layers, and has an output for each word or, without words, more outputs than others.

    Example:
        >>> model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 16), nn.Linear(16, 100))
        >>> find_head(model)[0]
        '2'
    """
    names = {id(module): name for name, module in model.named_modules()}
    said = getattr(model, "get_output_embeddings", None)
    head = said() if callable(said) else None
    if head is None or id(head) not in names:
        head = _largest_output(model)
    if head is None:
        return "", None, f"{type(model).__name__} has no linear layer for a head"
    name = names[id(head)]
    objection = _objection(head)
    if objection is not None or not isinstance(head, nn.Linear):
        return name, None, f"{name} {objection}"
    return name, head, ""


def _largest_output(model: nn.Module) -> nn.Module | None:
    """The last linear layer with an output for each row of an embedding; if there is none, that with the most."""
    inside = tuple(
        f"{member}." for block in find_blocks(model) if block.role == "repeated" for member in block.members
    )
    linear = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(inside)
    ]
    words = {table.num_embeddings for table in model.modules() if isinstance(table, nn.Embedding)}
    for module in reversed(linear):
        if module.out_features in words:
            return module
    return max(reversed(linear), key=lambda module: module.out_features, default=None)


def _objection(head: nn.Module) -> str | None:
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return f"is a {type(head).__name__}, which computes in a way of its own"
    weight = head._parameters.get("weight")
    if weight is None or not weight.is_floating_point() or is_traceable_wrapper_subclass(weight):
        return "has a weight that is not an ordinary parameter"
    forward = vars(head).get("forward")
    # A tiled head can do without those of ours: it saves nothing, and fetches what it needs itself.
    while isinstance(forward, ReplacedForward):
        forward = forward._before
    return (
        None
        if forward is None
        else f"has a forward of its own ({type(forward).__name__}), put there by others"
    )


class HeadForward(ReplacedForward):
    """The forward of a head whose logits are lazy. See Note [Lazy logits].

    Args:
        module: The head.
        rows: How many tokens make a tile.
        device: Where it computes, if its parameters may be at home elsewhere.
        mapped: The parameters of the model that are at home on disk.
        meter: Told when backward comes by. Lazy logits do not pass the boundary by which others are seen.
    """

    def __init__(
        self,
        module: nn.Linear,
        rows: int,
        device: torch.device | None,
        mapped: MappedParameters,
        meter: Meter,
    ) -> None:
        super().__init__(module)
        self._rows = rows
        self._device = device
        self._mapped = mapped
        self._meter = meter

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if _in_static_graph():
            return forward(*args, **kwargs)
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(hidden, torch.Tensor) or isinstance(hidden, LazyLogits) or not hooks_are_allowed():
            return forward(*args, **kwargs)
        if self._device is not None and hidden.device.type == "cpu":
            hidden = hidden.to(self._device, non_blocking=True)
        # Inside an offloaded block the module has working copies when it runs, which must not be held on to.
        weight, bias = (
            None if each is None else parameter_behind(each)
            for each in (module._parameters["weight"], module._parameters["bias"])
        )
        if not isinstance(weight, nn.Parameter) or not isinstance(bias, (nn.Parameter, type(None))):
            return forward(*args, **kwargs)  # other weights, by torch.func.functional_call
        dtype = _computed_in(hidden, weight)
        tensors = [each for each in (hidden, weight, bias) if each is not None]
        if dtype is None or hidden.dim() < 2 or not any(each.requires_grad for each in tensors):
            return forward(*args, **kwargs)
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
