"""The best trades there are: for each peak the least step time. A dynamic programme over the model's layers.

Note [The memory of a step]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A model is a row of positions. An *option* covers one position, or a few neighbours (a segment that is recomputed
as one), and says what that costs. With the options o₁ … oₙ in the order of forward, in bytes above the constants::

    in forward at k        Σ resident + Σ_{j<k} held_j + forward_k
    from the loss on       Σ resident + Σ held + the loss's own peak
    in backward at k       Σ resident + Σ_{j<k} held_j + Σ_{j>k} gradient_j + backward_k
    in the optimizer step  Σ resident + Σ stepping

and the peak is the most of these. Four running numbers say all about the options so far that the rest of the row
can still make worse: what is live at this point, and the most seen so far in forward, in backward (where what
follows in the row will have left gradients behind), and in the optimizer step. Of two partial plans the one that
is no better in any of the four, nor in time, can never win, and is dropped.

So the programme is exact. Where the rest of the row leaves no choice about resident bytes and gradients, the last
three are known to end as one number, and only two are compared.

Options may have *phases*: an option never follows one of a later phase. So layers whose parameters live elsewhere are
the last ones of the row, which is where they serve best: their gradients are the first that come, and would be there
the longest. There is one row for all numbers of them, and little to compare.

If more partial plans stay than are wanted (`most`), those in the same cell of a grid count as one, the
fastest; the grid is as coarse as it must be.

For one peak alone (`fastest_within`) less is to be compared: partial plans that will exceed it are dropped, and of
those that will not, how far below they stay is of no account.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["Option", "Row", "Trade", "best_trades", "fastest_within", "trade_of"]

What = TypeVar("What")
Number = TypeVar("Number", int, float)

MOST = 3000  # partial plans kept, shared out among the positions
LEAST = 130  # partial plans kept at a position, however many positions there are
WITHIN = 300  # partial plans kept at a position if the peak is given
CELLS = 512  # along each side of a grid that thins out what is too much to compare
DENSE = 2**15  # cells of a grid that are all written down; of more, those that are not empty
CHUNK = 512  # partial plans that are compared with the others at a time


@dataclass(frozen=True)
class Option(Generic[What]):
    """What can be done with one position, or with `span` neighbours. See Note [The memory of a step].

    Attributes:
        what: what it stands for.
        seconds: the time of a step that falls on these positions.
        resident: bytes there all the time.
        held: bytes that forward leaves for backward.
        forward: the most in use in its forward, above what is live before it.
        backward: the most in use in its backward, above what is live before its forward.
        gradient: bytes of the gradients that its backward leaves.
        stepping: bytes in use in the optimizer step.
        span: positions that it covers.
        phase: an option does not follow one of a later phase; None fits everywhere.
    """

    what: What
    seconds: float
    resident: int = 0
    held: int = 0
    forward: int = 0
    backward: int = 0
    gradient: int = 0
    stepping: int = 0
    span: int = 1
    phase: int | None = None


@dataclass(frozen=True)
class Row(Generic[What]):
    """A model as the programme sees it.

    Attributes:
        options: at each position the options that begin there.
        dropped: at each position bytes that are made there and live on until forward ends.
        constant: bytes that are there whatever is chosen.
        seconds: time of a step that falls on no position.
        loss: the most in use at the end of forward above what is live then; `dropped` is live there.
        tail: the most in use from there to the first backward, above what is live then.
        stepping: bytes in use in the optimizer step whatever is chosen.
    """

    options: Sequence[Sequence[Option[What]]]
    dropped: Sequence[int] = ()
    constant: int = 0
    seconds: float = 0.0
    loss: int = 0
    tail: int = 0
    stepping: int = 0

    @functools.cached_property
    def phases(self) -> range:
        """Those that options have."""
        return range(1 + max((option.phase or 0 for here in self.options for option in here), default=0))

    def dropped_before(self, position: int) -> int:
        """What the positions before this one have made that lives until forward ends."""
        return sum(self.dropped[:position])


@dataclass(frozen=True)
class Trade(Generic[What]):
    """One plan for the whole row."""

    peak: int
    seconds: float
    options: tuple[Option[What], ...]

    @property
    def held(self) -> int:
        return sum(option.held for option in self.options)


def trade_of(row: Row[What], options: Sequence[Option[What]]) -> Trade[What]:
    """What a given plan costs, by the same count."""
    live = forward = backward = stepping = position = 0
    seconds = row.seconds
    for option in options:
        forward = max(forward, live + option.forward + row.dropped_before(position)) + option.resident
        backward = max(backward + option.gradient, live + option.backward) + option.resident
        live += option.resident + option.held
        stepping += option.resident + option.stepping
        seconds += option.seconds
        position += option.span
    peak = max(
        forward,
        backward,
        live + row.loss + row.dropped_before(position),
        live + row.tail,
        stepping + row.stepping,
    )
    return Trade(row.constant + peak, seconds, tuple(options))


def best_trades(row: Row[What], most: int | None = None) -> list[Trade[What]]:
    """The frontier, fastest first: each trade needs less than all that are faster.

    Args:
        row: the model.
        most: partial plans kept at a position. Below it the frontier is exact.
    """
    if most is None:
        most = max(LEAST, MOST // max(1, len(row.options)))
    fastest = _fastest(row)
    rest = _rests(row)[0, 0]
    if rest is not None and fastest.peak == row.constant + rest.resident + rest.stepping:
        return [fastest]  # the optimizer step alone needs as much, whatever else is done
    with _one_thread():
        return _frontier(row, _partial_plans(row, most))


def fastest_within(
    row: Row[What], peak: int, most: int | None = None, faster_than: float = math.inf
) -> Trade[What] | None:
    """The fastest trade that needs no more than a given peak; None if there is none.

    Args:
        row: the model.
        peak: what may be needed.
        most: partial plans kept at a position. Below it the trade is the fastest there is.
        faster_than: seconds; no others are looked for.
    """
    fastest = _fastest(row)
    if fastest.seconds >= faster_than:
        return None
    if fastest.peak <= peak:
        return fastest
    with _one_thread():
        found = _frontier(row, _partial_plans(row, most or WITHIN, peak - row.constant, faster_than))
    return next((trade for trade in found if trade.peak <= peak), None)


def _fastest(row: Row[What]) -> Trade[What]:
    """The least time, regardless of memory; of equal ones the options that stand first."""
    count = len(row.options)
    best: dict[State, tuple[float, tuple[Option[What], ...]]] = {(0, 0): (0.0, ())}
    for position in range(count):
        for phase in row.phases:
            if (position, phase) not in best:
                continue
            seconds, options = best[position, phase]
            for _, option, after in _following(row, (position, phase)):
                if after not in best or seconds + option.seconds < best[after][0]:
                    best[after] = (seconds + option.seconds, (*options, option))
    ends = [best[count, phase] for phase in row.phases if (count, phase) in best]
    return trade_of(row, min(ends, key=lambda end: end[0])[1])


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """These tensors are small: threads would wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


