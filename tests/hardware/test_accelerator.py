"""Accelerators other than CUDA, none of which is here: their torch modules are replaced by fakes.

Each fake answers what the real module of that backend answers, and lacks what it lacks.
"""

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


def unsupported(*_: object) -> None:
    raise RuntimeError("Backend doesn't support this.\nAnd here is a stack trace.")


@pytest.fixture
def fake_backend(monkeypatch: pytest.MonkeyPatch):
    def install(kind: str, module: object, *, memory=unsupported, capability=unsupported) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", memory, raising=False)
        monkeypatch.setattr(torch.accelerator, "get_device_capability", capability, raising=False)

    return install


def test_a_backend_that_answers_everything(fake_backend) -> None:
    module = SimpleNamespace(
        get_device_name=lambda index: "Intel Data Center GPU Max", device_count=lambda: 4
    )
    fake_backend(
        "xpu",
        module,
        memory=lambda device: (40 * GIB, 48 * GIB),
        capability=lambda device: {"supported_dtypes": {torch.float32, torch.float16, torch.bfloat16}},
    )
    hardware = detect()
    device = hardware.device
    assert (device.name, device.kind, device.index) == ("Intel Data Center GPU Max", "xpu", 0)
    assert hardware.device_count == 4
    assert (device.total_bytes, device.free_bytes) == (48 * GIB, 40 * GIB)
    assert device.computes_bf16_fast
    assert device.rates_source == "estimated"
    assert device.notes == ()


def test_apple(fake_backend) -> None:
    module = SimpleNamespace(
        recommended_max_memory=lambda: 12 * GIB,
        driver_allocated_memory=lambda: 2 * GIB,
        device_count=lambda: 1,
    )
    fake_backend("mps", module)
    device = detect("mps").device
    assert (device.name, device.total_bytes, device.free_bytes) == ("mps", 12 * GIB, 10 * GIB)
    assert not device.supports_bf16  # nobody said so
    assert any(note.startswith("name not answered (AttributeError") for note in device.notes)
    assert any(note.startswith("dtypes not answered (RuntimeError: Backend doesn't") for note in device.notes)


def test_an_older_torch_asks_the_module(fake_backend) -> None:
    module = SimpleNamespace(
        get_device_properties=lambda index: SimpleNamespace(total_memory=16 * GIB),
        memory_allocated=lambda index: 1 * GIB,
        get_device_name=lambda index: "Arc",
        is_bf16_supported=lambda: True,
        device_count=lambda: 1,
    )
    fake_backend("xpu", module)
    device = detect("xpu:0").device
    assert (device.total_bytes, device.free_bytes) == (16 * GIB, 15 * GIB)
    assert device.supports_bf16


def test_a_device_that_bears_the_name_of_a_known_gpu_has_its_rates(fake_backend) -> None:
    """As the virtual GPU does while a simulation runs."""
    module = SimpleNamespace(
        mem_get_info=lambda index: (20 * GIB, 24 * GIB),
        get_device_name=lambda index: "NVIDIA GeForce RTX 3090",
        device_count=lambda: 1,
    )
    fake_backend(_custom_backend(), module)
    device = detect().device
    assert (device.kind, device.free_bytes) == (_custom_backend(), 20 * GIB)
    assert device.rates == find_gpu("RTX 3090").rates
    assert device.rates_source == "published"
    assert device.compute_capability == (8, 6)


def test_a_backend_that_does_not_know_its_memory_is_refused_with_its_reasons(fake_backend) -> None:
    fake_backend("xpu", SimpleNamespace())
    with pytest.raises(
        HardwareError, match=r"xpu:0 does not say how much memory it has: .*Backend doesn't"
    ) as caught:
        detect("xpu")
    assert "stack trace" not in str(caught.value)
    assert "hardware='8GiB'" in str(caught.value)


def test_by_default_such_a_backend_is_passed_over_for_the_cpu(fake_backend) -> None:
    fake_backend(_custom_backend(), SimpleNamespace())
    device = detect().device
    assert device.kind == "cpu"
    assert any(_custom_backend() in note for note in device.notes)


def test_an_error_nobody_expects_is_not_swallowed(fake_backend) -> None:
    def interrupted(device: object) -> None:
        raise KeyboardInterrupt

    fake_backend("xpu", SimpleNamespace(), memory=interrupted)
    with pytest.raises(KeyboardInterrupt):
        detect("xpu")
