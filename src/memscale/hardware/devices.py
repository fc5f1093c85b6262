"""Describe the device that computes: the CPU, a CUDA device (NVIDIA or AMD), or another accelerator.

Note [AMX that is announced but does not work]
A virtual machine may pass on the CPU flags `amx_tile` and `amx_bf16` and yet hide CPUID leaf 0x1D, which describes
the layout of tiles. oneDNN, which multiplies matrices for torch, trusts the flags, reads no layout from the missing
leaf, loads an empty tile configuration, and the first tile instruction kills the process with SIGILL. No exception
can be caught: any bf16 product of 32 x 32 or more ends the training run (seen with torch 2.13, oneDNN 3.12). The
highest leaf is the `cpuid level` of `/proc/cpuinfo`. If AMX is announced and the level is below 0x1D, bf16 counts as
not supported, unless the user keeps oneDNN from AMX with `ONEDNN_MAX_CPU_ISA`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from memscale.errors import HardwareError
from memscale.hardware.gpus import GpuSpec, find_gpu
from memscale.hardware.host import PROC
from memscale.hardware.specs import DeviceSpec, DiskSpec, HostSpec, Rates

if TYPE_CHECKING:
    import torch

__all__ = ["CpuFeatures", "accelerator_device", "cpu_device", "cuda_device", "published_device", "read_cpu"]

T = TypeVar("T")

# -- the CPU

# Rates are assumptions, so that plans never depend on a measurement: fp32 matrix products of one core in FLOP/s, about
# two thirds of one vector unit at 2.5 GHz, as seen on a core of a shared cloud machine.
_AVX512_FLOPS = 50e9
_AVX2_FLOPS = 32e9
_OTHER_FLOPS = 16e9

# 16-bit matrix products relative to fp32. Seen on an Emerald Rapids core with torch 2.13: 1.2 with avx512_bf16, 2.3
# with avx512_fp16, and without instructions for them 0.4 for bf16 and 0.007 for fp16. A whole training step in bf16
# without them took three times the fp32 one.
_AMX_BF16 = 4.0
_VECTOR_BF16 = 1.2
_VECTOR_FP16 = 2.0
_SLOW_BF16 = 0.33
_SLOW_FP16 = 0.01

_BANDWIDTH_PER_CORE = 8e9
_LARGEST_BANDWIDTH = 100e9  # a few cores saturate the memory

_TILE_LEAF = 0x1D

# Values of ONEDNN_MAX_CPU_ISA that keep oneDNN from instructions the CPU has.
_ISA_WITHOUT_BF16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"})
_ISA_WITHOUT_FP16 = _ISA_WITHOUT_BF16 | {"AVX512_CORE_BF16"}
_ISA_WITHOUT_AMX = _ISA_WITHOUT_FP16 | {"AVX512_CORE_FP16", "AVX10_1_512", "AVX2_VNNI_2"}


@dataclass(frozen=True, slots=True)
class SixteenBitSupport:
    """How a CPU computes in one 16-bit type: whether at all, its rate relative to fp32, and why."""

    supported: bool
    relative_rate: float
    reason: str

    @property
    def fast(self) -> bool:
        """Whether computing in it is at least as fast as in fp32."""
        return self.supported and self.relative_rate >= 1.0


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """What a CPU announces about itself.

    Attributes:
        model: Its name.
        flags: The instruction sets, as `/proc/cpuinfo` names them.
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
    def bf16(self) -> SixteenBitSupport:
        """How it computes in bf16."""
        if self._uses_amx("amx_bf16"):
            works = SixteenBitSupport(True, _AMX_BF16, "amx_bf16")
            return works if self._tiles_work else self._broken_tiles("bf16")
        if "avx512_bf16" in self.flags and self.isa_limit not in _ISA_WITHOUT_BF16:
            return SixteenBitSupport(True, _VECTOR_BF16, "avx512_bf16")
        if "bf16" in self.flags:  # Arm
            return SixteenBitSupport(True, _VECTOR_BF16, "Arm bf16")
        return SixteenBitSupport(True, _SLOW_BF16, "no bf16 instructions: converted from and to fp32")

    @property
    def fp16(self) -> SixteenBitSupport:
        """How it computes in fp16."""
        if self._uses_amx("amx_fp16") and not self._tiles_work:
            return self._broken_tiles("fp16")
        if "avx512_fp16" in self.flags and self.isa_limit not in _ISA_WITHOUT_FP16:
            return SixteenBitSupport(True, _VECTOR_FP16, "avx512_fp16")
        return SixteenBitSupport(True, _SLOW_FP16, "no fp16 instructions: multiplied number by number")

    @property
    def _tiles_work(self) -> bool:
        return self.cpuid_level is None or self.cpuid_level >= _TILE_LEAF

    def _uses_amx(self, flag: str) -> bool:
        return {"amx_tile", flag} <= self.flags and self.isa_limit not in _ISA_WITHOUT_AMX

    def _broken_tiles(self, dtype: str) -> SixteenBitSupport:
        # See Note [AMX that is announced but does not work].
        return SixteenBitSupport(
            False,
            _SLOW_BF16,
            "matrix products would end this process with an illegal instruction: AMX is announced, but "
            f"CPUID stops at leaf {self.cpuid_level:#x} and AMX needs {_TILE_LEAF:#x}; to use {dtype} "
            "without AMX, start Python with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16",
        )


