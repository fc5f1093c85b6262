"""The Pareto frontier of peak memory and step time over all plans for a model.

Note [The memory of a step]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A model is a row of positions. An *option* covers one position, or a few neighbours (a segment that is recomputed
as one), and says what that costs. With the options o₁ … oₙ in the order of forward, in bytes above the constants::

    in forward at k        Σ resident + Σ_{j<k} held_j + forward_k
    from the loss on       Σ resident + Σ held + the loss's own peak
    in backward at k       Σ resident + Σ_{j<k} held_j + Σ_{j>k} gradient_j + backward_k
    in the optimizer step  Σ resident + Σ stepping

and the peak is the maximum of these.

Options may have *phases*: an option never follows one of a later phase. Layers whose parameters are offloaded are the
last ones of the row, where that saves the most: their gradients would be live the longest. One row then stands for
every number of offloaded layers.

Note [The dynamic programme]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The programme goes through the row and extends partial plans by every option. A partial plan is dominated, and dropped,
if another one equals or beats it in time and in four numbers: the bytes live at this point, and the maxima so far in
forward, in backward (to which the rest will add gradients) and in the optimizer step. Three observations keep it small:

- whatever is chosen for the rest needs at least some known number of bytes above what is live now, so a partial plan
  whose maximum so far is lower than that gains nothing by it;
- where the rest of the row offers one choice only of resident bytes and gradients, the three maxima end as one;
- for a given limit, a partial plan that must exceed it is dropped, and maxima that cannot reach it count as equal.

Where more than `most` partial plans are left at a position, a grid over their bytes keeps the fastest and the smallest
of each cell. On deep models the frontier is thereby thinned out; it stays within 1% of an integer programme's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

What = TypeVar("What")

State = tuple[int, int]
"""A position in the row, and the phase."""

ALL_POSITIONS = 3000  # partial plans kept on a whole frontier, divided among the positions of a row
LEAST_AT_POSITION = 100  # partial plans kept at a position of however deep a row
WITHIN_LIMIT = 200  # partial plans kept at a position where only the fastest plan within a limit is wanted
# Times as many partial plans as wanted, from which on the grid comes before the comparison of pairs.
GRID_FIRST = 3
CHUNK = 512  # partial plans compared with all others at a time, which bounds the memory of the comparison


@dataclass(frozen=True)
class Option(Generic[What]):
    """What can be done with one position, or with `span` neighbours. See Note [The memory of a step]."""

    what: What
    seconds: float  # what it adds to the time of a step
    resident: int = 0  # bytes live during the whole step
    held: int = 0  # bytes that forward leaves for backward
    forward: int = 0  # the peak in its forward, above what is live before it
    backward: int = 0  # the peak in its backward, above what is live before its forward
    gradient: int = 0  # bytes of the gradients that its backward leaves
    stepping: int = 0  # bytes in use in the optimizer step
    span: int = 1  # positions that it covers
    phase: int | None = None  # it does not follow an option of a later phase; None is allowed in each


@dataclass(frozen=True)
class ModelRow(Generic[What]):
    """A model as the dynamic programme sees it."""

    options: Sequence[Sequence[Option[What]]]  # for each position those that begin there
    dropped: Sequence[int] = ()  # bytes allocated at each position that are live until forward ends
    constant: int = 0  # bytes live whatever is chosen
    seconds: float = 0.0  # time of a step that belongs to no position
    loss: int = 0  # the peak at the end of forward above what is live then; `dropped` is live there
    tail: int = 0  # the peak from there to the first backward, above what is live then
    stepping: int = 0  # bytes in use in the optimizer step whatever is chosen

    @functools.cached_property
    def phases(self) -> range:
        return range(1 + max((option.phase or 0 for here in self.options for option in here), default=0))

    @functools.cached_property
    def _dropped(self) -> list[int]:
        return list(itertools.accumulate(self.dropped or (0,) * len(self.options), initial=0))

    def dropped_before(self, position: int) -> int:
        """Return what the positions before this one allocated that is live until forward ends."""
        return self._dropped[position]

    @functools.cached_property
    def end(self) -> int:
        """The peak between forward and backward, above what is live then."""
        return max(self.loss + self.dropped_before(len(self.options)), self.tail)

    def following(self, state: State) -> Iterator[tuple[int, Option[What], State]]:
        """Yield the options that may come next, with their indices and the states they lead to."""
        position, phase = state
        for index, option in enumerate(self.options[position]):
            if option.phase is None or option.phase >= phase:
                yield index, option, (position + option.span, phase if option.phase is None else option.phase)


@dataclass(frozen=True)
class Trade(Generic[What]):
    """One plan for the whole row: a peak in exchange for a step time."""

    peak: int
    seconds: float
    options: tuple[Option[What], ...]

    @property
    def held(self) -> int:
        return sum(option.held for option in self.options)


def trade_of(row: ModelRow[What], options: Sequence[Option[What]]) -> Trade[What]:
    """Return what a given sequence of options costs."""
    live = forward = backward = stepping = position = 0
    seconds = row.seconds
    for option in options:
        forward = max(forward, live + option.forward + row.dropped_before(position)) + option.resident
        backward = max(backward + option.gradient, live + option.backward) + option.resident
        live += option.resident + option.held
        stepping += option.resident + option.stepping
        seconds += option.seconds
        position += option.span
    peak = max(forward, backward, live + row.end, stepping + row.stepping)
    return Trade(row.constant + peak, seconds, tuple(options))


def best_trades(row: ModelRow[What], most: int | None = None) -> list[Trade[What]]:
    """Return the frontier, fastest first: each trade needs less memory than all faster ones.

    `most` partial plans are kept at a position; the frontier is exact where there are no more than that.
    """
    if most is None:
        most = max(LEAST_AT_POSITION, ALL_POSITIONS // max(1, len(row.options)))
    return _frontier(row, most, None)


def fastest_within(row: ModelRow[What], peak: int, most: int = WITHIN_LIMIT) -> Trade[What] | None:
    """Return the fastest trade that needs no more than a given peak; None if there is none."""
    found = _frontier(row, most, peak - row.constant)
    # Below the limit partial plans count as equal, so the peak found is the limit: compute the true one.
    return trade_of(row, found[0].options) if found else None


def _frontier(row: ModelRow[What], most: int, limit: int | None) -> list[Trade[What]]:
    """Return the frontier of the plans up to a limit in bytes above the constants."""
    with _on_one_thread():
        kept = _partial_plans(row, most, limit)
    count = len(row.options)
    ends: list[tuple[float, int, State, int]] = []
    for phase in row.phases:
        plans = kept.get((count, phase))
        if plans is not None:
            live, forward, backward, stepping = plans.bytes.unbind(1)
            peaks = torch.stack((forward, backward, live + row.end, stepping + row.stepping)).amax(dim=0)
            for index, (seconds, peak) in enumerate(zip(plans.seconds.tolist(), peaks.tolist(), strict=True)):
                ends.append((seconds, row.constant + peak, (count, phase), index))
    trades: list[Trade[What]] = []
    for seconds, peak, state, index in sorted(ends):
        if not trades or peak < trades[-1].peak:
            trades.append(Trade(peak, seconds, tuple(_walk_back(row, kept, state, index))))
    return trades


def _walk_back(
    row: ModelRow[What], kept: dict[State, _Plans], state: State, index: int
) -> list[Option[What]]:
    options: list[Option[What]] = []
    while state[0] > 0:
        position, phase, index, number = kept[state].trail[index].tolist()
        state = (position, phase)
        options.append(row.options[position][number])
    return options[::-1]


@contextlib.contextmanager
def _on_one_thread() -> Iterator[None]:
    """Run on one thread of the CPU: these tensors are small, and threads would wait for each other, or for a GPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    is_cpu = torch.get_default_device().type == "cpu"  # unless by torch.set_default_device
    try:
        with contextlib.nullcontext() if is_cpu else torch.device("cpu"):
            yield
    finally:
        torch.set_num_threads(before)


