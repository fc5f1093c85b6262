"""Describe the hardware of this machine, or a GPU that is not here but planned for."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from memscale.errors import ConfigTypeError, HardwareError, shown
from memscale.hardware.devices import accelerator_device, cpu_device, cuda_device, published_device, read_cpu
from memscale.hardware.gpus import GpuSpec, find_gpu
from memscale.hardware.host import find_disk, read_host
from memscale.hardware.specs import DeviceSpec, DiskSpec, Hardware, HostSpec
from memscale.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["detect", "virtual_hardware"]

# The host of a virtual GPU: fixed figures, so that a plan for it is the same on every machine.
_VIRTUAL_HOST_BYTES = 64 * 2**30
_VIRTUAL_CORES = 8
_VIRTUAL_DISK = DiskSpec(
    directory=Path("memscale-virtual-disk"),
    free_bytes=2**40,
    total_bytes=2**40,
    writable=True,
    read_bandwidth=2.0e9,
    write_bandwidth=1.0e9,
)
# Its rates are those of a virtual GPU of which only the size is known: published results are for this card.
_REFERENCE_GPU = "NVIDIA GeForce RTX 3090"

_SIZE = re.compile(r"\s*[+-]?[\d.]+\s*[kmgtpe]?i?b\s*", re.IGNORECASE)


def detect(
    device: torch.device | str | None = None, *, offload_dir: str | os.PathLike[str] | None = None
) -> Hardware:
    """Describe the hardware of this machine.

    Nothing is timed: rates come from the table of GPUs or from documented assumptions, so that a machine gets the
    same plan every time. Without an accelerator the CPU is the device, and the disk the tier below it.

    Args:
        device: The device to describe, such as "cuda:1" or "cpu". By default the current CUDA device, else another
            accelerator that torch knows, else the CPU.
        offload_dir: The directory of the disk tier; by default as `find_disk` chooses it.

    Raises:
        HardwareError: There is no such device, or it does not say how much memory it has.

    Example:
        >>> hardware = detect("cpu")
        >>> hardware.device.kind, hardware.device_count
        ('cpu', 1)
    """
    host, disk = read_host(), find_disk(offload_dir)
    if device is None:
        spec, count = _default_device(host, disk)
    else:
        spec, count = _describe(_parse(device), host, disk)
    return Hardware(device=spec, device_count=count, host=host, disk=disk)


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
        >>> virtual_hardware(6 * 10**9).device.rates_source
        'estimated'
    """
    host_ram = _VIRTUAL_HOST_BYTES if host_bytes is None else parse_bytes(host_bytes, field="host_bytes")
    return Hardware(
        device=_virtual_device(gpu),
        device_count=1,
        host=HostSpec(total_ram_bytes=host_ram, available_ram_bytes=host_ram, cores=_VIRTUAL_CORES),
        disk=_VIRTUAL_DISK,
    )


def _virtual_device(gpu: str | GpuSpec | int) -> DeviceSpec:
    if isinstance(gpu, bool) or not isinstance(gpu, (str, GpuSpec, int)):
        raise ConfigTypeError(
            f"hardware={shown(gpu)} is a {type(gpu).__name__}, which describes no GPU: give a name such as "
            "'RTX 3090', an entry of memscale.hardware.list_gpus(), or a size: '8GiB', or a number of bytes."
        )
    if isinstance(gpu, int) or (isinstance(gpu, str) and _SIZE.fullmatch(gpu)):
        size = parse_bytes(gpu, field="hardware")
        device = _virtual_device(find_gpu(_REFERENCE_GPU))
        return replace(
            device,
            name=f"GPU of {format_bytes(size)}",
            total_bytes=size,
            free_bytes=size,
            rates_source="estimated",
            notes=(f"only the size is known: rates are those of the {_REFERENCE_GPU}",),
        )
    spec = find_gpu(gpu) if isinstance(gpu, str) else gpu
    return published_device(
        spec,
        kind="virtual",
        name=spec.name,
        index=None,
        total_bytes=spec.memory_bytes,
        free_bytes=spec.memory_bytes,
        compute_capability=spec.compute_capability,
    )


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


def _default_device(host: HostSpec, disk: DiskSpec) -> tuple[DeviceSpec, int]:
    import torch

    if torch.cuda.is_available():
        return _describe(torch.device("cuda"), host, disk)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type == "cpu":
        return cpu_device(read_cpu(), host, disk), 1
    try:
        return _describe(accelerator, host, disk)
    except HardwareError as error:
        # torch counts a backend that was registered from Python, to test or to simulate, as an accelerator.
        cpu = cpu_device(read_cpu(), host, disk)
        return replace(cpu, notes=(*cpu.notes, f"torch names {accelerator} as the accelerator; {error}")), 1


def _describe(device: torch.device, host: HostSpec, disk: DiskSpec) -> tuple[DeviceSpec, int]:
    import torch

    if device.type == "cpu":
        return cpu_device(read_cpu(), host, disk), 1
    if device.type == "meta":
        raise HardwareError(
            "device='meta' has no memory and computes nothing: name the device that the model is to train "
            "on, such as 'cuda:0', or a GPU with the hardware argument of memscale.plan."
        )
    if device.type == "cuda":
        index = device.index
        if index is None:
            index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return cuda_device(index), torch.cuda.device_count()
    return accelerator_device(device)
