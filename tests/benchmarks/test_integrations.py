"""The page on integrations: its rows come from the tests."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.integrations import LIBRARIES, main
from support.surfaces import MATRIX, Row, record

ROOT = Path(__file__).resolve().parents[2]


def test_every_row_saved_memory() -> None:
    results = json.loads((ROOT / "benchmarks/results/integrations.json").read_text())
    surfaces = {row["surface"] for row in results["rows"]}
    libraries = {"Accelerate", "Fabric", "Lightning", "PEFT", "Seq2SeqTrainer", "TRL", "Trainer"}
    assert surfaces == libraries | {"torch.compile", "DDP, 2 processes", "FSDP2, 2 processes"}
    for row in results["rows"]:
        assert row["techniques"], row
        measured = [each for each in (row["held_bytes"], row["peak_bytes"]) if each]
        assert measured, row
        assert all(wrapped < plain for plain, wrapped in measured), row


@pytest.mark.skipif(any(find_spec(name) is None for name in LIBRARIES), reason="needs all libraries")
def test_rows_of_tests_become_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, page, results = tmp_path / "rows", tmp_path / "page.md", tmp_path / "results.json"
    page.write_text("<!-- table: integrations -->\n<!-- /table -->\n")
    monkeypatch.setenv(MATRIX, str(rows))
    for name in ("b", "a"):
        record(Row("Library", name, ("checkpointing",), (2048, 1024), None))
    assert main([str(rows), "--json", str(results), "--into", str(page)]) == 0
    assert [row["setting"] for row in json.loads(results.read_text())["rows"]] == ["a", "b"]
    assert "| Library | a | checkpointing | 2.0 KiB → 1.0 KiB | – |" in page.read_text()
