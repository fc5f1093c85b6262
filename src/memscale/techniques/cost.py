"""What a technique tells the planner: what it can do with a block, in bytes and seconds.

Times are floating-point operations and bytes over the device's rates. They come from the profile and from tables, never
from a clock, so that a plan is the same on every run. `docs/step_times.md` compares them with published measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from memscale.config import Config
from memscale.execution_plan import Checkpointing, StepTime
from memscale.hardware import Hardware
from memscale.profiler.profile import BlockProfile, ModelProfile, OpProfile

COMPUTE_EFFICIENCY = 0.65  # of the published rate, which training code reaches
MEMORY_EFFICIENCY = 0.8  # of the published bandwidth of device memory, which pointwise kernels reach
LINK_EFFICIENCY = 0.83  # of the link's theoretical rate, page-locked (torchtitan: 53.1 of 64 GB/s)
PAGEABLE_BANDWIDTH = 11e9  # bytes per second from memory that is not page-locked (torchtitan: 11.2 GB/s)
# Seconds of Adam on the host for each byte of fp32 parameters: torch's loop over parameters takes 2.5 to 10 ns a
# parameter (DeepSpeed PR 735: 4.8), its fused implementation 0.7 to 1.1.
HOST_ADAM_LOOP = 4.8e-9 / 4
HOST_ADAM_FUSED = 0.9e-9 / 4
FOREACH_ACCESSES = 22  # reads and writes of torch's foreach AdamW, for each byte of parameters
OPTIMIZER_READS = 4  # Adam reads weight, gradient and two moments
OPTIMIZER_WRITES = 3  # and writes weight and both moments
# Fixed seconds of each transfer of a tensor: launching a copy, or page faults and calls of the file system.
LINK_LATENCY = 15e-6
DISK_LATENCY = 2e-3
BUCKET_SECONDS = 500e-6  # of Python and launches, of one call of an optimizer's arithmetic for a bucket
HOOK_SECONDS = 100e-6  # of Python around the forward and backward of a block that a technique is attached to


@dataclass(frozen=True)
class ReachedRates:
    """The rates of a device and of its offload tier, as training code reaches them."""

    fp32_flops: float  # products of fp32 a second, in TF32 if torch's switch allows it
    half_flops: float  # products in 16 bits a second
    bytes_per_second: float  # of the device's own memory
    h2d_per_second: float  # bytes copied to the device from page-locked memory, or from disk
    d2h_per_second: float  # bytes copied back
    pageable_per_second: float  # bytes copied each way from memory that is not page-locked
    latency: float = LINK_LATENCY  # fixed seconds of each transfer of a tensor
    tier_is_disk: bool = False  # whether the offload tier is the disk, not host memory
    host_adam_loop: float = HOST_ADAM_LOOP  # seconds for each byte of parameters
    host_adam_fused: float = HOST_ADAM_FUSED
    accesses: int = FOREACH_ACCESSES  # of the optimizer's step on the device

    @classmethod
    def for_profile(cls, hardware: Hardware, profile: ModelProfile) -> ReachedRates:
        """Return the rates of a device, with the accesses of the profile's optimizer."""
        return replace(cls.of(hardware), accesses=profile.step_accesses or FOREACH_ACCESSES)

    @classmethod
    def of(cls, hardware: Hardware) -> ReachedRates:
        """Return the rates of a device: those that were measured, else what code reaches of those of tables."""
        device, disk, measured = hardware.device, hardware.disk, hardware.measured
        # Not by `get_float32_matmul_precision`, which raises if the user has set this.
        tf32_is_allowed = torch.backends.cuda.matmul.fp32_precision == "tf32" and device.kind != "cpu"
        half = device.rates.of(torch.bfloat16 if device.supports_bf16 else torch.float16) * COMPUTE_EFFICIENCY
        adam = HOST_ADAM_LOOP, HOST_ADAM_FUSED
        if measured is None:
            fp32 = (tf32_is_allowed and device.rates.tf32) or device.rates.fp32
            fp32 *= COMPUTE_EFFICIENCY
            memory = device.memory_bandwidth * MEMORY_EFFICIENCY
            h2d = d2h = device.link_bandwidth * LINK_EFFICIENCY
            pageable = PAGEABLE_BANDWIDTH
        else:
            fp32 = (tf32_is_allowed and measured.tf32) or measured.fp32
            half = measured.half or half
            memory = measured.memory_bandwidth
            h2d, d2h = (rate or math.inf for rate in (measured.h2d, measured.d2h))
            pageable = min(rate or math.inf for rate in (measured.pageable_h2d, measured.pageable_d2h))
            adam = measured.host_adam_loop, measured.host_adam_fused
        if device.kind == "cpu":  # there is no link
            h2d = d2h = math.inf
        if hardware.offloads_to_disk:
            h2d, d2h = min(h2d, disk.read_bandwidth), min(d2h, disk.write_bandwidth)
            return cls(fp32, half, memory, h2d, d2h, min(h2d, d2h), DISK_LATENCY, True, *adam)
        return cls(fp32, half, memory, h2d, d2h, min(h2d, d2h, pageable), LINK_LATENCY, False, *adam)

    def seconds(self, flops: int, half_flops: int, traffic: int) -> float:
        """Return the time of so many operations, those of them in 16 bits, that read and write so many bytes.

        Kernels that compute and kernels that move bytes overlap in the caches and between each other: the larger of
        the two times is close to what is measured, their sum is not.
        """
        compute = (flops - half_flops) / self.fp32_flops + half_flops / self.half_flops
        return max(compute, traffic / self.bytes_per_second)

    def forward(self, block: BlockProfile) -> float:
        return self.seconds(block.forward_flops, block.forward_half_flops, block.forward_traffic)

    def backward(self, block: BlockProfile) -> float:
        return self.seconds(block.backward_flops, block.backward_half_flops, block.backward_traffic)

    def step(self, profile: ModelProfile, accumulated: int = 1) -> StepTime:
        """Return the time of a whole plain step for one batch of those that are `accumulated` for the optimizer's."""
        blocks = sum(self.forward(block) + self.backward(block) for block in profile.blocks)
        other = self.seconds(profile.other_flops, profile.other_half_flops, profile.other_traffic)
        stepping = self.optimizer(profile.gradient_bytes) / accumulated
        return StepTime(compute=blocks + other, device_step=stepping)

    def optimizer(self, gradient_bytes: int) -> float:
        """Return the time of the optimizer's step on the device, by torch's foreach implementation."""
        return self.accesses * gradient_bytes / self.bytes_per_second

    def optimizer_offloaded(self, gradient_bytes: int, *, fused: bool) -> float:
        """Return the time of Adam on the offload tier; on the host by torch's fused implementation, or by its loop."""
        if not self.tier_is_disk:
            return (self.host_adam_fused if fused else self.host_adam_loop) * gradient_bytes
        reads = OPTIMIZER_READS * gradient_bytes / self.h2d_per_second
        return reads + OPTIMIZER_WRITES * gradient_bytes / self.d2h_per_second


