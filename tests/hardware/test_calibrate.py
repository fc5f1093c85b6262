"""Rates that are measured once: written, read where the hardware is described, and used as they are."""

from __future__ import annotations

import errno
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale.errors import ConfigTypeError, HardwareError
from memscale.hardware import Hardware, MeasuredRates, detect, virtual_hardware
from memscale.hardware.calibrate import CALIBRATION_VARIABLE, default_path, measure
from memscale.planner.cache import plan_key
from memscale.profiler import Sample
from memscale.simulator import simulate
from memscale.techniques.cost import ReachedRates
from memscale.testing import executing

RATES = MeasuredRates(
    date="2026-05-04",
    fp32=7e12,
    memory_bandwidth=600e9,
    host_adam_loop=1e-9,
    host_adam_fused=2e-10,
    tf32=20e12,
    half=41e12,
    h2d=12e9,
    d2h=11e9,
    pageable_h2d=6e9,
    pageable_d2h=5e9,
)
SIZES: dict[str, Any] = {"nbytes": 2**20, "side": 64}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own, which is in use."""
    monkeypatch.delenv(CALIBRATION_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "memscale"


@pytest.fixture
def written(cache: Path) -> Path:
    """A file for the CPU of this machine at the default place."""
    memscale.calibrate(device="cpu", **SIZES)
    (path,) = cache.iterdir()
    return path


def change(path: Path, part: str, changes: Any) -> None:
    """Change what a file says, in a part or as a whole."""
    contents = json.loads(path.read_text())
    contents[part] = {**contents[part], **changes} if isinstance(changes, dict) else changes
    path.write_text(json.dumps(contents))


def planned(hardware: Hardware) -> memscale.Plan:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))
    config = memscale.Config(memory_budget="80MB", enable_logging=False)
    return memscale.plan(model, torch.ones(8, 2048), config, hardware=hardware)


def test_what_was_measured_is_read_where_the_hardware_is_described(cache: Path) -> None:
    before = detect("cpu")
    measured = memscale.calibrate(device="cpu", **SIZES)
    assert [path.name.startswith("cpu-") for path in cache.iterdir()] == [True]
    after = detect("cpu")
    assert before.measured is None
    assert measured.measured == after.measured
    assert measured.disk.read_bandwidth == after.disk.read_bandwidth != before.disk.read_bandwidth
    assert measured.disk.write_bandwidth == after.disk.write_bandwidth != before.disk.write_bandwidth
    date = f"calibrated on {after.measured.date}"
    assert after.summary().endswith(f" · {date}")
    assert planned(after).device == f"{after.device.describe()}, {date}"
    assert "calibrated" not in before.summary() + planned(before).device


def test_rates_of_the_disk_are_for_its_directory(written: Path, tmp_path: Path) -> None:
    other = detect("cpu", offload_dir=tmp_path)
    assert other.measured is not None
    assert (other.disk.read_bandwidth, other.disk.write_bandwidth) == (2.0e9, 1.0e9)
    memscale.calibrate(device="cpu", offload_dir=tmp_path, **SIZES)
    assert detect("cpu", offload_dir=tmp_path).disk.write_bandwidth != 1.0e9


def test_measured_rates_are_not_discounted() -> None:
    hardware = replace(virtual_hardware("RTX 3090"), measured=RATES)
    assert ReachedRates.of(hardware) == ReachedRates(
        fp32_flops=7e12,
        half_flops=41e12,
        bytes_per_second=600e9,
        h2d_per_second=12e9,
        d2h_per_second=11e9,
        pageable_per_second=5e9,
        host_adam_loop=1e-9,
        host_adam_fused=2e-10,
    )
    torch.set_float32_matmul_precision("high")
    try:
        assert ReachedRates.of(hardware).fp32_flops == 20e12
    finally:
        torch.set_float32_matmul_precision("highest")
    cpu = ReachedRates.of(replace(detect("cpu"), measured=RATES))
    assert (cpu.fp32_flops, cpu.h2d_per_second, cpu.d2h_per_second) == (7e12, 2.0e9, 1.0e9)


def test_plans_follow_measured_rates_and_stay_the_same_for_them() -> None:
    table = virtual_hardware("RTX 3090")
    slow = replace(table, measured=replace(RATES, host_adam_fused=1e-8))
    fast = replace(table, measured=RATES)
    assert planned(slow).predicted_time_ratio > planned(fast).predicted_time_ratio
    assert planned(fast).to_json() == planned(fast).to_json()
    model, sample = nn.Linear(4, 4), Sample((torch.ones(2, 4),), {})
    keys = {
        plan_key(model, sample, memscale.Config(), each, None, suggest=True) for each in (table, slow, fast)
    }
    assert len(keys) == 3


DAMAGES = {
    "empty": "",
    "cut off": '{"schema": 1, "device": {"kind"',
    "a list": "[]",
    "not text": b"\xff\xfe\x00",
    "another schema": ("schema", 2),
    "a rate is missing": ("rates", {"fp32": None}),
    "a rate is negative": ("rates", {"half": -1.0}),
    "a rate is no number": ("rates", {"memory_bandwidth": "fast"}),
    "a rate is infinite": ("rates", {"h2d": float("inf")}),
    "a rate is unknown": ("rates", {"fp7": 1.0}),
    "the disk has none": ("disk", None),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_ignored_with_a_warning_and_refused_if_it_was_named(
    damage: Any, written: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if isinstance(damage, tuple):
        change(written, *damage)
    else:
        written.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    with caplog.at_level(logging.WARNING, logger="memscale"):
        assert detect("cpu").measured is None
        assert detect("cpu").measured is None
    (record,) = caplog.records  # one, not one for each plan
    assert f"{written} is ignored: it is damaged" in record.getMessage()
    assert "memscale.calibrate()" in record.getMessage()
    monkeypatch.setenv(CALIBRATION_VARIABLE, str(written))
    with pytest.raises(HardwareError, match=rf"{CALIBRATION_VARIABLE}='.*': it is damaged .*'none'"):
        detect("cpu")
    memscale.calibrate(written, device="cpu", **SIZES)
    assert detect("cpu").measured is not None


def test_a_file_that_could_not_be_written_is_as_before(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written.read_bytes()
    write = Path.write_text

    def fail(path: Path, text: str, **options: Any) -> int:
        write(path, text[:100], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(HardwareError, match="can't be written: No space left"):
        memscale.calibrate(device="cpu", **SIZES)
    assert written.read_bytes() == before
    assert detect("cpu").measured is not None


def test_a_file_of_another_machine_is_treated_like_a_damaged_one(
    written: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change(written, "device", {"cores": 999})
    assert detect("cpu").measured is None
    assert "it was measured on" in caplog.text
    assert "999" in caplog.text
    monkeypatch.setenv(CALIBRATION_VARIABLE, str(written))
    with pytest.raises(HardwareError, match=r"it was measured on .*999"):
        detect("cpu")


def test_the_variable_names_a_file_that_must_be_there(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "rates.json"
    monkeypatch.setenv(CALIBRATION_VARIABLE, str(path))
    with pytest.raises(HardwareError, match=r"can't be read \(No such file"):
        detect("cpu")
    memscale.calibrate(path, device="cpu", **SIZES)
    assert detect("cpu").measured is not None
    assert not cache.exists()


def test_with_none_and_for_virtual_hardware_rates_are_those_of_tables(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert detect("cpu").measured is not None
    # Files of a real card of the same name, and one that was named.
    for kind in ("virtual", "vgpu", "cuda"):
        card = replace(virtual_hardware("RTX 3090").device, kind=kind)
        path = default_path(replace(virtual_hardware("RTX 3090"), device=card))
        path.write_text(written.read_text())
        change(path, "device", {"kind": kind, "name": card.name})
    for named in ("", str(written)):
        monkeypatch.setenv(CALIBRATION_VARIABLE, named)
        assert virtual_hardware("RTX 3090").measured is None
        with simulate("RTX 3090") as simulation:
            assert detect(simulation.device).measured is None
        with executing("1GiB") as gpu:
            assert detect(gpu.device).measured is None
            with pytest.raises(HardwareError, match="is virtual"):
                memscale.calibrate(device=gpu.device, **SIZES)
    monkeypatch.setenv(CALIBRATION_VARIABLE, "none")
    assert detect("cpu").measured is None


def test_the_link_of_an_accelerator_is_measured_both_ways_and_both_kinds_of_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with executing("1GiB") as gpu:
        rates = measure(detect(gpu.device), 2**16, 32)
        copied = [rates.h2d, rates.d2h, rates.pageable_h2d, rates.pageable_d2h, rates.half]
        assert all(rate is not None and rate > 0 for rate in copied)
        assert not caplog.records

        def none_left(self: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(torch.Tensor, "pin_memory", none_left)
        assert measure(detect(gpu.device), 2**16, 32).h2d is not None
        assert "No memory could be page-locked (CUDA error" in caplog.text


def test_measuring_leaves_switches_and_generators_as_they_were() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        state = torch.get_rng_state()
        measure(detect("cpu"), 2**16, 32)
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_tf32_by_the_newer_of_torchs_switches() -> None:
    """Set by it, `torch.get_float32_matmul_precision` raises."""
    matmul: Any = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        assert ReachedRates.of(replace(virtual_hardware("RTX 3090"), measured=RATES)).fp32_flops == 20e12
        measure(detect("cpu"), 2**16, 32)
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_what_can_not_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match=r"can't be written: .*directory that you may write to"):
        memscale.calibrate(tmp_path, device="cpu", **SIZES)
    with pytest.raises(ConfigTypeError, match="path=3 is a int"):
        memscale.calibrate(3, device="cpu", **SIZES)  # type: ignore[arg-type]
