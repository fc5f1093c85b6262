"""The rules that choose a point of the frontier, and their constants.

| asked for | the point taken |
|---|---|
| CONSERVATIVE | the least peak whose step time is within 1.15 × of the fastest plan that fits; where full \
checkpointing (every repeated block recomputed whole) would need less, the fastest plan at its peak or below; on a \
CPU below it by MemScale's own size, which is in the same memory |
| BALANCED | the least product of peak and step time |
| AGGRESSIVE | the least peak; of equal ones the one that holds the least between forward and backward |
| a memory budget | the fastest plan that fits it |

A point that does not fit the device is replaced by the fastest one that does; if none fits, by the smallest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memscale.config import OptimizationMode
from memscale.planner.options import Candidate, Choices, spans
from memscale.planner.settings import NOTHING, Setting
from memscale.units import format_bytes

__all__ = ["WHY_KEPT", "Point", "Verdict", "choose", "pareto_frontier"]

CONSERVATIVE_TIME = 1.15  # times the fastest plan that fits
OWN_BYTES = 12 * 2**20  # what importing and running the planner adds to a process, measured with torch 2.13
UNCHANGED = "as it is"

WHY_KEPT = {
    "least-peak-times-time": "computing it again costs more time than the memory is worth",
    "least-peak": "dropping it would not lower the peak",
    "least-peak-within-1.15x": "computing it again would not lower the peak, or take too long",
    "fastest-at-full-checkpointing": "the peak is at that of full checkpointing without it",
    "fastest-that-fits": "the device has room for it",
    "budget-fastest": "the budget has room for it",
    "smallest-plan": "dropping it would not lower the peak",
    "forced": "dropping it would not lower the peak",
    "by-hand": "nobody asked for it",
}
"""For each rule, why a block that could be recomputed is not."""


@dataclass(frozen=True)
class Point:
    """A candidate and what it costs.

    Attributes:
        candidate: the choices.
        peak_bytes: the peak of device memory.
        saved_bytes: what forward saves for backward.
        seconds: the time of a step.
        offloaded_bytes: what is on the tier below: parameters, their gradients and their optimizer state.
        peak_below_bytes: the most that the tier below needs at once: those, in whole pages of a file on disk, and the
            activations there.
        setting: what is done with the model as a whole.
        prefetch: how many layers ahead parameters are fetched.
    """

    candidate: Candidate
    peak_bytes: int
    saved_bytes: int
    seconds: float
    offloaded_bytes: int = 0
    peak_below_bytes: int = 0
    setting: Setting = NOTHING
    prefetch: int = 0

    @property
    def label(self) -> str:
        """Return what is done, in words."""
        parts = _describe(self.candidate.choices)
        if self.prefetch:
            parts[-1] += ", prefetched"
        if self.setting.loss is not None:
            parts.append("loss in tiles")
        if self.setting.mlp_rows is not None:
            parts.append("MLPs in tiles")
        if self.setting.precision is not None:
            parts.append(self.setting.precision.dtype)
        if self.setting.eight_bit:
            parts.append("8-bit optimizer")
        return ", ".join(parts) or UNCHANGED


def _describe(choices: Choices) -> list[str]:
    parts = []
    recomputed = [choice for choice in choices if choice.recompute]
    if recomputed:
        parts.append(f"{len(recomputed)} blocks recomputed")
        lengths = {stop - start for start, stop in spans(choices) if choices[start].recompute}
        if lengths != {1}:
            parts.append(f"in segments of {_range(lengths)}")
        kept = {choice.variant for choice in recomputed}
        if kept != {0}:
            parts.append(f"keeping {_range(kept)} products each")
    others = Counter(choice.technique for choice in choices if choice.technique and not choice.recompute)
    parts += [f"{name} on {count} blocks" for name, count in sorted(others.items())]
    inputs = sum(choice.input_offloaded and not choice.chained for choice in choices)
    if inputs:
        parts.append(f"inputs of {inputs} offloaded")
    offloaded = sum(choice.offloaded for choice in choices)
    if offloaded:
        all_of_them = offloaded == len(choices)
        parts.append("parameters offloaded" if all_of_them else f"parameters of {offloaded} blocks offloaded")
    return parts


def _range(numbers: set[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


@dataclass(frozen=True)
class Verdict:
    """The point taken, the rule that took it, and what the user should know.

    Attributes:
        point: the point.
        rule: the rule's name.
        notes: for the user.
        within: where the rule takes the fastest plan up to a peak, that peak.
    """

    point: Point
    rule: str
    notes: tuple[str, ...] = ()
    within: int | None = None


def pareto_frontier(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points that no other beats in both peak and time, fastest first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (each.seconds, each.peak_bytes)):
        if not best or point.peak_bytes < best[-1].peak_bytes:
            best.append(point)
    return tuple(best)


def choose(
    points: Sequence[Point],
    mode: OptimizationMode,
    budget: int | None,
    capacity: int,
    own_bytes: int = 0,
    margin: int = 0,
) -> Verdict:
    """Choose a point.

    Args:
        points: what there is to choose from.
        mode: the user's mode.
        budget: the memory that may be used, if the user has set one.
        capacity: what the device has.
        own_bytes: what MemScale itself takes of the same memory.
        margin: what must stay free of either.
    """
    room = capacity - margin
    curve = pareto_frontier(points)
    fitting = [point for point in curve if point.peak_bytes <= room]
    smallest = min(points, key=_size)
    if not fitting:
        note = f"nothing fits: {_shortage(smallest, room)} than the device has ({format_bytes(capacity)})"
        return Verdict(smallest, "smallest-plan", (note,))
    if budget is not None:
        most = min(budget, capacity) - margin
        within = [point for point in fitting if point.peak_bytes <= most]
        if within:
            return Verdict(within[0], "budget-fastest", within=most)
        note = f"no plan fits the budget of {format_bytes(budget)}: {_shortage(smallest, budget - margin)}"
        return Verdict(smallest, "smallest-plan", (note,))
    verdict = _by_mode(points, curve, fitting, mode, own_bytes)
    wanted = verdict.point
    if wanted.peak_bytes <= room:
        return verdict
    note = (
        f"the {mode.value} point needs {format_bytes(wanted.peak_bytes)} and does not fit "
        f"{format_bytes(capacity)}: the fastest plan that fits was taken"
    )
    return Verdict(fitting[0], "fastest-that-fits", (note,), within=room)


def _shortage(smallest: Point, room: int) -> str:
    needs = smallest.peak_bytes
    return f"the smallest plan needs {format_bytes(needs)}, {format_bytes(needs - room)} more"


def _size(point: Point) -> tuple[int, int, float]:
    return point.peak_bytes, point.saved_bytes, point.seconds


def _by_mode(
    points: Sequence[Point],
    curve: Sequence[Point],
    fitting: Sequence[Point],
    mode: OptimizationMode,
    own_bytes: int,
) -> Verdict:
    if mode is OptimizationMode.AGGRESSIVE:
        return Verdict(min(points, key=_size), "least-peak")
    if mode is OptimizationMode.BALANCED:
        product = min(curve, key=lambda point: point.peak_bytes * point.seconds)
        return Verdict(product, "least-peak-times-time")
    limit = CONSERVATIVE_TIME * fitting[0].seconds
    within = [point for point in fitting if point.seconds <= limit]
    wanted = min(within, key=lambda point: point.peak_bytes)
    full = next((point for point in points if point.candidate.is_full_checkpointing), None)
    if full is not None and wanted.peak_bytes > full.peak_bytes - own_bytes:
        for most in (full.peak_bytes - own_bytes, full.peak_bytes):
            below = [point for point in curve if point.peak_bytes <= most]
            if below:
                return Verdict(below[0], "fastest-at-full-checkpointing", within=most)
    return Verdict(wanted, "least-peak-within-1.15x")
