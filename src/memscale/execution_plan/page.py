"""The report page: a plan, and what was observed of it, as one HTML file that needs no network.

Tables are written here; `page.js` draws the charts from data in the page. Names of layers are text of whoever wrote the
model: they are escaped here, and never become markup there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memscale.execution_plan import LayerPlan, Plan, StepMemory
from memscale.execution_plan.explain import (
    format_seconds,
    names_in_short,
    overlap_remark,
    source_of_plain,
    technique_in_words,
    whole_rows,
)
from memscale.execution_plan.html import (
    Html,
    chip,
    code,
    folded,
    html_table,
    labelled,
    meters,
    section,
    swatch,
)
from memscale.hardware import Hardware
from memscale.units import format_bytes
from memscale.version import __version__

if TYPE_CHECKING:
    from memscale.observe.report import Report

MOST_HOLDERS = 6  # tensors that are named at a peak
GROUP_COLORS = 6  # in page.css; later groups repeat them, and differ by their letters


def write_page(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    title: str = "",
    hardware: Hardware | None = None,
    modes: Mapping[str, Plan] | None = None,
    report: Report | None = None,
) -> None:
    """Write the report page of a plan.

    Args:
        plan: the plan.
        path: the file to write.
        title: the heading, such as the model's name; "Memory plan" if there is none.
        hardware: what the plan was made for; without it the page has the device's name alone.
        modes: plans of other modes by name, to be shown among the trades.
        report: what was observed in training with the plan.
    """
    page = render_page(plan, title=title, hardware=hardware, modes=modes or {}, report=report)
    Path(path).write_text(page, encoding="utf-8")


def render_page(
    plan: Plan, *, title: str, hardware: Hardware | None, modes: Mapping[str, Plan], report: Report | None
) -> str:
    """Return the page that `write_page` writes."""
    sections = (
        _facts(plan, hardware),
        _memory(plan),
        _trades(plan, modes),
        _time(plan),
        _layers(plan),
        _observed(plan, report),
        _hardware(plan, hardware),
        _notes(plan),
    )
    parts = {
        "title": escape(title or "Memory plan"),
        "kind": "Training report" if report is not None else "Memory plan",
        "about": escape(" · ".join(filter(None, (plan.device, f"{plan.mode} mode")))),
        "batch": escape(plan.batch),
        "body": "\n".join(filter(None, sections)),
        "version": escape(__version__),
        "style": _asset("page.css"),
        "script": _asset("page.js"),
        "data": _as_script_data(_chart_data(plan, hardware, modes)),
    }
    # In one pass, so that nothing which is put in is taken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files("memscale.execution_plan").joinpath(name).read_text(encoding="utf-8")


def _as_script_data(data: object) -> str:
    """Return JSON that cannot end the script element that it is in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _chart_data(plan: Plan, hardware: Hardware | None, modes: Mapping[str, Plan]) -> dict[str, Any]:
    return {
        "steps": [
            {
                "id": each.id,
                "how": each.how,
                "where": each.where,
                "categories": each.memory.categories,
                "samples": each.memory.samples,
                "phases": [dataclasses.asdict(phase) for phase in each.memory.phases],
                "peak": each.memory.peak,
            }
            for each in _steps(plan)
        ],
        "limit": None if hardware is None else hardware.device.total_bytes,
        "trades": {
            "points": [
                {
                    "label": point.label,
                    "peak": point.peak_bytes,
                    "ratio": point.time_ratio,
                    "budget": point.budget_bytes,
                    "how": "estimated",
                }
                for point in plan.frontier
            ],
            "marks": [dataclasses.asdict(mark) for mark in _marks(plan, modes)],
        },
    }


# Sections --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ShownStep:
    """A step whose memory is known, as the page shows it."""

    id: str
    name: str
    how: str
    where: str
    memory: StepMemory


