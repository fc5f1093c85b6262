"""The CPU as a device: which 16-bit types it computes fast, which slowly, and which would end the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memscale.hardware import DiskSpec, HostSpec, detect
from memscale.hardware.detect import CpuFeatures, cpu_device, read_cpu

HASWELL = "fpu sse4_2 avx avx2 fma"
SKYLAKE = f"{HASWELL} avx512f avx512bw avx512vl"
COOPER_LAKE = f"{SKYLAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{COOPER_LAKE} avx512_fp16 amx_tile amx_int8 amx_bf16"

HOST = HostSpec(total_ram_bytes=2**34, available_ram_bytes=2**33, cores=4)
DISK = DiskSpec(Path("tmp"), 2**35, True, read_bandwidth=2e9, write_bandwidth=1e9)


def features(flags: str, cpuid_level: int | None = 32, isa_limit: str = "") -> CpuFeatures:
    return CpuFeatures("a CPU", frozenset(flags.split()), cpuid_level, isa_limit)


@pytest.mark.parametrize(
    ("flags", "bf16", "fp16"),
    [
        ("", False, False),
        (HASWELL, False, False),
        (SKYLAKE, False, False),
        (COOPER_LAKE, True, False),
        (SAPPHIRE_RAPIDS, True, True),
        ("fp asimd fphp asimdhp", False, False),
        ("fp asimd fphp asimdhp i8mm bf16", True, False),
    ],
)
def test_sixteen_bits_are_fast_where_there_are_instructions_for_them(flags, bf16, fp16) -> None:
    device = cpu_device(features(flags), HOST, DISK)
    assert (device.computes_bf16_fast, device.computes_fp16_fast) == (bf16, fp16)
    assert device.supports_bf16
    assert device.supports_fp16


def test_rates_follow_the_instructions() -> None:
    skylake, haswell, other = (
        cpu_device(features(flags), HOST, DISK).rates.fp32 for flags in (SKYLAKE, HASWELL, "")
    )
    assert skylake > haswell > other
    assert features(SAPPHIRE_RAPIDS).bf16.relative_rate > features(COOPER_LAKE).bf16.relative_rate > 1
    assert features(SKYLAKE).bf16.relative_rate < 1
    assert features(SKYLAKE).fp16.relative_rate < features(SKYLAKE).bf16.relative_rate


@pytest.mark.parametrize(("level", "supported"), [(0x1C, False), (0x1D, True), (0x20, True), (None, True)])
def test_amx_without_its_cpuid_leaf_rules_bf16_out(level: int | None, supported: bool) -> None:
    bf16 = features(SAPPHIRE_RAPIDS, level).bf16
    assert (bf16.relative_rate is not None) == supported
    if not supported:
        assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in bf16.reason


def test_amx_without_its_cpuid_leaf_rules_fp16_out_where_amx_would_do_it() -> None:
    assert features(SAPPHIRE_RAPIDS, 0x1C).fp16.relative_rate > 1
    assert features(f"{SAPPHIRE_RAPIDS} amx_fp16", 0x1C).fp16.relative_rate is None


@pytest.mark.parametrize(
    ("limit", "bf16", "fp16"),
    [
        ("AVX512_CORE_FP16", True, True),
        ("AVX512_CORE_BF16", True, False),
        ("AVX512_CORE", False, False),
        ("AVX2", False, False),
    ],
)
def test_the_limit_a_user_sets_on_onednn_is_honoured(limit: str, bf16: bool, fp16: bool) -> None:
    cpu = features(SAPPHIRE_RAPIDS, 0x1C, limit)
    assert (cpu.bf16.relative_rate > 1, cpu.fp16.relative_rate > 1) == (bf16, fp16)


def test_cpuinfo_is_read(tmp_path: Path) -> None:
    processor = (
        f"processor\t: 0\nmodel name\t: Some CPU @ 2GHz\ncpuid level\t: 28\nflags\t\t: {COOPER_LAKE}\n"
    )
    (tmp_path / "cpuinfo").write_text(f"{processor}\n{processor.replace('Some', 'Other')}")
    cpu = read_cpu(proc=tmp_path, environ={"ONEDNN_MAX_CPU_ISA": "avx2"})
    assert cpu == CpuFeatures("Some CPU @ 2GHz", frozenset(COOPER_LAKE.split()), 28, "AVX2")


def test_arm_calls_them_features(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor: 0\nFeatures: fp asimd bf16\nCPU part: 0xd40\n")
    cpu = read_cpu(proc=tmp_path, environ={})
    assert cpu.bf16.relative_rate > 1
    assert cpu.cpuid_level is None
    assert cpu.model


def test_without_cpuinfo_only_the_name_is_known(tmp_path: Path) -> None:
    cpu = read_cpu(proc=tmp_path, environ={})
    assert cpu.model
    assert cpu.flags == frozenset()


def test_the_cpu_is_a_device_with_the_disk_below_it() -> None:
    device = cpu_device(features(SKYLAKE), HOST, DISK)
    assert (device.kind, device.index) == ("cpu", None)
    assert (device.total_bytes, device.free_bytes) == (2**34, 2**33)
    assert device.link_bandwidth == 1e9
    assert device.rates.bf16 is not None
    assert device.rates.bf16 < device.rates.fp32
    assert len(device.notes) == 2  # why bf16 and fp16 are slow


def test_a_device_whose_bf16_kills_says_so() -> None:
    device = cpu_device(features(SAPPHIRE_RAPIDS, 0x1C), HOST, DISK)
    assert not device.supports_bf16
    assert not device.computes_bf16_fast
    assert device.rates.bf16 is None
    assert any("illegal instruction" in note for note in device.notes)


@pytest.mark.slow
def test_what_this_cpu_is_said_to_support_survives() -> None:
    """In a child process, as the failure this guards against is a signal, not an exception."""
    device = detect("cpu").device
    dtypes = ["float32"]
    dtypes += ["bfloat16"] if device.supports_bf16 else []
    dtypes += ["float16"] if device.supports_fp16 else []
    code = (
        "import torch\n"
        f"for dtype in {dtypes}:\n"
        "    ones = torch.ones(64, 64, dtype=getattr(torch, dtype))\n"
        "    assert (ones @ ones)[0, 0] == 64\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
