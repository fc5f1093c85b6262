"""CUDA devices, on a machine without one: the functions of torch.cuda are replaced by fakes.

What is tested is what is made of the answers of torch, not that it gives them. The test marked `cuda` asks
torch itself.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from memscale.errors import HardwareError
from memscale.hardware import detect, find_gpu

GIB = 2**30


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch):
    """Make torch answer as if it saw `count` GPUs of one kind."""

    def install(
        name: str,
        total: int,
        capability: tuple[int, int],
        *,
        count: int = 1,
        free: int | None = None,
        cached: int = 0,
        hip: str | None = None,
        **properties: object,
    ) -> None:
        answer = SimpleNamespace(name=name, total_memory=total, **{"multi_processor_count": 82, **properties})
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: answer)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda index: (total if free is None else free, total)
        )
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: cached)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 0)
        monkeypatch.setattr(torch.version, "hip", hip)

    return install


def test_a_gpu_of_the_table(fake_cuda) -> None:
    fake_cuda("NVIDIA GeForce RTX 3090", int(23.7 * GIB), (8, 6), count=2, free=23 * GIB)
    hardware = detect("cuda:1")
    device = hardware.device
    assert (device.kind, device.index, hardware.device_count) == ("cuda", 1, 2)
    assert (device.total_bytes, device.free_bytes) == (int(23.7 * GIB), 23 * GIB)
    assert device.rates == find_gpu("RTX 3090").rates
    assert (device.memory_bandwidth, device.link_bandwidth) == (936e9, 31.5e9)
    assert device.supports_bf16
    assert device.computes_bf16_fast
    assert hardware.summary().startswith(
        "2 × NVIDIA GeForce RTX 3090 (23.7 GiB, 23.0 GiB free, sm_86, bf16) · host "
    )


def test_by_default_the_current_cuda_device(fake_cuda) -> None:
    fake_cuda("Tesla T4", 15 * GIB, (7, 5))
    device = detect().device
    assert (device.kind, device.index) == ("cuda", 0)
    assert not device.supports_bf16
    assert device.computes_fp16_fast
    assert "fp16" in detect().summary()


def test_what_torch_caches_is_free_to_torch(fake_cuda) -> None:
    fake_cuda("NVIDIA L4", 22 * GIB, (8, 9), free=10 * GIB, cached=5 * GIB)
    device = detect().device
    assert device.free_bytes == device.capacity_bytes == 15 * GIB, "others hold 7 GiB"


def test_the_memory_tells_variants_apart(fake_cuda) -> None:
    fake_cuda("NVIDIA GeForce RTX 3080", int(11.8 * GIB), (8, 6))
    assert detect().device.memory_bandwidth == 912e9


def test_pascal_geforce_has_fp16_and_should_not_use_it(fake_cuda) -> None:
    fake_cuda("NVIDIA GeForce GTX 1080 Ti", 11 * GIB, (6, 1))
    device = detect().device
    assert device.supports_fp16
    assert not device.computes_fp16_fast
    assert "no fast 16-bit" in detect().summary()


def test_an_amd_device_has_no_compute_capability(fake_cuda) -> None:
    fake_cuda("AMD Instinct MI300X", 192 * GIB, (9, 4), hip="6.4")
    device = detect().device
    assert device.compute_capability is None
    assert "sm_" not in detect().summary()


def test_an_unknown_gpu_is_estimated_from_its_multiprocessors_and_clocks(fake_cuda) -> None:
    fake_cuda(
        "NVIDIA GeForce RTX 6090",
        48 * GIB,
        (8, 6),
        multi_processor_count=82,
        clock_rate=1_695_000,
        memory_clock_rate=9_751_000,
        memory_bus_width=384,
    )
    device = detect().device
    assert "rates estimated" in device.notes[0]
    assert "No GPU is known as 'NVIDIA GeForce RTX 6090'" in device.notes[0]
    # These are the figures of an RTX 3090, so the estimate has a known answer.
    known = find_gpu("RTX 3090")
    assert device.rates.fp32 == pytest.approx(known.rates.fp32, rel=0.01)
    assert device.rates.fp16 == pytest.approx(known.rates.fp16, rel=0.01)
    assert device.memory_bandwidth == pytest.approx(known.memory_bandwidth_gbs * 1e9, rel=0.01)


@pytest.mark.parametrize("name", ["A100", "RTX 4090", "H100 SXM", "T4", "V100", "P100", "B200", "RTX 5090"])
def test_estimates_stay_near_what_is_published(fake_cuda, name: str) -> None:
    gpu = find_gpu(name)
    assert gpu.compute_capability is not None
    cores_per_sm = 64 if gpu.compute_capability in {(6, 0), (7, 0), (7, 5), (8, 0)} else 128
    multiprocessors = 100
    clock_khz = gpu.fp32_tflops * 1e12 / (2 * multiprocessors * cores_per_sm) / 1e3
    fake_cuda(
        "a GPU of tomorrow",
        gpu.memory_bytes,
        gpu.compute_capability,
        multi_processor_count=multiprocessors,
        clock_rate=clock_khz,
    )
    device = detect().device
    assert device.rates.fp32 == pytest.approx(gpu.rates.fp32)
    # A T4 accumulates at full rate, which its capability does not tell: too low is the safe side.
    assert 0.2 * gpu.rates.fp16 <= device.rates.fp16 <= 1.15 * gpu.rates.fp16
    assert device.supports_bf16 == (gpu.bf16_tflops is not None)


def test_a_slice_of_a_gpu_is_not_taken_for_the_whole(fake_cuda) -> None:
    fake_cuda("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5 * GIB, (8, 0), multi_processor_count=14)
    device = detect().device
    assert "rates estimated" in device.notes[0]
    assert device.rates.fp32 < find_gpu("A100").rates.fp32 / 4


@pytest.mark.parametrize(
    ("capability", "bf16", "fp16_fast"),
    [
        ((3, 5), False, False),
        ((5, 2), False, False),
        ((7, 2), False, True),
        ((8, 7), True, True),
        ((10, 3), True, True),
        ((12, 1), True, True),
        ((13, 0), True, True),
    ],
)
def test_every_capability_has_an_estimate(fake_cuda, capability, bf16: bool, fp16_fast: bool) -> None:
    fake_cuda("a GPU", 8 * GIB, capability)
    device = detect().device
    assert (device.supports_bf16, device.computes_fp16_fast) == (bf16, fp16_fast)
    assert device.rates.fp32 > 0 < device.memory_bandwidth


def test_a_device_that_tells_nothing_but_its_memory_is_estimated(fake_cuda) -> None:
    fake_cuda("virtual GPU of 8GiB", 8 * GIB, (8, 6), multi_processor_count=None)
    device = detect().device
    assert "rates estimated" in device.notes[0]
    assert device.rates.fp32 > 1e12


def test_an_unknown_amd_device_is_estimated(fake_cuda) -> None:
    fake_cuda("AMD Radeon Graphics", 8 * GIB, (10, 3), hip="6.4", multi_processor_count=12)
    device = detect().device
    assert "rates estimated" in device.notes[0]
    assert device.compute_capability is None


def test_an_index_that_is_not_there(fake_cuda) -> None:
    fake_cuda("NVIDIA L4", 22 * GIB, (8, 9), count=2)
    with pytest.raises(HardwareError, match="cuda:2 was asked for, and torch sees 2: cuda:0 to cuda:1"):
        detect("cuda:2")


def test_cuda_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HardwareError, match="choose device='cpu'"):
        detect("cuda")


@pytest.mark.cuda
def test_the_real_device() -> None:
    device = detect("cuda").device
    assert device.name == torch.cuda.get_device_name()
    assert 0 < device.free_bytes <= device.total_bytes
