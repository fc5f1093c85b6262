"""One optimizer step in several calls: buckets of parameters, and slices of a large one.

A step of torch.optim is called once for each bucket, with its groups cut down to the bucket's parameters and
without the groups that have none there (Note [Whose arithmetic is split] in ``kinds.py``).

Note [Slices]
~~~~~~~~~~~~~
An embedding can be larger than a bucket by itself: with its gradient, Adam's moments and Adam's temporaries, six
times its own bytes. Optimizers that treat every element by itself can be called for a slice of it: a parameter over
a part of the same memory, with that part of the gradient and of the state. Each slice begins with the counters
that the parameter had; those of the last are the parameter's afterwards. So the values are the same, and only a
slice of the state is loaded at a time, from the first step on, when it is made. Slices of 8-bit moments begin where
their blocks do. Other optimizers (Adafactor looks at rows and columns, Muon at matrices) get the parameter whole.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memscale.optimizer.eight_bit import BLOCK, EightBitState, Moment, is_moment, moment_layout
from memscale.optimizer.kinds import ELEMENTWISE, MOMENTS, arithmetic_of
from memscale.optimizer.state_stores import PAGE, StateMover

__all__ = [
    "Buckets",
    "Member",
    "SlicedParameter",
    "SplitStep",
    "bytes_of_gradient",
    "members_of",
    "slice_length",
]

LEAST_SLICE_BYTES = 16 * PAGE
"""Of a parameter in one slice: below that, calls cost more than memory is worth."""

_ADAM_FACTOR = 4  # the parameter, its gradient and two moments, for each byte of parameter

# The lists of a group that have one entry for each parameter.
_PARALLEL_LISTS = ("params", "param_names")


class Member(NamedTuple):
    """A parameter and its position in the optimizer."""

    group: int
    position: int
    parameter: Tensor


def members_of(optimizer: Optimizer) -> list[Member]:
    """Return all parameters of an optimizer, in its order."""
    return [
        Member(index, position, parameter)
        for index, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    ]


class SplitStep:
    """One step of an optimizer, in several calls; the groups are whole again when the block ends, also by an error.

    Example:
        >>> first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
        >>> optimizer = torch.optim.SGD([first, second], lr=0.1)
        >>> with SplitStep(optimizer) as split:
        ...     for member in members_of(optimizer):
        ...         split.show([member])
        ...         print(len(optimizer.param_groups[0]["params"]))
        1
        1
        >>> len(optimizer.param_groups[0]["params"])
        2
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._groups = list(optimizer.param_groups)
        self._lists = [
            {key: group[key] for key in _PARALLEL_LISTS if isinstance(group.get(key), list)}
            for group in self._groups
        ]

    def __enter__(self) -> SplitStep:
        return self

    def show(self, bucket: Iterable[Member]) -> None:
        """Cut the groups down to these parameters, for the next call."""
        positions: dict[int, list[int]] = defaultdict(list)
        for member in bucket:
            positions[member.group].append(member.position)
        shown = sorted(positions)
        self.optimizer.param_groups[:] = [self._groups[index] for index in shown]
        for index in shown:
            for key, values in self._lists[index].items():
                self._groups[index][key] = [values[position] for position in sorted(positions[index])]

    def show_instead(self, member: Member, stand_in: Tensor) -> None:
        """Cut the groups down to one parameter, with another tensor in its place."""
        self.show([member])
        self._groups[member.group]["params"] = [stand_in]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for group, lists in zip(self._groups, self._lists, strict=True):
            group.update(lists)
        self.optimizer.param_groups[:] = self._groups


