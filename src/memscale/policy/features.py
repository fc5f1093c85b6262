"""What the learned policy knows of a model, its batch, the device and the Config."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memscale.config import Config
from memscale.hardware import Hardware
from memscale.profiler.profile import ModelProfile
from memscale.techniques.cost import ReachedRates


@dataclass(frozen=True)
class Situation:
    """What a strategy is chosen for.

    Attributes:
        profile: what the plain model needs for the batch.
        hardware: what there is.
        config: what the user has set.
        room_bytes: what a plan may take of the device: all that torch can have, or the user's budget.
        plain_peak_bytes: the estimated peak of the plain step.
        positions: of one sequence of the batch; 1 if it has none.
        tokens: of all sequences; the samples of a batch that has none.
        vocabulary: the outputs of the model's head; 0 without one.
        is_sharded: FSDP2 has sharded the model.
    """

    profile: ModelProfile
    hardware: Hardware
    config: Config
    room_bytes: int
    plain_peak_bytes: int
    positions: int
    tokens: int
    vocabulary: int
    is_sharded: bool = False

    def features(self) -> dict[str, float]:
        """Return the features by name. Sizes and rates are logarithms to base 2, shares are themselves."""
        profile, config, rates = self.profile, self.config, ReachedRates.of(self.hardware)
        layers = [block for block in profile.blocks if block.role == "repeated" and block.calls]
        saved = profile.other_saved_bytes + sum(
            block.saved_bytes + block.boundary_bytes for block in profile.blocks
        )
        flops = profile.other_flops + sum(b.forward_flops + b.backward_flops for b in profile.blocks)
        half = profile.other_half_flops + sum(
            block.forward_half_flops + block.backward_half_flops for block in profile.blocks
        )
        traffic = profile.other_traffic + sum(b.forward_traffic + b.backward_traffic for b in profile.blocks)
        everything = profile.parameter_bytes + profile.gradient_bytes + profile.optimizer_bytes
        host = self.hardware.host
        cap, pool = config.max_cpu_offload_bytes, None
        if config.async_config is not None:
            pool = config.async_config.pinned_pool_bytes
        boundary = max((block.boundary_bytes // max(1, block.calls) for block in layers), default=0)
        plain_seconds = rates.seconds(flops, half, traffic)
        return {
            "parameter bytes": _log(profile.parameter_bytes),
            "activation bytes": _log(saved),
            "activation share": saved / max(1, saved + everything),
            "trainable share": profile.gradient_bytes / max(1, profile.parameter_bytes),
            "optimizer state per gradient": profile.optimizer_bytes / max(1, profile.gradient_bytes),
            "layers": _log(len(layers)),
            "bytes between layers for a token": _log(boundary // self.tokens),
            "logits bytes": _log(4 * self.tokens * self.vocabulary),
            "logits share of the room": 4 * self.tokens * self.vocabulary / max(1, self.room_bytes),
            "positions": _log(self.positions),
            "samples": _log(self.tokens // self.positions),
            "16-bit share": half / max(1, flops),
            "mixed precision": float(config.use_mixed_precision),
            "8-bit optimizer": float(config.use_8bit_optimizer),
            "overlapped steps": float(config.overlap_optimizer is True),
            "accumulated batches": _log(config.gradient_accumulation_steps),
            "room on the device": _log(self.room_bytes),
            "plain peak over room": _log(self.plain_peak_bytes) - _log(self.room_bytes),
            "parameters and state over room": _log(everything) - _log(self.room_bytes),
            "operations a second": _log(rates.fp32_flops),
            "bytes a second on the device": _log(rates.bytes_per_second),
            "bytes a second on the link": _log(rates.h2d_per_second),
            # How long the plain step hides transfers of everything, and how long the host takes to step.
            "plain step over transfers": _log(plain_seconds) - _log(everything / rates.h2d_per_second),
            "plain step over host Adam": _log(plain_seconds)
            - _log(profile.gradient_bytes * rates.host_adam_fused),
            "host memory": _log(host.offload_bytes if cap is None else min(cap, host.offload_bytes)),
            "page-locked memory over state": _log(host.page_locked_bytes if pool is None else pool)
            - _log(everything),
            "offloads to disk": float(self.hardware.offloads_to_disk),
            "sharded": float(self.is_sharded),
            "profiled by a real step": float(profile.source != "static"),
        }


def _log(value: float) -> float:
    """Return the logarithm to base 2, and that of a tiny number for nothing."""
    return math.log2(max(value, 2.0**-40)) if math.isfinite(value) else 1000.0
