"""The truth page: published figures, simulated; those that are not stay in the table with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.truth import FIGURES, SOURCES, main

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "truth.json"


def test_one_row_and_its_table(tmp_path, capsys):
    page, results = tmp_path / "page.md", tmp_path / "truth.json"
    page.write_text("<!-- table: truth -->\n<!-- /table -->\n")
    assert main(["--only", "8,192 tokens", "--json", str(results), "--into", str(page)]) == 0
    (row,) = json.loads(results.read_text())["rows"]
    assert (row["kind"], row["published"], row["unit"]) == ("allocated", 9162.31, "MiB")
    assert row["simulated"] == pytest.approx(9162.31, rel=1e-3)
    table = capsys.readouterr().out.strip()
    assert table in page.read_text()
    assert "| Liger-Kernel | linear and cross entropy, 8,192 tokens | allocated | 9,162.31 MiB |" in table
    assert "1 of 1 figures simulated" in table


def test_what_is_not_simulated_stays_with_its_reason(capsys):
    assert main(["--only", "batch 4, 8-bit"]) == 0
    shown = capsys.readouterr().out
    assert "13,085.00 MiB | – | – | not simulated: bitsandbytes" in shown
    assert all(each.run is not None or each.reason.startswith("not simulated: ") for each in FIGURES)
    assert {each.source for each in FIGURES} == set(SOURCES)


def test_the_committed_results_have_every_row():
    rows = json.loads(RESULTS.read_text())["rows"]
    assert [(row["source"], row["what"], row["published"]) for row in rows] == [
        (each.source, each.what, each.published) for each in FIGURES
    ]


def test_bad_arguments(tmp_path, capsys):
    assert main(["--only", "nobody"]) == 2
    assert "no row has that. Sources: Liger-Kernel, LitGPT" in capsys.readouterr().err
    assert main(["--only", "liger", "--into", str(tmp_path / "absent.md")]) == 2
