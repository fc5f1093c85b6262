"""The 8-bit optimizer state of one model while it is wrapped, and back to 32 bits."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from memscale.observe.counters import Meter
from memscale.optimizer.eight_bit.quantizer import Quantizer, Unavailable, find_quantizer
from memscale.optimizer.eight_bit.steps import EightBitSteps

__all__ = ["EightBitSettings", "EightBitStates"]


@dataclass(frozen=True)
class EightBitSettings:
    """How moments are kept in 8 bits.

    Attributes:
        bucket_bytes: The most that is in 32 bits at once while an optimizer steps, with parameters and gradients.
        logs: Whether optimizers that are left alone are named in the log.
    """

    bucket_bytes: int
    logs: bool = True


class EightBitStates:
    """The steps of one model's optimizers. Between two plans moments stay as they are.

    Args:
        meter: Takes the time of it.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        self._meter = meter
        self._settings: EightBitSettings | None = None
        self._parameters: list[nn.Parameter] = []
        self._running = False
        self._steps: EightBitSteps | None = None

    @property
    def steps(self) -> EightBitSteps | None:
        """What runs the steps, if anything does."""
        return self._steps

    def arrange(
        self, parameters: Iterable[nn.Parameter], settings: EightBitSettings, quantizer: Quantizer
    ) -> None:
        """Keep the moments of these parameters in 8 bits from now on."""
        wanted = list(parameters)
        same = [*map(id, wanted)] == [*map(id, self._parameters)]
        if self._steps is None or settings != self._settings or not same:
            self.restore()
            self._settings, self._parameters = settings, wanted
            self._steps = EightBitSteps(
                wanted, quantizer, settings.bucket_bytes, logger=_logger(settings), meter=self._meter
            )
        self._steps.attach()
        self._running = True

    def pause(self) -> None:
        """Change no steps for now, as while the plan is exchanged; moments stay as they are."""
        if self._steps is not None:
            self._steps.pause()
            self._running = False

    def restore(self) -> None:
        """All moments in 32 bits, beside their parameters, and steps as they were."""
        if self._steps is not None:
            self._steps.detach()
        self._steps, self._settings, self._parameters, self._running = None, None, [], False

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has parameters of its own; no optimizer has stepped them yet.
        return {
            "meter": self._meter,
            "settings": self._settings,
            "parameters": self._parameters,
            "running": self._running,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["meter"])  # type: ignore[misc]
        if not state["running"]:
            return
        try:
            quantizer = find_quantizer(state["parameters"])
        except Unavailable as reason:  # on the machine where it was unpickled
            _logger(state["settings"]).warning("Optimizer state stays in 32 bits: %s.", reason)
        else:
            self.arrange(state["parameters"], state["settings"], quantizer)


def _logger(settings: EightBitSettings) -> logging.Logger:
    return logging.getLogger("memscale") if settings.logs else _SILENT


_SILENT = logging.getLogger("memscale.silent")
_SILENT.disabled = True