def read_cpu(*, proc: Path = PROC, environ: Mapping[str, str] | None = None) -> CpuFeatures:
    """Read what this CPU announces; without `/proc/cpuinfo` only its name is known."""
    environ = os.environ if environ is None else environ
    limit = environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA") or ""
    try:
        text = (proc / "cpuinfo").read_text()
    except OSError:
        text = ""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())  # the first processor stands for all
    level = fields.get("cpuid level", "")
    return CpuFeatures(
        model=fields.get("model name") or platform.processor() or platform.machine() or "CPU",
        flags=frozenset((fields.get("flags") or fields.get("Features") or "").split()),
        cpuid_level=int(level) if level.isdecimal() else None,
        isa_limit=limit.strip().upper(),
    )


def cpu_device(cpu: CpuFeatures, host: HostSpec, disk: DiskSpec) -> DeviceSpec:
    """Describe the CPU as the device: the host's RAM is its memory, the disk the tier below."""
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
        memory_bandwidth=min(host.cores * _BANDWIDTH_PER_CORE, _LARGEST_BANDWIDTH),
        # An offloaded tensor is written and read again: the slower of the two counts.
        link_bandwidth=min(disk.read_bandwidth, disk.write_bandwidth),
        rates_source="estimated",
        notes=tuple(
            f"{name}: {support.reason}"
            for name, support in (("bf16", bf16), ("fp16", fp16))
            if not support.fast
        ),
    )


# -- CUDA, which is also torch's name for AMD's devices


class _Architecture(NamedTuple):
    """Assumptions about a GPU outside of the table, by its compute capability.

    The ratios to fp32 are those of the slower product line where an architecture has two (GeForce accumulates fp16
    in fp32 at half rate), so that an estimate does not promise what the card may not have.
    """

    cores_per_multiprocessor: int
    tf32_ratio: float | None
    fp16_ratio: float
    bf16_ratio: float | None
    link_gbs: float


_ARCHITECTURES: dict[tuple[int, int], _Architecture] = {
    (6, 0): _Architecture(64, None, 2.0, None, 15.75),
    (6, 1): _Architecture(128, None, 1 / 64, None, 15.75),
    (6, 2): _Architecture(128, None, 2.0, None, 15.75),
    (7, 0): _Architecture(64, None, 8.0, None, 15.75),
    (7, 2): _Architecture(64, None, 8.0, None, 15.75),
    (7, 5): _Architecture(64, None, 2.0, None, 15.75),
    (8, 0): _Architecture(64, 8.0, 16.0, 16.0, 31.5),
    (8, 6): _Architecture(128, 1.0, 2.0, 2.0, 31.5),
    (8, 9): _Architecture(128, 1.0, 2.0, 2.0, 31.5),
    (9, 0): _Architecture(128, 7.0, 14.0, 14.0, 63.0),
    (10, 0): _Architecture(128, 14.0, 28.0, 28.0, 63.0),
}
_BEFORE_PASCAL = _Architecture(128, None, 1 / 64, None, 15.75)
_LATER = _Architecture(128, 1.0, 2.0, 2.0, 63.0)  # consumer Blackwell, and what is not known yet
_AMD = _Architecture(64, None, 2.0, 2.0, 31.5)  # 64 lanes a compute unit

# Where a driver does not tell.
_MULTIPROCESSORS = 82
_CLOCK_HZ = 1.5e9
_MEMORY_BANDWIDTH = 300e9


