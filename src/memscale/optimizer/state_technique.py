"""Optimizer state off the device: it waits on the host or on disk, and comes up a bucket at a time in a step.

The mechanism is ``StreamedSteps`` in ``memscale.optimizer.streamed``, which finds the optimizers of a model's
parameters by itself, those that are built later included. Whatever an optimizer has in ``state`` is moved: also
the 8-bit moments of one that keeps such.

Parameters that are at home on disk are stepped in the same buckets, with their gradients, wherever the state is:
their pages must not be in memory all at once either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memscale.config import Config
from memscale.execution_plan import Tier
from memscale.optimizer.state_homes import StateHomes, StateSettings
from memscale.techniques.base import ModelSite

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

__all__ = ["DEFAULT_BUCKET_BYTES", "OptimizerState", "takes_all_state"]

DEFAULT_BUCKET_BYTES = 64 * 2**20
"""What is up at once where the plan does not say: large enough to be read and written in long runs."""


class OptimizerState:
    """Puts optimizer state where ``plan.optimizer`` says."""

    def attach(self, site: ModelSite, log: UndoLog) -> None:
        states, settings = site.homes.states, _settings(site)
        if settings is None:
            states.restore()  # of a plan before this one
            return
        parameters = list(site.model.parameters())
        is_beside = (
            settings.tier == "disk" and site.device.type != "cpu"
        )  # state of others is on the accelerator
        if settings.tier == "device" or is_beside or not takes_all_state(settings.tier, site.config):
            parameters = site.homes.on_disk
        states.arrange(parameters, settings)
        log.add(_Arranged(states))


def takes_all_state(tier: Tier, config: Config | None) -> bool:
    """Return whether the state of all parameters goes there, or only of those that are there themselves.

    Under a cap on the disk, what the engine counts goes there.
    """
    return tier != "disk" or config is None or config.max_disk_offload_bytes is None


class _Arranged:
    """Steps that are streamed. State stays down between two plans; `Homes.restore` brings it back at the end."""

    def __init__(self, states: StateHomes) -> None:
        self._states = states

    def undo(self) -> None:
        self._states.pause()


def _settings(site: ModelSite) -> StateSettings | None:
    wanted, config = site.plan.optimizer, site.config
    tier: Tier = "device" if wanted is None else wanted.state
    if tier == "host" and site.device.type == "cpu":
        tier = "device"  # which is the host
    if tier == "device" and not site.homes.on_disk:
        return None
    capacity = None if config is None else config.max_cpu_offload_bytes
    if capacity is not None:
        capacity = max(0, capacity - site.homes.bytes_on_host)
    return StateSettings(
        tier=tier,
        bucket_bytes=(wanted.bucket_bytes if wanted else 0) or DEFAULT_BUCKET_BYTES,
        host_capacity=capacity,
        logs=config is None or config.enable_logging,
    )
