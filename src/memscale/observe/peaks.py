"""The most memory that was in use since a plan was attached, as far as it can be known without resetting anything.

Note [Peaks without a reset]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch and the kernel keep one peak each, for everyone in the process, and a user may be watching it too. So it is
never reset here, but read when the plan is attached and when someone asks:

- it has grown: then the peak is of the time since the plan was attached;
- it is lower: then someone has reset it since, and it is of the time since then;
- it is the same: then there was a higher one before, and nothing is known but that. There is no number for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from memscale.errors import ProfileError
from memscale.memory.process import peak_rss_bytes, rss_bytes

__all__ = ["NOT_WATCHED", "ObservedPeak", "PeakKind", "PeakWatch"]

PeakKind = Literal["device memory", "process memory above that at attach", "not known"]


@dataclass(frozen=True)
class ObservedPeak:
    """A peak, and what it is of.

    Attributes:
        nbytes: the peak; None if it is not known.
        kind: whose memory.
        since: since when; or, if it is not known, why.
    """

    nbytes: int | None
    kind: PeakKind
    since: str


NOT_WATCHED = ObservedPeak(None, "not known", "no plan was attached")
_HIGHER_BEFORE = "it was higher before the plan was attached, and has not been reset since"


class PeakWatch:
    """Reads the peak of a device, or of the process for a model on the CPU. See Note [Peaks without a reset]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = _read(self._peak())
        self._resident = _read(rss_bytes) if device.type == "cpu" else 0

    def read(self) -> ObservedPeak:
        """What it is now."""
        peak, before, resident = _read(self._peak()), self._before, self._resident
        kind: PeakKind = "device memory"
        if self._device.type == "cpu":
            kind = "process memory above that at attach"
        if peak is None or before is None or resident is None:
            return ObservedPeak(None, "not known", f"there is no such figure for {self._device.type} here")
        if peak == before:
            return ObservedPeak(None, kind, _HIGHER_BEFORE)
        since = "the plan was attached" if peak > before else "the system's figure was last reset"
        return ObservedPeak(max(0, peak - resident), kind, since)

    def _peak(self) -> Callable[[], int] | None:
        if self._device.type == "cpu":
            return peak_rss_bytes
        most = getattr(torch.get_device_module(self._device), "max_memory_allocated", None)
        return None if most is None else lambda: int(most(self._device))


def _read(figure: Callable[[], int] | None) -> int | None:
    try:
        return None if figure is None else figure()
    except ProfileError:  # a system that does not tell
        return None
