"""The frontier is the best there is: equal to trying everything, and close to an integer programme on deep models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from memscale.planner import frontier
from memscale.planner.frontier import ModelRow, Option, Trade, best_trades, fastest_within, trade_of

EXACT = 10**6  # partial plans: more than these rows have

sizes = st.integers(0, 40)


@st.composite
def options(draw: st.DrawFn, span: int = 1) -> Option[int]:
    return Option(
        draw(st.integers(0, 99)),
        draw(st.integers(0, 20)) / 4,  # sums of quarters are exact, whatever their order
        resident=draw(sizes),
        held=draw(sizes),
        forward=draw(sizes),
        backward=draw(st.integers(0, 80)),
        gradient=draw(sizes),
        stepping=draw(sizes),
        span=span,
        phase=draw(st.sampled_from((None, None, 0, 0, 1))),
    )


@st.composite
def rows(draw: st.DrawFn) -> ModelRow[int]:
    count = draw(st.integers(1, 8))
    most = 4 if count <= 5 else 2 if count <= 7 else 1
    positions = []
    for index in range(count):
        here = draw(st.lists(options(), min_size=1, max_size=most))
        here.append(replace(here[0], phase=None))  # so that there is a way to the end
        if index + 2 <= count and draw(st.booleans()):
            here.append(draw(options(span=2)))
        positions.append(here)
    return ModelRow(
        positions,
        dropped=[draw(st.integers(0, 5)) for _ in range(count)],
        constant=draw(sizes),
        seconds=draw(st.integers(0, 8)) / 4,
        loss=draw(st.integers(-10, 100)),
        tail=draw(st.integers(-10, 100)),
        stepping=draw(st.integers(-10, 100)),
    )


def plans(row: ModelRow[int], position: int = 0, phase: int = 0) -> Iterator[tuple[Option[int], ...]]:
    if position == len(row.options):
        yield ()
        return
    for option in row.options[position]:
        if option.phase is None or option.phase >= phase:
            after = phase if option.phase is None else option.phase
            for others in plans(row, position + option.span, after):
                yield (option, *others)


def by_trying_everything(row: ModelRow[int]) -> list[tuple[float, int]]:
    best: list[tuple[float, int]] = []
    for seconds, peak in sorted(
        (trade.seconds, trade.peak) for trade in (trade_of(row, p) for p in plans(row))
    ):
        if not best or peak < best[-1][1]:
            best.append((seconds, peak))
    return best


@settings(max_examples=150, deadline=None)
@given(row=rows())
def test_equal_to_trying_everything_at_every_budget(row):
    found = best_trades(row, EXACT)
    assert [(trade.seconds, trade.peak) for trade in found] == by_trying_everything(row)


@st.composite
def large_rows(draw: st.DrawFn) -> ModelRow[int]:
    """Eight layers of five options, two of which may be of a later phase: 390,625 plans."""
    positions = []
    for _ in range(8):
        here = [draw(options()) for _ in range(5)]
        positions.append([replace(each, phase=None) for each in here[:3]] + here[3:])
    return ModelRow(
        positions,
        dropped=[draw(st.integers(0, 5)) for _ in range(8)],
        constant=draw(sizes),
        loss=draw(st.integers(-10, 100)),
        tail=draw(st.integers(-10, 100)),
        stepping=draw(st.integers(-10, 100)),
    )


def by_trying_all_columns(row: ModelRow[int]) -> list[tuple[float, int]]:
    """The same as `by_trying_everything`, a layer at a time: a column for each plan, none of them left out."""
    live, forward, backward, stepping, phase = (numpy.zeros(1, dtype=numpy.int64) for _ in range(5))
    seconds = numpy.full(1, row.seconds)
    for position, here in enumerate(row.options):
        parts = []
        for option in here:
            may = slice(None) if option.phase is None else phase <= option.phase
            at_forward = live[may] + option.forward + row.dropped_before(position)
            at_backward = live[may] + option.backward
            parts.append(
                (
                    live[may] + option.resident + option.held,
                    numpy.maximum(forward[may], at_forward) + option.resident,
                    numpy.maximum(backward[may] + option.gradient, at_backward) + option.resident,
                    stepping[may] + option.resident + option.stepping,
                    phase[may] if option.phase is None else numpy.full(len(live[may]), option.phase),
                    seconds[may] + option.seconds,
                )
            )
        live, forward, backward, stepping, phase, seconds = map(numpy.concatenate, zip(*parts, strict=True))
    end = len(row.options)
    moments = (
        forward,
        backward,
        live + row.loss + row.dropped_before(end),
        live + row.tail,
        stepping + row.stepping,
    )
    peaks = row.constant + numpy.maximum.reduce(moments)
    order = numpy.lexsort((peaks, seconds))
    seconds, peaks = seconds[order], peaks[order]
    best = numpy.concatenate(([True], peaks[1:] < numpy.minimum.accumulate(peaks)[:-1]))
    return list(zip(seconds[best].tolist(), peaks[best].tolist(), strict=True))


@settings(max_examples=50, deadline=None)
@given(row=rows())
def test_all_columns_are_every_plan(row):
    row = replace(row, options=[[option for option in here if option.span == 1] for here in row.options])
    assert by_trying_all_columns(row) == by_trying_everything(row)


@settings(max_examples=25, deadline=None)
@given(row=large_rows(), share=st.floats(0, 1))
def test_eight_layers_of_five_options_at_every_budget(row, share):
    exact = by_trying_all_columns(row)
    assert [(trade.seconds, trade.peak) for trade in best_trades(row, EXACT)] == exact
    peak = int(exact[-1][1] + share * (exact[0][1] - exact[-1][1]))
    found = fastest_within(row, peak, EXACT)
    assert found is not None
    assert found.seconds == next(seconds for seconds, needed in exact if needed <= peak)


@settings(max_examples=150, deadline=None)
@given(row=rows(), share=st.floats(-0.1, 1.1))
def test_fastest_within_a_peak_is_what_trying_everything_finds(row, share):
    exact = by_trying_everything(row)
    low, high = exact[-1][1], exact[0][1]
    peak = int(low + share * (high - low))
    fastest = min((seconds for seconds, needed in exact if needed <= peak), default=None)
    found = fastest_within(row, peak)
    assert (None if found is None else found.seconds) == fastest
    if found is not None:
        assert trade_of(row, found.options) == found
        assert found.peak <= peak


@settings(max_examples=100, deadline=None)
@given(row=rows())
def test_a_trade_costs_what_its_options_cost(row):
    for trade in best_trades(row):
        assert trade_of(row, trade.options) == trade
        assert sum(option.span for option in trade.options) == len(row.options)


@settings(max_examples=100, deadline=None)
@given(row=rows(), most=st.integers(2, 6))
def test_few_partial_plans_give_true_plans_and_both_ends(row, most):
    """A coarse grid may miss a trade, never invent one."""
    exact = by_trying_everything(row)
    found = best_trades(row, most)
    assert found[0].seconds == exact[0][0]
    for trade in found:
        assert trade_of(row, trade.options) == trade
        assert any(seconds <= trade.seconds and peak <= trade.peak for seconds, peak in exact)


def deep(count: int, options_at: list[Option[str]], loss: int) -> ModelRow[str]:
    return ModelRow([options_at] * count, dropped=[0] * count, constant=5_000, loss=loss, tail=loss // 2)


MIXED = [
    Option("plain", 0.0, 120, 1000, 1300, 1500, 40, 80, phase=0),
    Option("selective", 0.11, 120, 310, 1300, 1530, 40, 80, phase=0),
    Option("recomputed", 0.31, 120, 97, 1300, 1490, 40, 80, phase=0),
    Option("plain at home", 0.53, 0, 1000, 1340, 1550, 0, 0, phase=1),
    Option("recomputed at home", 0.85, 0, 97, 1340, 1540, 0, 0, phase=1),
]
RECOMPUTE = [option for option in MIXED if option.resident]
CASES = [(24, RECOMPUTE, 900), (48, RECOMPUTE, 20_000), (24, MIXED, 900), (48, MIXED, 9000)]


@pytest.mark.parametrize(("count", "choices", "loss"), CASES)
def test_within_one_per_cent_of_an_integer_programme(count, choices, loss):
    row = deep(count, choices, loss)
    found = best_trades(row)
    low, high = found[-1].peak, found[0].peak
    for share in (0.02, 0.1, 0.25, 0.5, 0.75, 0.95):
        budget = int(low + share * (high - low))
        ours = next(trade for trade in found if trade.peak <= budget)
        # At most 1% more memory or 1% more time than the best there is.
        assert ours.seconds <= 1.01 * oracle(row, int(budget / 1.01)) + 1e-9
    assert low <= 1.01 * least_peak(row)


def test_options_that_lead_nowhere_are_not_taken():
    """Nothing may follow the faster one: the second position has options of an earlier phase alone."""
    here = [Option("at home", 0.0, held=10, phase=1), Option("resident", 1.0, resident=5, held=10, phase=0)]
    row = ModelRow([here, [Option("resident", 1.0, resident=5, held=10, phase=0)]])
    (trade,) = best_trades(row)
    assert [option.what for option in trade.options] == ["resident", "resident"]
    assert fastest_within(row, trade.peak) == trade
    assert fastest_within(row, trade.peak - 1) is None


@pytest.mark.parametrize(("choices", "most"), [(RECOMPUTE, 800), (MIXED, 2000)])
def test_what_is_still_to_come_leaves_few_to_compare(choices, most):
    """Without it 1371 and 2799 partial plans are left that no other beats; the frontier is exact either way."""
    kept = frontier._partial_plans(deep(24, choices, 900), EXACT, None)
    assert sum(len(plans.seconds) for plans in kept.values()) < most


def oracle(row: ModelRow[str], budget: int) -> float:
    """The least time within a budget, by mixed-integer programming, in any order of phases."""
    model = Programme(row)
    result = model.solve(model.seconds, budget)
    return float(result.fun) if result.success else float("inf")


def least_peak(row: ModelRow[str]) -> float:
    model = Programme(row)
    return float(model.solve(None, None).fun)


class Programme:
    """One variable per position and option, and one for the peak. See Note [The memory of a step]."""

    def __init__(self, row: ModelRow[str]) -> None:
        self.row = row
        self.count = len(row.options)
        self.places = [(k, o) for k in range(self.count) for o in row.options[k]]
        self.seconds = [option.seconds for _, option in self.places]

    def solve(self, objective: list[float] | None, budget: int | None):
        n = len(self.places)
        lines, upper = [], []
        for position in range(self.count):
            for moment in ("forward", "backward"):
                line = [self._in(moment, position, k, option) for k, option in self.places]
                lines.append([*line, -1])
                upper.append(-self.row.constant)
        totals = ((self.row.loss, "held"), (self.row.tail, "held"), (self.row.stepping, "stepping"))
        for extra, name in totals:
            lines.append([*(o.resident + getattr(o, name) for _, o in self.places), -1])
            upper.append(-self.row.constant - extra)
        one = [[*(float(k == position) for k, _ in self.places), 0] for position in range(self.count)]
        constraints = [
            optimize.LinearConstraint(numpy.array(lines, dtype=float), -numpy.inf, upper),
            optimize.LinearConstraint(numpy.array(one), 1, 1),
        ]
        goal = [0.0] * n + [1.0] if objective is None else [*objective, 0.0]
        bounds = optimize.Bounds([0] * n + [0], [1] * n + [numpy.inf if budget is None else budget])
        return optimize.milp(
            goal,
            constraints=constraints,
            integrality=[1] * n + [0],
            bounds=bounds,
            options={"mip_rel_gap": 1e-3, "time_limit": 60},
        )

    @staticmethod
    def _in(moment: str, position: int, k: int, option: Option[str]) -> int:
        """What an option at ``k`` adds to what is in use at a moment of ``position``."""
        if k < position:
            return option.resident + option.held
        if k == position:
            return option.resident + getattr(option, moment)
        return option.resident + (option.gradient if moment == "backward" else 0)


@pytest.mark.parametrize(("count", "choices", "loss"), CASES)
def test_closer_look_at_a_peak_is_faster_than_a_thinned_frontier(count, choices, loss):
    row = deep(count, choices, loss)
    found = best_trades(row, 20)
    better = 0
    for share in (0.02, 0.1, 0.25, 0.5, 0.75, 0.95):
        budget = int(found[-1].peak + share * (found[0].peak - found[-1].peak))
        ours = next(trade for trade in found if trade.peak <= budget)
        closer = fastest_within(row, budget)
        assert closer is not None
        assert closer.peak <= budget
        assert closer.seconds <= ours.seconds + 1e-9
        better += closer.seconds < ours.seconds - 1e-9
    assert better


def test_more_memory_is_never_slower():
    found = best_trades(deep(24, MIXED, 900))
    assert len(found) > 20
    assert [trade.seconds for trade in found] == sorted(trade.seconds for trade in found)
    assert [trade.peak for trade in found] == sorted((trade.peak for trade in found), reverse=True)


def test_the_same_every_time():
    row = deep(48, MIXED, 9000)
    first: list[Trade[str]] = best_trades(row)
    assert best_trades(row) == first
