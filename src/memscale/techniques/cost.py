"""What a technique tells the planner: what it can do with a block, in bytes and seconds.

Times are floating-point operations and bytes over the device's rates. They come from the profile and from tables, never
from a clock, so that a plan is the same on every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from memscale.config import Config
from memscale.execution_plan import Checkpointing, Precision
from memscale.hardware import Hardware
from memscale.profiler.profile import BlockProfile, ModelProfile, OpProfile

__all__ = ["BlockOption", "CostTerms", "Rates"]

# The share of the published peak that training code reaches. It scales all computation alike; only its ratio to
# memory traffic matters to a plan.
COMPUTE_EFFICIENCY = 0.5
LINK_EFFICIENCY = 0.8  # of the link's theoretical rate, from page-locked memory
HOST_BANDWIDTH = 20e9  # bytes per second of Adam in host memory; an assumption, since hosts are not described
OPTIMIZER_READS = 4  # Adam reads weight, gradient and two moments
OPTIMIZER_WRITES = 3  # and writes weight and both moments
# Fixed seconds of each transfer of a block: launching copies, or page faults and calls of the file system.
LINK_LATENCY = 30e-6
DISK_LATENCY = 2e-3


@dataclass(frozen=True)
class Rates:
    """The rates of a device and of the tier below it.

    Attributes:
        flops_per_second: of the device.
        bytes_per_second: of the device's own memory.
        h2d_per_second: bytes copied to the device from the tier below.
        d2h_per_second: bytes copied back.
        latency: fixed seconds of each transfer.
        below_is_disk: whether the tier below is the disk, not host memory.
    """

    flops_per_second: float
    bytes_per_second: float
    h2d_per_second: float
    d2h_per_second: float
    latency: float = LINK_LATENCY
    below_is_disk: bool = False

    @classmethod
    def of(cls, hardware: Hardware, precision: Precision | None = None) -> Rates:
        """Return the rates of a device that computes in a precision."""
        device, disk = hardware.device, hardware.disk
        rate = device.rates.fp32 if precision is None else device.rates.of(getattr(torch, precision.dtype))
        flops = rate * COMPUTE_EFFICIENCY
        link = float("inf") if device.kind == "cpu" else device.link_bandwidth * LINK_EFFICIENCY
        if device.kind == "cpu" or hardware.offloads_to_disk:
            h2d, d2h = min(link, disk.read_bandwidth), min(link, disk.write_bandwidth)
            return cls(flops, device.memory_bandwidth, h2d, d2h, DISK_LATENCY, below_is_disk=True)
        return cls(flops, device.memory_bandwidth, link, link)

    def seconds(self, flops: int, traffic: int) -> float:
        """Return the time of so many operations that read and write so many bytes."""
        return flops / self.flops_per_second + traffic / self.bytes_per_second

    def forward(self, block: BlockProfile) -> float:
        return self.seconds(block.forward_flops, block.forward_traffic)

    def backward(self, block: BlockProfile) -> float:
        return self.seconds(block.backward_flops, block.backward_traffic)

    def step(self, profile: ModelProfile) -> float:
        """Return the time of a whole plain step."""
        blocks = sum(self.forward(block) + self.backward(block) for block in profile.blocks)
        other = self.seconds(profile.other_flops, profile.other_traffic)
        return blocks + other + self.optimizer(profile.gradient_bytes)

    def optimizer(self, gradient_bytes: int) -> float:
        """Return the time of Adam on the device."""
        return (OPTIMIZER_READS + OPTIMIZER_WRITES) * gradient_bytes / self.bytes_per_second

    def optimizer_below(self, gradient_bytes: int) -> float:
        """Return the time of Adam on the tier below."""
        if not self.below_is_disk:
            return (OPTIMIZER_READS + OPTIMIZER_WRITES) * gradient_bytes / HOST_BANDWIDTH
        reads = OPTIMIZER_READS * gradient_bytes / self.h2d_per_second
        return reads + OPTIMIZER_WRITES * gradient_bytes / self.d2h_per_second


@dataclass(frozen=True)
class CostTerms:
    """What the cost of an option depends on beside the block.

    Attributes:
        rates: of the device.
        config: what the user allows.
        working_share: the size of a working copy as a share of the parameters': one half in 16 bits.
        prefetch: whether transfers overlap with computation.
    """

    rates: Rates
    config: Config
    working_share: float = 1.0
    prefetch: bool = False


@dataclass(frozen=True)
class BlockOption:
    """One thing that a technique can do with a block, and what it costs.

    A block has at most one option for its activations, and at most one for its parameters.

    Attributes:
        technique: the technique's name.
        seconds: what it adds to the time of a step.
        target: what it concerns. With an option for its parameters, a block's parameters, gradients and optimizer
            state are on the tier below, and a working copy is on the device while the block computes.
        held_bytes: what forward then holds for backward on the device, all calls together.
        returned_bytes: what comes back for backward, one call at a time.
        reruns_forward: whether backward runs forward again, from the block's input.
        keep: the operations whose outputs are not recomputed.
        settings: the technique's entry in the `LayerPlan`, if it has one.
        reason: what is done, in words and numbers; the planner adds to it why.
    """

    technique: str
    seconds: float
    target: Literal["activations", "parameters"] = "activations"
    held_bytes: int = 0
    returned_bytes: int = 0
    reruns_forward: bool = False
    keep: tuple[OpProfile, ...] = ()
    settings: Checkpointing | None = None
    reason: str = ""
