"""Results in the terminal and in Markdown."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.step_times import constants
from benchmarks.tables import main, markdown, pages, replace_tables, write_into
from memscale.benchmarks import Results, Row
from memscale.benchmarks.results import cells
from memscale.errors import ConfigError
from memscale.execution_plan import StepTime

GIB = 2**30
MEDIUM = Row(
    model="gpt2-medium",
    params=354_823_168,
    batch=4,
    seq=512,
    mode="none",
    on="RTX 3090",
    source="simulated",
    baseline_bytes=int(10.87 * GIB),
    peak_bytes=int(10.87 * GIB),
    host_bytes=1000,
    disk_bytes=0,
    reduction=0.0,
    time_ratio=1.0,
)
XL = dataclasses.replace(
    MEDIUM,
    model="gpt2-xl",
    batch=1,
    baseline_bytes=None,
    peak_bytes=None,
    note="does not fit: needs 29.64 GiB, has 24.0 GiB",
)
BALANCED = dataclasses.replace(
    MEDIUM, mode="balanced", peak_bytes=2 * GIB, host_bytes=6 * GIB, reduction=0.816, time_ratio=1.25
)
VERSIONS = {"torch": "2.13.0", "transformers": "5.22.0"}
RESULTS = Results("python -m memscale.benchmarks --on 'RTX 3090'", VERSIONS, (MEDIUM, XL))


def headers(rows: list[Row]) -> list[str]:
    return [column.header for column in cells(rows).columns]


def column(rows: list[Row], header: str) -> list[str]:
    return [row[headers(rows).index(header)] for row in cells(rows).rows]


def test_published_figures_stand_beside_ours():
    assert column([MEDIUM, XL], "peak (GiB)") == ["10.87", "does not fit"]
    assert column([MEDIUM, XL], "published (GiB)") == ["10.87", "does not fit"]
    assert column([MEDIUM, XL], "error") == ["-0.0%", "agrees"]
    larger = dataclasses.replace(MEDIUM, peak_bytes=11 * GIB)
    fits = dataclasses.replace(XL, peak_bytes=11 * GIB, note=None)
    assert column([larger, fits], "error") == ["+1.2%", "differs"]


@pytest.mark.parametrize(
    "change",
    [{"batch": 8}, {"seq": 256}, {"on": "A100"}, {"on": "24GiB"}, {"on": "cpu", "source": "measured"}],
    ids=str,
)
def test_published_figures_are_of_one_device_and_batch(change):
    assert "published (GiB)" not in headers([dataclasses.replace(MEDIUM, **change)])


def test_modes_have_reduction_and_time():
    assert "reduction" not in headers([MEDIUM])
    rows = [MEDIUM, BALANCED]
    assert column(rows, "reduction") == ["–", "81.6%"]
    assert column(rows, "step time") == ["1.00 ×", "1.25 ×"]
    assert column(rows, "host (GiB)") == ["0.00", "6.00"]
    assert column(rows, "published (GiB)") == ["10.87", "2.61"]
    assert column(rows, "error") == ["+0.0%", "–"] or column(rows, "error") == ["-0.0%", "–"]


def test_images_have_no_length():
    assert column([MEDIUM, dataclasses.replace(MEDIUM, seq=None)], "batch × seq") == ["4 × 512", "4"]


def test_a_budget_is_named_by_its_size():
    row = dataclasses.replace(XL, mode="budget", peak_bytes=9 * GIB, note=None)
    assert column([row], "mode") == ["memory_budget 9.25 GiB"]
    assert column([row], "published (GiB)") == ["9.25"]


def test_step_times_are_taken_apart(tmp_path):
    time = StepTime(compute=0.2, device_step=0.05)
    offloaded = StepTime(compute=0.2, recomputation=0.05, transfers=0.1, host_step=0.1, overhead=0.0005)
    rows = (
        dataclasses.replace(MEDIUM, step_time=time),
        dataclasses.replace(BALANCED, step_time=offloaded),
        dataclasses.replace(XL, on="cpu", source="measured"),
    )
    results, page = tmp_path / "gpu.json", tmp_path / "page.md"
    dataclasses.replace(RESULTS, rows=rows).write(results)
    page.write_text("<!-- table: gpu_step_time -->\n<!-- /table -->\n")
    assert main([str(results), "--into", str(page)]) == 0
    lines = page.read_text().splitlines()
    assert [line for line in lines if line.startswith("| gpt2")] == [
        "| gpt2-medium | none | 200.0 | – | – | 50.0 | – | – | 250.0 | 1.00 × |",
        "| gpt2-medium | balanced | 200.0 | 50.0 | 100.0 | – | 100.0 | 0.5 | 450.5 | 1.80 × |",
    ]
    assert any("estimated" in line for line in lines)


def test_markdown_says_source_command_and_versions():
    text = markdown(RESULTS)
    assert text.splitlines()[0].startswith("| model | params |")
    assert "| gpt2-xl | 354.8 M | 1 × 512 | none | does not fit | does not fit | agrees |" in text
    assert "Simulated on NVIDIA GeForce RTX 3090, 24.0 GiB" in text
    assert "needs 29.64 GiB" in text
    assert (
        "Made by `python -m memscale.benchmarks --on 'RTX 3090'` (torch 2.13.0, transformers 5.22.0)" in text
    )
    measured = dataclasses.replace(MEDIUM, on="cpu", source="measured")
    assert "Measured on the CPU" in markdown(dataclasses.replace(RESULTS, rows=(measured,)))


def test_what_is_around_the_markers_stays():
    text = "# Title\n<!-- table: a -->\nold\n<!-- /table -->\nmiddle\n<!-- table: b -->\n<!-- /table -->\nend"
    new, changed = replace_tables(text, {"a": "A1\nA2", "b": "B"})
    assert changed == ("a", "b")
    assert new == (
        "# Title\n<!-- table: a -->\n\nA1\nA2\n\n<!-- /table -->\nmiddle\n"
        "<!-- table: b -->\n\nB\n\n<!-- /table -->\nend"
    )
    assert replace_tables(new, {"a": "A1\nA2", "b": "B"}) == (new, ())


def test_line_ends_stay():
    text = "a\r\n<!-- table: a -->\r\n<!-- /table -->\r\n"
    new, _ = replace_tables(text, {"a": "A1\nA2"})
    assert new == "a\r\n<!-- table: a -->\r\n\r\nA1\r\nA2\r\n\r\n<!-- /table -->\r\n"
    assert replace_tables(new, {"a": "A1\nA2"}) == (new, ())


def test_indented_markers_are_text():
    text = "    <!-- table: NAME -->\n    <!-- /table -->\n"
    assert replace_tables(text, {}) == (text, ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: b -->\n<!-- /table -->", r"no table 'b'.* Allowed: a"),
        ("<!-- table: a -->\n", "'a' is not closed"),
        ("<!-- /table -->\n", "line 1: <!-- /table --> without"),
        ("<!-- table: a -->\n<!-- table: a -->\n", "line 2: the table 'a' is still open"),
    ],
)
def test_broken_markers(text, message):
    with pytest.raises(ConfigError, match=message):
        replace_tables(text, {"a": "A"})


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    results, page = tmp_path / "plain.json", tmp_path / "page.md"
    RESULTS.write(results)
    page.write_text("# Page\n\n<!-- table: plain -->\n<!-- /table -->\n")
    return str(results), str(page)


def test_check_fails_until_the_tables_are_written(files, capsys):
    results, page = files
    before = Path(page).read_text()
    assert main([results, "--into", page, "--check"]) == 1
    assert "table plain is not up to date" in capsys.readouterr().out
    assert Path(page).read_text() == before

    assert main([results, "--into", page]) == 0
    assert markdown(RESULTS) in Path(page).read_text()
    assert main([results, "--into", page, "--check"]) == 0

    dataclasses.replace(RESULTS, rows=(BALANCED,)).write(Path(results))
    assert main([results, "--into", page, "--check"]) == 1


def test_without_into_the_tables_are_printed(files, capsys):
    assert main([files[0]]) == 0
    assert markdown(RESULTS) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.json", "--into", "{page}"], "absent.json"),
        (["{page}", "--into", "{page}"], "Not JSON"),
        (["{results}", "--into", "absent.md"], "absent.md"),
        (["{results}", "{results}"], "another results file with the name 'plain'"),
    ],
)
def test_bad_arguments(arguments, message, files, capsys):
    results, page = files
    assert main([each.format(results=results, page=page) for each in arguments]) == 2
    assert message in capsys.readouterr().err


def test_every_page_has_the_tables_of_the_committed_results(capsys):
    names = {page.name for page in pages()}
    assert names >= {"README.md", "results.md", "comparison.md", "predictions.md", "truth.md", "frontier.md"}
    assert main(["--check"]) == 0, f"run `make tables`:\n{capsys.readouterr().out}"


def test_one_table_is_written_and_the_others_stay(tmp_path):
    page = tmp_path / "page.md"
    text = "<!-- table: a -->\n<!-- /table -->\n<!-- table: b -->\nold\n<!-- /table -->\n"
    page.write_text(text)
    write_into(page, {"a": "new"})
    assert page.read_text() == text.replace("a -->\n", "a -->\n\nnew\n\n", 1)
    with pytest.raises(ConfigError, match=r"page.md: there is no <!-- table: c -->"):
        write_into(page, {"c": "new"})


def test_readme_has_one_unit_in_a_column(tmp_path, capsys):
    small = dataclasses.replace(BALANCED, peak_bytes=917 * 2**20, host_bytes=100 * 2**20)
    time = StepTime(compute=0.2, device_step=0.05)
    file = tmp_path / "gpu.json"
    dataclasses.replace(RESULTS, rows=(dataclasses.replace(MEDIUM, step_time=time), small)).write(file)
    assert main([str(file)]) == 0
    short = capsys.readouterr().out.partition("gpu_short")[2]
    assert "| gpt2-medium | 4 × 512 | 10.87 GiB | 0.90 GiB | 1.25 × | 0.10 GiB |" in short


def test_check_needs_files_to_check(files):
    with pytest.raises(SystemExit) as caught:
        main([files[0], "--check"])
    assert caught.value.code == 2


def test_the_committed_step_times_have_the_constants_of_the_code():
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "step_times.json"
    committed = {(row["source"], row["what"]): row for row in json.loads(file.read_text())["rows"]}
    for row in constants():
        assert committed[row.source, row.what]["estimated"] == row.estimated
