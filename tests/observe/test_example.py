"""`examples/observe.py` shows what it says it shows."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "observe.py"


def test_the_example_prints_a_report_and_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert "Report: Model on cpu" in said
    written = 'direction="written",model="Model",tier="disk",what="optimizer state"'
    assert f"memscale_moved_bytes_total{{{written}}}" in said
    assert 'memscale_lost_seconds_total{model="Model",technique="recomputing"}' in said
