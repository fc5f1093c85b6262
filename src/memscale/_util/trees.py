"""Tensors in nested arguments and results: dicts, lists, tuples, dataclasses, and all that pytree knows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from memscale._torch import pytree


def any_on_accelerator(tensors: Iterable[object]) -> bool:
    """Return whether a tensor of a call is on an accelerator. See Note [Inputs on the host]."""
    return any(isinstance(each, torch.Tensor) and each.device.type not in ("cpu", "meta") for each in tensors)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is computed when it is asked for (lazy logits); gradients arrive at its `hidden`."""
    return bool(getattr(type(tensor), "is_computed_later", False))


class Tree:
    """A nested value, flattened so that its tensors can be replaced and the value rebuilt, with new containers."""

    __slots__ = ("_leaves", "_spec")

    def __init__(self, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        self._leaves = leaves
        self._spec = spec

    @classmethod
    def of(cls, value: object) -> Tree:
        # Hugging Face's outputs are registered with pytree; a dataclass that is not is flattened here, field by field.
        leaves, spec = pytree.tree_flatten(value)
        return cls([_Record.of(leaf) if _is_record(leaf) else leaf for leaf in leaves], spec)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors in order, each as often as it occurs."""
        for leaf in self._leaves:
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif isinstance(leaf, _Record):
                yield from leaf.fields.tensors()

    def map(self, of: type, change: Callable[[Any], object]) -> Tree:
        """Return the tree with every leaf of one type changed."""

        def changed(leaf: Any) -> Any:
            if isinstance(leaf, _Record):
                return _Record(leaf.cls, leaf.fields.map(of, change), leaf.rest)
            return change(leaf) if isinstance(leaf, of) else leaf

        return Tree([changed(leaf) for leaf in self._leaves], self._spec)

    def build(self) -> Any:
        leaves = [leaf.build() if isinstance(leaf, _Record) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


class _Record(NamedTuple):
    cls: type
    fields: Tree
    rest: dict[str, Any]

    @classmethod
    def of(cls, value: Any) -> _Record:
        names = [field.name for field in dataclasses.fields(value)]  # in order: the same in every process
        fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
        rest = {name: v for name, v in getattr(value, "__dict__", {}).items() if name not in names}
        return cls(type(value), Tree.of(fields), rest)

    def build(self) -> Any:
        value: Any = object.__new__(self.cls)
        for name, field in {**self.fields.build(), **self.rest}.items():
            object.__setattr__(value, name, field)  # as dataclasses do it: the class may be frozen
        return value


def _is_record(leaf: object) -> bool:
    if isinstance(leaf, torch.Tensor) or not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return False
    return not isinstance(leaf, (dict, list, tuple))  # those keep more than their fields: pass them on whole


def copied(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of what a model is called with, with every tensor replaced by what `change` makes of it.

    Objects that are no containers, as a cache for keys and values, are copied with the tensors in them: a forward may
    change them. Functions and modules are shared, and so is what cannot be copied. A tensor that requires a gradient
    does so in the copy, as a leaf or not.
    """
    memo: dict[int, Any] = {}
    changed = _Copies(change)

    def copy_of(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return changed.of(leaf)
        if callable(leaf):
            return leaf
        try:
            with changed:
                return copy.deepcopy(leaf, memo)
        except (TypeError, copy.Error):  # a generator of random numbers, a lock
            return leaf

    return pytree.tree_map(copy_of, value)


class _Copies(TorchFunctionMode):
    """Replaces every tensor that `copy.deepcopy` comes to."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._change = change
        self._made: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            made = self._change(tensor)
            if tensor.requires_grad:
                made.requires_grad_()
                made = made if tensor.is_leaf else _Received.apply(made)  # type: ignore[no-untyped-call]
            self._made[id(tensor)] = made
        return self._made[id(tensor)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.of(args[0]) if func is torch.Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


class _Received(torch.autograd.Function):
    """Gives a tensor a history, in place of the one that it has in the user's graph: it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None
