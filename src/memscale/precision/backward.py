"""Backward passes whose gradients are scaled on their way: see Note [Loss scaling]."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from memscale._torch import BACKWARD, GRAD_SCALER_SCALE, BackwardOrder, in_backward, leaves_of

__all__ = ["ScaledModel", "start_scaling", "stop_scaling"]


class ScaledModel(Protocol):
    """A model whose backward passes are scaled."""

    @property
    def factor(self) -> float:
        """The scale of a pass that begins now; 1 if it is not to be scaled."""

    def parameter_ids(self) -> set[int]:
        """Return the ids of its parameters."""

    def note_pass(self) -> None:
        """Note that a scaled pass through the model begins."""

    def defer_to_loop(self) -> None:
        """Stop scaling: the loop has a `GradScaler` of its own."""


# Of the scaled passes that are running: the scale, and the ids of the models' parameters.
_running: list[tuple[float, set[int]]] = []


def start_scaling(model: ScaledModel) -> None:
    """Scale the backward passes through a model until `stop_scaling`, or until it is collected."""
    BACKWARD.subscribe(_scaled_backward, model, BackwardOrder.LOSS_SCALING)
    GRAD_SCALER_SCALE.subscribe(_noticed_scale, model)


def stop_scaling(model: ScaledModel) -> None:
    """Scale the backward passes through a model no more."""
    BACKWARD.unsubscribe(_scaled_backward, model)
    GRAD_SCALER_SCALE.unsubscribe(_noticed_scale, model)


def _noticed_scale(
    scale: Callable[..., Any], models: list[ScaledModel], scaler: GradScaler, outputs: Any
) -> Any:
    if scaler.is_enabled():
        reached = {id(leaf) for leaf in leaves_of(_as_list(outputs))}
        for model in models:
            if reached & model.parameter_ids():
                model.defer_to_loop()
    return scale(scaler, outputs)


def _scaled_backward(
    backward: Callable[..., None],
    models: list[ScaledModel],
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    options = {
        "retain_graph": retain_graph,
        "create_graph": create_graph,
        "grad_variables": grad_variables,
        "inputs": inputs,
    }
    roots = _as_list(tensors)
    if any(isinstance(root, GradientEdge) for root in roots):  # the caller works on the graph itself
        return backward(tensors, grad_tensors, **options)
    if in_backward():
        with _divided_inside(roots):
            return backward(tensors, grad_tensors, **options)
    leaves, scaled, factor = _what_to_scale(models, roots, options)
    if factor == 1:
        return backward(tensors, grad_tensors, **options)
    seeds = _seeds(roots, grad_tensors, factor)
    for model in scaled:
        model.note_pass()  # before the pass: an optimizer may step inside of it
    _running.append((factor, set().union(*(model.parameter_ids() for model in scaled))))
    try:
        with _divided(leaves, factor):
            backward(roots, seeds, **options)
    finally:
        _running.pop()
    return None


def _what_to_scale(
    models: Iterable[ScaledModel], roots: Sequence[torch.Tensor], options: dict[str, Any]
) -> tuple[list[torch.Tensor], list[ScaledModel], float]:
    """Return the leaves of a pass, the models that it reaches, and the scale for it."""
    wanted = [model for model in models if model.factor != 1]
    if not wanted or options["grad_variables"] is not None:  # deprecated in torch
        return [], [], 1
    # A graph of gradients is differentiated again, and gradients of inner tensors are what the caller asked for.
    inputs = options["inputs"]
    of_inner = inputs is not None and any(not tensor.is_leaf for tensor in _as_list(inputs))
    is_narrow = any(root.dtype in (torch.float16, torch.bfloat16) for root in roots)
    if of_inner or is_narrow or options["create_graph"]:
        return [], [], 1
    leaves = leaves_of(roots)
    reached = {id(leaf) for leaf in leaves}
    scaled = [model for model in wanted if reached & model.parameter_ids()]
    return leaves, scaled, min((model.factor for model in scaled), default=1)


def _seeds(roots: Sequence[torch.Tensor], given: Any, factor: float) -> list[torch.Tensor]:
    """Return the scaled gradients that a pass begins with: ones, if the caller has given none."""
    gradients = [None] * len(roots) if given is None else _as_list(given)
    return [
        _ones(root, factor) if gradient is None else gradient * factor
        for root, gradient in zip(roots, gradients, strict=True)
    ]


def _ones(root: torch.Tensor, factor: float) -> torch.Tensor:
    if root.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")  # torch's message
    return torch.full_like(root, factor, requires_grad=False)


@contextlib.contextmanager
def _divided(leaves: Iterable[torch.Tensor], factor: float) -> Iterator[None]:
    """Divide gradients that arrive at these leaves inside the block, before any other hook sees them."""
    share = 1 / factor  # exact: a power of two
    handles: list[RemovableHandle] = []
    try:
        for leaf in leaves:
            handles.append(leaf.register_hook(lambda gradient: gradient * share))  # type: ignore[no-untyped-call]
            hooks = leaf._backward_hooks or {}
            for key in list(hooks)[:-1]:
                # The others to the end, one by one: autograd goes by insertion, not by `move_to_end`.
                hooks[key] = hooks.pop(key)
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _divided_inside(roots: Sequence[torch.Tensor]) -> Iterator[None]:
    """Divide the same in a pass inside of another one, of parameters only: the outer pass goes on from the rest."""
    if not _running:
        yield
        return
    factor, parameters = _running[-1]
    with _divided([leaf for leaf in leaves_of(roots) if id(leaf) in parameters], factor):
        yield


def _as_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, (torch.Tensor, GradientEdge)) else list(value)
