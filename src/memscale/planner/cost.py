"""Predicted time: floating-point operations and bytes moved over the device's rates.

Figures come from the profile and from tables, never from a stop-watch, so that a plan is the same on every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memscale.execution_plan import Precision
from memscale.hardware import Hardware
from memscale.profiler.profile import BlockProfile, ModelProfile

# The share of the published peak that training code reaches. It scales all compute alike; only its ratio to
# memory traffic matters to a plan.
COMPUTE_EFFICIENCY = 0.5
LINK_EFFICIENCY = 0.8  # of the link's theoretical rate, from pinned memory
HOST_BANDWIDTH = (
    20e9  # bytes per second that Adam reaches in host memory; an assumption, as hosts are not described
)
# Adam reads weight, gradient and two moments and writes weight and both moments.
OPTIMIZER_READS = 4
OPTIMIZER_WRITES = 3
# What each transfer of a block takes besides: launching copies, or page faults and calls of the file system.
LINK_LATENCY = 30e-6
DISK_LATENCY = 2e-3


@dataclass(frozen=True)
class Clock:
    """Seconds of the device's work.

    Attributes:
        flops_per_second: what it computes.
        bytes_per_second: what its own memory moves.
        up_per_second: what comes up from the tier below.
        down_per_second: what goes down to it.
        latency: what each transfer takes besides.
        below_is_disk: the optimizer steps through the disk, not in host memory.
    """

    flops_per_second: float
    bytes_per_second: float
    up_per_second: float
    down_per_second: float
    latency: float = LINK_LATENCY
    below_is_disk: bool = False

    @classmethod
    def of(cls, hardware: Hardware, precision: Precision | None = None) -> Clock:
        device, disk = hardware.device, hardware.disk
        rate = device.rates.fp32 if precision is None else device.rates.of(getattr(torch, precision.dtype))
        flops = rate * COMPUTE_EFFICIENCY
        if device.kind == "cpu":
            return cls(
                flops,
                device.memory_bandwidth,
                disk.read_bandwidth,
                disk.write_bandwidth,
                DISK_LATENCY,
                below_is_disk=True,
            )
        link = device.link_bandwidth * LINK_EFFICIENCY
        if hardware.offloads_to_disk:
            up, down = min(link, disk.read_bandwidth), min(link, disk.write_bandwidth)
            return cls(flops, device.memory_bandwidth, up, down, DISK_LATENCY, below_is_disk=True)
        return cls(flops, device.memory_bandwidth, link, link)

    def seconds(self, flops: int, traffic: int) -> float:
        return flops / self.flops_per_second + traffic / self.bytes_per_second

    def forward(self, block: BlockProfile) -> float:
        return self.seconds(block.forward_flops, block.forward_traffic)

    def recompute(self, block: BlockProfile, kept_flops: int) -> float:
        """Running a block's forward again without the operations whose results were kept."""
        return self.seconds(max(0, block.forward_flops - kept_flops * block.calls), block.forward_traffic)

    def home(self, block: BlockProfile, *, share: float = 1.0, ahead: bool = False) -> float:
        """What a step takes longer when a block's parameters are at home on the tier below.

        They go up twice (forward, backward), their gradients come down once, and the optimizer steps below.

        Args:
            block: the block.
            share: of the parameters' bytes that moves: 16-bit copies are half.
            ahead: transfers run beside the computation; what is left is what takes longer than that.
        """
        up = share * block.used_bytes / self.up_per_second + self.latency
        forward = up * max(1, block.calls)
        backward = (
            up * max(1, block.calls) + share * block.gradient_bytes / self.down_per_second + self.latency
        )
        if ahead:
            forward = max(self.latency, forward - self.forward(block))
            backward = max(self.latency, backward - self.backward(block))
        return forward + backward + self._stepping_below(block)

    def down(self, nbytes: int, *, ahead: bool = False) -> float:
        """Sending what a block leaves for backward down, and bringing it up again."""
        if ahead:
            return 2 * self.latency
        return nbytes / self.down_per_second + nbytes / self.up_per_second + 2 * self.latency

    def _stepping_below(self, block: BlockProfile) -> float:
        size = block.gradient_bytes
        here = (OPTIMIZER_READS + OPTIMIZER_WRITES) * size / self.bytes_per_second
        if self.below_is_disk:
            below = (
                OPTIMIZER_READS * size / self.up_per_second + OPTIMIZER_WRITES * size / self.down_per_second
            )
        else:
            below = (OPTIMIZER_READS + OPTIMIZER_WRITES) * size / HOST_BANDWIDTH
        return max(0.0, below - here)

    def backward(self, block: BlockProfile) -> float:
        return self.seconds(block.backward_flops, block.backward_traffic)

    def step(self, profile: ModelProfile) -> float:
        """A whole step without MemScale."""
        blocks = sum(self.forward(block) + self.backward(block) for block in profile.blocks)
        other = self.seconds(profile.other_flops, profile.other_traffic)
        optimizer = self.seconds(0, (OPTIMIZER_READS + OPTIMIZER_WRITES) * profile.gradient_bytes)
        return blocks + other + optimizer
