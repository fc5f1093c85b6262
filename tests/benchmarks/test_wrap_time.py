"""How long `wrap` takes: the figures are there, and say what was measured. No bound on a time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import wrap_time
from benchmarks.wrap_time import WAYS, Row, main, tables


@pytest.mark.slow
def test_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    page, results = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text("<!-- table: wrap_time -->\n<!-- /table -->\n")
    small = ["--models", "gpt2-small", "--batch", "1", "--seq", "16", "--rounds", "1"]
    assert main([*small, "--json", str(results), "--into", str(page)]) == 0
    found = json.loads(results.read_text())
    assert found["source"] == "measured"
    assert [row["way"] for row in found["rows"]] == list(WAYS)
    assert all(len(row["seconds"]) == 1 and row["seconds"][0] > 0 for row in found["rows"])
    moved = {row["way"]: row["moved_bytes"] for row in found["rows"]}
    assert moved["wrap, on meta"] == 0  # nothing has been written yet
    table = capsys.readouterr().out.strip()
    assert table in page.read_text()
    assert "python -m benchmarks.wrap_time --models gpt2-small" in table


def test_the_table_says_what_was_written_and_how_fast_it_could_be() -> None:
    row = Row("m", "wrap, with weights", "balanced", (2.0, 1.0, 4.0), 3 * 2**30, (5e8, 1e9, 2e9))
    (text,) = tables({"command": "it", "rows": [dataclasses.asdict(row)]}).values()
    assert "| m | wrap, with weights | 2.0 (1.0 to 4.0) | 3.0 GiB | 1.0 (0.5 to 2.0) GB/s |" in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--models", "nope"], "There is no model 'nope'. Allowed: bert-base"),
        (["--mode", "sideways"], "mode='sideways' is not allowed"),
        (["--rounds", "0"], "--rounds 0 is not allowed"),
        (["--batch", "-1"], "--batch -1 is not allowed"),
        (["--json", "."], "is a directory"),
        (["--into", "README.md"], "README.md: "),
    ],
)
def test_what_is_not_allowed_is_said_before_anything_runs(
    given: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("<!-- table: another -->\n<!-- /table -->\n")
    monkeypatch.setattr(wrap_time, "measure_in_fresh_process", None)
    assert main(given) == 2
    assert said in capsys.readouterr().err


def test_plain_writes_are_measured() -> None:
    assert wrap_time._write_rate() > 0
