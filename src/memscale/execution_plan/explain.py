"""Plans as text for a person: one line, or tables of what each layer gets, what it saves and what it costs."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

from memscale._util.terminal import Terminal, clean, table, wrap
from memscale.execution_plan import LayerPlan, LossTiling, OptimizerPlan, Plan, Precision, StepTime
from memscale.units import format_bytes

MOST_TRADES = 12  # points of the frontier that a table shows; a plan may have hundreds


def summarize_plan(plan: Plan) -> str:
    """Return the plan in one line."""
    counts = Counter(name for layer in plan.layers for name in layer.techniques)
    done = ", ".join(f"{name} on {count}" for name, count in counts.items()) or "nothing on any"
    return (
        f"Plan for {plan.device or 'an unnamed device'} ({plan.mode}): {done} of {len(plan.layers)} "
        f"layers; peak {format_bytes(plan.baseline_peak_bytes)} → "
        f"{format_bytes(plan.predicted_peak_bytes)}{_peak_at(plan)}, step time {_ratio(plan.predicted_time_ratio)} "
        f"({plan.prediction_source})"
    )


def explain_plan(plan: Plan, *, trades: bool = True, terminal: Terminal | None = None) -> str:
    """Return the plan as tables; see `Plan.explain`."""
    screen = terminal or Terminal.detect()
    about = [plan.device, f"mode {plan.mode}", plan.batch, f"numbers are {plan.prediction_source}"]
    title = f"Plan: {', '.join(text for text in about if text)}"
    columns = ["layer", "technique", "why", "saves", "costs"]
    rows = [*_layer_rows(plan.layers), *_whole_rows(plan)]
    parts = [table(title, columns, rows, terminal=screen)]
    columns = ["totals", "plain", "with this plan", "change"]
    parts.append(table("", columns, _total_rows(plan), terminal=screen))
    if plan.step_time.total:
        parts += wrap(_step_time(plan.step_time), screen.width)
    if plan.frontier and trades:
        count = len(plan.frontier)
        most = min(count, MOST_TRADES)  # evenly spread, with both ends
        points = [plan.frontier[index * (count - 1) // max(1, most - 1)] for index in range(most)]
        rest = f" (and {count - most} more between them, in plan.frontier)" if count > most else ""
        trade_rows = [(p.label, format_bytes(p.peak_bytes), _ratio(p.time_ratio)) for p in points]
        parts.append(
            table(f"The trades found{rest}", ["plan", "peak", "step time"], trade_rows, terminal=screen)
        )
    for note in plan.notes:
        parts += wrap(f"Note: {clean(note)}", screen.width)
    return "\n".join(parts)


def _layer_rows(layers: Iterable[LayerPlan]) -> Iterator[tuple[str | None, ...]]:
    """Yield the rows of layers: neighbours that differ in nothing but a number in their names share one."""

    def without_numbers(layer: LayerPlan) -> LayerPlan:
        pattern = re.sub(r"\d+", "#", layer.name)
        return dataclasses.replace(layer, name=pattern, members=("",) * len(layer.members))

    for _, run in groupby(layers, key=without_numbers):
        first, *others = group = list(run)
        name = first.name or "(the model)"
        saved = sum(layer.saved_bytes for layer in group)
        seconds = sum(layer.extra_seconds for layer in group)
        yield (
            f"{name} … {others[-1].name} ×{len(group)}" if others else name,
            "; ".join(_technique(technique, first) for technique in first.techniques) or None,
            f"{first.rule}: {first.reason}" if first.rule else first.reason,
            format_bytes(saved) if saved else None,
            f"+{_seconds(seconds)}" if seconds else None,
        )


def _whole_rows(plan: Plan) -> Iterator[tuple[str | None, ...]]:
    """Yield the rows of what concerns the model as a whole."""
    rows: list[tuple[str, str, LossTiling | Precision | OptimizerPlan]] = []
    if plan.loss is not None:
        rows.append(("(head and loss)", f"tiling, {plan.loss.rows} tokens at a time", plan.loss))
    if plan.precision is not None:
        rows.append(("(all layers)", f"mixed precision, {plan.precision.dtype}", plan.precision))
    if plan.optimizer is not None:
        state = plan.optimizer.state
        parts = ["8-bit"] * plan.optimizer.eight_bit + [f"state on {state}"] * (state != "device")
        parts += ["in buckets"] * (plan.optimizer.bucket_bytes > 0)
        parts += ["host parameters stepped on the device"] * (plan.optimizer.host_step == "device")
        rows.append(("(optimizer)", ", ".join(parts), plan.optimizer))
    for where, what, entry in rows:
        yield where, what or None, f"{entry.rule}: {entry.reason}" if entry.rule else entry.reason, None, None


def _technique(name: str, layer: LayerPlan) -> str:
    if name == "offloading" and layer.offloading is not None:
        inside = " with activations" if layer.offloading.activations else ""
        return f"offloading to {layer.offloading.to}{inside}"
    if name == "tiling" and layer.tiling is not None:
        return f"tiling, {layer.tiling.rows} rows at a time"
    settings = layer.checkpointing
    if name != "checkpointing" or settings is None:
        return name
    if settings.keep:
        kept = ", ".join(op.removeprefix("aten.").replace(".default", "") for op in settings.keep)
        name += f", keeps {kept if len(settings.keep) <= 3 else f'{len(settings.keep)} outputs'}"
    return f"{name}, chained" if settings.chained else name


def _total_rows(plan: Plan) -> Iterator[tuple[str, str | None, str | None, str | None]]:
    for what, plain, planned in (
        (f"peak of device memory{_peak_at(plan)}", plan.baseline_peak_bytes, plan.predicted_peak_bytes),
        ("activations saved for backward", plan.baseline_saved_bytes, plan.predicted_saved_bytes),
        ("host memory", 0, plan.host_bytes),
        ("disk", 0, plan.disk_bytes),
    ):
        if plain or planned:
            change = f"{100 * (planned - plain) / plain:+.1f}%" if plain else None
            yield what, format_bytes(plain), format_bytes(planned), change
    ratio = plan.predicted_time_ratio
    yield "step time", _ratio(1.0), _ratio(ratio), f"{100 * (ratio - 1):+.1f}%"


def _step_time(time: StepTime) -> str:
    names = (field.name.replace("_", " ") for field in dataclasses.fields(time))
    parts = (f"{name} {_seconds(part)}" for name, part in zip(names, time.parts, strict=True) if part)
    return f"A step takes {_seconds(time.total)} (estimated): {', '.join(parts)}."


def _peak_at(plan: Plan) -> str:
    return f" (in {clean(plan.peak_at)})" if plan.peak_at else ""


def _ratio(value: float) -> str:
    return f"{value:.2f}×"


def _seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if abs(value) * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"