def _steps(plan: Plan) -> list[ShownStep]:
    steps = []
    if plan.baseline_memory is not None:
        steps.append(ShownStep("plain", "Plain step", "simulated", "", plan.baseline_memory))
    if plan.predicted_memory is not None:
        source, where = plan.prediction_source, plan.peak_at
        steps.append(ShownStep("planned", "With this plan", source, where, plan.predicted_memory))
    return steps


def _facts(plan: Plan, hardware: Hardware | None) -> str:
    before, after = plan.baseline_peak_bytes, plan.predicted_peak_bytes
    plain_too = (
        "" if plan.prediction_source == source_of_plain(plan) else f" Plain: {chip(source_of_plain(plan))}"
    )
    where = f"in {code(plan.peak_at)}" if plan.peak_at else ""
    device = None if hardware is None else hardware.device.total_bytes
    bars = [("plain", before, format_bytes(before)), ("this plan", after, format_bytes(after))]
    peak = (
        f'<div class="fact"><h2>Peak of device memory {chip(plan.prediction_source)}</h2>'
        f'<p class="big">{format_bytes(after)}<small>{_change(before, after)}</small></p><p>{where}{plain_too}</p>'
        f"{meters(bars, device, ' on the device')}</div>"
    )
    plain, total = plan.baseline_seconds, plan.step_time.total
    times = [("plain", plain, format_seconds(plain)), ("this plan", total, format_seconds(total))]
    time = (
        f'<div class="fact"><h2>Step time {chip("estimated")}</h2>'
        f'<p class="big">{plan.predicted_time_ratio:.2f} ×</p><p>of the plain step</p>'
        f"{meters(times) if total else ''}</div>"
    )
    done = sum(1 for layer in plan.layers if layer.techniques)
    size, place = (plan.host_bytes, "the host") if plan.host_bytes else (plan.disk_bytes, "disk")
    sizes = (("host", plan.host_bytes), ("disk", plan.disk_bytes))
    below = [(name, size, format_bytes(size)) for name, size in sizes if size]
    host = hardware.host.total_ram_bytes if hardware is not None and not plan.disk_bytes else None
    outside = (
        f'<div class="fact"><h2>Kept on {place} {chip("estimated")}</h2><p class="big">{format_bytes(size)}</p>'
        f"<p>techniques on {done} of {len(plan.layers)} layers</p>"
        f"{meters(below, host) if below else ''}</div>"
    )
    return f'<div class="facts">{peak}{time}{outside}</div>'


def _change(before: float, after: float) -> str:
    return f"{100 * (after - before) / before:+.1f}%".replace("-", "−") if before else ""


def _memory(plan: Plan) -> str:
    steps = _steps(plan)
    if not steps:
        lead = "Not known: no step was simulated. Plans made with a sample input have it."
        return section("memory", "Memory over a step", lead)
    figures, tables = [], []
    for each in steps:
        memory = each.memory
        top = format_bytes(sum(memory.samples[memory.peak]))
        caption = f"<b>{each.name}</b> <span>peak {top}</span> {chip(each.how)}"
        label = f"{each.name}: device memory by use. Arrow keys move along the step, P to the peak."
        figures.append(
            f'<figure><figcaption>{caption}</figcaption><div class="plot" id="memory-{each.id}" tabindex="0" '
            f'role="slider" aria-orientation="horizontal" aria-label="{label}"></div></figure>'
        )
        rows = [
            (f"{index + 1}", memory.phase_of(index), *map(format_bytes, sample), format_bytes(sum(sample)))
            for index, sample in enumerate(memory.samples)
        ]
        columns = ["part", "phase", *memory.categories, "total"]
        about = f"{each.name}, {each.how}: the highest moment of each part of the step."
        table = html_table(about, columns, rows, numbers=len(columns) - 2)
        tables.append(folded(f"{each.name} as a table", table))
    categories = _categories(steps)
    legend = "".join(f"<li>{swatch(name)}</li>" for name in categories)
    scale = ""
    if len(steps) == 2:
        buttons = "".join(
            f'<button type="button" data-scale="{key}" aria-pressed="{pressed}">{text}</button>'
            for key, pressed, text in (("same", "true", "same scale"), ("own", "false", "own scales"))
        )
        scale = f'<div class="choice" id="scale" role="group" aria-label="Scale of the charts" hidden>{buttons}</div>'
    tools = f'<div class="tools"><ul class="legend">{legend}</ul>{scale}</div>'
    lead = (
        "What the device’s memory is used for from the first operation of forward to the end of the optimizer’s step. "
        "Each part of the step is drawn at its highest moment."
    )
    if plan.baseline_memory is None:
        lead += " The plain step was not simulated; <code>memscale report</code> does that."
    keys = "<kbd>←</kbd> <kbd>→</kbd>; <kbd>P</kbd> goes to the peak"
    hint = f'<p class="hint">Point at a chart, or focus it and use {keys}.</p>'
    charts = f'<div class="charts">{"".join(figures)}</div>'
    return section("memory", "Memory over a step", lead, tools, charts, hint, _at_peak(steps), *tables)


