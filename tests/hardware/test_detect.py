"""What is here, and what is planned for without being here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memscale.errors import ConfigError, ConfigTypeError, HardwareError, MemScaleError
from memscale.hardware import Hardware, detect, find_gpu, list_gpus, read_host, virtual_hardware

GIB = 2**30


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def test_on_a_host_without_an_accelerator_the_cpu_is_the_device(no_accelerator, tmp_path: Path) -> None:
    hardware = detect(offload_dir=tmp_path)
    assert hardware.device.kind == "cpu"
    assert hardware.device_count == 1
    assert hardware.device.total_bytes == read_host().total_ram_bytes
    assert hardware.disk.directory == tmp_path
    assert not hardware.is_virtual
    summary = hardware.summary()
    assert hardware.device.name in summary
    assert f"at {tmp_path}" in summary
    assert " · host " not in summary


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_the_cpu_by_name(device) -> None:
    assert detect(device).device.kind == "cpu"


def test_the_same_machine_is_described_in_the_same_way(tmp_path: Path) -> None:
    def steady(hardware: Hardware) -> Hardware:
        """Without what changes by itself: free memory and free disk."""
        return replace(
            hardware,
            device=replace(hardware.device, free_bytes=0),
            host=replace(hardware.host, available_ram_bytes=0),
            disk=replace(hardware.disk, free_bytes=0),
        )

    assert steady(detect("cpu", offload_dir=tmp_path)) == steady(detect("cpu", offload_dir=tmp_path))


@pytest.mark.parametrize(
    ("device", "error", "says"),
    [
        ("gpu", HardwareError, "not a device that torch knows"),
        ("RTX 3090", HardwareError, "hardware argument"),
        ("", HardwareError, "not a device that torch knows"),
        ("cuda:-1", HardwareError, "not a device that torch knows"),
        ("meta", HardwareError, "has no memory"),
        (0, ConfigTypeError, "is a int"),
        (True, ConfigTypeError, "is a bool"),
        (3.5, ConfigTypeError, "is a float"),
    ],
)
def test_what_is_no_device_is_refused(device, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        detect(device)


def test_a_gpu_that_is_not_there() -> None:
    hardware = virtual_hardware("RTX 3090")
    device = hardware.device
    assert hardware.is_virtual
    assert (device.kind, device.index, device.name) == ("virtual", None, "NVIDIA GeForce RTX 3090")
    assert device.total_bytes == device.free_bytes == 24 * GIB
    assert device.rates == find_gpu("RTX 3090").rates
    assert virtual_hardware(find_gpu("RTX 3090")) == hardware


@pytest.mark.matrix(13)
@pytest.mark.parametrize("gpu", list_gpus(), ids=lambda gpu: gpu.name)
def test_every_gpu_of_the_table_can_be_planned_for(gpu) -> None:
    hardware = virtual_hardware(gpu)
    assert hardware.device.total_bytes == gpu.memory_bytes
    assert hardware.device.computes_fp16_fast == (gpu.compute_capability != (6, 1))
    assert gpu.name in hardware.summary()


@pytest.mark.parametrize(
    ("size", "expected"), [(6 * 10**9, 6 * 10**9), ("8GiB", 8 * GIB), (" 6 gb ", 6 * 10**9), (1, 1)]
)
def test_a_gpu_of_which_only_the_size_is_known(size, expected: int) -> None:
    device = virtual_hardware(size).device
    assert device.total_bytes == device.free_bytes == expected
    assert device.rates == find_gpu("RTX 3090").rates
    assert "RTX 3090" in device.notes[0]


def test_the_host_of_a_virtual_gpu_does_not_depend_on_this_machine() -> None:
    assert virtual_hardware("T4").host.total_ram_bytes == 64 * GIB
    assert virtual_hardware("T4", host_bytes=8 * GIB).host.available_ram_bytes == 8 * GIB


@pytest.mark.parametrize(
    ("gpu", "error"),
    [
        (0, ConfigError),
        (-1, ConfigError),
        ("0GB", ConfigError),
        ("-8GB", ConfigError),
        ("1.2.3GB", ConfigError),
        (2**80, ConfigError),
        ("RTX 3099", HardwareError),
        ("", HardwareError),
        (True, ConfigTypeError),
        (False, ConfigTypeError),
        (24.0, ConfigTypeError),
        (None, ConfigTypeError),
        ([24], ConfigTypeError),
        (torch.device("cpu"), ConfigTypeError),
    ],
)
def test_what_describes_no_gpu_is_refused(gpu, error: type[MemScaleError]) -> None:
    with pytest.raises(error) as caught:
        virtual_hardware(gpu)
    assert "give" in str(caught.value) or 'such as "24GiB"' in str(caught.value)


@pytest.mark.parametrize(
    ("host_bytes", "error"),
    [(0, ConfigError), (-1, ConfigError), (True, ConfigTypeError), (1.5, ConfigTypeError)],
)
def test_a_host_has_a_size(host_bytes, error: type[MemScaleError]) -> None:
    with pytest.raises(error, match="host_bytes"):
        virtual_hardware("T4", host_bytes=host_bytes)


@given(size=st.integers(1, 2**50))
def test_any_size_of_gpu_has_a_summary(size: int) -> None:
    assert "virtual" in virtual_hardware(size).summary()


@pytest.mark.parametrize(
    ("change", "says"), [({"writable": False}, "(not writable)"), ({"ram_backed": True}, "(in RAM)")]
)
def test_the_summary_names_a_disk_that_is_of_no_use(change: dict[str, bool], says: str) -> None:
    hardware = virtual_hardware("T4")
    assert replace(hardware, disk=replace(hardware.disk, **change)).summary().endswith(says)


def test_reading_the_table_does_not_import_torch() -> None:
    code = (
        "import sys, memscale.hardware as h; h.virtual_hardware('RTX 3090'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
