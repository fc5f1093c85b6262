"""Descriptions of a machine: the device that computes and its rates, the host, and the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memscale.units import format_bytes

if TYPE_CHECKING:
    import torch

# A dtype without hardware still runs: torch converts to fp32, computes, and converts back, which moves the tensors
# twice (bf16 on Turing and Volta).
_EMULATED_RATE = 0.5
_HOST_STEPS = 16  # into which the host's memory is divided for plans


@dataclass(frozen=True, slots=True)
class Rates:
    """Floating point operations per second of a dense matrix product, by dtype; None where the device has none.

    Example:
        >>> import torch
        >>> Rates(fp32=8.1e12, fp16=65e12, bf16=None).of(torch.float16)
        65000000000000.0
    """

    fp32: float  # IEEE single precision
    fp16: float | None  # with fp32 accumulation where the device has it
    bf16: float | None
    tf32: float | None = None  # fp32 tensors in TF32, which torch.set_float32_matmul_precision allows

    def of(self, dtype: torch.dtype) -> float:
        """Return the rate at which matrices of `dtype` are multiplied; the fp32 rate for float64 and integers."""
        # By name, so that a table of GPUs can be read without importing torch.
        rate = {"torch.float16": self.fp16, "torch.bfloat16": self.bf16}.get(str(dtype), self.fp32)
        return self.fp32 * _EMULATED_RATE if rate is None else rate


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device that computes.

    Example:
        >>> from memscale.hardware import virtual_hardware
        >>> device = virtual_hardware("T4").device
        >>> device.supports_bf16, device.computes_fp16_fast
        (False, True)
    """

    name: str  # as its driver or the table of GPUs names it
    kind: str  # the torch device type ("cuda", "cpu", "xpu", ...), or "virtual" for a GPU that is not there
    index: int | None  # None where there is only one of its kind
    total_bytes: int  # for the CPU: the RAM that the control group allows
    free_bytes: int  # when it was read
    compute_capability: tuple[int, int] | None  # NVIDIA's; None for everything else
    rates: Rates
    memory_bandwidth: float  # bytes per second
    link_bandwidth: float  # to the tier it offloads to (host RAM; of the CPU disk), one way, bytes a second
    notes: tuple[str, ...] = ()  # what could not be read, why, and what was assumed instead
    # What this process can have: without CUDA's context and other processes, within torch's own limit. None: all.
    capacity_bytes: int | None = None

    @property
    def supports_bf16(self) -> bool:
        """Whether bf16 products run natively and safely."""
        return self.rates.bf16 is not None

    @property
    def supports_fp16(self) -> bool:
        """Whether fp16 products run natively and safely."""
        return self.rates.fp16 is not None

    @property
    def computes_bf16_fast(self) -> bool:
        """Whether bf16 is at least as fast as fp32."""
        return self.rates.bf16 is not None and self.rates.bf16 >= self.rates.fp32

    @property
    def computes_fp16_fast(self) -> bool:
        """Whether fp16 is at least as fast as fp32."""
        return self.rates.fp16 is not None and self.rates.fp16 >= self.rates.fp32

    def describe(self) -> str:
        """Return name and size, which do not change while the machine runs."""
        return f"{self.name} ({format_bytes(self.total_bytes)})"