def _categories(steps: Iterable[ShownStep]) -> list[str]:
    return list(dict.fromkeys(name for each in steps for name in each.memory.categories))


def _at_peak(steps: Sequence[ShownStep]) -> str:
    """Return what holds the peaks: by use, and the largest tensors."""
    rows: list[tuple[object, ...]] = []
    for category in _categories(steps):
        sizes = [each.memory.at_peak.get(category, 0) for each in steps]
        rows.append((swatch(category), *map(format_bytes, sizes)))
    rows.append(("total", *(format_bytes(sum(each.memory.at_peak.values())) for each in steps)))
    columns = ["used for", *(labelled(each.name, each.how) for each in steps)]
    by_use = html_table("By use, at each step’s peak.", columns, rows, numbers=len(steps), last_is_total=True)
    last = steps[-1]
    holders = []
    for holder in last.memory.largest[:MOST_HOLDERS]:
        what, by, where = holder.what.partition(" by ")
        tensor = Html(f"{code(what)}<br><small>{swatch(holder.category)} {escape(by + where)}</small>")
        holders.append((tensor, format_bytes(holder.nbytes)))
    about = f"The largest tensors at the peak, {last.name[0].lower()}{last.name[1:]}."
    largest = html_table(about, ["tensor", labelled("size", last.how)], holders, numbers=1)
    return f'<h3>What holds the peak</h3><div class="columns"><div>{by_use}</div><div>{largest}</div></div>'


@dataclasses.dataclass(frozen=True)
class ShownPlan:
    """A plan among the trades."""

    kind: str
    label: str
    peak: int
    ratio: float
    how: str


def _marks(plan: Plan, modes: Mapping[str, Plan]) -> Iterator[ShownPlan]:
    yield ShownPlan("plain", "plain", plan.baseline_peak_bytes, 1.0, source_of_plain(plan))
    chosen = (plan.predicted_peak_bytes, plan.predicted_time_ratio)
    alike = []
    for name, other in modes.items():
        figures = (other.predicted_peak_bytes, other.predicted_time_ratio)
        if figures == chosen:
            alike.append(name)
        else:
            yield ShownPlan(name, name, *figures, other.prediction_source)
    label = f"this plan ({', '.join(alike)})" if alike else "this plan"
    yield ShownPlan("chosen", label, *chosen, plan.prediction_source)


