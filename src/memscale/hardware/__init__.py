"""What there is to compute with: the device, the host, the disk, and the table of GPUs."""

from __future__ import annotations

from memscale.hardware.detect import detect, gpu_or_size, virtual_hardware
from memscale.hardware.gpus import GpuSpec, find_gpu, list_gpus
from memscale.hardware.host import find_disk, read_host
from memscale.hardware.specs import DeviceSpec, DiskSpec, Hardware, HostSpec, MeasuredRates, Rates

__all__ = [
    "DeviceSpec",
    "DiskSpec",
    "GpuSpec",
    "Hardware",
    "HostSpec",
    "MeasuredRates",
    "Rates",
    "detect",
    "find_disk",
    "find_gpu",
    "gpu_or_size",
    "list_gpus",
    "read_host",
    "virtual_hardware",
]