State = tuple[int, int]
"""A position in the row, and the phase."""


def _partial_plans(
    row: Row[What], most: int, limit: int | None = None, faster_than: float = math.inf
) -> dict[State, _Labels]:
    """Those worth going on from, at each state.

    Args:
        row: the model.
        most: how many to keep.
        limit: the most bytes above the constants that are of interest.
        faster_than: the seconds that are not.
    """
    count = len(row.options)
    rests = _rests(row)
    live = _least(row, lambda option: option.resident + option.held) if limit is not None else {}
    seconds = _least(row, lambda option: option.seconds) if faster_than < math.inf else {}
    known: dict[tuple[int, ...], _Moves] = {}  # equal positions have the same options
    reached: dict[State, list[_Labels]] = {(0, 0): [_Labels.first(row.seconds)]}
    kept: dict[State, _Labels] = {}
    for position in range(count + 1):
        dropped = row.dropped_before(position)
        for phase in row.phases:
            state = (position, phase)
            labels = _Labels.together(reached.pop(state, ()))
            if limit is not None:
                labels = labels.within(limit, row, rests[state], live[state])
            if seconds:
                labels = labels.faster_than(faster_than - seconds[state])
            labels = kept[state] = labels.thinned(most, rests[state], limited=limit is not None)
            if position == count or not len(labels):
                continue
            key = (phase, *map(id, row.options[position]))
            if key not in known:
                known[key] = _Moves(row, state)
            for after, those in labels.followed_by(known[key], state, dropped):
                reached.setdefault(after, []).append(those)
    return kept