def _partial_plans(row: ModelRow[What], most: int, limit: int | None) -> dict[State, _Plans]:
    """Return the partial plans worth extending at each state. See Note [The dynamic programme]."""
    rests = _rests(row)
    reached: dict[State, list[_Plans]] = {(0, 0): [_Plans.empty(row.seconds)]}
    kept: dict[State, _Plans] = {}
    for position in range(len(row.options) + 1):
        for phase in row.phases:
            state = (position, phase)
            if state not in reached:
                continue
            plans = _Plans.together(reached.pop(state)).reduced(rests[state], most, limit)
            if not len(plans.seconds):
                continue
            kept[state] = plans
            if position < len(row.options):
                for after, extended in plans.extended(row, state):
                    if after in rests:  # else the end of the row cannot be reached from there
                        reached.setdefault(after, []).append(extended)
    return kept


class _Rest(NamedTuple):
    """Bounds of what the rest of a row adds to a partial plan, over all choices for the rest.

    Attributes:
        least: the least that it adds to each column of `_Plans.bytes`; to what is live, up to the end of forward.
        most: the most that it adds to them.
        least_peak: the least that it needs itself above what is live now, less what it adds to the maximum of backward.
    """

    least: Tensor
    most: Tensor
    least_peak: int

    @property
    def is_known(self) -> bool:
        """Whether it adds the same to the three maxima whatever is chosen."""
        return torch.equal(self.least[1:], self.most[1:])


