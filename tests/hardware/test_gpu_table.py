"""The table of GPUs: complete, unique, and within what silicon can be."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from memscale.hardware import GpuSpec, find_gpu, list_gpus

GPUS = list_gpus()
ids = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)

LINKS = {15.75, 31.5, 63.0, 450.0}  # PCIe 3 x16, 4 x16 and x8, 5 x16 and x8, NVLink-C2C


def test_there_are_at_least_fifty() -> None:
    assert len(GPUS) >= 50


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(gpu.name for gpu in GPUS).items() if count > 1] == []


@ids
def test_figures_are_plausible(gpu: GpuSpec) -> None:
    assert gpu.memory_bytes % 2**30 == 0
    assert 4 <= gpu.memory_bytes // 2**30 <= 288
    assert 1.5 < gpu.fp32_tflops < 200
    assert 100 <= gpu.memory_bandwidth_gbs <= 8000
    assert gpu.link_gbs in LINKS
    assert gpu.source
    assert gpu.name.startswith({"nvidia": "NVIDIA ", "amd": "AMD "}[gpu.vendor])
    # A device that reads its memory in less than 10 ms or more than 200 ms has a figure in the wrong unit.
    assert 0.01 < gpu.memory_bytes / (gpu.memory_bandwidth_gbs * 1e9) < 0.2


@ids
def test_sixteen_bits_are_faster_than_thirty_two_except_on_pascal_geforce(gpu: GpuSpec) -> None:
    if gpu.compute_capability == (6, 1):
        assert gpu.fp16_tflops == pytest.approx(gpu.fp32_tflops / 64, rel=0.05)
    else:
        assert 1.95 <= gpu.fp16_tflops / gpu.fp32_tflops <= 35
    if gpu.bf16_tflops is not None:
        assert gpu.fp32_tflops < gpu.bf16_tflops <= gpu.fp16_tflops
    if gpu.tf32_tflops is not None:
        assert gpu.fp32_tflops <= gpu.tf32_tflops
        assert gpu.fp16_tflops / gpu.tf32_tflops == pytest.approx(2.0, rel=0.02)


@ids
def test_types_follow_the_architecture(gpu: GpuSpec) -> None:
    if gpu.vendor == "nvidia":
        assert gpu.compute_capability is not None
        has_ampere_types = gpu.compute_capability >= (8, 0)
        assert (gpu.bf16_tflops is not None) == has_ampere_types
        assert (gpu.tf32_tflops is not None) == has_ampere_types
    else:
        assert gpu.compute_capability is None


@ids
def test_geforce_tensor_cores_accumulate_in_fp32_at_half_rate(gpu: GpuSpec) -> None:
    """The advertised fp16 figure of a GeForce is with fp16 accumulation; torch asks for fp32."""
    if "GeForce RTX" not in gpu.name or gpu.compute_capability is None:
        return
    expected = 4.0 if gpu.compute_capability == (7, 5) else 2.0
    assert gpu.fp16_tflops / gpu.fp32_tflops == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("name", "gib", "fp32", "fp16", "bandwidth", "capability"),
    [
        ("GTX 1080 Ti", 11, 11.3, 0.177, 484, (6, 1)),
        ("V100-SXM2-32GB", 32, 15.7, 125, 900, (7, 0)),
        ("T4", 16, 8.1, 65, 320, (7, 5)),
        ("RTX 3090", 24, 35.6, 71, 936, (8, 6)),
        ("A100-SXM4-80GB", 80, 19.5, 312, 2039, (8, 0)),
        ("RTX 4090", 24, 82.6, 165.2, 1008, (8, 9)),
        ("H100 SXM", 80, 66.9, 989.4, 3350, (9, 0)),
        ("RTX 5090", 32, 104.8, 209.5, 1792, (12, 0)),
        ("MI300X", 192, 163.4, 1307.4, 5300, None),
    ],
)
def test_known_figures(name, gib, fp32, fp16, bandwidth, capability) -> None:
    gpu = find_gpu(name)
    assert gpu.memory_bytes == gib * 2**30
    assert (gpu.fp32_tflops, gpu.fp16_tflops, gpu.memory_bandwidth_gbs) == (fp32, fp16, bandwidth)
    assert gpu.compute_capability == capability


def test_a_card_of_two_dies_is_listed_as_torch_sees_it() -> None:
    assert find_gpu("MI250X").memory_bytes == 64 * 2**30  # the card has 128 GB, each of its two devices half


def test_rates_are_asked_by_dtype() -> None:
    rates = find_gpu("A100").rates
    assert rates.of(torch.float32) == 19.5e12
    assert rates.of(torch.float16) == rates.of(torch.bfloat16) == 312e12
    assert rates.of(torch.float64) == rates.of(torch.int64) == rates.fp32
    turing = find_gpu("T4").rates
    assert turing.of(torch.bfloat16) == turing.fp32 / 2  # emulated