def _trades(plan: Plan, modes: Mapping[str, Plan]) -> str:
    if not plan.frontier:
        return ""
    lead = (
        f"The least peak for each step time, of {len(plan.frontier)} plans that the planner found "
        f"{chip('estimated')}. Marked plans may lie beside the line where their peaks were simulated. Modes differ in "
        "the techniques that they may use."
    )
    label = "Peak memory over step time. Arrow keys move from plan to plan, P to this plan."
    plot = f'<div class="plot" id="trades-plot" tabindex="0" role="slider" aria-label="{label}"></div>'
    rows: list[tuple[object, ...]] = [
        (
            Html(f"<b>{escape(mark.label)}</b>"),
            labelled(format_bytes(mark.peak), mark.how),
            f"{mark.ratio:.2f} ×",
            None,
        )
        for mark in _marks(plan, modes)
    ]
    rows += [
        (
            p.label,
            labelled(format_bytes(p.peak_bytes), "estimated"),
            f"{p.time_ratio:.2f} ×",
            f"{p.budget_bytes:,} B",
        )
        for p in plan.frontier
    ]
    columns = ["plan", "peak", labelled("step time", "estimated"), "memory_budget that leads there"]
    table = html_table("Peaks and step times, as multiples of the plain step’s.", columns, rows, numbers=3)
    figure = f"<figure>{plot}</figure>"
    return section("trades", "Memory against step time", lead, figure, folded("The plans as a table", table))


def _time(plan: Plan) -> str:
    total = plan.step_time.total
    if not total:
        return ""
    longest = max(total, plan.baseline_seconds)
    parts = [
        (field.name.replace("_", " "), seconds)
        for field, seconds in zip(dataclasses.fields(plan.step_time), plan.step_time.parts, strict=True)
    ]

    def bar(name: str, seconds: float, spans: Iterable[tuple[str, float]]) -> str:
        inside = "".join(
            f'<span style="--c:var(--{what.replace(" ", "-")});width:{100 * part / longest:.3f}%">'
            f"{what if part / longest > 0.02 + 0.008 * len(what) else ''}</span>"
            for what, part in spans
            if part
        )
        time = f"<span>{format_seconds(seconds)}</span>"
        return f'<div class="row"><b>{name}</b><div class="track">{inside}</div>{time}</div>'

    plain = bar("plain", plan.baseline_seconds, [("plain step", plan.baseline_seconds)])
    bars = f'<div class="time" aria-hidden="true">{plain}{bar("this plan", total, parts)}</div>'
    about = {
        "compute": "forward and backward, each once",
        "recomputation": "forward again in backward, of checkpointed layers and tiles",
        "transfers": "copies between device and host that no computation hides",
        "device step": "the optimizer’s arithmetic on the device",
        "host step": "the optimizer’s step of offloaded parameters, with the copies for it",
        "overhead": "hooks, launches, the latency of copies",
    }
    rows: list[tuple[object, ...]] = [
        (
            Html(f'<span class="part">{swatch(name)}</span> <small>{about[name]}</small>'),
            format_seconds(seconds),
            f"{100 * seconds / total:.1f}%",
        )
        for name, seconds in parts
        if seconds
    ]
    rows.append(("total", format_seconds(total), "100.0%"))
    columns = ["part", labelled("time", "estimated"), "share"]
    table = html_table("", columns, rows, numbers=2, last_is_total=True)
    lead = "Where the time of a step goes, from the device’s rates. Transfers that computation hides do not count."
    lead = f"{lead} {overlap_remark(plan)}".rstrip()
    return section("time", "Step time", f"{lead} {chip('estimated')}", bars, table)


# Layers ----------------------------------------------------------------------------------------------


