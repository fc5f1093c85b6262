"""Predictions against observations, by the code of the benchmark: a few of its cases."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import predictions
from benchmarks.prediction_cases import BOUNDS, Device, PredictionCase, PredictionRow, run_cases
from memscale.optimizer.simulated_steps import SimulatedSteps
from tests.support.families import SMALL_FAMILIES

pytest.importorskip("transformers")


def row_of(family: str, mode: str, device: Device) -> PredictionRow:
    (row,) = run_cases([PredictionCase(family, mode, 8, device)])
    return row


@pytest.mark.matrix(9)
@pytest.mark.parametrize(
    ("family", "mode", "device"),
    [
        ("gpt2", "balanced", "vgpu"),
        ("llama", "aggressive", "vgpu"),
        ("t5", "conservative", "vgpu"),
        ("resnet", "balanced", "vgpu"),
        ("transformer_encoder", "aggressive", "vgpu"),
        ("mixtral", "conservative", "vgpu"),
        ("gpt2", "balanced", "cpu"),
        ("vit", "conservative", "cpu"),
    ],
)
def test_the_peak_is_as_predicted(family: str, mode: str, device: Device) -> None:
    row = row_of(family, mode, device)
    assert abs(row.error) <= BOUNDS[device]
    assert row.observed_bytes <= row.predicted_bytes + row.allowance_bytes or device == "cpu"


def test_a_prediction_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command must fail where a prediction does: here one that leaves Adam's state out."""
    monkeypatch.setattr(SimulatedSteps, "_state_sizes", lambda *args: [])
    arguments = ["--families", "cnn", "--modes", "conservative", "--batches", "2", "--on", "vgpu"]
    assert predictions.main([*arguments, "--json", str(tmp_path / "rows.json")]) == 1
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["error"] > BOUNDS["vgpu"]
    assert row["observation"] == "executed"
    assert row["prediction"] == "simulated"


def test_the_command_writes_rows_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, rows = tmp_path / "page.md", tmp_path / "rows.json"
    page.write_text("# Page\n<!-- table: predictions -->\n<!-- /table -->\n")
    arguments = ["--families", "cnn", "--modes", "conservative", "--batches", "2"]
    assert predictions.main([*arguments, "--json", str(rows), "--into", str(page)]) == 0
    found = json.loads(rows.read_text())["rows"]
    assert [row["device"] for row in found] == ["vgpu", "cpu"]
    assert [row["observation"] for row in found] == ["executed", "measured"]
    assert "- 1 cases on the executing virtual GPU (executed)" in page.read_text()
    assert "| cnn | conservative | 2 |" in page.read_text()
    assert str(tmp_path) not in page.read_text()


@pytest.mark.parametrize("arguments", [["--families", "GPT-9"], ["--modes", "none"], ["--on", "tpu"]])
def test_what_is_not_there_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert predictions.main(arguments) == 2
    assert arguments[1] in capsys.readouterr().err


def test_there_are_enough_cases() -> None:
    assert len(SMALL_FAMILIES) >= 12
    assert len(SMALL_FAMILIES) * 3 * 2 >= 60


def test_a_row_holds_within_its_bound_only() -> None:
    row = PredictionRow("cnn", "balanced", 2, "vgpu", "simulated", 1000, 10, "executed", 1010)
    assert row.holds
    assert row.error == pytest.approx(0.01)
    assert not dataclasses.replace(row, observed_bytes=1011).holds
    assert not dataclasses.replace(row, observed_bytes=989).holds
    assert not dataclasses.replace(row, allowance_bytes=5).holds
    assert dataclasses.replace(row, device="cpu", observed_bytes=1030).holds
