"""Optimizer state on its way up and down, and what is stepped on disk, seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor

from memscale.observe.meter import Below, Cost, Meter

__all__ = ["WatchedState"]


class WatchedState:
    """Who is told of state that is taken up and down.

    Args:
        meter: Counts it; None if nobody asks.
        below: Where it waits; None if it waits beside its parameter, and nothing is moved.
        cost: What the time is lost to.
        on_disk: Whether a parameter, or a gradient, is at home on disk.
    """

    def __init__(
        self,
        meter: Meter | None = None,
        below: Below | None = None,
        cost: Cost = "optimizer state",
        on_disk: Callable[[Tensor], bool] | None = None,
    ) -> None:
        self._meter = meter
        self._below = below
        self._cost: Cost = cost
        self._on_disk = on_disk

    def timed(self) -> contextlib.AbstractContextManager[None]:
        """Around the moving."""
        return contextlib.nullcontext() if self._meter is None else self._meter.timing(self._cost)

    def up(self, home: Tensor, parameter: Tensor) -> None:
        """This came up, to be stepped with a parameter."""
        if self._meter is not None and self._below is not None and self._is_moved(home, parameter):
            self._meter.up("optimizer state", self._below, home.nbytes)

    def down(self, home: Tensor, parameter: Tensor) -> None:
        """This went down."""
        if self._meter is not None and self._below is not None and self._is_moved(home, parameter):
            self._meter.down("optimizer state", self._below, home.nbytes)

    def stepped(self, parameter: Tensor) -> None:
        """A parameter was stepped: on disk it was read and written, and its gradient read."""
        if self._meter is None or self._on_disk is None or not self._on_disk(parameter):
            return
        self._meter.up("parameters", "disk", parameter.nbytes)
        self._meter.down("parameters", "disk", parameter.nbytes)
        if parameter.grad is not None and self._on_disk(parameter.grad):
            self._meter.up("gradients", "disk", parameter.grad.nbytes)

    def _is_moved(self, home: Tensor, parameter: Tensor) -> bool:
        # State of a parameter that is at home on the host is beside it there.
        return self._below == "disk" or home.device != parameter.device