def _layers(plan: Plan) -> str:
    groups = layer_groups(plan.layers)
    badges: list[tuple[str, str]] = []
    for group in groups:
        lettered = sum(1 for letter, _ in badges if letter != "–")
        if not group[0].techniques:
            badges.append(("–", "plain"))
        else:
            letter = chr(ord("A") + lettered) if lettered < 26 else str(lettered + 1)
            badges.append((letter, f"g{lettered % GROUP_COLORS}"))
    badge_of = {layer.name: badge for group, badge in zip(groups, badges, strict=True) for layer in group}
    cells = "".join(
        f'<li class="{badge_of[layer.name][1]}" title="{escape(layer.name)}">{badge_of[layer.name][0]}</li>'
        for layer in plan.layers
    )
    strip = f'<h3>In model order</h3><ol class="strip" aria-hidden="true">{cells}</ol>'
    head = (
        '<div class="group head" aria-hidden="true"><span></span><span>layers</span><span>technique and reason</span>'
        '<span class="number">saves</span><span class="number">costs</span><span></span></div>'
    )
    rows = [_group(group, *badge) for group, badge in zip(groups, badges, strict=True)]
    for where, what, why, *_ in whole_rows(plan):
        cells = _group_cells("•", "plain", escape(where or ""), what or "", why or "", "", "")
        rows.append(f'<div class="group single">{cells}</div>')
    lead = (
        "Layers that are treated alike are one group, which opens to its layers. Savings are of device memory at the "
        f"end of forward, costs are time added to a step {chip('estimated')}"
    )
    return section("layers", "Plan by layer", lead, strip, head, *rows)


def layer_groups(layers: Iterable[LayerPlan]) -> list[list[LayerPlan]]:
    """Return the layers by what they get and why, those that are left as they are last."""
    groups: dict[object, list[LayerPlan]] = {}
    for layer in layers:
        settings = (layer.checkpointing, layer.offloading, layer.tiling)
        groups.setdefault((layer.techniques, settings, layer.rule, layer.reason), []).append(layer)
    return sorted(groups.values(), key=lambda group: not group[0].techniques)


def _group(group: Sequence[LayerPlan], letter: str, color: str) -> str:
    first = group[0]
    what = "; ".join(technique_in_words(technique, first) for technique in first.techniques) or "as it is"
    why = first.reason
    count = f' <span class="count">×\u2009{len(group)}</span>' if len(group) > 1 else ""
    names = f"{escape(names_in_short(layer.name for layer in group))}{count}"
    saves = _saves(sum(layer.saved_bytes for layer in group))
    costs = _costs(sum(layer.extra_seconds for layer in group))
    cells = _group_cells(letter, color, names, what, why, saves or "", costs or "")
    rows = [
        (
            code(layer.name or "(the model)"),
            _saves(layer.saved_bytes),
            _costs(layer.extra_seconds),
            f"{layer.recompute_flops:.3g}" if layer.recompute_flops else None,
        )
        for layer in group
    ]
    columns = ["layer", labelled("saves", "estimated"), labelled("costs", "estimated"), "FLOPs recomputed"]
    table = html_table("", columns, rows, numbers=3)
    return f'<details class="group"><summary>{cells}</summary><div class="inner">{table}</div></details>'


def _saves(size: int) -> str | None:
    return format_bytes(size) if size else None


def _costs(seconds: float) -> str | None:
    return f"+{format_seconds(seconds)}" if seconds else None


def _group_cells(letter: str, color: str, names: str, what: str, why: str, saves: str, costs: str) -> str:
    return (
        f'<span class="badge {color}" aria-hidden="true">{letter}</span><span class="names">{names}</span>'
        f'<span class="what">{escape(what)}</span><span class="number saves">{saves}</span>'
        f'<span class="number costs">{costs}</span><span class="why">{escape(why)}</span>'
    )


# What was observed, the machine, notes ---------------------------------------------------------------