def cuda_device(index: int) -> DeviceSpec:
    """Describe CUDA device `index`: its memory as the driver reports it, its rates from the table by name.

    A GPU that the table does not have (new, or a slice of one) gets rates estimated from its multiprocessors and
    clock, and says so in `rates_source` and `notes`.

    Raises:
        HardwareError: There is no such device.
    """
    import torch

    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or count == 0:
        raise HardwareError(
            "A CUDA device was asked for, and torch sees none (torch.cuda.is_available() is False): install "
            "the driver and a torch built for it, choose device='cpu', or plan for a GPU that is not here "
            "with hardware='RTX 3090'."
        )
    if not 0 <= index < count:
        raise HardwareError(
            f"cuda:{index} was asked for, and torch sees {count}: cuda:0 to cuda:{count - 1}."
        )
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    # The driver counts torch's cache as in use; whoever allocates through torch can have it.
    cached = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    free = min(free + cached, total)
    name = str(properties.name)
    # On AMD torch reports the version of the graphics core as the compute capability.
    capability = None if torch.version.hip is not None else torch.cuda.get_device_capability(index)
    try:
        gpu = find_gpu(name, memory_bytes=total)
    except HardwareError as error:
        return _estimated_cuda_device(name, index, total, free, capability, properties, str(error))
    return published_device(
        gpu,
        kind="cuda",
        name=name,
        index=index,
        total_bytes=total,
        free_bytes=free,
        compute_capability=capability,
    )


def published_device(
    gpu: GpuSpec,
    *,
    kind: str,
    name: str,
    index: int | None,
    total_bytes: int,
    free_bytes: int,
    compute_capability: tuple[int, int] | None,
) -> DeviceSpec:
    """Describe a device with the rates that the table has for `gpu`."""
    rates = gpu.rates
    return DeviceSpec(
        name=name,
        kind=kind,
        index=index,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        compute_capability=compute_capability,
        supports_bf16=rates.bf16 is not None,
        supports_fp16=True,
        computes_bf16_fast=rates.bf16 is not None and rates.bf16 >= rates.fp32,
        computes_fp16_fast=rates.fp16 >= rates.fp32,
        rates=rates,
        memory_bandwidth=gpu.memory_bandwidth_gbs * 1e9,
        link_bandwidth=gpu.link_gbs * 1e9,
        rates_source="published",
    )


def _estimated_cuda_device(
    name: str,
    index: int,
    total: int,
    free: int,
    capability: tuple[int, int] | None,
    properties: Any,
    reason: str,
) -> DeviceSpec:
    def reported(field: str) -> float:  # 0 where this torch does not have it
        value = getattr(properties, field, 0)
        return float(value) if isinstance(value, (int, float)) and value > 0 else 0.0

    architecture = _architecture(capability)
    clock = reported("clock_rate") * 1e3 or _CLOCK_HZ  # kHz
    multiprocessors = int(reported("multi_processor_count")) or _MULTIPROCESSORS
    fp32 = 2.0 * multiprocessors * architecture.cores_per_multiprocessor * clock
    # Two transfers a clock, on a bus measured in bits.
    memory_clock = reported("memory_clock_rate") * 1e3
    bandwidth = 2.0 * memory_clock * reported("memory_bus_width") / 8 or _MEMORY_BANDWIDTH
    tf32, bf16 = architecture.tf32_ratio, architecture.bf16_ratio
    return DeviceSpec(
        name=name,
        kind="cuda",
        index=index,
        total_bytes=total,
        free_bytes=free,
        compute_capability=capability,
        supports_bf16=bf16 is not None,
        supports_fp16=capability is None or capability >= (5, 3),
        computes_bf16_fast=bf16 is not None,
        computes_fp16_fast=architecture.fp16_ratio >= 1.0,
        rates=Rates(
            fp32=fp32,
            tf32=None if tf32 is None else fp32 * tf32,
            fp16=fp32 * architecture.fp16_ratio,
            bf16=None if bf16 is None else fp32 * bf16,
        ),
        memory_bandwidth=bandwidth,
        link_bandwidth=architecture.link_gbs * 1e9,
        rates_source="estimated",
        notes=(f"rates estimated from {multiprocessors} multiprocessors: {reason}",),
    )


def _architecture(capability: tuple[int, int] | None) -> _Architecture:
    if capability is None:
        return _AMD
    if capability < (6, 0):
        return _BEFORE_PASCAL
    # A later member of a known family is like the last known one: 8.7 (Orin) like 8.6, 10.3 like 10.0.
    family = [known for known in _ARCHITECTURES if known[0] == capability[0] and known <= capability]
    return _ARCHITECTURES[max(family)] if family else _LATER


# -- other accelerators

# What a backend raises for a question it does not support: an unknown name, other arguments, a missing device, an error
# from its C++ side (NotImplementedError is a RuntimeError).
_UNSUPPORTED = (AttributeError, TypeError, ValueError, KeyError, AssertionError, RuntimeError)


