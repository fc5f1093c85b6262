"""The self-test: a row for each thing, also when one of them is broken; its JSON is a calibration file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memscale
from memscale._util.snapshots import TorchRngState
from memscale._util.terminal import Terminal
from memscale.diagnosis import environment
from memscale.diagnosis.checks import SEGMENT_BYTES, _Checks, _Trained
from memscale.diagnosis.environment import Skipped, make_row, without_paths
from memscale.hardware import detect
from memscale.hardware.calibrate import CALIBRATION_VARIABLE

SIZES: dict[str, Any] = {"nbytes": 2**20, "side": 64}
TRAINED = ["conservative", "balanced", "aggressive", "asynchronous transfers", "failed backward"]


@pytest.fixture(scope="module")
def offload_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("somewhere-personal")


@pytest.fixture(scope="module")
def found(offload_dir: Path) -> memscale.SelfTest:
    state = torch.get_rng_state()
    result = memscale.selftest("cpu", offload_dir=offload_dir, **SIZES)
    assert torch.equal(torch.get_rng_state(), state)
    return result


def test_everything_works_on_this_cpu_and_is_exact(found: memscale.SelfTest) -> None:
    rows = {row.name: row for row in found.rows}
    assert found.passed, str(found)
    for name in (*TRAINED, "fused optimizer", "GradScaler"):
        assert "equal to the bit" in rows[name].detail
    for name in TRAINED:
        figures = rows[f"{name}: memory"].figures
        assert figures["allocated"] == pytest.approx(figures["predicted"], rel=0.01)
        assert figures["allocated"] < figures["plain"]
    assert rows["asynchronous transfers"].detail.count("MiB") == 2  # read and written
    assert rows["context"].status == "skip"


def test_the_json_is_a_calibration_file(
    found: memscale.SelfTest, offload_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text(found.to_json())
    monkeypatch.setenv(CALIBRATION_VARIABLE, str(path))
    contents, hardware = json.loads(found.to_json()), detect("cpu", offload_dir=offload_dir)
    assert hardware.measured is not None
    assert hardware.measured.host_adam_fused == contents["rates"]["host_adam_fused"]
    assert hardware.disk.write_bandwidth == contents["disk"]["write_bandwidth"]
    assert detect("cpu").disk.write_bandwidth != contents["disk"]["write_bandwidth"]  # of another directory


def test_the_json_is_for_a_bug_report(found: memscale.SelfTest, offload_dir: Path) -> None:
    contents = json.loads(found.to_json())
    assert contents["passed"] is True
    assert contents["versions"]["torch"] == torch.__version__
    assert contents["versions"]["memscale"] == memscale.__version__
    assert [row["name"] for row in contents["rows"]] == [row.name for row in found.rows]
    for personal in (
        offload_dir.name,
        str(Path.home()),
        str(Path.cwd()),
        str(Path(memscale.__file__).parent),
    ):
        assert personal not in found.to_json()


@pytest.mark.slow
def test_a_broken_technique_fails_its_rows_and_stops_no_other(
    found: memscale.SelfTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout is recomputed with other masks; the scaler raises."""
    recomputing = {row.name for row in found.rows if re.search(r"[1-9]\d* recomputations", row.detail)}
    monkeypatch.setattr(environment, "LIBRARIES", [])
    monkeypatch.setattr(TorchRngState, "restore", lambda self: None)

    def refuse(self: Any, optimizer: Any) -> None:
        raise OSError(f"{Path.home() / 'scaler'} is gone")

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", refuse)
    found = memscale.selftest("cpu", **SIZES)
    rows = {row.name: row for row in found.rows}
    assert not found.passed
    assert recomputing >= {"conservative", "balanced"}
    for name in TRAINED:
        assert (rows[name].status == "fail") == (name in recomputing)
        if name in recomputing:
            assert re.search(r"the first loss or its gradients differ by \d", rows[name].detail)
        assert rows[f"{name}: memory"].status == "pass"
    assert re.fullmatch(r"OSError at test_selftest\.py:\d+: ~/scaler is gone", rows["GradScaler"].detail)
    assert rows["rates"].status == rows["plain model, twice"].status == "pass"
    shown = found.explain(Terminal(width=300))
    assert "checks failed" in shown.splitlines()[0]
    assert "scaler is gone" in shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("can't open /data/ann/models/x.bin: gone", "can't open .../x.bin: gone"),
        ("'C:\\Users\\ann\\x.bin'", "'.../x.bin'"),
        (f"at {Path.home()}", "at ~"),
        ("8.0 MiB read/written, 3/4", "8.0 MiB read/written, 3/4"),
    ],
)
def test_no_path_is_left_in_a_row(text: str, expected: str) -> None:
    assert without_paths(text) == expected


def test_a_row_has_the_result_or_the_reason() -> None:
    def skip() -> str:
        raise Skipped("not here")

    def fail() -> str:
        raise KeyError("x")

    checks: list[Callable[[], Any]] = [lambda: ("good", {"bytes": 3.0}), skip, fail]
    rows = [make_row("a", check) for check in checks]
    assert [row.status for row in rows] == ["pass", "skip", "fail"]
    assert rows[0].figures == {"bytes": 3.0}
    assert re.fullmatch(r"KeyError at test_selftest\.py:\d+: 'x'", rows[2].detail)


@pytest.mark.parametrize(
    ("memory", "status"),
    [
        ({"allocated": 101, "reserved": 201 + SEGMENT_BYTES}, "pass"),
        ({"allocated": 102, "reserved": 200}, "fail"),
        ({"allocated": 100, "reserved": 202 + SEGMENT_BYTES}, "fail"),
    ],
)
def test_allocated_and_reserved_memory_are_held_to_the_prediction(
    memory: dict[str, float], status: str
) -> None:
    sizes = {"predicted_peak_bytes": 100, "allowance_bytes": 1, "predicted_reserved_bytes": 200}
    plan: Any = SimpleNamespace(**sizes, baseline_peak_bytes=300)
    trained = _Trained([], [], [], None, memory, plan, None)
    checks = _Checks(detect("cpu"), None)
    assert make_row("memory", lambda: checks._as_predicted([trained])).status == status
