"""The rates of a CUDA device, measured and read again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import memscale
from memscale.hardware import detect
from memscale.hardware.calibrate import CALIBRATION_VARIABLE


def test_a_device_has_the_rates_that_were_measured_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, device = tmp_path / "rates.json", f"cuda:{torch.cuda.device_count() - 1}"
    measured = memscale.calibrate(path, device=device, nbytes=2**20, side=64).measured
    monkeypatch.setenv(CALIBRATION_VARIABLE, str(path))
    assert detect(device).measured == measured
    assert measured is not None
    assert all(rate for name, rate in asdict(measured).items() if name != "tf32")  # Turing has none
