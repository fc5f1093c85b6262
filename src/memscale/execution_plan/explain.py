"""Plans as text for a person: one line, tables of what each layer gets, saves and costs, and a chart of the trades."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from memscale._util.terminal import Terminal, clean, table, wrap
from memscale.execution_plan import (
    FrontierPoint,
    LayerPlan,
    LossTiling,
    OptimizerPlan,
    Plan,
    Precision,
    PredictionSource,
    StepMemory,
    StepTime,
)
from memscale.units import format_bytes, parse_bytes

RESERVED_SHARE = 0.05  # of a peak: what torch reserves beside it is said from here on
MOST_TRADES = 12  # points of the frontier that a table shows; a plan may have hundreds
MOST_OF_NAMES = 60  # characters for the names of layers in a row of the log
STEPS_AFTER_BACKWARD = (
    "Optimizer steps are counted after backward, as in the first steps of a run. In a loop that leaves gradients alone "
    "they then overlap with backward and take less time; memscale bench counts that, unless --no-overlap is given."
)
HEIGHT = 12  # lines of a chart
WIDEST = 72  # its columns
_SIZE = re.compile(r"[1-9][\d.]* (?:[KMGTPE]i)?B\b")  # as `format_bytes` writes it
CHOSEN, OTHER, PLAIN = "●", "·", "○"


def summarize_plan(plan: Plan) -> str:
    """Return the plan in one line."""
    counts = Counter(name for layer in plan.layers for name in layer.techniques)
    done = ", ".join(f"{name} on {count}" for name, count in counts.items()) or "nothing on any"
    return (
        f"Plan for {plan.device or 'an unnamed device'} ({plan.mode}): {done} of {len(plan.layers)} "
        f"layers; peak {format_bytes(plan.baseline_peak_bytes)} → "
        f"{format_bytes(plan.predicted_peak_bytes)}{_peak_at(plan)}{reserved(plan)}, step time "
        f"{_ratio(plan.predicted_time_ratio)} "
        f"({sources_in_words(plan)})"
    )


def source_of_plain(plan: Plan) -> PredictionSource:
    """Return where the figures of the plain step are from."""
    if plan.prediction_source == "simulated" and plan.baseline_memory is None:
        return "estimated"
    return plan.prediction_source


def sources_in_words(plan: Plan) -> str:
    """Return where a plan's peaks are from: "simulated", or of which steps what holds."""
    plain, planned = source_of_plain(plan), plan.prediction_source
    return planned if plain == planned else f"{planned}, of the plain step {plain}"


