"""Reports as text that Prometheus reads (its text format, version 0.0.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from memscale.observe.report import Report

__all__ = ["CONTENT_TYPE", "metrics_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Samples = Iterator[tuple[dict[str, str], float | None]]


def metrics_text(reports: Sequence[Report]) -> str:
    """The metrics of some models; two of one class are told apart by a number.

    Example:
        >>> from memscale.execution_plan import Plan
        >>> from memscale.observe.meter import Meter
        >>> report = Report.of(Plan((), predicted_peak_bytes=7), Meter(), model="Net", device="cpu")
        >>> print(metrics_text([report]).splitlines()[2])
        memscale_predicted_peak_bytes{model="Net"} 7
    """
    named = list(_named(reports))
    lines: list[str] = []
    for name, kind, words, samples in _FAMILIES:
        found = [
            f"memscale_{name}{_labels({'model': model, **labels})} {_number(value)}"
            for model, report in named
            for labels, value in samples(report)
            if value is not None
        ]
        if found:
            lines += [f"# HELP memscale_{name} {words}", f"# TYPE memscale_{name} {kind}", *found]
    return "".join(f"{line}\n" for line in lines)


def _named(reports: Iterable[Report]) -> Iterator[tuple[str, Report]]:
    seen: Counter[str] = Counter()
    for report in reports:
        seen[report.model] += 1
        number = seen[report.model]
        yield (report.model if number == 1 else f"{report.model}#{number}"), report


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))


def _predicted(report: Report) -> Samples:
    yield {}, report.predicted_peak_bytes


def _allowance(report: Report) -> Samples:
    yield {}, report.allowance_bytes


def _observed(report: Report) -> Samples:
    yield {"of": report.observed_peak_kind}, report.observed_peak_bytes


def _forwards(report: Report) -> Samples:
    yield {}, report.forward_passes


def _backwards(report: Report) -> Samples:
    yield {}, report.backward_passes


def _moved(report: Report) -> Samples:
    for each in report.moved:
        labels = {"what": each.what, "below": each.below}
        yield {**labels, "direction": "up"}, each.up_bytes
        yield {**labels, "direction": "down"}, each.down_bytes


def _recomputations(report: Report) -> Samples:
    yield {}, report.recomputations


def _flops(report: Report) -> Samples:
    yield {}, report.recompute_flops


def _lost(report: Report) -> Samples:
    for each in report.lost:
        yield {"technique": each.to}, each.seconds


def _on_disk(report: Report) -> Samples:
    yield {}, report.disk_bytes


Kind = Literal["gauge", "counter"]

_FAMILIES: tuple[tuple[str, Kind, str, Callable[[Report], Samples]], ...] = (
    ("predicted_peak_bytes", "gauge", "Peak of a training step by the plan (predicted).", _predicted),
    ("allowance_bytes", "gauge", "What a step may need beyond the predicted peak.", _allowance),
    ("observed_peak_bytes", "gauge", "Most memory in use since the plan was attached (measured).", _observed),
    ("forward_passes_total", "counter", "Forward passes in training.", _forwards),
    ("backward_passes_total", "counter", "Backward passes that came to the model.", _backwards),
    ("moved_bytes_total", "counter", "Bytes moved to and from the tier below.", _moved),
    ("recomputations_total", "counter", "Layers that were computed again in backward.", _recomputations),
    ("recompute_flops_total", "counter", "Recomputations times their profiled FLOPs.", _flops),
    ("lost_seconds_total", "counter", "Time lost to each technique (measured).", _lost),
    ("disk_bytes", "gauge", "Bytes on disk now.", _on_disk),
)