class Buckets:
    """Divides one step's parameters into buckets while it runs, in the optimizer's order.

    What a parameter needs is its own bytes, its gradient's and its state's; temporaries of the arithmetic are not
    counted. State that is not there yet is expected to be as large, for its parameter's size, as that of a
    parameter with as many dimensions in the same group: settings are a group's, and some optimizers (Adafactor) keep
    less for matrices. The first parameter of each such kind goes alone, to find out.

    Args:
        optimizer: Whose step it is.
        members: The parameters.
        state_bytes: Returns the bytes of a member's loaded state.
        limit: The most bytes of a bucket; a parameter that needs more has one to itself.

    Attributes:
        needed: Bytes of the last bucket; as for Adam, where that is not known yet.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        members: Iterable[Member],
        state_bytes: Callable[[Member], int],
        limit: int,
    ) -> None:
        self._optimizer = optimizer
        self._pending = deque(members)
        self._state_bytes = state_bytes
        self._limit = limit
        self._ratios: dict[tuple[int, int], float] = {}  # bytes of state for a byte of parameter
        self._new: list[Member] = []  # of the last bucket, those that had no state
        self.needed = 0

    @property
    def is_last(self) -> bool:
        """Whether nothing is left after the last bucket."""
        return not self._pending

    def next_bucket(self) -> list[Member]:
        """Return the next bucket; one parameter at least, if there is one."""
        for member in self._new:
            ratio = self._state_bytes(member) / max(1, member.parameter.nbytes)
            self._ratios[_kind(member)] = max(ratio, self._ratios.get(_kind(member), 0.0))
        bucket: list[Member] = []
        total = 0
        while self._pending:
            needed = self._bytes_of(self._pending[0])
            if bucket and (needed is None or total + needed > self._limit):
                break
            bucket.append(self._pending.popleft())
            if needed is None:
                total = _ADAM_FACTOR * bucket[0].parameter.nbytes
                break
            total += needed
        self.needed = total
        self._new = [member for member in bucket if not self._optimizer.state.get(member.parameter)]
        return bucket

    def _bytes_of(self, member: Member) -> int | None:
        parameter = member.parameter
        if self._optimizer.state.get(parameter):
            state = self._state_bytes(member)
        else:
            ratio = self._ratios.get(_kind(member))
            if ratio is None:
                return None
            state = round(ratio * parameter.nbytes)
        return parameter.nbytes + bytes_of_gradient(parameter.grad) + state


def _kind(member: Member) -> tuple[int, int]:
    return member.group, member.parameter.dim()


def bytes_of_gradient(gradient: Tensor | None) -> int:
    """Return the bytes of a gradient; of a sparse one, of its indices and values."""
    if gradient is None:
        return 0
    if gradient.layout is torch.sparse_coo:
        return gradient._indices().nbytes + gradient._values().nbytes
    return gradient.nbytes if gradient.layout is torch.strided else gradient.numel() * gradient.element_size()


def slice_length(optimizer: Optimizer, parameter: Tensor, needed: int, limit: int) -> int | None:
    """Return the elements of a slice that needs no more than the limit; None for a parameter that is stepped whole."""
    if arithmetic_of(type(optimizer)) not in ELEMENTWISE or needed <= limit or not _is_flat(parameter):
        return None
    if parameter.grad is None or not _is_flat(parameter.grad):
        return None
    values = optimizer.state.get(parameter, {}).values()
    if not all(_can_be_sliced(value, parameter) for value in values):
        return None
    share = max(LEAST_SLICE_BYTES, int(parameter.nbytes * (limit / needed)) // PAGE * PAGE)
    length = share // parameter.element_size()
    return length if length < parameter.numel() else None


class SlicedParameter:
    """Steps one parameter slice by slice. See Note [Slices].

    Args:
        optimizer: Whose step it is.
        parameter: The parameter.
        mover: Loads and saves its state.
        length: Elements of a slice.
        eight_bit: Quantizes its moments; None if they are in 32 bits.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameter: Tensor,
        mover: StateMover,
        length: int,
        eight_bit: EightBitState | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._parameter = parameter
        self._mover = mover
        self._eight_bit = eight_bit
        self._length = length if eight_bit is None else max(BLOCK, length // BLOCK * BLOCK)
        with torch.no_grad():
            mover.store_existing(optimizer.state.get(parameter), parameter)
        self._before: dict[str, Any] = dict(optimizer.state.get(parameter, {}))
        self._made: dict[str, Any] = {}  # whole tensors and moments that the optimizer has begun to keep

    def __len__(self) -> int:
        return math.ceil(self._parameter.numel() / self._length)

    def run(self, call: Callable[[nn.Parameter], Any]) -> None:
        """Step every slice by ``call(slice)``."""
        counters: dict[str, Any] = {}
        for start in range(0, self._parameter.numel(), self._length):
            counters = self._step(slice(start, start + self._length), call)
        values = {**self._before, **self._made, **counters}
        if values or self._parameter in self._optimizer.state:
            self._optimizer.state[self._parameter] = values
        with torch.no_grad():
            self._parameter.view(-1)[:0].zero_()  # counts as a change in place, which it was

    def _step(self, part: slice, call: Callable[[nn.Parameter], Any]) -> dict[str, Any]:
        """Step one slice; return the entries of its state that are no part of a larger tensor: counters."""
        parameter, state = self._parameter, self._optimizer.state
        piece = nn.Parameter(parameter.detach().view(-1)[part], requires_grad=parameter.requires_grad)
        assert parameter.grad is not None
        piece.grad = parameter.grad.detach().view(-1)[part]
        with torch.no_grad(), self._mover.watched.timed():
            values = {name: self._load(value, part, piece) for name, value in self._before.items()}
        if values:
            state[piece] = values
        try:
            call(piece)
            with torch.no_grad(), self._mover.watched.timed():
                counters = dict(self._save(state.get(piece, {}), part, piece))
        finally:
            state.pop(piece, None)
        for each in (piece, piece.grad):
            self._mover.store.release_pages(each.detach())
        return counters

    def _load(self, value: Any, part: slice, piece: Tensor) -> Any:
        if isinstance(value, Moment):
            assert self._eight_bit is not None, "a moment in 8 bits of a parameter that has none"
            for each, whole in zip(value.part(part), value.values(), strict=True):
                if self._mover.is_stored(whole):
                    self._mover.note_load(each, piece)
            return self._eight_bit.dequantize_part(value, part, piece.device)
        if not isinstance(value, Tensor):
            return value
        if value.shape != self._parameter.shape:
            return value.clone()  # a counter
        flat = value.view(-1)[part]
        if not self._mover.is_stored(value):
            return flat
        self._mover.note_load(flat, piece)
        return self._mover.store.load(flat, piece)

    def _save(self, values: dict[str, Any], part: slice, piece: Tensor) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.shape != piece.shape or value.dim() == 0:
                yield name, value
            elif self._eight_bit is not None and is_moment(name, value, piece):
                moment = self._moment(name)
                self._eight_bit.quantize_part(value, part, moment)
                for each, whole in zip(moment.part(part), moment.values(), strict=True):
                    self._note_saved(each, whole, piece)
            else:
                whole = self._whole(name, value)
                flat = whole.view(-1)[part]
                if flat.data_ptr() != value.data_ptr() or flat.device != value.device:
                    flat.copy_(value)
                self._note_saved(flat, whole, piece)

    def _note_saved(self, part: Tensor, whole: Tensor, piece: Tensor) -> None:
        if self._mover.is_stored(whole):
            self._mover.note_save(part, piece)
            self._mover.store.release_pages(part)

    def _whole(self, name: str, value: Tensor) -> Tensor:
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
            self._made[name] = self._mover.allocate(like, self._parameter, (name,))
        whole: Tensor = self._made[name]
        return whole

    def _moment(self, name: str) -> Moment:
        """Return the moment that the slices of this name go to."""
        before = self._before.get(name)
        if isinstance(before, Moment):
            return before
        if name not in self._made:
            parameter = self._parameter
            tensors = {
                key: self._mover.allocate(like, parameter, (name, key))
                for key, like in moment_layout(parameter).items()
            }
            self._made[name] = Moment(
                **tensors, signed=MOMENTS[name], shape=parameter.shape, stride=parameter.stride()
            )
        moment: Moment = self._made[name]
        return moment


def _is_flat(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_complex()


def _can_be_sliced(value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor):
        return True
    return value.dim() == 0 or (value.shape == parameter.shape and _is_flat(value))
