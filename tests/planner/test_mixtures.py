"""What a mixture of plans takes: between theirs, never better than what is there, and close to the frontier."""

from __future__ import annotations

import pytest

from memscale.planner.engine import _models, points_by_hand
from memscale.planner.estimates import mixed_seconds
from memscale.planner.frontier import best_trades
from memscale.planner.options import Candidate
from memscale.planner.rules import Point
from memscale.planner.settings import NOTHING
from support.profiles import LARGE, config_of, stack


def point(peak: int, seconds: float) -> Point:
    return Point(Candidate(()), peak, 0, seconds)


def test_between_two_plans_along_a_line() -> None:
    points = [point(100, 1.0), point(60, 1.5), point(20, 3.5)]
    assert mixed_seconds(points, 200) == 1.0
    assert mixed_seconds(points, 100) == 1.0
    assert mixed_seconds(points, 80) == pytest.approx(1.25)
    assert mixed_seconds(points, 40) == pytest.approx(2.5)
    assert mixed_seconds(points, 20) == pytest.approx(3.5)
    assert mixed_seconds(points, 19) is None


def test_plans_that_a_mixture_beats_do_not_count() -> None:
    points = [point(100, 1.0), point(60, 1.5), point(20, 2.0)]
    points += [point(80, 1.3), point(61, 9.0), point(60, 1.6), point(30, 1.95)]
    assert mixed_seconds(points, 60) == pytest.approx(1.5)
    assert mixed_seconds(points, 40) == pytest.approx(1.75)


@pytest.mark.parametrize(("offloading", "apart"), [(False, 0.1), (True, 0.15)])
def test_close_to_the_frontier(offloading: bool, apart: float) -> None:
    profile, config = stack(24), config_of(enable_offloading=offloading)
    under = [(NOTHING, profile)]
    found = points_by_hand(profile, LARGE, config)
    rows = [row for model in _models(under, LARGE, config) for row in model.rows()]
    trades = [trade for row in rows for trade in best_trades(row)]
    low, high = min(trade.peak for trade in trades), max(trade.peak for trade in trades)
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        peak = int(low + share * (high - low))
        about = mixed_seconds(found, peak)
        exact = min(trade.seconds for trade in trades if trade.peak <= peak)
        assert about is not None
        assert about == pytest.approx(exact, rel=apart)
