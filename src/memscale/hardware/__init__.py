"""What there is to compute with: the device, the host, the disk, and the table of GPUs."""

from __future__ import annotations

from memscale.hardware.detect import detect, virtual_hardware
from memscale.hardware.device import DeviceSpec, DiskSpec, Hardware, HostSpec, RatesSource
from memscale.hardware.disk import find_disk
from memscale.hardware.gpu_table import GpuSpec
from memscale.hardware.gpus import find_gpu, list_gpus
from memscale.hardware.host import read_host
from memscale.hardware.rates import Rates

__all__ = [
    "DeviceSpec",
    "DiskSpec",
    "GpuSpec",
    "Hardware",
    "HostSpec",
    "Rates",
    "RatesSource",
    "detect",
    "find_disk",
    "find_gpu",
    "list_gpus",
    "read_host",
    "virtual_hardware",
]
