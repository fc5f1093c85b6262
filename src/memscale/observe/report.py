"""What a plan has done so far, beside what was predicted."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from memscale.errors import HardwareError
from memscale.execution_plan import Plan, PredictionSource
from memscale.observe.counters import Meter, OffloadTier, What
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale._util.terminal import Terminal


@dataclass(frozen=True)
class Moved:
    """Bytes copied between the model's device (host memory for a model on the CPU) and the tier they are kept on."""

    what: What
    tier: OffloadTier
    technique: str  # which technique moved them
    read_bytes: int  # copied from the tier
    written_bytes: int  # copied to the tier


@dataclass(frozen=True)
class Recomputed:
    """A layer that was recomputed in backward; its FLOPs are an upper bound, as a recomputation may end early."""

    layer: str
    times: int
    flops: int


@dataclass(frozen=True)
class Lost:
    """Time that a step would not have taken without MemScale."""

    to: str
    seconds: float | None  # measured; None on a device whose time is not known


@dataclass(frozen=True)
class Report:
    """What an executor's plans have done so far, all of them together; the prediction is the present plan's.

    Example:
        >>> Report.of(Plan(()), Meter(), model="Net", device="cpu").recomputations
        0
    """

    model: str
    device: str
    forward_passes: int | None  # in training that were begun; None if they are not counted
    backward_passes: int | None  # that reached the model; None if they are not counted
    predicted_peak_bytes: int  # of a step by the plan
    allowance_bytes: int  # what a step may need beyond that
    prediction_source: PredictionSource
    observed_peak_bytes: int | None  # measured; None if it is not known
    # Of which memory. What the process had at attach, such as the parameters on a CPU, is in the prediction alone.
    observed_peak_kind: str
    observed_since: str  # since when; or why it is not known
    moved: tuple[Moved, ...] = ()
    recomputed: tuple[Recomputed, ...] = ()
    lost: tuple[Lost, ...] = ()
    disk_bytes: int = 0  # what is on disk now
    plans: int = 0  # how many were made: by wrap, for larger batches, and after memory ran out
    planning_seconds: float = 0.0  # the time that took (measured)
    steps_committed: int = 0  # steps of single parameters that were computed in backward
    steps_dropped: int = 0  # the same, not used: something had changed before the optimizer's step
    plan: Plan = field(default=Plan(()), repr=False, compare=False)  # the present one; not in the JSON

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
        """Return the counts so far beside what the plan predicts."""
        peak, totals = meter.peak(), meter.totals()
        order = {layer.name: place for place, layer in enumerate(plan.layers)}
        return cls(
            model=model,
            device=device,
            forward_passes=totals.forward_passes if counts_forward else None,
            backward_passes=totals.backward_passes if counts_backward else None,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            allowance_bytes=plan.allowance_bytes,
            prediction_source=plan.prediction_source,
            observed_peak_bytes=peak.nbytes,
            observed_peak_kind=peak.kind,
            observed_since=peak.since,
            moved=tuple(
                Moved(what, tier, what if what == "optimizer state" else "offloading", read, written)
                for (what, tier), (read, written) in sorted(totals.moved.items())
            ),
            recomputed=tuple(
                Recomputed(layer, times, flops)
                for layer, (times, flops) in sorted(
                    totals.recomputed.items(), key=lambda each: (order.get(each[0], len(order)), each[0])
                )
            ),
            lost=tuple(Lost(to, seconds) for to, seconds in sorted(totals.seconds_lost.items())),
            disk_bytes=disk_bytes,
            plans=meter.plans,
            planning_seconds=meter.planning_seconds,
            steps_committed=meter.steps_committed,
            steps_dropped=meter.steps_dropped,
            plan=plan,
        )

    @property
    def bytes_read(self) -> int:
        """Return all bytes copied from host or disk."""
        return sum(each.read_bytes for each in self.moved)

    @property
    def bytes_written(self) -> int:
        """Return all bytes copied to host or disk."""
        return sum(each.written_bytes for each in self.moved)

    @property
    def recomputations(self) -> int:
        """Return the recomputations of all layers."""
        return sum(each.times for each in self.recomputed)

    @property
    def recompute_flops(self) -> int:
        """Return the floating-point operations of all recomputations."""
        return sum(each.flops for each in self.recomputed)

    def scalars(self) -> dict[str, float]:
        """Return every number that is known, by name, for dashboards."""
        values: dict[str, float | None] = {
            "forward_passes": self.forward_passes,
            "backward_passes": self.backward_passes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "allowance_bytes": self.allowance_bytes,
            "observed_peak_bytes": self.observed_peak_bytes,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "recomputations": self.recomputations,
            "recompute_flops": self.recompute_flops,
            "disk_bytes": self.disk_bytes,
            "plans": self.plans or None,
            "planning_seconds": self.planning_seconds if self.plans else None,
            **{f"seconds_lost/{each.to.replace(' ', '_')}": each.seconds for each in self.lost},
        }
        return {name: value for name, value in values.items() if value is not None}

    def to_json(self) -> str:
        counts = dataclasses.replace(self, plan=Plan(()))
        data = {name: value for name, value in dataclasses.asdict(counts).items() if name != "plan"}
        return json.dumps(data, indent=1, sort_keys=True)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the plan and what was observed of it as a page: one HTML file without references to others."""
        from memscale.execution_plan.page import write_page
        from memscale.hardware import detect

        hardware = None
        # A device that says nothing about itself: the plan has its name.
        with contextlib.suppress(HardwareError):
            hardware = detect(self.device) if self.device else None
        write_page(self.plan, path, title=self.model, hardware=hardware, report=self)

    def explain(self, *, terminal: Terminal | None = None) -> str:
        """Return the report as tables for a person."""
        from memscale._util.terminal import Terminal, table

        screen = terminal or Terminal.detect()
        title = f"Report: {self.model} on {self.device}"
        parts = [table(title, ["what", "so far", "how it is known"], self.totals(), terminal=screen)]
        for columns, rows in (
            (["moved (counted)", "technique", "tier", "read", "written"], map(_moved_row, self.moved)),
            (["recomputed", "times (counted)", "FLOPs (counted × profiled)"], _layer_rows(self.recomputed)),
            (["time lost to", "seconds (measured)"], map(_lost_row, self.lost)),
        ):
            if listed := list(rows):
                parts.append(table("", columns, listed, terminal=screen))
        return "\n".join(parts)

    def totals(self) -> Iterator[tuple[str, object, str]]:
        """Yield what is counted or known of all layers together: what, how much, and how it is known."""
        yield "forward passes in training", self.forward_passes, "counted"
        yield "backward passes", self.backward_passes, "counted"
        yield "peak of a step", format_bytes(self.predicted_peak_bytes), self.prediction_source
        yield "  allowance beyond that", format_bytes(self.allowance_bytes), "a share of the prediction"
        known = self.observed_peak_bytes is not None
        how = f"measured since {self.observed_since}" if known else f"not known: {self.observed_since}"
        if known and self.observed_peak_kind.startswith("process memory"):
            how += "; it includes libraries, which outweigh a small model's step"
        kind = "" if self.observed_peak_kind == "not known" else f" of {self.observed_peak_kind}"
        observed = None if self.observed_peak_bytes is None else format_bytes(self.observed_peak_bytes)
        yield f"observed peak{kind}", observed, how
        yield "on disk now", format_bytes(self.disk_bytes), "counted"
        if self.plans:
            made = f"{self.plans} plan{'s' if self.plans > 1 else ''}"
            yield f"time to make {made}", f"{self.planning_seconds:.2f} s", "measured"
        if self.steps_committed or self.steps_dropped:
            dropped = f", {self.steps_dropped:,} dropped" if self.steps_dropped else ""
            yield "parameters stepped in backward", f"{self.steps_committed:,}{dropped}", "counted"

    def __str__(self) -> str:
        return self.explain()


def _moved_row(one: Moved) -> tuple[str, ...]:
    return one.what, one.technique, one.tier, format_bytes(one.read_bytes), format_bytes(one.written_bytes)


def _lost_row(one: Lost) -> tuple[str, str | None]:
    return one.to, None if one.seconds is None else f"{one.seconds:.3f}"


def _layer_rows(layers: tuple[Recomputed, ...]) -> Iterator[tuple[str, int, str]]:
    """Yield a row for each run of layers that differ only in a number in their names."""
    for _, run in groupby(layers, key=lambda each: (re.sub(r"\d+", "#", each.layer), each.times, each.flops)):
        first, *others = group = list(run)
        name = first.layer or "(the model)"
        yield (
            f"{name} … {others[-1].layer} ×{len(group)}" if others else name,
            sum(each.times for each in group),
            f"{sum(each.flops for each in group):.3e}",
        )
