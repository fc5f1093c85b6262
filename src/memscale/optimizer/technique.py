"""The technique: optimizer state on the host, on disk or in 8 bits, with steps in buckets.

It finds the optimizers of a model's parameters by itself, those that are built later included (``interceptor.py``).
Parameters that are kept on disk are stepped in the same buckets, with their gradients, wherever the state is: their
pages must not be in memory all at once either.

In 8 bits, two moments take 2.03 bytes a parameter instead of 8. Embeddings and small tensors stay in 32 bits: GPT-2 XL,
of which they are 5%, has 2.35 bytes a parameter in all, GPT-2 small, with 32%, has 3.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from memscale.config import Config
from memscale.execution_plan import Tier
from memscale.optimizer.eight_bit import parameters_in_eight_bits
from memscale.optimizer.states import OptimizerStates, StateSettings
from memscale.techniques.base import ModelSite

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

__all__ = ["DEFAULT_BUCKET_BYTES", "OptimizerState", "takes_all_state"]

DEFAULT_BUCKET_BYTES = 64 * 2**20
"""What is loaded at once where the plan does not say: large enough to be read and written in long runs."""


class OptimizerState:
    """Keeps optimizer state as ``plan.optimizer`` says."""

    def attach(self, site: ModelSite, log: UndoLog) -> None:
        states, wanted = site.placement.states, site.plan.optimizer
        eight_bit = parameters_in_eight_bits(site.model) if wanted is not None and wanted.eight_bit else []
        tier: Tier = "device" if wanted is None else wanted.state
        if tier == "host" and site.device.type == "cpu":
            tier = "device"  # which is the host
        stored = _stored_parameters(site, tier)
        if not stored and not eight_bit:
            states.restore()  # of a plan before this one
            return
        capacity = None if site.config is None else site.config.max_cpu_offload_bytes
        if capacity is not None:
            capacity = max(0, capacity - site.placement.bytes_on_host)
        bucket_bytes = (wanted.bucket_bytes if wanted else 0) or DEFAULT_BUCKET_BYTES
        states.attach(stored, eight_bit, StateSettings(tier, bucket_bytes, capacity, site.logs))
        log.add(_AttachedStates(states))


def _stored_parameters(site: ModelSite, tier: Tier) -> Sequence[nn.Parameter]:
    """Return the parameters that are stepped in buckets, with their state on that tier."""
    is_beside = tier == "disk" and site.device.type != "cpu"  # state of others is on the accelerator
    if tier == "device" or is_beside or not takes_all_state(tier, site.config):
        return site.placement.on_disk
    return list(site.model.parameters())


def takes_all_state(tier: Tier, config: Config | None) -> bool:
    """Return whether the state of all parameters is kept on a tier, or only of those that are there themselves.

    Under a cap on the disk, only what the planner counts goes there.
    """
    return tier != "disk" or config is None or config.max_disk_offload_bytes is None


class _AttachedStates:
    """Bucketed steps of one plan. State stays on its tier between two plans."""

    def __init__(self, states: OptimizerStates) -> None:
        self._states = states

    def undo(self) -> None:
        self._states.pause()
