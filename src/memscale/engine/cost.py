"""Predicted time: floating-point operations and bytes moved over the device's rates.

Figures come from the profile and from tables, never from a stop-watch, so that a plan is the same on every run.
"""

from __future__ import annotations

from dataclasses import dataclass

from memscale.hardware import DeviceSpec
from memscale.profiler.profile import BlockProfile, ModelProfile

# The share of the published peak that training code reaches. It scales all compute alike; only its ratio to
# memory traffic matters to a plan.
COMPUTE_EFFICIENCY = 0.5
LINK_EFFICIENCY = 0.8  # of the link's theoretical rate, from pinned memory
HOST_BANDWIDTH = (
    20e9  # bytes per second that Adam reaches in host memory; an assumption, as hosts are not described
)
# Adam reads weight, gradient and two moments and writes weight and both moments.
OPTIMIZER_PASSES = 7


@dataclass(frozen=True)
class Clock:
    """Seconds of the device's work."""

    flops_per_second: float
    bytes_per_second: float
    link_per_second: float

    @classmethod
    def of(cls, device: DeviceSpec) -> Clock:
        return cls(
            device.rates.fp32 * COMPUTE_EFFICIENCY,
            device.memory_bandwidth,
            device.link_bandwidth * LINK_EFFICIENCY,
        )

    def seconds(self, flops: int, traffic: int) -> float:
        return flops / self.flops_per_second + traffic / self.bytes_per_second

    def forward(self, block: BlockProfile) -> float:
        return self.seconds(block.forward_flops, block.forward_traffic)

    def recompute(self, block: BlockProfile, kept_flops: int) -> float:
        """Running a block's forward again without the operations whose results were kept."""
        return self.seconds(max(0, block.forward_flops - kept_flops * block.calls), block.forward_traffic)

    def home(self, block: BlockProfile) -> float:
        """What a step takes longer when a block's parameters are at home on the tier below.

        They go up twice (forward, backward), their gradients come down once, and the optimizer steps in host
        memory. Nothing is overlapped here: an upper bound.
        """
        up = 2 * block.used_bytes * max(1, block.calls)
        stepping = OPTIMIZER_PASSES * block.gradient_bytes * (1 / HOST_BANDWIDTH - 1 / self.bytes_per_second)
        return (up + block.gradient_bytes) / self.link_per_second + max(0.0, stepping)

    def step(self, profile: ModelProfile) -> float:
        """A whole step without MemScale."""
        blocks = sum(
            self.forward(block) + self.seconds(block.backward_flops, block.backward_traffic)
            for block in profile.blocks
        )
        other = self.seconds(profile.other_flops, profile.other_traffic)
        optimizer = self.seconds(0, OPTIMIZER_PASSES * profile.gradient_bytes)
        return blocks + other + optimizer
