"""The optimizer state of one wrapped model: where the plan has it, and back again."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from memscale.execution_plan import Tier
from memscale.observe.counters import Meter, WatchedState
from memscale.optimizer.bucketed_steps import BucketedSteps
from memscale.optimizer.eight_bit import EightBitState, Unavailable, find_quantizer
from memscale.optimizer.state_stores import PAGE, DiskStateStore, HostStateStore, StateStore
from memscale.tiers.disk import DiskStore

__all__ = ["OptimizerStates", "StateSettings"]

logger = logging.getLogger("memscale")
_SILENT = logging.getLogger("memscale.silent")
_SILENT.disabled = True


@dataclass(frozen=True)
class StateSettings:
    """How optimizer state is kept.

    Attributes:
        tier: Where it is kept between steps; ``"device"`` if it stays where the optimizer made it, and only
            parameters and gradients are stepped a bucket at a time.
        bucket_bytes: The most that is loaded at once, in 32 bits.
        host_capacity: The most host memory to take for it; None for no cap.
        logs: Whether optimizers that are left alone are named in the log.
    """

    tier: Tier
    bucket_bytes: int
    host_capacity: int | None = None
    logs: bool = True


class OptimizerStates:
    """Keeps the optimizer state of one model while it is wrapped, through all of its plans.

    Args:
        disk: The disk.
        meter: Counts what is moved.
    """

    def __init__(self, disk: DiskStore, meter: Meter | None = None) -> None:
        self._disk = disk
        self._meter = meter
        self._settings: StateSettings | None = None
        self._stored: list[nn.Parameter] = []
        self._eight_bit: list[nn.Parameter] = []
        self._steps: BucketedSteps | None = None
        self._is_attached = False
        self._unavailable = ""  # the reason that was last given

    @property
    def steps(self) -> BucketedSteps | None:
        """What runs the steps; None if they are left alone."""
        return self._steps

    def is_stored(self, tensor: Tensor) -> bool:
        """Return whether this is a state tensor in a store, which must be left there."""
        return self._steps is not None and self._steps.is_stored(tensor)

    def quantizes(self, optimizer: Optimizer, parameter: Tensor) -> bool:
        """Return whether moments of a parameter are kept in 8 bits under an optimizer."""
        return self._steps is not None and self._steps.quantizes(optimizer, parameter)

    def store_state(self, optimizer: Optimizer) -> None:
        """Store an optimizer's state now, and not at its next step: the device may be short of memory."""
        if self._steps is not None:
            self._steps.store_state(optimizer)

    def attach(
        self, stored: Iterable[nn.Parameter], eight_bit: Iterable[nn.Parameter], settings: StateSettings
    ) -> None:
        """Keep the state of parameters as a plan says; what the plan before had the same stays as it is.

        Args:
            stored: The parameters whose state is kept on `settings.tier`.
            eight_bit: Those whose moments are kept in 8 bits; without bitsandbytes, none are.
            settings: How.
        """
        stored, eight_bit = list(stored), list(eight_bit)
        same_moments = _same(eight_bit, self._eight_bit)
        if (
            self._steps is None
            or settings != self._settings
            or not same_moments
            or not _same(stored, self._stored)
        ):
            before = self._steps
            quantized = before.eight_bit if before is not None and same_moments else None
            optimizers = [] if before is None else before.detach(keep_eight_bits=quantized is not None)
            self._settings, self._stored, self._eight_bit = settings, stored, eight_bit
            quantized = quantized or self._quantization(eight_bit, settings)
            self._steps = self._made(settings, quantized) if stored or quantized else None
            if before is not None and before.eight_bit is quantized and self._steps is not None:
                for optimizer in optimizers:
                    self._steps.adopt(optimizer)
        if self._steps is not None:
            self._steps.attach()
        self._is_attached = True

    def pause(self) -> None:
        """Change no steps for now, while the plan is replaced; state stays where it is."""
        if self._steps is not None:
            self._steps.pause()
        self._is_attached = False

    def restore(self) -> None:
        """Bring all state back beside its parameters, in 32 bits, and leave steps alone."""
        if self._steps is not None:
            self._steps.detach()
        self._steps, self._settings = None, None
        self._stored, self._eight_bit, self._is_attached = [], [], False

    def _quantization(self, parameters: list[nn.Parameter], settings: StateSettings) -> EightBitState | None:
        if not parameters:
            return None
        try:
            quantizer = find_quantizer(parameters)
        except Unavailable as reason:
            if settings.logs and str(reason) != self._unavailable:
                self._unavailable = str(reason)
                logger.warning("No 8-bit optimizer, the standard one goes on as it is: %s.", reason)
            return None
        return EightBitState(parameters, quantizer, logger if settings.logs else _SILENT)

    def _made(self, settings: StateSettings, eight_bit: EightBitState | None) -> BucketedSteps:
        on_disk = settings.tier == "disk"
        store: StateStore = (
            DiskStateStore(self._disk) if on_disk else HostStateStore(self._disk, settings.host_capacity)
        )
        return BucketedSteps(
            self._stored,
            store,
            settings.bucket_bytes,
            # On the device no state is moved, but parameters and gradients still come and go in buckets.
            least_bytes=sys.maxsize if settings.tier == "device" else PAGE,
            logger=logger if settings.logs else _SILENT,
            watched=WatchedState(self._meter, "disk" if on_disk else "host", on_disk=self._disk.holds),
            eight_bit=eight_bit,
            quantizing=WatchedState(self._meter, cost="8-bit optimizer"),
        )


def _same(one: list[nn.Parameter], other: list[nn.Parameter]) -> bool:
    return [*map(id, one)] == [*map(id, other)]
