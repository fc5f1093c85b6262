"""Where the optimizer state of one model is while it is wrapped, and back again."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale.execution_plan import Tier
from memscale.observe.counters import Meter, WatchedState
from memscale.optimizer.state import PAGE
from memscale.optimizer.state_places import HostPlace, MappedPlace
from memscale.optimizer.streamed import StreamedSteps
from memscale.tiers.store import DiskStore

__all__ = ["StateHomes", "StateSettings"]


@dataclass(frozen=True)
class StateSettings:
    """How optimizer state is kept.

    Attributes:
        tier: Where it waits between steps; ``"device"`` if it stays where the optimizer made it, and only
            parameters and gradients are stepped a bucket at a time.
        bucket_bytes: The most that is up at once.
        host_capacity: The most host memory to take for it; None for no limit.
        logs: Whether optimizers that are left alone are named in the log.
    """

    tier: Tier
    bucket_bytes: int
    host_capacity: int | None = None
    logs: bool = True


class StateHomes:
    """The streamed steps of one model's optimizers.

    Args:
        store: The disk.
        meter: Counts what is moved.
    """

    def __init__(self, store: DiskStore, meter: Meter | None = None) -> None:
        self._store = store
        self._meter = meter
        self._settings: StateSettings | None = None
        self._parameters: list[nn.Parameter] = []
        self._steps: StreamedSteps | None = None
        self._running = False

    @property
    def steps(self) -> StreamedSteps | None:
        """What runs the steps, if anything does."""
        return self._steps

    def is_down(self, tensor: torch.Tensor) -> bool:
        """Whether this is a state tensor that waits in its place, and must be left there."""
        return self._steps is not None and self._steps.is_down(tensor)

    def arrange(self, parameters: Iterable[nn.Parameter], settings: StateSettings) -> None:
        """Stream the steps of these parameters; with the settings of before, state that is down stays there."""
        wanted = list(parameters)
        same = len(wanted) == len(self._parameters) and all(map(_is, wanted, self._parameters))
        if self._steps is None or settings != self._settings or not same:
            self.restore()
            self._settings, self._parameters = settings, wanted
            self._steps = self._made(settings)
        self._steps.attach()
        self._running = True

    def pause(self) -> None:
        """Run no steps for now, as while the plan is exchanged; state stays where it is."""
        if self._steps is not None:
            self._steps.pause()
            self._running = False

    def restore(self) -> None:
        """All state beside its parameters, and steps as they were."""
        if self._steps is not None:
            self._steps.detach()
        self._steps, self._settings, self._parameters, self._running = None, None, [], False

    def _made(self, settings: StateSettings) -> StreamedSteps:
        on_disk = settings.tier == "disk"
        place = MappedPlace(self._store) if on_disk else HostPlace(self._store, settings.host_capacity)
        # With no state that is large enough to go down, parameters and gradients still come and go in buckets.
        least = sys.maxsize if settings.tier == "device" else PAGE
        logger = None if settings.logs else _SILENT
        watched = WatchedState(self._meter, "disk" if on_disk else "host", on_disk=self._store.holds)
        return StreamedSteps(
            self._parameters,
            place,
            settings.bucket_bytes,
            least_bytes=least,
            logger=logger,
            watched=watched,
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has parameters of its own; no optimizer has stepped them yet.
        return {
            "store": self._store,
            "meter": self._meter,
            "settings": self._settings,
            "parameters": self._parameters,
            "running": self._running,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["store"], state["meter"])  # type: ignore[misc]
        if state["running"]:
            self.arrange(state["parameters"], state["settings"])


def _is(one: object, other: object) -> bool:
    return one is other


_SILENT = logging.getLogger("memscale.silent")
_SILENT.disabled = True
