"""Describe the hardware of this machine, or a GPU that is not here but planned for.

Note [AMX that is announced but does not work]
A virtual machine may pass on the CPU flags `amx_tile` and `amx_bf16` and yet hide CPUID leaf 0x1D, which describes
the layout of tiles. oneDNN trusts the flags, and the first tile instruction kills the process with SIGILL: any bf16
product of 32 x 32 or more (seen with torch 2.13, oneDNN 3.12). If AMX is announced and the `cpuid level` of
`/proc/cpuinfo` is below 0x1D, bf16 counts as not supported, unless `ONEDNN_MAX_CPU_ISA` keeps oneDNN from AMX.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from memscale.errors import ConfigTypeError, HardwareError, shown
from memscale.hardware.calibrate import calibrated
from memscale.hardware.gpus import GpuSpec, find_gpu
from memscale.hardware.host import PROC, find_disk, read_host
from memscale.hardware.specs import DeviceSpec, DiskSpec, Hardware, HostSpec, Rates
from memscale.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

# The host of a virtual GPU: fixed figures, so that a plan for it is the same on every machine.
_VIRTUAL_HOST_BYTES = 64 * 2**30
_VIRTUAL_CORES = 8
_VIRTUAL_DISK = DiskSpec(
    Path("memscale-virtual-disk"), 2**40, True, read_bandwidth=2.0e9, write_bandwidth=1.0e9
)
# Its rates are those of a virtual GPU of which only the size is known: published results are for this card.
_REFERENCE_GPU = "NVIDIA GeForce RTX 3090"

# With a unit, or too large a number to be the name of a GPU ("3090").
_SIZE = re.compile(r"\s*[-+]?(\d[\d_.]*\s*[a-z]*b|\d{7,})\s*", re.IGNORECASE)


def detect(
    device: torch.device | str | None = None, *, offload_dir: str | os.PathLike[str] | None = None
) -> Hardware:
    """Describe the hardware of this machine.

    Nothing is timed: rates come from the file that `memscale.calibrate` wrote (Note [Calibrated rates]), else from the
    table of GPUs or from documented assumptions, so that a machine gets the same plan every time. Without an
    accelerator the CPU is the device, and it offloads to disk.

    Args:
        device: The device to describe, such as "cuda:1" or "cpu". By default the current CUDA device, else another
            accelerator that torch knows, else the CPU.
        offload_dir: The directory of the disk tier; by default as `find_disk` chooses it.

    Raises:
        HardwareError: There is no such device, or it does not say how much memory it has; `MEMSCALE_CALIBRATION` names
            a file that can't be used.

    Example:
        >>> hardware = detect("cpu")
        >>> hardware.device.kind, hardware.device_count
        ('cpu', 1)
    """
    return calibrated(detect_by_tables(device, offload_dir=offload_dir))


def detect_by_tables(
    device: torch.device | str | None = None, *, offload_dir: str | os.PathLike[str] | None = None
) -> Hardware:
    """Describe the hardware of this machine, as `detect` does, with rates of tables alone."""
    import torch

    host, disk = read_host(), find_disk(offload_dir)
    notes: tuple[str, ...] = ()
    if device is not None:
        wanted = _parse(device)
    elif torch.cuda.is_available():
        wanted = torch.device("cuda")
    else:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        wanted = accelerator or torch.device("cpu")
    if wanted.type == "meta":
        raise HardwareError(
            "device='meta' has no memory and computes nothing: name the device that the model is to train "
            "on, such as 'cuda:0', or a GPU with the hardware argument of memscale.plan."
        )
    if wanted.type != "cpu":
        try:
            spec, count = _accelerator_device(wanted)
            # Page-locked memory that torch keeps for the next request is as good as free.
            if wanted.type == "cuda":
                stats = torch.cuda.host_memory_stats()
                cached = stats.get("allocated_bytes.current", 0) - stats.get("active_bytes.current", 0)
                available = min(host.total_ram_bytes, host.available_ram_bytes + cached)
                host = replace(host, available_ram_bytes=available)
            return Hardware(spec, count, host, disk)
        except HardwareError as error:
            if device is not None or wanted.type == "cuda":
                raise
            # torch counts a backend that was registered from Python, to test or to simulate, as an accelerator.
            notes = (f"torch names {wanted} as the accelerator; {error}",)
    cpu = cpu_device(read_cpu(), host, disk)
    return Hardware(replace(cpu, notes=(*cpu.notes, *notes)), 1, host, disk)


def _parse(device: torch.device | str) -> torch.device:
    import torch

    if isinstance(device, torch.device):
        return device
    if not isinstance(device, str):
        raise ConfigTypeError(
            f"device={shown(device)} is a {type(device).__name__}: give a torch.device, or a str such as "
            "'cuda:0' or 'cpu'."
        )
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise HardwareError(
            f"device={shown(device)} is not a device that torch knows: give one such as 'cuda:0' or 'cpu'. "
            "To plan for a GPU by its name, use the hardware argument of memscale.plan."
        ) from error


def gpu_or_size(gpu: str | int, *, field: str) -> GpuSpec | int:
    """Return the GPU of that name, or the bytes of a size: "24GiB", or a whole number of at least seven digits.

    Raises:
        HardwareError: No GPU of that name is known.
        ConfigError, ConfigTypeError: The size can't be one; messages call it `field`.

    Example:
        >>> gpu_or_size("3060 12gb", field="on").name, gpu_or_size("2 GiB", field="on")
        ('NVIDIA GeForce RTX 3060', 2147483648)
    """
    if isinstance(gpu, str) and not _SIZE.fullmatch(gpu):
        return find_gpu(gpu)
    return parse_bytes(gpu, field=field)


def virtual_hardware(gpu: str | GpuSpec | int, *, host_bytes: int | None = None) -> Hardware:
    """Describe a GPU that is not here, to plan or to simulate for it.

    Args:
        gpu: A name ("RTX 3090"), an entry of the table, or a size of memory, in bytes or with a unit ("8GiB"); a
            GPU of which only the size is known has the rates of an RTX 3090.
        host_bytes: The RAM of its host; 64 GiB by default, so that the plan is the same everywhere.

    Raises:
        HardwareError: No GPU of that name is known; the message lists the nearest.
        ConfigError: The size is zero, negative or unreadable.
        ConfigTypeError: `gpu` is something else, such as a bool or a float.

    Example:
        >>> virtual_hardware("A100-80GB").device.total_bytes // 2**30
        80
    """
    if isinstance(gpu, bool) or not isinstance(gpu, (str, GpuSpec, int)):
        raise ConfigTypeError(
            f"hardware={shown(gpu)} is a {type(gpu).__name__}, which describes no GPU: give a name such as "
            "'RTX 3090', an entry of memscale.hardware.list_gpus(), or a size: '8GiB', or a number of bytes."
        )
    spec = gpu if isinstance(gpu, GpuSpec) else gpu_or_size(gpu, field="hardware")
    notes: tuple[str, ...] = ()
    if isinstance(spec, int):
        notes = (f"only the size is known: rates are those of the {_REFERENCE_GPU}",)
        spec = replace(find_gpu(_REFERENCE_GPU), name=f"GPU of {format_bytes(spec)}", memory_bytes=spec)
    host_ram = _VIRTUAL_HOST_BYTES if host_bytes is None else parse_bytes(host_bytes, field="host_bytes")
    device = _device_of(spec, "virtual", None, spec.memory_bytes, notes)
    return Hardware(device, 1, HostSpec(host_ram, host_ram, cores=_VIRTUAL_CORES), _VIRTUAL_DISK)


# -- the CPU

# Rates are assumptions, so that plans never depend on a measurement: fp32 matrix products of one core in FLOP/s, about
# two thirds of one vector unit at 2.5 GHz, as seen on a core of a shared cloud machine.
_FLOPS_PER_CORE = {"avx512f": 50e9, "avx2": 32e9}
_OTHER_FLOPS = 16e9

# 16-bit matrix products relative to fp32. Seen on an Emerald Rapids core with torch 2.13: 1.2 with avx512_bf16, 2.3
# with avx512_fp16, and without instructions for them 0.4 for bf16 (a whole training step: 0.33) and 0.007 for fp16.
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


class SixteenBitSupport(NamedTuple):
    """How a CPU computes in one 16-bit type: its rate relative to fp32 (None: not safely), and why."""

    relative_rate: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """What a CPU announces about itself."""

    model: str
    flags: frozenset[str]  # the instruction sets, as `/proc/cpuinfo` names them
    cpuid_level: int | None = None  # the highest basic CPUID leaf; None where there is no such thing
    isa_limit: str = ""  # the user's `ONEDNN_MAX_CPU_ISA`, in capitals

    @property
    def bf16(self) -> SixteenBitSupport:
        """How it computes in bf16."""
        if self._uses_amx("amx_bf16"):
            return self._broken_tiles("bf16") or SixteenBitSupport(_AMX_BF16, "amx_bf16")
        if "avx512_bf16" in self.flags and self.isa_limit not in _ISA_WITHOUT_BF16:
            return SixteenBitSupport(_VECTOR_BF16, "avx512_bf16")
        if "bf16" in self.flags:  # Arm
            return SixteenBitSupport(_VECTOR_BF16, "Arm bf16")
        return SixteenBitSupport(_SLOW_BF16, "no bf16 instructions: converted from and to fp32")

    @property
    def fp16(self) -> SixteenBitSupport:
        """How it computes in fp16."""
        if self._uses_amx("amx_fp16") and (broken := self._broken_tiles("fp16")):
            return broken
        if "avx512_fp16" in self.flags and self.isa_limit not in _ISA_WITHOUT_FP16:
            return SixteenBitSupport(_VECTOR_FP16, "avx512_fp16")
        return SixteenBitSupport(_SLOW_FP16, "no fp16 instructions: about 100 times slower than fp32")

    def _uses_amx(self, flag: str) -> bool:
        return {"amx_tile", flag} <= self.flags and self.isa_limit not in _ISA_WITHOUT_AMX

    def _broken_tiles(self, dtype: str) -> SixteenBitSupport | None:
        """Return why tiles do not work; None if they do. See Note [AMX that is announced but does not work]."""
        if self.cpuid_level is None or self.cpuid_level >= _TILE_LEAF:
            return None
        return SixteenBitSupport(
            None,
            "matrix products would end this process with an illegal instruction: AMX is announced, but "
            f"CPUID stops at leaf {self.cpuid_level:#x} and AMX needs {_TILE_LEAF:#x}; to use {dtype} "
            "without AMX, start Python with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16",
        )


def read_cpu(*, proc: Path = PROC, environ: Mapping[str, str] = os.environ) -> CpuFeatures:
    """Read what this CPU announces; without `/proc/cpuinfo` only its name is known."""
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
    """Describe the CPU as the device: the host's RAM is its memory, and it offloads to disk."""
    per_core = next((rate for flag, rate in _FLOPS_PER_CORE.items() if flag in cpu.flags), _OTHER_FLOPS)
    fp32 = host.cores * per_core
    support = {"bf16": cpu.bf16, "fp16": cpu.fp16}
    bf16, fp16 = (ratio and fp32 * ratio for ratio, _ in support.values())
    return DeviceSpec(
        name=cpu.model,
        kind="cpu",
        index=None,
        total_bytes=host.total_ram_bytes,
        free_bytes=host.available_ram_bytes,
        compute_capability=None,
        rates=Rates(fp32, fp16, bf16),
        memory_bandwidth=min(host.cores * _BANDWIDTH_PER_CORE, _LARGEST_BANDWIDTH),
        # An offloaded tensor is written and read again: the slower of the two counts.
        link_bandwidth=min(disk.read_bandwidth, disk.write_bandwidth),
        notes=tuple(f"{name}: {reason}" for name, (ratio, reason) in support.items() if (ratio or 0.0) < 1.0),
    )


