"""What a machine is made of: the device that computes, the host behind it, and the disk behind that.

How fast a device computes, by the type of number it computes with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from memscale.errors import HardwareError
from memscale.units import format_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceSpec", "DiskSpec", "Hardware", "HostSpec", "Rates", "RatesSource"]

RatesSource: TypeAlias = Literal["published", "estimated"]


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The device that computes.

    Attributes:
        name: As its driver, or the table of GPUs, calls it.
        kind: The torch device type ("cuda", "cpu", "mps", "xpu", ...), or "virtual" for a GPU that is not
            there.
        index: Which of several; None where there is only one of its kind.
        total_bytes: Its memory. For the CPU: the RAM that the control group allows.
        free_bytes: What of it nobody held when it was looked at.
        compute_capability: NVIDIA's (major, minor); None for everything else.
        supports_bf16: Whether bf16 products run natively and safely.
        supports_fp16: The same for fp16.
        computes_bf16_fast: Whether bf16 is at least as fast as fp32. Where it is not, bf16 saves memory and
            costs time.
        computes_fp16_fast: The same for fp16.
        rates: FLOP/s by dtype.
        memory_bandwidth: Of the device memory, in bytes per second.
        link_bandwidth: To the tier below (host RAM for a GPU, disk for the CPU), in bytes per second, one
            direction.
        rates_source: "published" if the rates are the vendor's, "estimated" if they follow from an
            assumption.
        notes: What a reader should know: what could not be asked, and why; what was assumed instead.

    Example:
        >>> from memscale.hardware import virtual_hardware
        >>> device = virtual_hardware("T4").device
        >>> device.supports_bf16, device.computes_fp16_fast, device.rates_source
        (False, True, 'published')
    """

    name: str
    kind: str
    index: int | None
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int] | None
    supports_bf16: bool
    supports_fp16: bool
    computes_bf16_fast: bool
    computes_fp16_fast: bool
    rates: Rates
    memory_bandwidth: float
    link_bandwidth: float
    rates_source: RatesSource
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """Name and size: what does not change while the machine runs."""
        return f"{self.name} ({format_bytes(self.total_bytes)})"

    def __post_init__(self) -> None:
        if self.total_bytes <= 0:
            raise HardwareError(
                f"{self.name} is said to have {self.total_bytes} bytes: a device has more than none."
            )
        if not 0 <= self.free_bytes <= self.total_bytes:
            raise HardwareError(
                f"{self.name} is said to have {self.free_bytes} bytes free of {self.total_bytes}: "
                "free memory is between none and all of it."
            )


@dataclass(frozen=True, slots=True)
class HostSpec:
    """The memory and the cores of the host, as far as this process may use them.

    Attributes:
        total_ram_bytes: The RAM, or the tightest limit of the control groups this process is in.
        available_ram_bytes: What could be allocated now without swapping and without meeting a limit.
        cores: The cores this process may run on, by affinity and by quota.

    Example:
        >>> HostSpec(total_ram_bytes=64 * 2**30, available_ram_bytes=60 * 2**30, cores=8).cores
        8
    """

    total_ram_bytes: int
    available_ram_bytes: int
    cores: int