@dataclass(frozen=True)
class CostTerms:
    """What the cost of an option depends on beside the block."""

    rates: ReachedRates
    config: Config
    working_share: float = 1.0  # the size of a working copy over that of the parameters: one half in 16 bits
    prefetch: bool = False  # whether transfers overlap with computation
    page_locked: bool = True  # whether what is offloaded fits page-locked memory
    fused_on_cpu: bool = True  # whether masters on the host can be stepped by a fused implementation
    # Bytes of masters on the host, gradients and state that are stepped on the device at a time; 0: on the CPU.
    step_bucket: int = 0
    overlapped: bool = False  # whether such steps are computed while backward goes on

    @property
    def accumulated(self) -> int:
        """Return for how many batches the optimizer steps once: each has that share of the time of its step."""
        return self.config.gradient_accumulation_steps

    @property
    def link(self) -> tuple[float, float]:
        """Return the bytes per second to the device and back."""
        h2d, d2h = self.rates.h2d_per_second, self.rates.d2h_per_second
        if self.page_locked:
            return h2d, d2h
        return min(h2d, self.rates.pageable_per_second), min(d2h, self.rates.pageable_per_second)

    def step_offloaded(self, gradient_bytes: int, state_bytes: int, tensors: int) -> float:
        """Return the time of stepping so many parameters that are on the offload tier, gradients and state with them.

        On the device, parameters, gradients and state are copied there, and all but the gradients back. Page-locked,
        both ways at once, while the calls for a bucket are launched; else one after the other.
        """
        rates = self.rates
        if not self.step_bucket:
            fused = self.config.fused_host_step and self.fused_on_cpu
            return rates.optimizer_offloaded(gradient_bytes, fused=fused)
        nbytes = 2 * gradient_bytes + state_bytes
        h2d = nbytes / self.link[0]
        d2h = (nbytes - gradient_bytes) / self.link[1] + rates.optimizer(gradient_bytes)
        launched = BUCKET_SECONDS * nbytes / self.step_bucket + OPTIMIZER_READS * rates.latency * tensors
        return max(launched, max(h2d, d2h) if self.page_locked else h2d + d2h)

    def steps_early(self, block: BlockProfile, *, offloaded: bool) -> bool:
        """Return whether the step of a block is computed while backward goes on, if its state is off the device."""
        return self.overlapped and block.role == "repeated" and (self.step_bucket > 0 or not offloaded)

    def early_copies(self, block: BlockProfile, *, offloaded: bool) -> float:
        """Return the time of the copies for such a step, less that of its arithmetic, which hides as much of them.

        State goes both ways, parameters too where they are offloaded, and their gradients to the device. Of two buckets
        one is copied while the other is computed or copied back.
        """
        copied = block.optimizer_bytes + (block.gradient_bytes if offloaded else 0)  # back to the host
        h2d = (copied + (block.gradient_bytes if offloaded else 0)) / self.link[0]
        d2h, arithmetic = copied / self.link[1], self.rates.optimizer(block.gradient_bytes)
        return max(0.0, max(h2d, d2h, (h2d + arithmetic + d2h) / 2) - arithmetic)

    def exposed_early(self, block: BlockProfile, cover: float, *, offloaded: bool = True) -> float:
        """Return what of that a block's own backward, with so much time free of copies, does not hide."""
        return max(0.0, self.early_copies(block, offloaded=offloaded) - max(0.0, cover))


@dataclass(frozen=True)
class BlockOption:
    """One thing that a technique can do with a block, and what it costs.

    A block has at most one option for its activations, and at most one for its parameters. With the latter its
    parameters, gradients and optimizer state are on the offload tier, and a working copy is on the device while it
    computes.
    """

    technique: str  # its name
    time: StepTime  # what it adds to the time of a step
    target: Literal["activations", "parameters"] = "activations"
    held_bytes: int = 0  # what forward then holds for backward on the device, all calls together
    returned_bytes: int = 0  # what comes back for backward, one call at a time
    # Whether backward runs forward again, from the block's input. Of an option for parameters: whether it is the one
    # beside such an option for activations, which covers transfers as well.
    reruns_forward: bool = False
    keep: tuple[OpProfile, ...] = ()  # the operations whose outputs are not recomputed
    settings: Checkpointing | None = None  # the technique's entry in the `LayerPlan`, if it has one
    reason: str = ""  # what is done, in words and numbers; the planner adds to it why

    @property
    def seconds(self) -> float:
        return self.time.total
