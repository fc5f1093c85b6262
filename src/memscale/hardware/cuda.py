"""CUDA devices, and AMD's, which torch calls "cuda" too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memscale.errors import HardwareError
from memscale.hardware.device import DeviceSpec
from memscale.hardware.gpus import find_gpu
from memscale.hardware.rates import Rates

if TYPE_CHECKING:
    from memscale.hardware.gpu_table import GpuSpec

__all__ = ["cuda_device", "published_device"]


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What a GPU outside the table is assumed to be like, by its compute capability.

    The ratios are those of the slower product line where an architecture has two (GeForce accumulates fp16 in
    fp32 at half rate): an estimate should not promise what the card may not have.
    """

    cores_per_sm: int
    tf32_ratio: float | None
    fp16_ratio: float
    bf16_ratio: float | None
    link_gbs: float


_FP16_CRAWLS = 1 / 64
_ARCHITECTURES: dict[tuple[int, int], _Architecture] = {
    (6, 0): _Architecture(64, None, 2.0, None, 15.75),
    (6, 1): _Architecture(128, None, _FP16_CRAWLS, None, 15.75),
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
_BEFORE_PASCAL = _Architecture(128, None, _FP16_CRAWLS, None, 15.75)
_LATER = _Architecture(128, 1.0, 2.0, 2.0, 63.0)  # consumer Blackwell, and what is not known yet

# Where a driver, or a simulated device, does not tell.
_MULTIPROCESSORS = 82
_CLOCK_HZ = 1.5e9
_MEMORY_BANDWIDTH = 300e9
# AMD: 64 lanes a compute unit; nothing but the unit count tells the rates apart without a table.
_AMD = _Architecture(64, None, 2.0, 2.0, 31.5)


def cuda_device(index: int) -> DeviceSpec:
    """Describe CUDA device `index`: its memory from the driver, its rates from the table by name.

    A GPU that the table does not know (new, or a slice of one) gets rates estimated from its multiprocessors
    and clock, and says so in `rates_source` and `notes`.

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
    # What torch keeps in its cache is taken to the driver, and free to whoever allocates through torch.
    cached = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    free = min(free + cached, total)
    name = str(properties.name)
    is_amd = torch.version.hip is not None
    # On AMD torch answers the version of the graphics core in the place of a compute capability.
    capability = None if is_amd else torch.cuda.get_device_capability(index)
    try:
        gpu = find_gpu(name, memory_bytes=total)
    except HardwareError as error:
        return _estimated(name, index, total, free, capability, properties, str(error))
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
    """Describe a device whose rates are those that the table has for `gpu`."""
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


def _estimated(
    name: str,
    index: int,
    total: int,
    free: int,
    capability: tuple[int, int] | None,
    properties: Any,
    reason: str,
) -> DeviceSpec:
    architecture = _architecture(capability)
    clock = _positive(properties, "clock_rate") * 1e3 or _CLOCK_HZ  # kHz
    multiprocessors = int(_positive(properties, "multi_processor_count")) or _MULTIPROCESSORS
    fp32 = 2.0 * multiprocessors * architecture.cores_per_sm * clock
    # Two transfers a clock, on a bus counted in bits.
    memory_clock = _positive(properties, "memory_clock_rate") * 1e3
    bandwidth = 2.0 * memory_clock * _positive(properties, "memory_bus_width") / 8 or _MEMORY_BANDWIDTH

    def scaled(ratio: float | None) -> float | None:
        return None if ratio is None else fp32 * ratio

    return DeviceSpec(
        name=name,
        kind="cuda",
        index=index,
        total_bytes=total,
        free_bytes=free,
        compute_capability=capability,
        supports_bf16=architecture.bf16_ratio is not None,
        supports_fp16=capability is None or capability >= (5, 3),
        computes_bf16_fast=architecture.bf16_ratio is not None,
        computes_fp16_fast=architecture.fp16_ratio >= 1.0,
        rates=Rates(
            fp32=fp32,
            tf32=scaled(architecture.tf32_ratio),
            fp16=fp32 * architecture.fp16_ratio,
            bf16=scaled(architecture.bf16_ratio),
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
    if capability in _ARCHITECTURES:
        return _ARCHITECTURES[capability]
    # A later member of a known family is like the last one known of it: 8.7 (Orin) like 8.6, 10.3 like 10.0.
    family = [known for known in _ARCHITECTURES if known[0] == capability[0] and known < capability]
    return _ARCHITECTURES[max(family)] if family else _LATER


def _positive(properties: Any, field: str) -> float:
    """A field of the device properties, or 0 where this torch does not have it."""
    value = getattr(properties, field, 0)
    return float(value) if isinstance(value, (int, float)) and value > 0 else 0.0