def _following(row: Row[What], state: State) -> Iterator[tuple[int, Option[What], State]]:
    """The options that may come next, with their numbers and where they lead."""
    position, phase = state
    for number, option in enumerate(row.options[position]):
        if option.phase is None or option.phase >= phase:
            yield number, option, (position + option.span, phase if option.phase is None else option.phase)


@dataclass(frozen=True)
class _Rest:
    """What the rest of a row adds, where it leaves no choice of that."""

    resident: int
    gradient: int
    stepping: int


def _rests(row: Row[What]) -> dict[State, _Rest | None]:
    """From each state on; None where it depends on the options."""
    count = len(row.options)
    found: dict[State, _Rest | None] = {(count, phase): _Rest(0, 0, row.stepping) for phase in row.phases}
    for position in reversed(range(count)):
        for phase in row.phases:
            ways: set[_Rest | None] = set()
            for _, option, after in _following(row, (position, phase)):
                rest = found[after]
                ways.add(
                    None
                    if rest is None
                    else _Rest(
                        rest.resident + option.resident,
                        rest.gradient + option.gradient,
                        rest.stepping + option.stepping,
                    )
                )
            found[position, phase] = ways.pop() if len(ways) == 1 else None
    return found


def _least(row: Row[What], cost: Callable[[Option[What]], Number]) -> dict[State, Number]:
    """From each state on, the least that the rest of the row costs: what is live when forward ends, or seconds."""
    count = len(row.options)
    found: dict[State, Number] = {(count, phase): 0 for phase in row.phases}
    for position in reversed(range(count)):
        for phase in row.phases:
            ways = [
                cost(option) + found[after]
                for _, option, after in _following(row, (position, phase))
                if after in found
            ]
            if ways:
                found[position, phase] = min(ways)
    return found


class _Moves:
    """The options that may come next, as columns.

    Attributes:
        groups: which of them cover so many positions and lead to a phase.
        numbers: theirs, among the options of their position.
        seconds: of each; and so are its bytes, `live` being what is resident or held.
    """

    def __init__(self, row: Row[What], state: State) -> None:
        found: dict[State, list[tuple[int, Option[What]]]] = {}
        for number, option, (_, phase) in _following(row, state):
            found.setdefault((option.span, phase), []).append((number, option))
        self.groups: dict[State, slice] = {}
        options: list[Option[What]] = []
        numbers: list[int] = []
        for key, group in found.items():
            self.groups[key] = slice(len(options), len(options) + len(group))
            numbers += [number for number, _ in group]
            options += [option for _, option in group]
        self.numbers = torch.tensor(numbers)
        self.seconds = torch.tensor([option.seconds for option in options], dtype=torch.float64)
        self.resident = torch.tensor([option.resident for option in options])
        self.live = torch.tensor([option.resident + option.held for option in options])
        self.forward = torch.tensor([option.forward for option in options])
        self.backward = torch.tensor([option.backward for option in options])
        self.gradient = torch.tensor([option.gradient for option in options])
        self.stepping = torch.tensor([option.resident + option.stepping for option in options])


