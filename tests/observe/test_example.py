"""`examples/observe.py` shows what it says it shows."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "observe.py"


def labels(text: str) -> list[str]:
    """The first cell of each row."""
    return [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]


@pytest.mark.slow
def test_the_example_prints_a_report_and_metrics(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert "Report: Model on cpu" in said
    page = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    assert labels(said) == labels(page), "the output in docs/observability.md has other rows"
    written = 'direction="written",model="Model",tier="disk",what="optimizer state"'
    assert f"memscale_moved_bytes_total{{{written}}}" in said
    assert 'memscale_lost_seconds_total{model="Model",technique="offloading"}' in said