def explain_plan(plan: Plan, *, trades: bool = True, terminal: Terminal | None = None) -> str:
    """Return the plan as tables; see `Plan.explain`."""
    screen = terminal or Terminal.detect()
    about = [plan.device, f"mode {plan.mode}", plan.batch, f"numbers are {sources_in_words(plan)}"]
    title = f"Plan: {', '.join(text for text in about if text)}"
    columns = ["layer", "technique", "why", "saves", "costs"]
    rows = [*_layer_rows(plan.layers), *whole_rows(plan)]
    parts = [table(title, columns, rows, terminal=screen)]
    columns = ["totals", "plain", "with this plan", "change"]
    parts.append(table("", columns, _total_rows(plan), terminal=screen))
    if plan.step_time.total:
        parts += wrap(f"{_step_time(plan.step_time)} {overlap_remark(plan)}".rstrip(), screen.width)
    if plan.frontier and trades:
        count = len(plan.frontier)
        most = min(count, MOST_TRADES)  # evenly spread, with both ends
        points = [plan.frontier[index * (count - 1) // max(1, most - 1)] for index in range(most)]
        rest = f" (and {count - most} more between them, in plan.frontier)" if count > most else ""
        trade_rows = [(p.label, format_bytes(p.peak_bytes), _ratio(p.time_ratio)) for p in points]
        parts.append(
            table(
                f"Other trade-offs of memory and time{rest}",
                ["plan", "peak", "step time"],
                trade_rows,
                terminal=screen,
            )
        )
    for note in plan.notes:
        parts += wrap(f"Note: {clean(note)}", screen.width)
    return "\n".join(parts)


def outline_plan(plan: Plan, *, terminal: Terminal | None = None) -> str:
    """Return the plan as a short table for a log: a row for all layers that get the same; `explain` has the rest."""
    alike: dict[tuple[str | None, str], list[LayerPlan]] = {}
    for layer in plan.layers:
        plain = dataclasses.replace(layer, checkpointing=None)  # not what it keeps of each
        what = "; ".join(technique_in_words(technique, plain) for technique in layer.techniques) or None
        why = "" if what is None else _SIZE.sub("", _short(layer.reason) or "")
        alike.setdefault((what, why), []).append(layer)
    rows: list[tuple[str | None, ...]] = []
    for (what, _), layers in sorted(alike.items(), key=lambda item: item[0][0] is None):
        saved = sum(layer.saved_bytes for layer in layers)
        names = names_in_short(layer.name for layer in layers)
        rows.append(
            (
                textwrap.shorten(names, MOST_OF_NAMES, placeholder=f" … ({len(layers)})"),
                what,
                "as they are"
                if what is None
                else _in_common([_short(layer.reason) or "" for layer in layers]),
                format_bytes(saved) if saved else None,
            )
        )
    rows += [(name, what, _short(why), saves) for name, what, why, saves, _ in whole_rows(plan)]
    return table("", ["layers", "technique", "why", "saves"], rows, terminal=terminal or Terminal.detect())


def _short(why: str | None) -> str | None:
    """Return the first clause of a reason."""
    return why and why.partition(";")[0]


def _in_common(reasons: Sequence[str]) -> str:
    """Return reasons that differ in nothing but sizes as one, with the largest of each.

    Example:
        >>> _in_common(["holds 2.0 KiB for backward", "holds 1.5 MiB for backward"])
        'holds up to 1.5 MiB for backward'
    """
    if len(set(reasons)) == 1:
        return reasons[0]
    sizes = zip(*map(_SIZE.findall, reasons), strict=True)
    largest = (max(column, key=lambda size: parse_bytes(size, field="size")) for column in sizes)
    return _SIZE.sub(lambda _: f"up to {next(largest)}", reasons[0])


def names_in_short(names: Iterable[str]) -> str:
    """Return names in one line, those that differ in nothing but a number as one.

    Example:
        >>> names_in_short(["h.0.mlp", "h.1.mlp", "h.2.mlp", "h.5.mlp", "head"])
        'h.0–2, 5.mlp, head'
        >>> names_in_short(["a.0.1", "a.2.3"])
        'a.0.1 … a.2.3'
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    return ", ".join(map(_numbered, alike.values()))


def _numbered(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0] or "(the model)"
    pieces = list(zip(*(re.split(r"(\d+)", name) for name in names), strict=True))
    different = [index for index, piece in enumerate(pieces) if len(set(piece)) > 1]
    if len(different) != 1:
        return f"{names[0]} … {names[-1]}"
    ranges = []
    for _, run in groupby(enumerate(map(int, pieces[different[0]])), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        ranges.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}")
    before, after = pieces[: different[0]], pieces[different[0] + 1 :]
    return "".join((*(piece[0] for piece in before), ", ".join(ranges), *(piece[0] for piece in after)))


def _groups(layers: Iterable[LayerPlan]) -> Iterator[list[LayerPlan]]:
    """Yield neighbours that differ in nothing but a number in their names."""

    def without_numbers(layer: LayerPlan) -> LayerPlan:
        pattern = re.sub(r"\d+", "#", layer.name)
        return dataclasses.replace(layer, name=pattern, members=("",) * len(layer.members))

    for _, run in groupby(layers, key=without_numbers):
        yield list(run)


def _layer_rows(layers: Iterable[LayerPlan]) -> Iterator[tuple[str | None, ...]]:
    """Yield a row for each group of layers."""
    for group in _groups(layers):
        first, *others = group
        name = first.name or "(the model)"
        saved = sum(layer.saved_bytes for layer in group)
        seconds = sum(layer.extra_seconds for layer in group)
        yield (
            f"{name} … {others[-1].name} ×{len(group)}" if others else name,
            "; ".join(technique_in_words(technique, first) for technique in first.techniques) or None,
            first.reason,
            format_bytes(saved) if saved else None,
            f"+{format_seconds(seconds)}" if seconds else None,
        )


def whole_rows(plan: Plan) -> Iterator[tuple[str | None, ...]]:
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
        yield where, what or None, entry.reason, None, None


def technique_in_words(name: str, layer: LayerPlan) -> str:
    """Return a technique of a layer with its settings."""
    if name == "offloading" and layer.offloading is not None:
        if layer.offloading.to == "device":
            return "offloading of activations"
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
    peak = f"peak of device memory{_peak_at(plan)}{reserved(plan)}"
    for what, plain, planned in (
        (peak, plan.baseline_peak_bytes, plan.predicted_peak_bytes),
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
    parts = (f"{name} {format_seconds(part)}" for name, part in zip(names, time.parts, strict=True) if part)
    return f"A step takes {format_seconds(time.total)} (estimated): {', '.join(parts)}."


def overlap_remark(plan: Plan) -> str:
    """Return that optimizer steps with state on the host are counted after backward; empty if there are none."""
    if plan.optimizer is None or plan.optimizer.state != "host" or plan.optimizer.overlapped:
        return ""
    return STEPS_AFTER_BACKWARD


def _peak_at(plan: Plan) -> str:
    return f" (in {clean(plan.peak_at)})" if plan.peak_at else ""


def reserved(plan: Plan) -> str:
    """Return what torch's allocator reserves for the peak, and what it makes do with, where that is much more."""
    needed = plan.predicted_capacity_bytes
    if needed <= (1 + RESERVED_SHARE) * plan.predicted_peak_bytes:
        return ""
    most = format_bytes(plan.predicted_reserved_bytes)
    return f" (torch reserves {most} where there is room; {format_bytes(needed)} is enough)"


def _ratio(value: float) -> str:
    return f"{value:.2f}×"


def format_seconds(value: float) -> str:
    """Return a time with three digits in the unit that fits it: "478 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if abs(value) * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def frontier_chart(plan: Plan, *, terminal: Terminal | None = None) -> str:
    """Return peak memory over step time of all trades, with the plan itself and the plain step; empty without trades.

    Example:
        >>> points = tuple(FrontierPoint("", peak << 20, time) for peak, time in ((900, 1.1), (500, 1.4), (200, 2.0)))
        >>> plan = Plan((), baseline_peak_bytes=1000 << 20, predicted_peak_bytes=500 << 20, frontier=points)
        >>> plan = dataclasses.replace(plan, predicted_time_ratio=1.4)
        >>> chart = frontier_chart(plan, terminal=Terminal(width=50))
        >>> chart.count(CHOSEN), chart.count(PLAIN), "1000.0 MiB" in chart
        (2, 2, True)
    """
    if not plan.frontier:
        return ""
    screen = terminal or Terminal.detect()
    chosen = FrontierPoint("this plan", plan.predicted_peak_bytes, plan.predicted_time_ratio)
    plain = FrontierPoint("plain", plan.baseline_peak_bytes, 1.0)
    points = [*plan.frontier, chosen, plain]
    fastest, slowest = (end(point.time_ratio for point in points) for end in (min, max))
    highest = max(point.peak_bytes for point in points)
    labels = [format_bytes(highest * line // (HEIGHT - 1)) for line in range(HEIGHT)]
    margin = max(map(len, labels)) + 2
    width = max(10, min(WIDEST, screen.width - margin - 1))
    grid = [[" "] * width for _ in range(HEIGHT)]  # line 0 is at the bottom
    for mark, shown in ((OTHER, plan.frontier), (PLAIN, (plain,)), (CHOSEN, (chosen,))):
        for point in shown:
            share = (point.time_ratio - fastest) / ((slowest - fastest) or 1)
            grid[round(point.peak_bytes / highest * (HEIGHT - 1))][round(share * (width - 1))] = mark
    title = f"Peak memory over step time: {CHOSEN} this plan, {PLAIN} plain, {OTHER} other plans (estimated)"
    lines = wrap(title, screen.width)
    for line in reversed(range(HEIGHT)):
        label = labels[line] if line % 3 == 2 or line == 0 else ""
        lines.append(f"{label:>{margin - 1}}┤{''.join(grid[line]).rstrip()}")
    left, right = f"{fastest:.2f} ×", f"{slowest:.2f} ×"
    lines.append(" " * (margin - 1) + "└" + "─" * width)
    lines.append(" " * margin + left + right.rjust(max(len(right) + 1, width - len(left))))
    return "\n".join(lines)


def memory_table(plan: Plan, *, terminal: Terminal | None = None) -> str:
    """Return what holds the device's memory at the peak, of the plain step and with the plan; empty if unknown."""
    steps = {"plain": plan.baseline_memory, "with this plan": plan.predicted_memory}
    known = {name: step for name, step in steps.items() if step is not None}
    if not known:
        return ""
    categories = dict.fromkeys(category for step in known.values() for category in step.categories)
    rows: list[tuple[str | None, ...]] = [
        (category, *(format_bytes(step.at_peak.get(category, 0)) for step in known.values()))
        for category in categories
        if any(step.at_peak.get(category) for step in known.values())
    ]
    rows.append(("largest tensor", *(_largest(step) for step in known.values())))
    rows.append(("when", *(step.phase_of(step.peak) for step in known.values())))
    return table("At the peak (simulated)", ["used for", *known], rows, terminal=terminal)


def _largest(step: StepMemory) -> str | None:
    return f"{format_bytes(step.largest[0].nbytes)}: {step.largest[0].what}" if step.largest else None