# -- CUDA, which is also torch's name for AMD's devices, and other accelerators


class _Architecture(NamedTuple):
    """Assumptions about a GPU outside of the table, by its compute capability: those of the slower product line."""

    cores_per_multiprocessor: int
    fp16_ratio: float
    bf16_ratio: float | None
    link_gbs: float


_ARCHITECTURES: dict[tuple[int, int], _Architecture] = {
    (6, 0): _Architecture(64, 2.0, None, 15.75),
    (6, 1): _Architecture(128, 1 / 64, None, 15.75),
    (6, 2): _Architecture(128, 2.0, None, 15.75),
    (7, 0): _Architecture(64, 8.0, None, 15.75),
    (7, 5): _Architecture(64, 2.0, None, 15.75),
    (8, 0): _Architecture(64, 16.0, 16.0, 31.5),
    (8, 6): _Architecture(128, 2.0, 2.0, 31.5),
    (9, 0): _Architecture(128, 14.0, 14.0, 63.0),
    (10, 0): _Architecture(128, 28.0, 28.0, 63.0),
}
_LATER = _Architecture(128, 2.0, 2.0, 63.0)  # consumer Blackwell, and what is not known yet
_OTHER_VENDOR = _Architecture(64, 2.0, 2.0, 31.5)  # AMD has 64 lanes a compute unit