def _observed(plan: Plan, report: Report | None) -> str:
    heading = "Predicted and observed"
    if report is None:
        lead = (
            "Nothing was observed yet: this page is of the plan alone. In training, "
            "<code>executor.report().to_html(…)</code> of the model’s executor writes it with what happened."
        )
        return section("observed", heading, lead)
    rows = [
        (what.strip(), value, chip(how) if " " not in how else how) for what, value, how in report.totals()
    ]
    about = escape(f"{report.model} on {report.device}")
    tables = [html_table(about, ["what", "so far", "how it is known"], rows)]
    if report.moved:
        moved: list[tuple[object, ...]] = [
            (
                Html(f"{escape(each.what)} <small>{escape(each.technique)}, {escape(each.tier)}</small>"),
                format_bytes(each.read_bytes),
                format_bytes(each.written_bytes),
            )
            for each in report.moved
        ]
        moved.append(("total", format_bytes(report.bytes_read), format_bytes(report.bytes_written)))
        columns = ["moved", labelled("read", "counted"), labelled("written", "counted")]
        about = "Bytes moved between the device and the tier they are kept on."
        tables.append(html_table(about, columns, moved, numbers=2, last_is_total=True))
    lost = [(each.to, None if each.seconds is None else format_seconds(each.seconds)) for each in report.lost]
    if lost:
        tables.append(
            html_table("Time lost to each technique.", ["to", labelled("time", "measured")], lost, numbers=1)
        )
    recomputed: list[tuple[object, ...]] = [
        (code(each.layer or "(the model)"), f"{each.times:,}", f"{each.flops:.3g}")
        for each in report.recomputed
    ]
    if recomputed:
        columns = ["layer", labelled("times", "counted"), "FLOPs (counted × profiled)"]
        recomputed.append(("total", f"{report.recomputations:,}", f"{report.recompute_flops:.3g}"))
        about = "Layers that were computed again in backward."
        table = html_table(about, columns, recomputed, numbers=2, last_is_total=True)
        tables.append(folded("Recomputations by layer", table))
    bars, known = "", report.observed_peak_bytes
    if known is not None:
        predicted = report.predicted_peak_bytes
        bars = meters(
            [("predicted", predicted, format_bytes(predicted)), ("observed", known, format_bytes(known))]
        )
    lead = "What the plan predicted, beside what this process has seen so far."
    return section("observed", heading, lead, bars, *tables)


def _hardware(plan: Plan, hardware: Hardware | None) -> str:
    if hardware is None:
        return section("hardware", "Hardware", escape(plan.device) or "Not known.") if plan.device else ""
    device, measured = hardware.device, hardware.measured
    source = "published" if device.kind in ("cuda", "virtual") else "estimated"

    def rate(label: str, table: float | None, field: str, unit: float, suffix: str) -> tuple[object, ...]:
        own: float | None = None if measured is None else getattr(measured, field)
        value, how = (table, source) if own is None else (own, "measured")
        return label, "not there" if value is None else labelled(f"{value / unit:.4g} {suffix}", how)

    rates = device.rates
    rows: list[tuple[object, ...]] = [
        ("device", f"{hardware.device_count} × {device.name}" if hardware.device_count > 1 else device.name),
        (
            "memory",
            labelled(format_bytes(device.total_bytes), "published" if hardware.is_virtual else "measured"),
        ),
        rate("fp32 products", rates.fp32, "fp32", 1e12, "TFLOP/s"),
        rate("16-bit products", rates.bf16 or rates.fp16, "half", 1e12, "TFLOP/s"),
        rate("memory bandwidth", device.memory_bandwidth, "memory_bandwidth", 1e9, "GB/s"),
        rate("link, one direction", device.link_bandwidth, "h2d", 1e9, "GB/s"),
    ]
    assumed = "estimated" if hardware.is_virtual else "measured"
    if device.kind != "cpu":
        rows.append(("host memory", labelled(format_bytes(hardware.host.total_ram_bytes), assumed)))
    rows.append(("disk, free", labelled(format_bytes(hardware.disk.free_bytes), assumed)))
    rows += [("note", note) for note in device.notes]
    when = "" if measured is None else f" Rates were measured on {escape(measured.date)}."
    kind = (
        "A virtual device: the plan is for a GPU that need not be here."
        if hardware.is_virtual
        else "This machine."
    )
    return section("hardware", "Hardware", f"{kind}{when}", html_table("", ["what", "how much"], rows))


def _notes(plan: Plan) -> str:
    if not plan.notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    return section(
        "notes", "Notes", "What the planner found worth saying.", f'<ul class="notes">{items}</ul>'
    )