class _Assumed(NamedTuple):
    """Figures of a small device of its kind, where there is no table."""

    fp32: float
    sixteen_bit_ratio: float
    memory_bandwidth: float
    link_bandwidth: float


_ASSUMED = {
    "mps": _Assumed(3e12, 1.0, 100e9, 50e9),  # shares its memory with the host: a transfer is a copy in RAM
    "xpu": _Assumed(15e12, 4.0, 400e9, 15.75e9),
}
_ASSUMED_OTHER = _Assumed(10e12, 2.0, 300e9, 15.75e9)


def accelerator_device(device: torch.device) -> tuple[DeviceSpec, int]:
    """Describe an accelerator other than CUDA, and count the devices of its kind.

    Each backend answers other questions, so each question is asked in several ways. What a backend does not answer
    is assumed with caution, and the reason is kept in the notes.

    Raises:
        HardwareError: The backend does not say how much memory the device has; the message has its reasons.
    """
    import torch

    notes: list[str] = []
    module: Any = _first_answer(notes, f"torch.{device.type}", lambda: torch.get_device_module(device))
    index = device.index
    if index is None:
        index = _first_answer(notes, "current device", torch.accelerator.current_device_index) or 0
        device = torch.device(device.type, index)

    def from_properties() -> tuple[int, int]:
        total = int(module.get_device_properties(index).total_memory)
        return total - int(module.memory_allocated(index)), total

    def from_mps() -> tuple[int, int]:
        total = int(module.recommended_max_memory())
        return total - int(module.driver_allocated_memory()), total

    memory = _first_answer(
        notes,
        "memory",
        lambda: _free_and_total(torch.accelerator.get_memory_info(device)),
        lambda: _free_and_total(module.mem_get_info(index)),
        from_properties,
        from_mps,
    )
    if memory is None:
        raise HardwareError(
            f"{device} does not say how much memory it has: {'; '.join(notes)}. Plan for a GPU "
            "of its size instead: memscale.plan(..., hardware='8GiB')."
        )
    free, total = memory
    free = max(0, min(free, total))
    name = _first_answer(notes, "name", lambda: str(module.get_device_name(index))) or device.type
    count = _first_answer(notes, "device count", lambda: int(module.device_count()))
    try:
        gpu = find_gpu(name, memory_bytes=total)  # a simulated device has the name of a known one
    except HardwareError:
        dtypes = _first_answer(
            notes,
            "dtypes",
            lambda: frozenset(torch.accelerator.get_device_capability(device)["supported_dtypes"]),
            # A backend that has the question for bf16 at all computes in fp16.
            lambda: frozenset({torch.float16, *([torch.bfloat16] if module.is_bf16_supported() else [])}),
        )
        spec = _assumed_device(device, name, total, free, dtypes or frozenset())
    else:
        spec = published_device(
            gpu,
            kind=device.type,
            name=name,
            index=index,
            total_bytes=total,
            free_bytes=free,
            compute_capability=gpu.compute_capability,
        )
    return replace(spec, notes=tuple(notes)), max(1, count or 1)


def _first_answer(notes: list[str], what: str, *questions: Callable[[], T]) -> T | None:
    """Return the first answer that a backend gives; if none, note the reasons and return None."""
    reasons = []
    for question in questions:
        try:
            return question()
        except _UNSUPPORTED as error:
            message = str(error).partition("\n")[0][:120]
            reasons.append(f"{type(error).__name__}: {message}")
    notes.append(f"{what} not answered ({'; '.join(reasons)})")
    return None


def _free_and_total(answer: Any) -> tuple[int, int]:
    free, total = answer
    return int(free), int(total)


def _assumed_device(
    device: torch.device, name: str, total: int, free: int, dtypes: frozenset[torch.dtype]
) -> DeviceSpec:
    import torch

    assumed = _ASSUMED.get(device.type, _ASSUMED_OTHER)
    sixteen_bit = assumed.fp32 * assumed.sixteen_bit_ratio
    bf16, fp16 = torch.bfloat16 in dtypes, torch.float16 in dtypes
    return DeviceSpec(
        name=name,
        kind=device.type,
        index=device.index,
        total_bytes=total,
        free_bytes=free,
        compute_capability=None,
        supports_bf16=bf16,
        supports_fp16=fp16,
        computes_bf16_fast=bf16,
        computes_fp16_fast=fp16,
        rates=Rates(fp32=assumed.fp32, tf32=None, fp16=sixteen_bit, bf16=sixteen_bit if bf16 else None),
        memory_bandwidth=assumed.memory_bandwidth,
        link_bandwidth=assumed.link_bandwidth,
        rates_source="estimated",
    )
