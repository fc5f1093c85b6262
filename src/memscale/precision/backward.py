"""Backward passes whose gradients are large on their way: see Note [Loss scaling]."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from memscale._torch import OUTSIDE_BACKWARD, graph_task_id
from memscale.precision.graph import leaves_of

__all__ = ["Scaled", "begin", "end"]


class Scaled(Protocol):
    """A model whose backward passes are scaled."""

    @property
    def factor(self) -> float:
        """The scale of a pass that begins now; 1 if it is not to be scaled."""

    def parameters(self) -> set[int]:
        """The ids of its parameters."""

    def note_pass(self) -> None:
        """A pass through it begins, and is scaled."""

    def step_back(self) -> None:
        """The loop scales by itself."""


class _Exchanged:
    """A function of torch's that is exchanged for one of ours."""

    def __init__(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._owner, self._name = owner, name
        self._before = vars(owner)[name]
        self._ours = make(self._before)
        setattr(owner, name, self._ours)

    def put_back(self) -> None:
        """As it was; ours passes calls on if someone else has exchanged it in turn."""
        if vars(self._owner)[self._name] is self._ours:
            setattr(self._owner, self._name, self._before)


_models: weakref.WeakSet[Any] = weakref.WeakSet()
_exchanged: list[_Exchanged] = []
_running: list[
    tuple[float, set[int]]
] = []  # of the passes that are running: scale, and the models' parameters


def begin(model: Scaled) -> None:
    """Scale the backward passes through a model from now on, until `end` or until it is dropped."""
    _models.add(model)
    weakref.finalize(model, _put_back_if_unused).atexit = False
    if not _exchanged:
        _exchanged.append(_Exchanged(torch.autograd, "backward", _scaled_backward))
        _exchanged.append(_Exchanged(GradScaler, "scale", _noticed_scale))


def end(model: Scaled) -> None:
    """Do not, any more."""
    _models.discard(model)
    _put_back_if_unused()


def _put_back_if_unused() -> None:
    if not any(True for _ in _models):  # not by its length, which counts one that is just being dropped
        while _exchanged:
            _exchanged.pop().put_back()


def _noticed_scale(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def noticed(scaler: GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled():
            reached = {id(leaf) for leaf in leaves_of(_tensors(outputs))} if _models else set()
            for model in list(_models):
                if reached & model.parameters():
                    model.step_back()
        return scale(scaler, outputs)

    return noticed


def _scaled_backward(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def scaled(
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
        roots = _tensors(tensors)
        if not all(
            isinstance(root, torch.Tensor) for root in roots
        ):  # edges of a graph: someone knows what they do
            return backward(tensors, grad_tensors, **options)
        if graph_task_id() != OUTSIDE_BACKWARD:
            with _divided_inside(roots):
                return backward(tensors, grad_tensors, **options)
        leaves, models, factor = _what_to_scale(roots, options)
        if factor == 1:
            return backward(tensors, grad_tensors, **options)
        seeds = _seeds(roots, grad_tensors, factor)
        for model in models:
            model.note_pass()  # before it: an optimizer may step inside of it
        _running.append((factor, set().union(*(model.parameters() for model in models))))
        try:
            with _divided(leaves, factor):
                backward(roots, seeds, **options)
        finally:
            _running.pop()
        return None

    return scaled


def _what_to_scale(
    roots: Sequence[torch.Tensor], options: dict[str, Any]
) -> tuple[list[torch.Tensor], list[Scaled], float]:
    wanted = [model for model in _models if model.factor != 1]
    if not wanted or options["grad_variables"] is not None:  # which torch has left behind
        return [], [], 1
    # A graph of gradients is differentiated again, and gradients of inner tensors are what someone asked for.
    asked = options["inputs"]
    inner = asked is not None and any(not tensor.is_leaf for tensor in _tensors(asked))
    narrow = any(root.dtype in (torch.float16, torch.bfloat16) for root in roots)
    if inner or narrow or options["create_graph"]:
        return [], [], 1
    leaves = leaves_of(roots)
    reached = {id(leaf) for leaf in leaves}
    models: list[Scaled] = [model for model in wanted if reached & model.parameters()]
    return leaves, models, min((model.factor for model in models), default=1)


def _seeds(roots: Sequence[torch.Tensor], given: Any, factor: float) -> list[torch.Tensor]:
    """The gradients that a pass begins with: ones, if the caller has given none."""
    gradients = [None] * len(roots) if given is None else _tensors(given)
    return [
        _ones(root, factor) if gradient is None else gradient * factor
        for root, gradient in zip(roots, gradients, strict=True)
    ]


def _ones(root: torch.Tensor, factor: float) -> torch.Tensor:
    if root.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")  # in torch's words
    return torch.full_like(root, factor, requires_grad=False)


@contextlib.contextmanager
def _divided(leaves: Iterable[torch.Tensor], factor: float) -> Iterator[None]:
    """Inside the block, gradients that arrive at these are divided, before anyone else sees them."""
    share = 1 / factor  # exact: a power of two
    handles: list[RemovableHandle] = []
    try:
        for leaf in leaves:
            handles.append(leaf.register_hook(lambda gradient: gradient * share))  # type: ignore[no-untyped-call]
            hooks = leaf._backward_hooks or {}
            for key in list(hooks)[:-1]:
                # To the end one by one: autograd looks at the order of insertion, not at `move_to_end`.
                hooks[key] = hooks.pop(key)
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _divided_inside(roots: Sequence[torch.Tensor]) -> Iterator[None]:
    """The same for a pass inside of another one, of parameters only: the rest is on its way."""
    if not _running:
        yield
        return
    factor, parameters = _running[-1]
    with _divided([leaf for leaf in leaves_of(roots) if id(leaf) in parameters], factor):
        yield


def _tensors(value: Any) -> list[Any]:
    return [value] if isinstance(value, (torch.Tensor, GradientEdge)) else list(value)