@dataclass(frozen=True, slots=True)
class DiskSpec:
    """Where the disk tier is, and how much it holds.

    Attributes:
        directory: The directory for offloaded tensors; it need not exist yet.
        free_bytes: What an unprivileged process may still write there.
        total_bytes: The size of the file system.
        writable: Whether this process may write there.
        read_bandwidth: In bytes per second: an assumption, never a measurement.
        write_bandwidth: The same for writing.
        filesystem: Its type ("ext4", "xfs", "tmpfs", ...); None where the system does not say.
        ram_backed: Whether the file system lives in RAM, so that what goes there frees none.

    Example:
        >>> from memscale.hardware import find_disk
        >>> find_disk("offloaded").directory.name
        'offloaded'
    """

    directory: Path
    free_bytes: int
    total_bytes: int
    writable: bool
    read_bandwidth: float
    write_bandwidth: float
    filesystem: str | None = None
    ram_backed: bool = False


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device and the tiers below it.

    Attributes:
        device: The device that computes.
        device_count: How many of its kind the machine has.
        host: The host.
        disk: The disk tier.
        past_host: What leaves an accelerator goes to disk, past a host that has too little memory for it.

    Example:
        >>> from memscale.hardware import virtual_hardware
        >>> print(virtual_hardware("RTX 3090").summary())
        NVIDIA GeForce RTX 3090 (virtual, 24.0 GiB, sm_86, bf16) · host 64.0 GiB · disk 1.0 TiB
    """

    device: DeviceSpec
    device_count: int
    host: HostSpec
    disk: DiskSpec
    past_host: bool = False

    @property
    def offloads_to_disk(self) -> bool:
        """Whether what leaves the device goes to disk: on a CPU, whose memory is the host's, always."""
        return self.past_host or self.device.kind == "cpu"

    @property
    def is_virtual(self) -> bool:
        """Whether this describes a GPU that is not there."""
        return self.device.kind == "virtual"

    def summary(self) -> str:
        """One line for the log: the device, the host and the disk."""
        tiers = [self._device_summary()]
        if self.device.kind != "cpu":  # there the device is the host
            tiers.append(f"host {format_bytes(self.host.total_ram_bytes)}")
        disk = f"disk {format_bytes(self.disk.free_bytes)}"
        if not self.is_virtual:
            disk += f" at {self.disk.directory}"
        if not self.disk.writable:
            disk += " (not writable)"
        elif self.disk.ram_backed:
            disk += " (in RAM)"
        tiers.append(disk)
        return " · ".join(tiers)

    def _device_summary(self) -> str:
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
        facts.append(_sixteen_bits(device))
        several = f"{self.device_count} × " if self.device_count > 1 else ""
        return f"{several}{device.name} ({', '.join(facts)})"


def _sixteen_bits(device: DeviceSpec) -> str:
    """The 16-bit type worth using on a device, bf16 first as it needs no loss scaling."""
    if device.computes_bf16_fast:
        return "bf16"
    if device.computes_fp16_fast:
        return "fp16"
    return "no fast 16-bit"


# A dtype without hardware still runs: torch converts to fp32, computes, and converts back. The tensors cross
# the memory twice for it, which halves the rate (bf16 on Turing and Volta behaves so).
_EMULATED = 0.5


@dataclass(frozen=True, slots=True)
class Rates:
    """Floating point operations per second of a dense matrix product, by dtype.

    Attributes:
        fp32: IEEE single precision.
        tf32: fp32 tensors multiplied in TF32, which a user allows with `torch.set_float32_matmul_precision`;
            None where the device has no TF32.
        fp16: Half precision with fp32 accumulation where the device has it.
        bf16: None where the device has no bf16 arithmetic and torch would emulate it.

    Example:
        >>> import torch
        >>> Rates(fp32=8.1e12, tf32=None, fp16=65e12, bf16=None).of(torch.float16)
        65000000000000.0
    """

    fp32: float
    tf32: float | None
    fp16: float
    bf16: float | None

    def __post_init__(self) -> None:
        for field, rate in (
            ("fp32", self.fp32),
            ("tf32", self.tf32),
            ("fp16", self.fp16),
            ("bf16", self.bf16),
        ):
            if rate is not None and not rate > 0:
                raise HardwareError(
                    f"The {field} rate is {rate!r} FLOP/s: a rate must be above zero, or None."
                )

    def of(self, dtype: torch.dtype) -> float:
        """The rate at which matrices of `dtype` are multiplied.

        A dtype without a figure of its own (float64, integers) answers the fp32 rate: plans compare times,
        and what all of them share cancels out.

        Example:
            >>> import torch
            >>> Rates(fp32=10e12, tf32=None, fp16=20e12, bf16=None).of(torch.bfloat16)  # emulated
            5000000000000.0
        """
        # By name, so that a table of GPUs can be read without importing torch.
        match str(dtype):
            case "torch.float16":
                return self.fp16
            case "torch.bfloat16":
                return self.fp32 * _EMULATED if self.bf16 is None else self.bf16
            case _:
                return self.fp32