# Where a driver does not tell.
_MULTIPROCESSORS = 82
_CLOCK_KHZ = 1.5e6
_MEMORY_BANDWIDTH_GBS = 300.0
_OTHERS_STEP = 64 * 2**20  # bytes to which what others hold is rounded up, so that plans do not waver


def _accelerator_device(device: torch.device) -> tuple[DeviceSpec, int]:
    """Describe an accelerator, and count the devices of its kind.

    Memory is as the driver reports it, rates are from the table by name. For a GPU that the table does not have (new,
    or a slice of one) they are estimated.
    """
    import torch

    module: Any = torch.get_device_module(device)
    count = module.device_count() if module.is_available() else 0
    if count == 0:
        raise HardwareError(
            f"A {device.type.upper()} device was asked for, and torch sees none (torch.{device.type}.is_available() "
            "is False): install the driver and a torch built for it, choose device='cpu', or plan for a GPU that is "
            "not here with hardware='RTX 3090'."
        )
    index = module.current_device() if device.index is None else device.index
    if not 0 <= index < count:
        kind = device.type
        raise HardwareError(
            f"{kind}:{index} was asked for, and torch sees {count}: {kind}:0 to {kind}:{count - 1}."
        )
    try:
        free, total = module.mem_get_info(index)
    except (AttributeError, RuntimeError) as error:
        raise HardwareError(
            f"{device} does not say how much memory it has: {str(error).partition(chr(10))[0]}. Plan for a GPU of "
            "its size instead: memscale.plan(..., hardware='8GiB')."
        ) from error
    # The driver counts torch's cache as in use; whoever allocates through torch can have it.
    reserved = module.memory_reserved(index)
    others = max(0, total - free - reserved)
    capacity = max(0, total - -(-others // _OTHERS_STEP) * _OTHERS_STEP)
    if device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        capacity = min(capacity, int(torch.cuda.get_per_process_memory_fraction(index) * total))
    free = max(0, min(free + reserved - module.memory_allocated(index), total))
    properties = module.get_device_properties(index)
    name = str(properties.name)
    # On AMD torch reports the version of the graphics core as the compute capability.
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    capability = module.get_device_capability(index) if is_nvidia else None
    notes: tuple[str, ...] = ()
    try:
        gpu = find_gpu(name, memory_bytes=total)
        # A virtual GPU of torch's own slot has the name of an NVIDIA card, and its capability.
        capability = capability if device.type == "cuda" else gpu.compute_capability
    except HardwareError as error:
        gpu = _estimated_gpu(properties, total, capability)
        notes = (f"rates estimated from its number of multiprocessors and clock: {error}",)
    gpu = replace(gpu, name=name, memory_bytes=total, compute_capability=capability)
    spec = _device_of(gpu, device.type, index, free, notes)
    return replace(spec, capacity_bytes=capacity), count


def _device_of(gpu: GpuSpec, kind: str, index: int | None, free: int, notes: tuple[str, ...]) -> DeviceSpec:
    return DeviceSpec(
        name=gpu.name,
        kind=kind,
        index=index,
        total_bytes=gpu.memory_bytes,
        free_bytes=free,
        compute_capability=gpu.compute_capability,
        rates=gpu.rates,
        memory_bandwidth=gpu.memory_bandwidth_gbs * 1e9,
        link_bandwidth=gpu.link_gbs * 1e9,
        notes=notes,
    )


def _estimated_gpu(properties: Any, total: int, capability: tuple[int, int] | None) -> GpuSpec:
    """Estimate the rates of a GPU that the table does not have."""

    def reported(field: str, default: float) -> float:  # where this torch or the driver does not tell
        value = getattr(properties, field, 0)
        return float(value) if isinstance(value, (int, float)) and value > 0 else default

    if capability is None:
        architecture = _OTHER_VENDOR
    elif capability < (6, 0):
        architecture = _ARCHITECTURES[6, 1]
    else:
        # A later member of a known family is like the last known one: 8.9 like 8.6, 10.3 like 10.0.
        family = [known for known in _ARCHITECTURES if known[0] == capability[0] and known <= capability]
        architecture = _ARCHITECTURES[max(family)] if family else _LATER
    cores = reported("multi_processor_count", _MULTIPROCESSORS) * architecture.cores_per_multiprocessor
    fp32 = 2.0 * cores * reported("clock_rate", _CLOCK_KHZ) * 1e3 / 1e12
    # Two transfers a clock (kHz), on a bus measured in bits.
    bandwidth = 2.0 * reported("memory_clock_rate", 0.0) * 1e3 * reported("memory_bus_width", 0.0) / 8 / 1e9
    return GpuSpec(
        name=str(properties.name),
        vendor="amd" if capability is None else "nvidia",
        memory_bytes=total,
        fp32_tflops=fp32,
        tf32_tflops=None,
        fp16_tflops=fp32 * architecture.fp16_ratio,
        bf16_tflops=architecture.bf16_ratio and fp32 * architecture.bf16_ratio,
        memory_bandwidth_gbs=bandwidth or _MEMORY_BANDWIDTH_GBS,
        link_gbs=architecture.link_gbs,
        compute_capability=capability,
        source="estimated",
    )
