"""The batches that a plan is good for, by their shapes.

Note [Batches that were planned for]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A batch is covered if it has the same tensors as one that was planned for, and none of them is larger: in the number
of its elements and, since attention grows with the square of the length, in that number times the longest dimension
behind the first. Before each forward pass in training this is looked up by the shapes of the call, and nothing else.

After `MOST_PLANS` plans no more are made: the one for the largest batch stays on.

One that is not covered is planned for once, rounded up, so that the next few that grow are covered too: each
dimension in which it differs from what was planned for goes up to the next power of two. Where that does not run
(a limit on positions) or does not fit, it goes up to the next sixteenth of that power, and then not at all.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from memscale._torch import pytree
from memscale.profiler.sample import Sample

__all__ = ["PlannedBatches", "call_key", "named_shapes", "named_tensors", "resized", "roundings"]

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = dict[str, Shape]
"""The tensors of a call, by where they are in it."""

MOST_KEYS = 4096
MOST_PLANS = 5  # in one run
STEPS_OF_A_POWER = 16

_PLAIN = frozenset({int, float, bool, str, type(None)})


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The shapes of a call as they come, to look them up by: made at every step, and so not by pytree."""
    key: list[Any] = [value.shape if isinstance(value, torch.Tensor) else _shapes_in(value) for value in args]
    for name, value in kwargs.items():
        key.append(name)
        key.append(value.shape if isinstance(value, torch.Tensor) else _shapes_in(value))
    return tuple(key)


def _shapes_in(value: Any) -> tuple[Any, ...] | None:
    if type(value) in _PLAIN:
        return None
    return tuple(leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(value))


def named_shapes(model: nn.Module, sample: Sample) -> Shapes:
    """The tensors of a call by the names of forward's arguments, whether they were passed by position or by name.

    Example:
        >>> layer, x = nn.Linear(2, 2), torch.ones(3, 2)
        >>> named_shapes(layer, Sample((x,), {})) == named_shapes(layer, Sample((), {"input": x}))
        True
    """
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(model, sample)}


def named_tensors(model: nn.Module, sample: Sample) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        arguments = inspect.signature(model.forward).bind(*sample.args, **sample.kwargs).arguments
    except (TypeError, ValueError):  # forward has no signature, or will refuse this call by itself
        arguments = {"args": sample.args, "kwargs": sample.kwargs}
    for path, leaf in pytree.tree_flatten_with_path(dict(arguments))[0]:
        if isinstance(leaf, torch.Tensor):
            yield pytree.keystr(path), leaf


class PlannedBatches:
    """What a model's plans were made for so far. See Note [Batches that were planned for].

    Attributes:
        ceiling: what plans may need from now on: one that needed more ran out of memory.
        said_full: the user was told that no more plans are made.

    Example:
        >>> batches = PlannedBatches()
        >>> batches.add({"x": (8, 128)})
        >>> batches.covers({"x": (8, 100)}), batches.covers({"x": (2, 129)})
        (True, True)
        >>> batches.covers({"x": (1, 512)})  # half the elements, and attention of twice as many scores
        False
    """

    def __init__(self) -> None:
        self.ceiling: int | None = None
        self._planned: list[Shapes] = []
        self._given_up: set[frozenset[tuple[str, int]]] = set()
        self._keys: set[tuple[Any, ...]] = set()
        self.said_full = False

    def __bool__(self) -> bool:
        return bool(self._planned or self._given_up)

    def knows(self, key: tuple[Any, ...]) -> bool:
        """Whether a call with this key was found to be covered."""
        return key in self._keys

    def note(self, key: tuple[Any, ...]) -> None:
        """A call with this key is covered."""
        if len(self._keys) >= MOST_KEYS:
            self._keys.clear()
        self._keys.add(key)

    def add(self, shapes: Shapes) -> None:
        """A plan was made for this batch."""
        self._planned.append(shapes)

    def give_up(self, shapes: Shapes) -> None:
        """Batches with such tensors cannot be planned for, however large they are."""
        self._given_up.add(_structure(shapes))

    @property
    def is_full(self) -> bool:
        """Whether as many plans were made as a run may have."""
        return len(self._planned) >= MOST_PLANS

    def covers(self, shapes: Shapes) -> bool:
        if _structure(shapes) in self._given_up:
            return True
        return any(_is_within(shapes, planned) for planned in self._alike(shapes))

    def varying(self, shapes: Shapes) -> dict[str, list[int]]:
        """The dimensions in which a batch differs from one that was planned for."""
        alike = self._alike(shapes)
        return {
            name: [
                index for index, size in enumerate(shape) if any(each[name][index] != size for each in alike)
            ]
            for name, shape in shapes.items()
        }

    def _alike(self, shapes: Shapes) -> list[Shapes]:
        structure = _structure(shapes)
        return [planned for planned in self._planned if _structure(planned) == structure]


def _structure(shapes: Shapes) -> frozenset[tuple[str, int]]:
    return frozenset((name, len(shape)) for name, shape in shapes.items())


def _is_within(shapes: Shapes, planned: Shapes) -> bool:
    return all(
        size <= limit
        for name, shape in shapes.items()
        for size, limit in zip(_sizes(shape), _sizes(planned[name]), strict=True)
    )


def _sizes(shape: Shape) -> tuple[int, int]:
    """The elements of a tensor, and what attention over its longest dimension would make of them."""
    elements = math.prod(shape)
    return elements, elements * max(shape[1:], default=1)


def roundings(shapes: Shapes, varying: dict[str, list[int]]) -> list[Shapes]:
    """What to plan for instead of a batch, the largest first; at last the batch itself.

    >>> roundings({"x": (8, 600)}, {"x": [1]})
    [{'x': (8, 1024)}, {'x': (8, 640)}, {'x': (8, 600)}]
    """
    found: list[Shapes] = []
    for steps in (1, STEPS_OF_A_POWER):
        rounded = {
            name: tuple(
                _up(size, steps) if index in varying[name] else size for index, size in enumerate(shape)
            )
            for name, shape in shapes.items()
        }
        if rounded not in found:
            found.append(rounded)
    return found if shapes in found else [*found, shapes]


def _up(size: int, steps: int) -> int:
    power = 1 << max(0, size - 1).bit_length()
    step = max(1, power // steps)
    return -(-size // step) * step


def resized(model: nn.Module, sample: Sample, shapes: Shapes) -> Sample:
    """The same call with tensors of other shapes, which have no values."""
    wanted = {id(tensor): shapes[name] for name, tensor in named_tensors(model, sample)}

    def change(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or wanted.get(id(leaf), tuple(leaf.shape)) == tuple(leaf.shape):
            return leaf
        empty = torch.empty(wanted[id(leaf)], dtype=leaf.dtype, device="meta")
        return empty.requires_grad_(leaf.requires_grad)

    return Sample(pytree.tree_map(change, sample.args), pytree.tree_map(change, sample.kwargs))
