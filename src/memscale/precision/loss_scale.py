"""The scale of a loss: as large as 16-bit gradients bear it."""

from __future__ import annotations

__all__ = ["LossScale"]

FIRST = 2.0**16
GROWS_AFTER = 2000
LEAST = 2.0**-24


class LossScale:
    """A power of two that halves when gradients overflow, and doubles after many steps in which none did.

    The numbers are those of torch's `GradScaler`.

    Example:
        >>> scale = LossScale()
        >>> scale.overflowed()
        >>> scale.value
        32768.0
    """

    def __init__(self) -> None:
        self.value = FIRST
        self._good = 0

    def overflowed(self) -> None:
        """A step was not made."""
        self.value = max(self.value / 2, LEAST)
        self._good = 0

    def went_well(self) -> None:
        """A step was made."""
        self._good += 1
        if self._good == GROWS_AFTER:
            self._good = 0
            if self.value < 2.0**120:  # beyond, 32 bits overflow too
                self.value *= 2
