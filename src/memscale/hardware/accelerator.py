"""Accelerators other than CUDA: whatever `torch.accelerator` and the device's own torch module answer.

Each backend answers a different part of the questions. So every question is asked in the ways there are, one
after the other; what a backend does not answer is assumed with caution, and the reason is kept in the notes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from memscale.errors import HardwareError
from memscale.hardware.cuda import published_device
from memscale.hardware.device import DeviceSpec
from memscale.hardware.gpus import find_gpu
from memscale.hardware.rates import Rates

if TYPE_CHECKING:
    import torch

    from memscale.hardware.gpu_table import GpuSpec

__all__ = ["accelerator_device"]

T = TypeVar("T")

# What a backend raises where it does not answer: nothing of that name, a call with other arguments, a device
# that is not there, an error from its C++ side (NotImplementedError is a RuntimeError).
_UNANSWERED = (AttributeError, TypeError, ValueError, KeyError, AssertionError, RuntimeError)


@dataclass(frozen=True, slots=True)
class _Assumed:
    """Figures for a kind of accelerator of which no table is kept: those of a small one of its kind."""

    fp32: float
    sixteen_bit_ratio: float
    memory_bandwidth: float
    link_bandwidth: float


_ASSUMED = {
    "mps": _Assumed(3e12, 1.0, 100e9, 50e9),  # shares its memory with the host: a "transfer" is a copy in RAM
    "xpu": _Assumed(15e12, 4.0, 400e9, 15.75e9),
}
_ASSUMED_OTHER = _Assumed(10e12, 2.0, 300e9, 15.75e9)


@dataclass(slots=True)
class _Questions:
    """Asks a backend, and keeps why it did not answer."""

    notes: list[str] = field(default_factory=list)

    def ask(self, what: str, *ways: Callable[[], T]) -> T | None:
        reasons = []
        for way in ways:
            try:
                return way()
            except _UNANSWERED as error:
                message = str(error).partition("\n")[0][:120]
                reasons.append(f"{type(error).__name__}: {message}")
        self.notes.append(f"{what} not answered ({'; '.join(reasons)})")
        return None


def accelerator_device(device: torch.device) -> tuple[DeviceSpec, int]:
    """Describe an accelerator that is not CUDA, and count its kind.

    Raises:
        HardwareError: The device's backend does not say how much memory it has; the message has its reasons.
    """
    import torch

    questions = _Questions()
    module: Any = questions.ask(f"torch.{device.type}", lambda: torch.get_device_module(device))
    index = device.index
    if index is None:
        index = questions.ask("current device", torch.accelerator.current_device_index) or 0
        device = torch.device(device.type, index)
    memory = questions.ask(
        "memory",
        lambda: _pair(torch.accelerator.get_memory_info(device)),
        lambda: _pair(module.mem_get_info(index)),
        lambda: _from_properties(module, index),
        lambda: _from_mps(module),
    )
    if memory is None:
        raise HardwareError(
            f"{device} does not say how much memory it has: {'; '.join(questions.notes)}. Plan for a GPU "
            "of its size instead: memscale.plan(..., hardware='8GiB')."
        )
    free, total = memory
    free = max(0, min(free, total))
    name = questions.ask("name", lambda: str(module.get_device_name(index))) or device.type
    count = questions.ask("device count", lambda: int(module.device_count()))
    gpu = _in_table(name, total)
    if gpu is not None:
        spec = published_device(
            gpu,
            kind=device.type,
            name=name,
            index=index,
            total_bytes=total,
            free_bytes=free,
            compute_capability=gpu.compute_capability,
        )
    else:
        dtypes = questions.ask("dtypes", lambda: _dtypes(device), lambda: _dtypes_from_module(module))
        spec = _assumed_device(device, name, total, free, dtypes or frozenset())
    return replace(spec, notes=tuple(questions.notes)), max(1, count or 1)


def _in_table(name: str, total: int) -> GpuSpec | None:
    """The GPU of that name: a simulated device bears the name of the one it stands for."""
    try:
        return find_gpu(name, memory_bytes=total)
    except HardwareError:  # a table of NVIDIA and AMD has no other vendor's names: the usual case
        return None


def _assumed_device(
    device: torch.device, name: str, total: int, free: int, dtypes: frozenset[torch.dtype]
) -> DeviceSpec:
    import torch

    assumed = _ASSUMED.get(device.type, _ASSUMED_OTHER)
    sixteen_bit = assumed.fp32 * assumed.sixteen_bit_ratio
    supports_bf16 = torch.bfloat16 in dtypes
    supports_fp16 = torch.float16 in dtypes
    return DeviceSpec(
        name=name,
        kind=device.type,
        index=device.index,
        total_bytes=total,
        free_bytes=free,
        compute_capability=None,
        supports_bf16=supports_bf16,
        supports_fp16=supports_fp16,
        computes_bf16_fast=supports_bf16,
        computes_fp16_fast=supports_fp16,
        rates=Rates(
            fp32=assumed.fp32, tf32=None, fp16=sixteen_bit, bf16=sixteen_bit if supports_bf16 else None
        ),
        memory_bandwidth=assumed.memory_bandwidth,
        link_bandwidth=assumed.link_bandwidth,
        rates_source="estimated",
    )


def _pair(answer: Any) -> tuple[int, int]:
    free, total = answer
    return int(free), int(total)


def _from_properties(module: Any, index: int) -> tuple[int, int]:
    total = int(module.get_device_properties(index).total_memory)
    return total - int(module.memory_allocated(index)), total


def _from_mps(module: Any) -> tuple[int, int]:
    total = int(module.recommended_max_memory())
    return total - int(module.driver_allocated_memory()), total


def _dtypes(device: torch.device) -> frozenset[torch.dtype]:
    import torch

    return frozenset(torch.accelerator.get_device_capability(device)["supported_dtypes"])


def _dtypes_from_module(module: Any) -> frozenset[torch.dtype]:
    import torch

    # A backend that knows the question for bf16 at all computes in fp16.
    return frozenset({torch.float16, torch.bfloat16} if module.is_bf16_supported() else {torch.float16})
