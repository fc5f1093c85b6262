"""The best trades there are: for each peak the least step time. A dynamic programme over the model's layers.

Note [The programme]
~~~~~~~~~~~~~~~~~~~~
What a plan costs is in Note [The memory of a step] (trades.py). Four running numbers say all about the options so far
that the rest of the row can still make worse: what is live at this point, and the most seen so far in forward, in
backward (where what follows in the row will have left gradients behind), and in the optimizer step. Of two partial
plans the one that is no better in any of the four, nor in time, can never win, and is dropped.

So the programme is exact. Fewer numbers are to be compared where some are known not to count: where the rest of the row
leaves no choice about resident bytes and gradients, the last three will end as one. And whatever is taken for the rest,
it will need something above what is live now: a partial plan that has needed less so far gains nothing by that
(`Labels.lifted`).

If more partial plans stay than are wanted (`most`), those in the same cell of a grid count as one, the
fastest; the grid is as coarse as it must be.

For one peak alone (`fastest_within`) partial plans that will exceed it are dropped, and of those that will not,
how far below they stay is of no account.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from memscale.planner.bounds import Bound, least
from memscale.planner.labels import LIVE, STEPPING, Labels, Moves, Rest, Span
from memscale.planner.trades import Option, Row, State, Trade, following, trade_of

__all__ = ["best_trades", "bound_within", "fastest_within"]

What = TypeVar("What")

MOST = 3000  # partial plans kept, shared out among the positions
LEAST = 100  # partial plans kept at a position, however many positions there are
ROUNDING = 1e-9  # of seconds and prices that are added up
WITHIN = 300  # partial plans kept at a position if the peak is given


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
    if rest.is_known and fastest.peak == row.constant + rest.stepping.least:
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
    if not found or found[0].seconds >= faster_than:
        return None
    # Up to the limit partial plans count as equals: what the plan needs is to be counted anew.
    return trade_of(row, found[0].options)


def bound_within(row: Row[What], peak: int) -> float:
    """Seconds that no trade which needs no more than a given peak is below. See Note [Priced memory] in bounds.py."""
    return max(bound.seconds for bound in _bounds(row, peak - row.constant))


def _bounds(row: Row[What], limit: int) -> tuple[Bound[What], Bound[What]]:
    """Of what is live where forward ends, and of what is in use in the optimizer step."""
    return (
        Bound(row, limit - _end(row), lambda option: option.resident + option.held),
        Bound(row, limit - row.stepping, lambda option: option.resident + option.stepping),
    )


def _fastest(row: Row[What]) -> Trade[What]:
    """The least time, regardless of memory; of equal ones the options that stand first."""
    count = len(row.options)
    best: dict[State, tuple[float, tuple[Option[What], ...]]] = {(0, 0): (0.0, ())}
    for position in range(count):
        for phase in row.phases:
            if (position, phase) not in best:
                continue
            seconds, options = best[position, phase]
            for _, option, after in following(row, (position, phase)):
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


def _partial_plans(
    row: Row[What], most: int, limit: int | None = None, faster_than: float = math.inf
) -> dict[State, Labels]:
    """Those worth going on from, at each state.

    Args:
        row: the model.
        most: how many to keep.
        limit: the most bytes above the constants that are of interest.
        faster_than: the seconds that are not.
    """
    count = len(row.options)
    rests = _rests(row)
    end = _end(row)
    live = least(row, lambda option: option.resident + option.held) if limit is not None else {}
    bounds = _bounds(row, limit) if limit is not None and faster_than < math.inf else None
    known: dict[tuple[int, int], Moves] = {}  # equal positions have the same options
    reached: dict[State, list[Labels]] = {(0, 0): [Labels.first(row.seconds)]}
    kept: dict[State, Labels] = {}
    for position in range(count + 1):
        dropped = row.dropped_before(position)
        for phase in row.phases:
            state = (position, phase)
            labels = Labels.together(reached.pop(state, ()))
            if len(labels):
                labels = labels.lifted(rests[state])
                if bounds is not None:
                    for bound, column in zip(bounds, (LIVE, STEPPING), strict=True):
                        below = bound.beyond(state, faster_than * (1 + ROUNDING))
                        labels = labels.below(below, bound.price, column)
                if limit is not None:
                    labels = labels.within(limit, rests[state], live[state] + end)
                labels = labels.thinned(most, rests[state])
            kept[state] = labels
            if position == count or not len(labels):
                continue
            key = (phase, id(row.options[position]))
            if key not in known:
                known[key] = Moves(row, state)
            for after, those in labels.followed_by(known[key], state, dropped):
                if after in rests:  # else it leads nowhere
                    reached.setdefault(after, []).append(those)
    return kept


def _end(row: Row[What]) -> int:
    """The most in use where forward ends, above what is live then."""
    return max(row.loss + row.dropped_before(len(row.options)), row.tail)


def _rests(row: Row[What]) -> dict[State, Rest]:
    """From each state on that leads to the end of the row."""
    count = len(row.options)
    last = Rest(Span(0, 0), Span(0, 0), Span(row.stepping, row.stepping), _end(row))
    found = {(count, phase): last for phase in row.phases}
    known: dict[tuple[int, int], list[tuple[int, int, Option[What]]]] = {}
    for position in reversed(range(count)):
        for phase in row.phases:
            key = (id(row.options[position]), phase)
            if key not in known:
                known[key] = _unlike(row, (position, phase))
            ways = [
                (option, found[position + span, then])
                for span, then, option in known[key]
                if (position + span, then) in found
            ]
            if ways:
                found[position, phase] = Rest(
                    _span([(rest.forward, option.resident) for option, rest in ways]),
                    _span([(rest.backward, option.resident + option.gradient) for option, rest in ways]),
                    _span([(rest.stepping, option.resident + option.stepping) for option, rest in ways]),
                    min([max(o.backward, o.held + rest.to_come) - o.gradient for o, rest in ways]),
                )
    return found


def _unlike(row: Row[What], state: State) -> list[tuple[int, int, Option[What]]]:
    """The options that may come next, but for those that lead to the same place as another that needs no more."""
    kept: dict[tuple[int, ...], list[tuple[int, int, Option[What]]]] = {}
    for _, option, (_, phase) in following(row, state):
        alike = (option.span, phase, option.resident, option.gradient, option.stepping)
        others = kept.setdefault(alike, [])
        if not any(o.backward <= option.backward and o.held <= option.held for _, _, o in others):
            others.append((option.span, phase, option))
    return [each for others in kept.values() for each in others]


def _span(ways: Sequence[tuple[Span, int]]) -> Span:
    return Span(
        min([span.least + more for span, more in ways]), max([span.most + more for span, more in ways])
    )


def _frontier(row: Row[What], kept: dict[State, Labels]) -> list[Trade[What]]:
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
