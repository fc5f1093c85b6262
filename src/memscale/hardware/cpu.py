"""The CPU as the device: what it is called, how fast it computes, and in which types.

Note [AMX that is announced but does not work]
A virtual machine may pass on the CPU flags `amx_tile` and `amx_bf16` and yet hide CPUID leaf 0x1D, which says
how tiles are laid out. oneDNN, which multiplies matrices for torch, believes the flags, reads "no layout"
from the missing leaf, loads an empty tile configuration, and the first tile instruction kills the process
with SIGILL. No exception can be caught: any bf16 product of 32 x 32 or more ends the training run (seen with
torch 2.13, oneDNN 3.12). The kernel tells us: the highest leaf is the `cpuid level` of `/proc/cpuinfo`. If
AMX is announced and the level is below 0x1D, bf16 is not supported here, unless the user keeps oneDNN away
from AMX with `ONEDNN_MAX_CPU_ISA`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from memscale.hardware.device import DeviceSpec, DiskSpec, HostSpec
from memscale.hardware.host import PROC
from memscale.hardware.rates import Rates

__all__ = ["CpuFeatures", "SixteenBits", "cpu_device", "read_cpu"]

# What one core sustains in fp32 matrix products, in FLOP/s. Assumptions, so that plans never depend on a
# stop-watch: about two thirds of one vector unit at 2.5 GHz, which is what a core of a shared cloud machine
# was seen to deliver.
_AVX512_FLOPS = 50e9
_AVX2_FLOPS = 32e9
_OTHER_FLOPS = 16e9

# Rate of 16-bit matrix products relative to fp32. Seen on an Emerald Rapids core with torch 2.13: 1.2 with
# avx512_bf16, 2.3 with avx512_fp16, 0.4 for bf16 and 0.007 for fp16 without instructions for them. A whole
# training step in bf16 without them took three times the fp32 one.
_AMX_BF16 = 4.0
_VECTOR_BF16 = 1.2
_VECTOR_FP16 = 2.0
_SLOW_BF16 = 0.33
_SLOW_FP16 = 0.01

_BANDWIDTH_PER_CORE = 8e9
_MOST_BANDWIDTH = 100e9  # some cores saturate the memory, more do not help

_TILE_LEAF = 0x1D

# Values of ONEDNN_MAX_CPU_ISA that keep oneDNN from instructions the CPU has.
_ISA_WITHOUT_BF16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"})
_ISA_WITHOUT_FP16 = _ISA_WITHOUT_BF16 | {"AVX512_CORE_BF16"}
_ISA_WITHOUT_AMX = _ISA_WITHOUT_FP16 | {"AVX512_CORE_FP16", "AVX10_1_512", "AVX2_VNNI_2"}


@dataclass(frozen=True, slots=True)
class SixteenBits:
    """How a CPU does with one 16-bit type.

    Attributes:
        supported: Whether products in it run at all.
        relative_rate: Its rate relative to fp32.
        reason: What this follows from.
    """

    supported: bool
    relative_rate: float
    reason: str

    @property
    def fast(self) -> bool:
        """Whether it is worth computing in, and not only storing in."""
        return self.supported and self.relative_rate >= 1.0


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """What a CPU announces about itself.

    Attributes:
        model: Its name.
        flags: The instruction sets, in the words of `/proc/cpuinfo`.
        cpuid_level: The highest basic CPUID leaf; None where there is no such thing.
        isa_limit: The user's `ONEDNN_MAX_CPU_ISA`, in capitals; empty if there is none.

    Example:
        >>> CpuFeatures("a CPU", frozenset({"avx2", "avx512f", "avx512_bf16"}), 32).bf16.fast
        True
    """

    model: str
    flags: frozenset[str]
    cpuid_level: int | None = None
    isa_limit: str = ""

    @property
    def fp32_flops_per_core(self) -> float:
        """The fp32 rate assumed of one core, in FLOP/s."""
        if "avx512f" in self.flags:
            return _AVX512_FLOPS
        return _AVX2_FLOPS if "avx2" in self.flags else _OTHER_FLOPS

    @property
    def bf16(self) -> SixteenBits:
        """How it does with bf16."""
        if self._uses_amx("amx_bf16"):
            works = SixteenBits(True, _AMX_BF16, "amx_bf16")
            return works if self._tiles_work else self._broken_tiles("bf16")
        if "avx512_bf16" in self.flags and self.isa_limit not in _ISA_WITHOUT_BF16:
            return SixteenBits(True, _VECTOR_BF16, "avx512_bf16")
        if "bf16" in self.flags:  # Arm
            return SixteenBits(True, _VECTOR_BF16, "Arm bf16")
        return SixteenBits(True, _SLOW_BF16, "no bf16 instructions: converted from and to fp32")

    @property
    def fp16(self) -> SixteenBits:
        """How it does with fp16."""
        if self._uses_amx("amx_fp16") and not self._tiles_work:
            return self._broken_tiles("fp16")
        if "avx512_fp16" in self.flags and self.isa_limit not in _ISA_WITHOUT_FP16:
            return SixteenBits(True, _VECTOR_FP16, "avx512_fp16")
        return SixteenBits(True, _SLOW_FP16, "no fp16 instructions: multiplied number by number")

    @property
    def _tiles_work(self) -> bool:
        return self.cpuid_level is None or self.cpuid_level >= _TILE_LEAF

    def _uses_amx(self, flag: str) -> bool:
        return {"amx_tile", flag} <= self.flags and self.isa_limit not in _ISA_WITHOUT_AMX

    def _broken_tiles(self, dtype: str) -> SixteenBits:
        # See Note [AMX that is announced but does not work].
        return SixteenBits(
            False,
            _SLOW_BF16,
            "matrix products would end this process with an illegal instruction: AMX is announced, but "
            f"CPUID stops at leaf {self.cpuid_level:#x} and AMX needs {_TILE_LEAF:#x}; to use {dtype} "
            "without AMX, start Python with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16",
        )


def read_cpu(*, proc: Path = PROC, environ: Mapping[str, str] | None = None) -> CpuFeatures:
    """Read what this CPU announces; where there is no `/proc/cpuinfo`, only its name is known.

    Example:
        >>> read_cpu().fp32_flops_per_core > 0
        True
    """
    environ = os.environ if environ is None else environ
    limit = environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA") or ""
    try:
        text = (proc / "cpuinfo").read_text()
    except OSError:
        text = ""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())  # the first processor speaks for all
    level = fields.get("cpuid level", "")
    return CpuFeatures(
        model=fields.get("model name") or platform.processor() or platform.machine() or "CPU",
        flags=frozenset((fields.get("flags") or fields.get("Features") or "").split()),
        cpuid_level=int(level) if level.isdecimal() else None,
        isa_limit=limit.strip().upper(),
    )


def cpu_device(cpu: CpuFeatures, host: HostSpec, disk: DiskSpec) -> DeviceSpec:
    """Describe the CPU as the device, with the host's RAM as its memory and the disk as the tier below.

    Example:
        >>> from memscale.hardware.disk import find_disk
        >>> from memscale.hardware.host import read_host
        >>> cpu_device(read_cpu(), read_host(), find_disk()).kind
        'cpu'
    """
    fp32 = host.cores * cpu.fp32_flops_per_core
    bf16, fp16 = cpu.bf16, cpu.fp16
    return DeviceSpec(
        name=cpu.model,
        kind="cpu",
        index=None,
        total_bytes=host.total_ram_bytes,
        free_bytes=host.available_ram_bytes,
        compute_capability=None,
        supports_bf16=bf16.supported,
        supports_fp16=fp16.supported,
        computes_bf16_fast=bf16.fast,
        computes_fp16_fast=fp16.fast,
        rates=Rates(
            fp32=fp32,
            tf32=None,
            fp16=fp32 * fp16.relative_rate,
            bf16=fp32 * bf16.relative_rate if bf16.supported else None,
        ),
        memory_bandwidth=min(host.cores * _BANDWIDTH_PER_CORE, _MOST_BANDWIDTH),
        # A tensor that goes out is written and read again: the slower of the two is what counts.
        link_bandwidth=min(disk.read_bandwidth, disk.write_bandwidth),
        rates_source="estimated",
        notes=tuple(
            f"{name}: {verdict.reason}"
            for name, verdict in (("bf16", bf16), ("fp16", fp16))
            if not verdict.fast
        ),
    )