@dataclass(frozen=True, slots=True)
class HostSpec:
    """The memory and the cores of the host that this process may use."""

    total_ram_bytes: int  # the RAM, or the tightest limit of the control groups this process is in
    available_ram_bytes: int  # what could be allocated now without swapping and within the limit
    cores: int  # by affinity and by quota
    processes: int = 1  # of one job on this host, which share its memory

    @property
    def offload_bytes(self) -> int:
        """What one process may offload to it where the Config does not say, in steps so that plans do not waver.

        It is what is available, less a reserve for what others will allocate: as much again as they hold now, at most
        a sixteenth of the RAM. What no plan may have is rounded up to sixteenths.

        Example:
            >>> HostSpec(64 * 2**30, 50 * 2**30, cores=8).offload_bytes // 2**30
            44
        """
        step = max(1, self.total_ram_bytes // _HOST_STEPS)
        others = self.total_ram_bytes - self.available_ram_bytes
        taken = -(-(others + min(others, step)) // step) * step
        return max(0, self.total_ram_bytes - taken) // self.processes

    @property
    def page_locked_bytes(self) -> int:
        """What one process may page-lock where the Config does not say: half of what it may offload."""
        return self.offload_bytes // 2


@dataclass(frozen=True, slots=True)
class DiskSpec:
    """The directory of the disk tier."""

    directory: Path  # need not exist yet
    free_bytes: int  # what an unprivileged process can still write there
    writable: bool
    read_bandwidth: float  # bytes per second: an assumption, unless `memscale.calibrate` has measured it
    write_bandwidth: float
    ram_backed: bool = False  # the file system is in RAM, so that offloading to it frees none


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Rates that `memscale.calibrate` measured: what code reaches, where tables have what hardware could do.

    None where the device has no such thing.
    """

    date: str
    fp32: float  # FLOP/s of a matrix product
    memory_bandwidth: float  # of the device's own memory, bytes read and written per second
    host_adam_loop: float  # seconds for each byte of fp32 parameters, by torch's loop over parameters
    host_adam_fused: float  # the same by torch's fused implementation
    tf32: float | None = None
    half: float | None = None  # in bf16, or in fp16 where the device has no bf16
    h2d: float | None = None  # bytes per second from page-locked memory of the host
    d2h: float | None = None
    pageable_h2d: float | None = None  # from memory that is not page-locked
    pageable_d2h: float | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, its host and its disk.

    Example:
        >>> from memscale.hardware import virtual_hardware
        >>> print(virtual_hardware("RTX 3090").summary())
        NVIDIA GeForce RTX 3090 (virtual, 24.0 GiB, sm_86, bf16) · host 64.0 GiB · disk 1.0 TiB
    """

    device: DeviceSpec
    device_count: int  # of its kind in the machine
    host: HostSpec
    disk: DiskSpec
    past_host: bool = False  # an accelerator offloads to disk because the host has too little memory
    measured: MeasuredRates | None = None  # None: rates are those of tables

    @property
    def offloads_to_disk(self) -> bool:
        """Whether the device offloads to disk; a CPU, whose memory is the host's, always does."""
        return self.past_host or self.device.kind == "cpu"

    @property
    def is_virtual(self) -> bool:
        """Whether this describes a GPU that is not there."""
        return self.device.kind == "virtual"

    def describe(self) -> str:
        """Return the device's name and size, and when its rates were measured, if they were."""
        calibrated = "" if self.measured is None else f", calibrated on {self.measured.date}"
        return f"{self.device.describe()}{calibrated}"

    def summary(self) -> str:
        """Return one line for the log: the device, the host, the disk, and when rates were measured, if they were."""
        device = self.device
        facts = ["virtual"] if self.is_virtual else []
        if device.kind == "cpu":
            facts.append(f"{self.host.cores} core{'s' if self.host.cores > 1 else ''}")
        facts.append(format_bytes(device.total_bytes))
        if device.free_bytes != device.total_bytes:
            facts.append(f"{format_bytes(device.free_bytes)} free")
        if device.compute_capability is not None:
            major, minor = device.compute_capability
            facts.append(f"sm_{major}{minor}")
        # bf16 first: it needs no loss scaling.
        fast = "bf16" if device.computes_bf16_fast else "fp16" if device.computes_fp16_fast else None
        facts.append(fast or "no fast 16-bit")
        several = f"{self.device_count} × " if self.device_count > 1 else ""
        tiers = [f"{several}{device.name} ({', '.join(facts)})"]
        if device.kind != "cpu":  # there the device is the host
            tiers.append(f"host {format_bytes(self.host.total_ram_bytes)}")
            if self.host.available_ram_bytes != self.host.total_ram_bytes:
                tiers[-1] += f" ({format_bytes(self.host.available_ram_bytes)} free)"
        disk = f"disk {format_bytes(self.disk.free_bytes)}"
        if not self.is_virtual:
            disk += f" at {self.disk.directory}"
        if not self.disk.writable:
            disk += " (not writable)"
        elif self.disk.ram_backed:
            disk += " (in RAM)"
        tiers.append(disk)
        if self.measured is not None:
            tiers.append(f"calibrated on {self.measured.date}")
        return " · ".join(tiers)
