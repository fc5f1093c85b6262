"""Accelerators other than CUDA, none of which is here: their torch modules are replaced by fakes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from memscale.errors import HardwareError
from memscale.hardware import detect, find_gpu

GIB = 2**30


def _custom_backend() -> str:
    """What torch's slot for a backend of one's own is called: a simulation in this process has renamed it."""
    return str(torch._C._get_privateuse1_backend_name())


@pytest.fixture
def fake_backend(monkeypatch: pytest.MonkeyPatch):
    def install(kind: str, name: str, **answers: object) -> None:
        module = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 4,
            current_device=lambda: 0,
            memory_reserved=lambda index: 2 * GIB,
            memory_allocated=lambda index: 1 * GIB,
            get_device_properties=lambda index: SimpleNamespace(name=name),
            **answers,
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))

    return install


def test_a_device_that_the_table_does_not_have(fake_backend) -> None:
    fake_backend("xpu", "Intel Data Center GPU Max", mem_get_info=lambda index: (40 * GIB, 48 * GIB))
    hardware = detect()
    device = hardware.device
    assert (device.name, device.kind, device.index) == ("Intel Data Center GPU Max", "xpu", 0)
    assert hardware.device_count == 4
    assert (device.total_bytes, device.free_bytes) == (48 * GIB, 41 * GIB)
    assert "rates estimated" in device.notes[0]


def test_a_device_that_bears_the_name_of_a_known_gpu_has_its_rates(fake_backend) -> None:
    """As the virtual GPU does while a simulation runs."""
    fake_backend(
        _custom_backend(), "NVIDIA GeForce RTX 3090", mem_get_info=lambda index: (20 * GIB, 24 * GIB)
    )
    device = detect().device
    assert (device.kind, device.free_bytes) == (_custom_backend(), 21 * GIB)
    assert device.rates == find_gpu("RTX 3090").rates
    assert device.compute_capability == (8, 6)


def test_a_backend_that_does_not_know_its_memory_is_refused_with_its_reasons(fake_backend) -> None:
    def unsupported(index: int) -> None:
        raise RuntimeError("Backend doesn't support this.\nAnd here is a stack trace.")

    fake_backend("xpu", "Arc", mem_get_info=unsupported)
    with pytest.raises(
        HardwareError, match=r"xpu does not say how much memory it has: .*Backend doesn't"
    ) as caught:
        detect("xpu")
    assert "stack trace" not in str(caught.value)
    assert "hardware='8GiB'" in str(caught.value)


def test_by_default_such_a_backend_is_passed_over_for_the_cpu(fake_backend) -> None:
    fake_backend(_custom_backend(), "a device")
    device = detect().device
    assert device.kind == "cpu"
    assert any(_custom_backend() in note for note in device.notes)