class _Labels:
    """Partial plans that end at one position.

    Attributes:
        bytes: a row each: what is live; the most in forward, in backward, in the optimizer step.
        seconds: time so far.
        trail: a row each: position, phase and number of the label before, and the number of the option since.
    """

    def __init__(self, bytes_: Tensor, seconds: Tensor, trail: Tensor) -> None:
        self.bytes = bytes_
        self.seconds = seconds
        self.trail = trail

    @classmethod
    def first(cls, seconds: float) -> _Labels:
        return cls(
            torch.zeros(1, 4, dtype=torch.int64),
            torch.tensor([seconds], dtype=torch.float64),
            torch.full((1, 4), -1, dtype=torch.int64),
        )

    @classmethod
    def together(cls, parts: Sequence[_Labels]) -> _Labels:
        if not parts:
            return cls(
                torch.zeros(0, 4, dtype=torch.int64),
                torch.zeros(0, dtype=torch.float64),
                torch.zeros(0, 4, dtype=torch.int64),
            )
        return cls(
            torch.cat([part.bytes for part in parts]),
            torch.cat([part.seconds for part in parts]),
            torch.cat([part.trail for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.seconds)

    def followed_by(self, moves: _Moves, state: State, dropped: int) -> Iterator[tuple[State, _Labels]]:
        """Every label with each option that may come next, by where that leads."""
        live, forward, backward, stepping = (column.unsqueeze(1) for column in self.bytes.unbind(1))
        after = (
            live + moves.live,
            torch.maximum(forward, live + (moves.forward + dropped)) + moves.resident,
            torch.maximum(backward + moves.gradient, live + moves.backward) + moves.resident,
            stepping + moves.stepping,
        )
        bytes_ = torch.stack(after, dim=2)
        seconds = self.seconds.unsqueeze(1) + moves.seconds
        trail = torch.empty((*seconds.shape, 4), dtype=torch.int64)
        trail[..., 0], trail[..., 1] = state
        trail[..., 2] = torch.arange(len(self)).unsqueeze(1)
        trail[..., 3] = moves.numbers
        for (span, phase), where in moves.groups.items():
            those = _Labels(
                bytes_[:, where].reshape(-1, 4), seconds[:, where].reshape(-1), trail[:, where].reshape(-1, 4)
            )
            yield (state[0] + span, phase), those

    def within(self, limit: int, row: Row[What], rest: _Rest | None, least_live: int) -> _Labels:
        """Those that may still end below a limit."""
        live, forward, backward, stepping = self.bytes.unbind(1)
        known = rest or _Rest(0, 0, row.stepping)
        loss = max(row.loss + row.dropped_before(len(row.options)), row.tail)
        ends = (
            live + (least_live + loss),
            forward + known.resident,
            backward + (known.resident + known.gradient),
            stepping + (known.resident + known.stepping),
        )
        return self._those(torch.nonzero(torch.stack(ends).amax(dim=0) <= limit).squeeze(1))

    def faster_than(self, seconds: float) -> _Labels:
        return self._those(torch.nonzero(self.seconds < seconds).squeeze(1))

    def thinned(self, most: int, rest: _Rest | None, *, limited: bool = False) -> _Labels:
        """Without those that cannot win; about `most` of them, if need be by a grid.

        Args:
            most: how many.
            rest: what is known of the rest of the row.
            limited: they are those within a limit, and so equal in all but what is live, as far as the rest is known.
        """
        if len(self) < 2:
            return self
        labels = self._those(torch.sort(self.seconds, stable=True).indices)
        if limited and rest is not None:
            labels = labels._those(_falling(labels.bytes[:, 0]))
        elif len(labels) > 8 * most:  # comparing each with each would take long
            labels = labels._on_grid(rest, CELLS)
        if not limited or rest is None:
            labels = labels._undominated(rest)
        cells = most // 2
        while len(labels) > most and cells > 1:
            labels = labels._on_grid(rest, cells)
            cells = cells * 2 // 3
        return labels

    def _compared(self, rest: _Rest | None) -> Tensor:
        """What decides which label is better, besides time: as few numbers as will do."""
        live, forward, backward, stepping = self.bytes.unbind(1)
        if rest is not None:
            end = torch.maximum(forward, backward + rest.gradient)
            return torch.stack((live, torch.maximum(end, stepping + rest.stepping)), dim=1)
        columns = [live, backward]
        if (forward > backward).any():  # else it never counts: backward's can only grow more
            columns.append(forward)
        if (stepping != stepping[0]).any():
            columns.append(stepping)
        return torch.stack(columns, dim=1)

    def _on_grid(self, rest: _Rest | None, cells: int) -> _Labels:
        """Two of each cell of a grid: the fastest and the one with the least live, or the ends would be lost."""
        compared = self._compared(rest)
        least = compared.amin(dim=0)
        width = torch.clamp((compared.amax(dim=0) - least) // (cells - 1), min=1)
        key = torch.zeros(len(self), dtype=torch.int64)
        for column in torch.div(compared - least, width, rounding_mode="floor").unbind(1):
            key = key * (cells + 1) + column
        if (cells + 1) ** compared.shape[1] > DENSE:
            key = torch.unique(key, return_inverse=True)[1]
        count = len(self)
        numbers = torch.arange(count)
        size = compared.sum(dim=1)
        kept = torch.zeros(count, dtype=torch.bool)
        kept[_least_in_each(key, numbers)] = True
        # Of equal sizes the first; the product is below 2**63 for any memory there is.
        kept[_least_in_each(key, (size - size.amin()) * count + numbers) % count] = True
        kept[compared.argmin(dim=0)] = True
        return self._those(torch.nonzero(kept).squeeze(1))

    def _undominated(self, rest: _Rest | None) -> _Labels:
        """Those that no other beats; they are sorted by time, so only one that stands before can."""
        compared = self._compared(rest)
        if compared.shape[1] == 2:
            firsts, seconds = compared[:, 0].tolist(), compared[:, 1].tolist()
            return self._those(torch.tensor(_below_the_stairs(firsts, seconds), dtype=torch.int64))
        kept = torch.zeros(0, dtype=torch.int64)
        for start in range(0, len(self), CHUNK):
            chunk = torch.arange(start, min(start + CHUNK, len(self)))
            before = torch.cat((kept, chunk))
            worse = before.unsqueeze(0) < chunk.unsqueeze(1)
            for column in compared.unbind(1):
                worse &= column[chunk].unsqueeze(1) >= column[before].unsqueeze(0)
            kept = torch.cat((kept, chunk[~worse.any(dim=1)]))
        return self._those(kept)

    def _those(self, indices: Tensor) -> _Labels:
        return _Labels(self.bytes[indices], self.seconds[indices], self.trail[indices])


def _falling(numbers: Tensor) -> Tensor:
    """Where a number is smaller than all before it."""
    before = torch.cummin(numbers, 0).values[:-1]
    smaller = torch.ones(len(numbers), dtype=torch.bool)
    smaller[1:] = numbers[1:] < before
    return torch.nonzero(smaller).squeeze(1)


def _least_in_each(cell_of: Tensor, numbers: Tensor) -> Tensor:
    """The least number of each cell that has one."""
    most = torch.iinfo(torch.int64).max
    least = torch.full((int(cell_of.max()) + 1,), most).scatter_reduce_(0, cell_of, numbers, "amin")
    return least[least < most]


def _below_the_stairs(ones: Sequence[int], others: Sequence[int]) -> list[int]:
    """Which pairs have no pair before them that is as small in both numbers.

    The smallest pairs so far are stairs: the larger the one number, the smaller the other.
    """
    kept: list[int] = []
    width: list[int] = []
    height: list[int] = []
    for index, (one, other) in enumerate(zip(ones, others, strict=True)):
        place = bisect.bisect_right(width, one)
        if place and height[place - 1] <= other:
            continue
        kept.append(index)
        end = place
        while end < len(height) and height[end] >= other:
            end += 1
        if place and width[place - 1] == one:
            place -= 1
        width[place:end] = [one]
        height[place:end] = [other]
    return kept


def _frontier(row: Row[What], kept: dict[State, _Labels]) -> list[Trade[What]]:
    count = len(row.options)
    trails = {state: labels.trail.tolist() for state, labels in kept.items()}
    ends: list[tuple[float, int, State, int]] = []
    for phase in row.phases:
        labels = kept[count, phase]
        if not len(labels):
            continue
        live, forward, backward, stepping = labels.bytes.unbind(1)
        moments = (
            forward,
            backward,
            live + (row.loss + row.dropped_before(count)),
            live + row.tail,
            stepping + row.stepping,
        )
        peaks = torch.stack(moments).amax(dim=0).tolist()
        for index, (seconds, peak) in enumerate(zip(labels.seconds.tolist(), peaks, strict=True)):
            ends.append((seconds, row.constant + peak, (count, phase), index))
    trades: list[Trade[What]] = []
    for seconds, peak, state, index in sorted(ends):
        if not trades or peak < trades[-1].peak:
            trades.append(Trade(peak, seconds, _walk_back(row, trails, state, index)))
    return trades


def _walk_back(
    row: Row[What], trails: dict[State, list[list[int]]], state: State, index: int
) -> tuple[Option[What], ...]:
    options: list[Option[What]] = []
    while state[0] > 0:
        position, phase, index_before, number = trails[state][index]
        state, index = (position, phase), index_before
        options.append(row.options[position][number])
    return tuple(reversed(options))
