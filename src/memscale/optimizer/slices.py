"""One large parameter, a slice at a time.

Note [Slices]
~~~~~~~~~~~~~
An embedding can be larger than a bucket by itself: with its gradient, Adam's moments and what Adam makes in
between, six times its own bytes. Optimizers of torch that treat every element by itself can be called for a slice
of it: a parameter over a part of the same memory, with that part of the gradient and of the state. Each slice
begins with the counters that the parameter had; those of the last are the parameter's afterwards. So the values
are the same, and only a slice of them is up at a time, from the first step on, when state is made.

Others (Adafactor looks at rows and columns, Muon at matrices) get such a parameter whole. So does who is
around the same step further in and must see a parameter itself (``INSIDE``); it may cut it on its own.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from memscale.optimizer.kinds import arithmetic_of
from memscale.optimizer.state import PAGE, MovingState

__all__ = ["INSIDE", "Inside", "SlicedParameter", "as_left", "length_of_slices", "slices_of"]

ELEMENTWISE = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Adagrad,
        optim.Adadelta,
        optim.Adamax,
        optim.ASGD,
        optim.Rprop,
    }
)

LEAST_BYTES = 16 * PAGE
"""Of a parameter in one slice: below that, calls cost more than memory is worth."""


class Inside(Protocol):
    """Someone around a step further in than what cuts it."""

    def keeps(self, parameter: Tensor) -> bool:
        """Whether it must be given this parameter whole."""

    def as_left(
        self, optimizer: Optimizer, parameter: Tensor, name: str, like: Tensor
    ) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield what it makes of new state of this parameter: its key, and a tensor of that size."""


INSIDE: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those who are, now."""


def slices_of(
    optimizer: Optimizer, parameter: Tensor, state: MovingState, needed: int, limit: int
) -> SlicedParameter | None:
    """Return the parameter cut so that no slice needs more than the limit; None for one that is stepped whole."""
    inside: Iterable[Inside] = INSIDE
    if any(each.keeps(parameter) for each in inside):
        return None
    length = length_of_slices(optimizer, parameter, needed, limit)
    return None if length is None else SlicedParameter(optimizer, parameter, state, length)


def as_left(
    optimizer: Optimizer, parameter: Tensor, name: str, like: Tensor
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield new state as the inner steps leave it: its key in the parameter's state, and its size."""
    for each in INSIDE:
        if each.keeps(parameter):
            yield from each.as_left(optimizer, parameter, name, like)
            return
    yield (name,), like


def length_of_slices(optimizer: Optimizer, parameter: Tensor, needed: int, limit: int) -> int | None:
    """Return the elements of such a slice."""
    if arithmetic_of(type(optimizer)) not in ELEMENTWISE or needed <= limit or not _is_flat(parameter):
        return None
    gradient = parameter.grad
    if gradient is None or not _is_flat(gradient):
        return None
    values = optimizer.state.get(parameter, {})
    if not all(_can_be_cut(value, parameter) for value in values.values()):
        return None
    share = max(LEAST_BYTES, int(parameter.nbytes * (limit / needed)) // PAGE * PAGE)
    length = share // parameter.element_size()
    return length if length < parameter.numel() else None


class SlicedParameter:
    """Steps one parameter slice by slice. See Note [Slices].

    Args:
        optimizer: Whose step it is.
        parameter: The parameter.
        state: Takes its state up and down.
        length: Elements of a slice.
    """

    def __init__(self, optimizer: Optimizer, parameter: Tensor, state: MovingState, length: int) -> None:
        self._optimizer = optimizer
        self._parameter = parameter
        self._state = state
        self._length = length
        with torch.no_grad():
            state.settle(optimizer.state.get(parameter), parameter)
        self._before: dict[str, Any] = dict(optimizer.state.get(parameter, {}))
        self._made: dict[str, Tensor] = {}  # whole tensors for state that the optimizer has begun to keep

    def __len__(self) -> int:
        return math.ceil(self._parameter.numel() / self._length)

    def run(self, call: Callable[[nn.Parameter], Any]) -> Any:
        """Step every slice by ``call(slice)``; what the last call returned."""
        result: Any = None
        counters: dict[str, Any] = {}
        for start in range(0, self._parameter.numel(), self._length):
            result, counters = self._step(slice(start, start + self._length), call)
        values = {**self._before, **self._made, **counters}
        if values or self._parameter in self._optimizer.state:
            self._optimizer.state[self._parameter] = values
        with torch.no_grad():
            self._parameter.view(-1)[:0].zero_()  # counts as a change in place, which it was
        return result

    def _step(self, part: slice, call: Callable[[nn.Parameter], Any]) -> tuple[Any, dict[str, Any]]:
        parameter, state = self._parameter, self._optimizer.state
        piece = nn.Parameter(parameter.detach().view(-1)[part], requires_grad=parameter.requires_grad)
        assert parameter.grad is not None
        piece.grad = parameter.grad.detach().view(-1)[part]
        with torch.no_grad(), self._state.watched.timed():
            values = {name: self._up(value, part, piece) for name, value in self._before.items()}
        if values:
            state[piece] = values
        try:
            result = call(piece)
            with torch.no_grad(), self._state.watched.timed():
                counters = dict(self._down(state.get(piece, {}), part, piece))
        finally:
            state.pop(piece, None)
        for each in (piece, piece.grad):
            self._state.place.rest(each.detach())
        return result, counters

    def _up(self, value: Any, part: slice, piece: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape != self._parameter.shape:
            return value.clone()  # a counter
        flat = value.view(-1)[part]
        if not self._state.is_home(value):
            return flat
        self._state.moved_up(flat, piece)
        return self._state.place.up(flat, piece)

    def _down(self, values: dict[str, Any], part: slice, piece: Tensor) -> Iterator[tuple[str, Any]]:
        """Put the slice's state where it belongs; what is no part of a larger tensor is a counter."""
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.shape != piece.shape or value.dim() == 0:
                yield name, value
                continue
            home = self._home_of(name, value)
            flat = home.view(-1)[part]
            if flat.data_ptr() != value.data_ptr() or flat.device != value.device:
                flat.copy_(value)
            if self._state.is_home(home):
                self._state.moved_down(flat, piece)
                self._state.place.rest(flat)

    def _home_of(self, name: str, value: Tensor) -> Tensor:
        """Return the whole tensor that this is a slice of."""
        before = self._before.get(name)
        if (
            isinstance(before, Tensor)
            and before.shape == self._parameter.shape
            and before.dtype == value.dtype
        ):
            return before
        if name not in self._made:
            like = torch.empty_like(self._parameter, dtype=value.dtype, device="meta")
            self._made[name] = self._state.new_home(like, self._parameter, name)
        return self._made[name]


def _is_flat(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_complex()


def _can_be_cut(value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor):
        return True
    return value.dim() == 0 or (value.shape == parameter.shape and _is_flat(value))
