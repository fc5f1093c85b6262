"""The report page, as a person uses it: by pointer, by keyboard, by screen reader, on a phone, in the dark."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale.cli.app import run
from memscale.execution_plan import Plan, StepMemory
from memscale.execution_plan.page import write_page
from memscale.hardware import virtual_hardware
from memscale.units import format_bytes
from support.shown_plan import MARKUP, MIB, SCRIPT, shown_plan

OpenPage = Callable[..., Any]


@pytest.fixture
def plan() -> Plan:
    return shown_plan()


@pytest.fixture
def path(plan: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    modes = {
        "balanced": plan,
        "aggressive": Plan((), predicted_peak_bytes=250 * MIB, predicted_time_ratio=2.2),
    }
    write_page(plan, path, title=f"A model {MARKUP}", hardware=virtual_hardware("RTX 3060"), modes=modes)
    return path


def phase_of(memory: StepMemory, sample: int) -> str:
    return ("forward", "forward", "backward", "backward", "optimizer step", "optimizer step")[sample]


def steps_of(plan: Plan) -> dict[str, StepMemory]:
    assert plan.baseline_memory is not None
    assert plan.predicted_memory is not None
    return {"plain": plan.baseline_memory, "planned": plan.predicted_memory}


def assert_says(text: str, memory: StepMemory, sample: int) -> None:
    """Assert that a text names the phase, the total and every use that is not zero."""
    sizes = memory.samples[sample]
    assert f"{phase_of(memory, sample)}, part {sample + 1} of {len(memory.samples)}" in text
    assert format_bytes(sum(sizes)) in text
    assert ("Peak" in text) == (sample == memory.peak)
    for category, size in zip(memory.categories, sizes, strict=True):
        assert (re.search(rf"{category}\s+{re.escape(format_bytes(size))}", text) is not None) == (size > 0)


def test_everything_is_there(plan: Plan, path: Path, open_page: OpenPage) -> None:
    page = open_page(path)
    headings = page.get_by_role("heading", level=2).all_inner_texts()
    for heading in (
        "Memory over a step",
        "Memory against step time",
        "Step time",
        "Plan by layer",
        "Hardware",
    ):
        assert heading in headings
    assert format_bytes(plan.predicted_peak_bytes) in page.locator(".facts").inner_text()
    for key, memory in steps_of(plan).items():
        plot = page.locator(f"#memory-{key}")
        assert plot.locator("path[data-category]").count() == len(memory.categories)
        assert f"Peak {format_bytes(sum(memory.samples[memory.peak]))}" in plot.text_content()
    assert f"in backward of {MARKUP}" in page.locator("#memory-planned").text_content()
    marks = page.locator("#trades-plot [data-mark]")
    kinds = [mark.get_attribute("data-mark") for mark in marks.all()]
    assert sorted(kinds) == ["aggressive", "chosen", "plain"]  # balanced is the chosen one
    assert "this plan (balanced)" in page.locator("#trades-plot").text_content()
    assert {"simulated", "estimated", "published"} <= set(page.locator("main .how").all_inner_texts())


@pytest.mark.parametrize("key", ["plain", "planned"])
def test_pointing_at_a_part_of_the_step_shows_its_memory(
    key: str, plan: Plan, path: Path, open_page: OpenPage
) -> None:
    page, memory = open_page(path), steps_of(plan)[key]
    plot = page.locator(f"#memory-{key}")
    areas = [area.bounding_box() for area in plot.locator("path[data-category]").all()]
    left = min(area["x"] for area in areas)
    width = max(area["x"] + area["width"] for area in areas) - left
    plot.scroll_into_view_if_needed()
    top = plot.bounding_box()["y"] + 200
    for sample in range(len(memory.samples)):
        page.mouse.move(left + width * (sample + 0.5) / len(memory.samples), top)
        assert_says(plot.locator(".tip").inner_text(), memory, sample)
    page.mouse.move(0, 0)
    assert plot.locator(".tip").is_hidden()


def test_keys_move_along_a_step_and_are_announced(plan: Plan, path: Path, open_page: OpenPage) -> None:
    page, memory = open_page(path), steps_of(plan)["planned"]
    slider = page.get_by_role("slider", name="With this plan: device memory by use")
    last = len(memory.samples) - 1

    def now_at(sample: int) -> None:
        assert slider.get_attribute("aria-valuenow") == str(sample)
        assert_says(slider.get_attribute("aria-valuetext"), memory, sample)
        assert_says(slider.locator(".tip").inner_text(), memory, sample)

    page.get_by_role("slider", name="Plain step").focus()
    page.keyboard.press("Tab")
    assert slider.evaluate("plot => plot === document.activeElement")
    now_at(memory.peak)
    page.keyboard.press("Home")
    for sample in range(last + 1):
        now_at(sample)
        page.keyboard.press("ArrowRight")
    now_at(last)
    page.keyboard.press("ArrowLeft")
    now_at(last - 1)
    page.keyboard.press("p")
    now_at(memory.peak)
    page.keyboard.press("End")
    now_at(last)
    page.keyboard.press("Escape")
    assert slider.locator(".tip").is_hidden()


def test_the_trades_by_key_and_by_pointer(plan: Plan, path: Path, open_page: OpenPage) -> None:
    page = open_page(path)
    plot = page.get_by_role("slider", name="Peak memory over step time")
    plot.focus()
    page.keyboard.press("Home")
    seen = []
    for _ in range(int(plot.get_attribute("aria-valuemax")) + 1):
        seen.append(plot.locator(".tip").inner_text())
        page.keyboard.press("ArrowRight")
    for point in plan.frontier:
        (tip,) = [text for text in seen if text.startswith(point.label)]
        budget = format_bytes(point.budget_bytes)
        assert all(
            part in tip for part in (format_bytes(point.peak_bytes), f"{point.time_ratio:.2f} ×", budget)
        )
    page.keyboard.press("p")
    assert "this plan" in plot.get_attribute("aria-valuetext")
    plot.locator("[data-mark=aggressive]").hover(force=True)
    assert "aggressive" in plot.locator(".tip").inner_text()
    assert format_bytes(250 * MIB) in plot.locator(".tip").inner_text()


def test_the_tables_have_what_the_charts_have(plan: Plan, path: Path, open_page: OpenPage) -> None:
    page = open_page(path)
    for key, name in (("plain", "Plain step"), ("planned", "With this plan")):
        memory = steps_of(plan)[key]
        page.get_by_text(f"{name} as a table").click()
        rows = page.get_by_role("region", name=f"{name} as a table").locator("tbody tr").all()
        for sample, (row, sizes) in enumerate(zip(rows, memory.samples, strict=True)):
            cells = [
                str(sample + 1),
                phase_of(memory, sample),
                *map(format_bytes, sizes),
                format_bytes(sum(sizes)),
            ]
            assert row.locator("th, td").all_inner_texts() == cells
    page.get_by_text("The plans as a table").click()
    rows = page.get_by_role("region", name="The plans as a table").locator("tbody tr")
    assert rows.count() == 3 + len(plan.frontier)


def test_scales_are_shared_or_not(path: Path, open_page: OpenPage) -> None:
    page = open_page(path)

    def heights() -> list[float]:
        return [
            page.locator(f"#memory-{key} path[data-category='activations']").bounding_box()["height"]
            for key in ("plain", "planned")
        ]

    same = heights()
    page.get_by_role("button", name="own scales").click()
    own = heights()
    assert own[0] == same[0]
    assert own[1] > 4 * same[1]
    assert page.get_by_role("button", name="same scale").get_attribute("aria-pressed") == "false"


def test_groups_of_layers_open(path: Path, open_page: OpenPage) -> None:
    page = open_page(path)
    group = page.locator("details.group", has_text="h.0–2, 5")
    summary = group.locator("summary").inner_text()
    for part in ("×\u20094", "offloading to host; checkpointing", "recomputed instead", "44.0 MiB", "+8 ms"):
        assert part in summary
    assert not group.get_by_text("h.5", exact=True).is_visible()
    group.locator("summary").focus()
    page.keyboard.press("Enter")
    assert group.get_by_text("h.5", exact=True).is_visible()
    assert page.locator(".group.single", has_text="(optimizer)").inner_text().count("in buckets") == 2


def test_names_are_text(path: Path, open_page: OpenPage) -> None:
    page = open_page(path)
    assert page.locator("h1").inner_text() == f"A model {MARKUP}"
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    layers = page.locator("#layers").inner_text()
    assert MARKUP in layers
    assert SCRIPT in layers
    assert MARKUP in page.locator("#notes").inner_text()
    assert MARKUP in page.locator("#memory-planned").text_content()


def luminance(color: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_have_contrast_and_the_button_changes_them(
    scheme: str, path: Path, open_page: OpenPage
) -> None:
    page = open_page(path, color_scheme=scheme)

    def color(selector: str, name: str = "color") -> str:
        found = page.locator(selector).first.evaluate(f"each => getComputedStyle(each)['{name}']")
        assert isinstance(found, str)
        return found

    before = color("body", "backgroundColor")
    assert (luminance(before) > 0.5) == (scheme == "light")
    for _ in range(2):
        surface = color("section", "backgroundColor")
        for selector in ("section", "section > p", ".how", ".big small", "details.data > summary", "th"):
            assert contrast(color(selector), surface) >= 4.5, selector
        for group in page.locator(".strip li").all():
            back, front = (
                group.evaluate(f"each => getComputedStyle(each).{what}") for what in ("background", "color")
            )
            assert contrast(re.match(r"rgb\([^)]*\)", back)[0], front) >= 4.5
        for area in page.locator("#memory-plain path[data-category]").all():
            fill = area.evaluate("each => getComputedStyle(each).fill")
            assert contrast(fill, surface) >= 4.5, area.get_attribute(
                "data-category"
            )  # names are written in it
        page.locator("#theme").click()
    assert color("body", "backgroundColor") == before
    page.locator("#theme").click()
    assert (luminance(color("body", "backgroundColor")) > 0.5) == (scheme == "dark")


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_scrolls_in_one_direction(width: int, path: Path, open_page: OpenPage) -> None:
    page = open_page(path, width=width, has_touch=True)
    for summary in page.locator("summary").all():
        summary.click()
    page.locator("#memory-plain").tap()
    assert page.locator("#memory-plain .tip").is_visible()
    assert beyond_their_place(page) == []


def beyond_their_place(page: Any) -> list[str]:
    """Return what is wider than its section, or makes the page scroll sideways."""
    assert page.evaluate("document.documentElement.scrollWidth") == page.viewport_size["width"]
    found = page.evaluate(
        "[...document.querySelectorAll('section *')].filter(each => !each.closest('.scroll') && "
        "each.getBoundingClientRect().right > each.closest('section').getBoundingClientRect().right - 8)"
        ".map(each => each.outerHTML.slice(0, 99))"
    )
    assert isinstance(found, list)
    return found


def test_the_page_of_the_command(
    tmp_path: Path, open_page: OpenPage, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / name for name in ("page.html", "snapshot.pickle", "trace.json")}
    arguments = ["-o", str(files["page.html"]), "--snapshot", str(files["snapshot.pickle"])]
    arguments += ["--trace", str(files["trace.json"])]
    assert run(["report", "gpt2-tiny", "--on", "RTX 3090", "--mode", "aggressive", *arguments]) == 0
    assert f"Written to {', '.join(map(str, files.values()))}." in capsys.readouterr().out
    assert all(path.stat().st_size for path in files.values())
    page = open_page(files["page.html"])
    assert page.locator("h1").inner_text().startswith("gpt2-tiny")
    assert page.locator("#memory-plain path").count() > 3
    assert page.locator("#memory-planned path").count() > 3
    assert "this plan (aggressive)" in page.locator("#trades-plot").text_content()
    assert "NVIDIA GeForce RTX 3090" in page.locator("#hardware").inner_text()


def test_the_page_of_a_training_run(
    tmp_path: Path, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The peak of this process may be that of an earlier test, and then the plan's own is not known.
    peaks = itertools.count(10 * 2**30, MIB)
    monkeypatch.setattr("memscale.observe.counters.peak_rss_bytes", lambda: next(peaks))
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    )
    config = memscale.Config(mode="aggressive", enable_logging=False, force_optimize=True)
    batch = torch.randn(64, 64)
    model = memscale.wrap(model, config, batch)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = model._memscale_executor.report()
    report.to_html(tmp_path / "page.html")
    memscale.detach(model)
    page = open_page(tmp_path / "page.html")
    assert page.locator("h1").inner_text() == "Sequential"
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("#observed tbody tr").all()]
    assert ["peak of a step", format_bytes(report.predicted_peak_bytes), report.prediction_source] in rows
    assert ["forward passes in training", "2", "counted"] in rows
    observed = [f"observed peak of {report.observed_peak_kind}", format_bytes(report.observed_peak_bytes)]
    [how] = [row[2] for row in rows if row[:2] == observed]
    assert how.startswith(f"measured since {report.observed_since}")
    assert report.bytes_written > 0
    assert ["total", format_bytes(report.bytes_read), format_bytes(report.bytes_written)] in rows
    assert [lost.to for lost in report.lost] == [row[0] for row in rows if len(row) == 2]
    page.get_by_text("Recomputations by layer").click()
    table = page.get_by_role("region", name="Recomputations by layer").locator("tbody tr")
    assert report.recomputations > 0
    assert table.last.inner_text().split()[:2] == ["total", f"{report.recomputations:,}"]
    page.set_viewport_size({"width": 390, "height": 900})
    assert beyond_their_place(page) == []


def test_a_plan_that_knows_nothing_has_a_page(tmp_path: Path, open_page: OpenPage) -> None:
    Plan(()).report(tmp_path / "page.html", title="Nothing & all")
    page = open_page(tmp_path / "page.html")
    assert page.locator("h1").inner_text() == "Nothing & all"
    assert "no step was simulated" in page.locator("#memory").inner_text()
