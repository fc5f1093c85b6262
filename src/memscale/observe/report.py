"""What a plan has done so far, beside what was predicted."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from memscale.execution_plan import Plan, PredictionSource
from memscale.observe.counters import Below, Meter, What
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale._util.terminal import Terminal

__all__ = ["Lost", "Moved", "Recomputed", "Report"]


@dataclass(frozen=True)
class Moved:
    """Bytes that went between the model's device and the tier below it (of the host's memory: the disk).

    Attributes:
        what: parameters, gradients, activations or optimizer state.
        below: the tier that they wait on.
        technique: on whose account.
        up_bytes: what came up.
        down_bytes: what went down.
    """

    what: What
    below: Below
    technique: str
    up_bytes: int
    down_bytes: int


@dataclass(frozen=True)
class Recomputed:
    """A layer that was computed again.

    Attributes:
        layer: its name in the plan.
        times: how often.
        flops: floating-point operations of all of that: counted recomputations, times what one of them takes by
            the profile. An upper bound, as a recomputation ends when backward has what it needs.
    """

    layer: str
    times: int
    flops: int


@dataclass(frozen=True)
class Lost:
    """Time that a step would not have taken without MemScale.

    Attributes:
        to: what it was lost to.
        seconds: measured; None on a device whose time is not known here.
    """

    to: str
    seconds: float | None


@dataclass(frozen=True)
class Report:
    """What an executor's plans have done so far, all of them together; the prediction is the present plan's.

    Attributes:
        model: the model's class.
        device: where it trains.
        forward_passes: forward passes in training that were begun; None if nobody counts them.
        backward_passes: backward passes that came to the model; None if nobody counts them.
        predicted_peak_bytes: peak of a step by the plan.
        allowance_bytes: what a step may need beyond that.
        prediction_source: "simulated", "measured" or "estimated".
        observed_peak_bytes: measured; None if it is not known.
        observed_peak_kind: of which memory. What the process had when the plan was attached, such as the
            model's parameters on a CPU, is not in the process's figure, and is in the prediction.
        observed_since: since when; or why it is not known.
        moved: bytes up and down.
        recomputed: recomputations, by layer.
        lost: time, by what it was lost to.
        disk_bytes: what is on disk now.
        plans: how many were made: by wrap, for larger batches, and after memory ran out.
        planning_seconds: the time that took (measured).

    Example:
        >>> Report.of(Plan(()), Meter(), model="Net", device="cpu").recomputations
        0
    """

    model: str
    device: str
    forward_passes: int | None
    backward_passes: int | None
    predicted_peak_bytes: int
    allowance_bytes: int
    prediction_source: PredictionSource
    observed_peak_bytes: int | None
    observed_peak_kind: str
    observed_since: str
    moved: tuple[Moved, ...] = ()
    recomputed: tuple[Recomputed, ...] = ()
    lost: tuple[Lost, ...] = ()
    disk_bytes: int = 0
    plans: int = 0
    planning_seconds: float = 0.0

    @classmethod
    def of(
        cls,
        plan: Plan,
        meter: Meter,
        *,
        model: str,
        device: str,
        counts_forward: bool = True,
        counts_backward: bool = True,
        disk_bytes: int = 0,
    ) -> Report:
        """What a meter shows now, beside what the plan says."""
        peak = meter.peak()
        order = {layer.name: place for place, layer in enumerate(plan.layers)}
        return cls(
            model=model,
            device=device,
            forward_passes=meter.forward_passes if counts_forward else None,
            backward_passes=meter.backward_passes if counts_backward else None,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            allowance_bytes=plan.allowance_bytes,
            prediction_source=plan.prediction_source,
            observed_peak_bytes=peak.nbytes,
            observed_peak_kind=peak.kind,
            observed_since=peak.since,
            moved=tuple(
                Moved(what, below, _technique(what), up, down)
                for (what, below), (up, down) in sorted(meter.moved().items())
            ),
            recomputed=tuple(
                Recomputed(layer, times, flops)
                for layer, (times, flops) in sorted(
                    meter.recomputations().items(), key=lambda each: (order.get(each[0], len(order)), each[0])
                )
            ),
            lost=tuple(Lost(to, seconds) for to, seconds in sorted(meter.seconds_lost().items())),
            disk_bytes=disk_bytes,
            plans=meter.plans,
            planning_seconds=meter.planning_seconds,
        )

    @property
    def bytes_up(self) -> int:
        """All that came up."""
        return sum(each.up_bytes for each in self.moved)

    @property
    def bytes_down(self) -> int:
        """All that went down."""
        return sum(each.down_bytes for each in self.moved)

    @property
    def recomputations(self) -> int:
        """Of all layers."""
        return sum(each.times for each in self.recomputed)

    @property
    def recompute_flops(self) -> int:
        """Of all layers."""
        return sum(each.flops for each in self.recomputed)

    def seconds_lost_to(self, what: str) -> float | None:
        """Measured; None if that was never at work, or its time is not known."""
        return next((each.seconds for each in self.lost if each.to == what), None)

    def scalars(self) -> dict[str, float]:
        """Every number that is known, under a name: what dashboards show."""
        values: dict[str, float | None] = {
            "forward_passes": self.forward_passes,
            "backward_passes": self.backward_passes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "allowance_bytes": self.allowance_bytes,
            "observed_peak_bytes": self.observed_peak_bytes,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "recomputations": self.recomputations,
            "recompute_flops": self.recompute_flops,
            "disk_bytes": self.disk_bytes,
            "plans": self.plans or None,
            "planning_seconds": self.planning_seconds if self.plans else None,
            **{f"seconds_lost/{each.to.replace(' ', '_')}": each.seconds for each in self.lost},
        }
        return {name: value for name, value in values.items() if value is not None}

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    def explain(self, *, terminal: Terminal | None = None) -> str:
        """The report as tables that a person reads."""
        from memscale._util.terminal import Terminal, table

        screen = terminal or Terminal.detect()
        title = f"Report: {self.model} on {self.device}"
        parts = [table(title, ["what", "so far", "how it is known"], self._totals(), terminal=screen)]
        if self.moved:
            columns = ["moved (counted)", "technique", "below", "up", "down"]
            rows = (
                (
                    each.what,
                    each.technique,
                    each.below,
                    format_bytes(each.up_bytes),
                    format_bytes(each.down_bytes),
                )
                for each in self.moved
            )
            parts.append(table("", columns, rows, terminal=screen))
        if self.recomputed:
            columns = ["recomputed", "times (counted)", "FLOPs (counted × profiled)"]
            parts.append(table("", columns, _layer_rows(self.recomputed), terminal=screen))
        if self.lost:
            rows_lost = ((each.to, _seconds(each.seconds)) for each in self.lost)
            parts.append(table("", ["time lost to", "seconds (measured)"], rows_lost, terminal=screen))
        return "\n".join(parts)

    def _totals(self) -> Iterator[tuple[str, object, str]]:
        yield "forward passes in training", self.forward_passes, "counted"
        yield "backward passes", self.backward_passes, "counted"
        yield "peak of a step", format_bytes(self.predicted_peak_bytes), self.prediction_source
        yield "  allowance beyond that", format_bytes(self.allowance_bytes), "a share of the prediction"
        known = self.observed_peak_bytes is not None
        how = f"measured since {self.observed_since}" if known else f"not known: {self.observed_since}"
        kind = "" if self.observed_peak_kind == "not known" else f" of {self.observed_peak_kind}"
        observed = None if self.observed_peak_bytes is None else format_bytes(self.observed_peak_bytes)
        yield f"observed peak{kind}", observed, how
        yield "on disk now", format_bytes(self.disk_bytes), "counted"
        if self.plans:
            made = f"{self.plans} plan{'s' if self.plans > 1 else ''}"
            yield f"time to make {made}", f"{self.planning_seconds:.2f} s", "measured"

    def __str__(self) -> str:
        return self.explain()


def _technique(what: What) -> str:
    return "optimizer state" if what == "optimizer state" else "offloading"


def _layer_rows(layers: tuple[Recomputed, ...]) -> Iterator[tuple[str, int, str]]:
    """Neighbours that differ in nothing but a number in their names are one row."""
    for _, run in groupby(layers, key=lambda each: (re.sub(r"\d+", "#", each.layer), each.times, each.flops)):
        first, *others = group = list(run)
        name = first.layer or "(the model)"
        yield (
            f"{name} … {others[-1].layer} ×{len(group)}" if others else name,
            sum(each.times for each in group),
            f"{sum(each.flops for each in group):.3e}",
        )


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"