def _rests(row: ModelRow[What]) -> dict[State, _Rest]:
    """Return the bounds of the rest for each state from which the end of the row can be reached."""
    count = len(row.options)
    ends = torch.tensor((row.end, 0, 0, row.stepping))
    found = {(count, phase): _Rest(ends, ends, row.end) for phase in row.phases}
    for position in reversed(range(count)):
        for phase in row.phases:
            ways = [
                (option, found[after])
                for _, option, after in row.following((position, phase))
                if after in found
            ]
            if ways:
                adds = torch.tensor([_adds(option) for option, _ in ways])
                found[position, phase] = _Rest(
                    (adds + torch.stack([rest.least for _, rest in ways])).amin(dim=0),
                    (adds + torch.stack([rest.most for _, rest in ways])).amax(dim=0),
                    min(max(way.backward, way.held + rest.least_peak) - way.gradient for way, rest in ways),
                )
    return found


def _adds(option: Option[What]) -> tuple[int, int, int, int]:
    """Return what an option adds to each column of `_Plans.bytes`, maxima of its own apart."""
    return (
        option.resident + option.held,
        option.resident,
        option.resident + option.gradient,
        option.resident + option.stepping,
    )


@dataclass(frozen=True)
class _Plans:
    """Partial plans that end at one state, a row each.

    Attributes:
        bytes: live now; the maxima in forward, in backward and in the optimizer step.
        seconds: the time so far.
        trail: position, phase and index of the partial plan that each extends, and the index of the option.
    """

    bytes: Tensor
    seconds: Tensor
    trail: Tensor

    @classmethod
    def empty(cls, seconds: float) -> _Plans:
        trail = torch.full((1, 4), -1, dtype=torch.int64)
        return cls(torch.zeros_like(trail), torch.tensor([seconds], dtype=torch.float64), trail)

    @classmethod
    def together(cls, parts: Sequence[_Plans]) -> _Plans:
        columns = zip(*((part.bytes, part.seconds, part.trail) for part in parts), strict=True)
        return cls(*map(torch.cat, columns))

    def extended(self, row: ModelRow[What], state: State) -> Iterator[tuple[State, _Plans]]:
        """Yield every plan with every option that may come next, by the states they lead to."""
        following = list(row.following(state))
        options = [option for _, option, _ in following]
        adds_live, resident, adds_backward, adds_stepping = torch.tensor(list(map(_adds, options))).unbind(1)
        dropped = row.dropped_before(state[0])
        forward_peaks = torch.tensor([option.forward + dropped for option in options])
        backward_peaks = torch.tensor([option.backward + option.resident for option in options])
        live, forward, backward, stepping = self.bytes.unsqueeze(2).unbind(1)
        bytes_ = torch.stack(
            (
                live + adds_live,
                torch.maximum(forward, live + forward_peaks) + resident,
                torch.maximum(backward + adds_backward, live + backward_peaks),
                stepping + adds_stepping,
            ),
            dim=2,
        )
        seconds = self.seconds.unsqueeze(1) + torch.tensor([o.seconds for o in options], dtype=torch.float64)
        trail = torch.empty((*seconds.shape, 4), dtype=torch.int64)
        trail[..., 0], trail[..., 1] = state
        trail[..., 2] = torch.arange(len(self.seconds)).unsqueeze(1)
        trail[..., 3] = torch.tensor([number for number, _, _ in following])
        afters = [after for _, _, after in following]
        for after in dict.fromkeys(afters):
            which = [index for index, each in enumerate(afters) if each == after]
            columns = bytes_[:, which].reshape(-1, 4), seconds[:, which].reshape(-1)
            yield after, _Plans(*columns, trail[:, which].reshape(-1, 4))

    def reduced(self, rest: _Rest, most: int, limit: int | None) -> _Plans:
        """Return the plans without those that exceed a limit or are dominated; about `most` of them."""
        live, forward, backward, stepping = self.bytes.unbind(1)
        backward = torch.maximum(backward, live + rest.least_peak)
        # Forward's maximum does not count where backward's is higher: the rest adds at least as much to that.
        forward = forward * (forward > backward)
        plans = _Plans(torch.stack((live, forward, backward, stepping), dim=1), self.seconds, self.trail)
        if limit is not None:
            plans = plans._within(rest, limit)
        plans = plans._at(torch.sort(plans.seconds, stable=True).indices)
        if len(plans.seconds) > GRID_FIRST * most:
            plans = plans._thinned(plans._compared(rest), GRID_FIRST * most)
        plans = plans._undominated(plans._compared(rest))
        return plans if len(plans.seconds) <= most else plans._thinned(plans._compared(rest), most)

    def _within(self, rest: _Rest, limit: int) -> _Plans:
        ends = self.bytes + rest.least
        plans = self._at(torch.nonzero(ends.amax(dim=1) <= limit).squeeze(1))
        lowest = limit - rest.most
        lowest[0] = torch.iinfo(torch.int64).min  # what is live counts in every moment to come
        return _Plans(torch.maximum(plans.bytes, lowest), plans.seconds, plans.trail)

    def _compared(self, rest: _Rest) -> Tensor:
        """Return the columns of bytes that decide which plan is better."""
        live, others = self.bytes[:, :1], self.bytes[:, 1:]
        if rest.is_known:
            others = (others + rest.most[1:]).amax(dim=1, keepdim=True)
        return torch.cat((live, others), dim=1)

    def _undominated(self, compared: Tensor) -> _Plans:
        """Return those that no other equals or beats; they are sorted by time, so only an earlier one can."""
        kept = torch.zeros(0, dtype=torch.int64)
        for chunk in torch.split(torch.arange(len(self.seconds)), CHUNK):
            earlier = torch.cat((kept, chunk))
            dominated = earlier.unsqueeze(0) < chunk.unsqueeze(1)
            for column in compared.unbind(1):
                dominated &= column[earlier].unsqueeze(0) <= column[chunk].unsqueeze(1)
            kept = torch.cat((kept, chunk[~dominated.any(dim=1)]))
        return self._at(kept)

    def _thinned(self, compared: Tensor, most: int) -> _Plans:
        """Return the fastest and the smallest of each cell of a grid that is coarse enough to leave about `most`.

        Where bytes are few, each costs the most time: there the cells are narrow.
        """
        above = (compared - compared.amin(dim=0)).double()
        share = (above / above.amax(dim=0).clamp(min=1)).sqrt()
        side = max(2, most // 2)
        while True:
            places = (share * (side - 1)).long() * side ** torch.arange(compared.shape[1])
            cells, cell = torch.unique(places.sum(dim=1), return_inverse=True)
            if len(cells) <= most or side == 2:
                break
            side = max(2, side * 3 // 4)
        count = len(self.seconds)
        numbers = torch.arange(count)
        size = compared.sum(dim=1)
        kept = torch.zeros(count, dtype=torch.bool)
        kept[_least_in_each(cell, len(cells), numbers)] = True
        # Of equal sizes the first; the product stays below 2**63 for any memory there is.
        kept[_least_in_each(cell, len(cells), (size - size.amin()) * count + numbers) % count] = True
        kept[compared.argmin(dim=0)] = True
        return self._at(torch.nonzero(kept).squeeze(1))

    def _at(self, indices: Tensor) -> _Plans:
        return _Plans(self.bytes[indices], self.seconds[indices], self.trail[indices])


def _least_in_each(cell: Tensor, count: int, numbers: Tensor) -> Tensor:
    """Return the least number in each of so many cells."""
    least = torch.full((count,), torch.iinfo(torch.int64).max)
    return least.scatter_reduce_(0, cell, numbers, "amin")
