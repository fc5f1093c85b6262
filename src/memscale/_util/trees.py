"""Tensors in nested arguments and results: dicts, lists, tuples, dataclasses, and all that pytree knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

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
