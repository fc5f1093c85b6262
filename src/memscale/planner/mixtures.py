"""About how long the fastest plan up to a peak takes, from a few plans for the whole model.

Note [Mixed plans]
~~~~~~~~~~~~~~~~~~
Where some layers follow one plan and the others another, peak and time lie between those of the two plans, about on a
line. So what the lower hull of some plans says at a peak is about what the best mixture of them takes: for the models
of the benchmark mostly within 2% of the frontier, and in a tenth of the time. It serves to compare sizes of a batch;
a plan that is given to anyone comes from the frontier.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from memscale.planner.rules import Point, frontier

__all__ = ["mixed_seconds"]


def mixed_seconds(points: Sequence[Point], peak: int) -> float | None:
    """About the step time of the fastest mixture of plans up to a peak; None if none of them fits.

    Args:
        points: plans for the whole model.
        peak: what may be needed.
    """
    hull: list[Point] = []  # fastest first; each needs less, for more and more time
    for point in frontier(points):
        while len(hull) > 1 and _price(hull[-2], point) <= _price(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    if hull[0].peak_bytes <= peak:
        return hull[0].seconds
    for faster, smaller in pairwise(hull):
        if smaller.peak_bytes <= peak:
            return smaller.seconds - _price(faster, smaller) * (peak - smaller.peak_bytes)
    return None


def _price(faster: Point, smaller: Point) -> float:
    """Seconds for each byte that is needed less."""
    return (smaller.seconds - faster.seconds) / (faster.peak_bytes - smaller.peak_bytes)
