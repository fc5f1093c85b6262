"""Clocks for the time that techniques cost, and the peak of memory while a plan is attached.

Note [Peaks without a reset]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch and the kernel keep one peak each for the whole process, and a user may be watching it too. So it is never reset
here, but read when the plan is attached and again when someone asks:

- it has grown: the peak was reached since the plan was attached;
- it is lower: someone has reset it, and the peak was reached since then;
- it is the same: there was a higher one before, and the plan's own peak is not known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from memscale.errors import ProfileError
from memscale.memory.process import peak_rss_bytes, rss_bytes

__all__ = [
    "NOT_WATCHED",
    "Clock",
    "CudaClock",
    "HostClock",
    "NoClock",
    "ObservedPeak",
    "PeakWatch",
    "clock_for",
]


class Clock(Protocol):
    """Reads the time of a device."""

    def now(self) -> Any:
        """Return the present moment."""

    def is_known(self, moment: Any) -> bool:
        """Return whether `elapsed` up to that moment returns at once."""

    def elapsed(self, start: Any, end: Any) -> float | None:
        """Return the seconds between two moments; None if they cannot be known."""


class HostClock:
    """Time work that is done when its call returns."""

    def now(self) -> float:
        return time.perf_counter()

    def is_known(self, moment: float) -> bool:
        return True

    def elapsed(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """Time work on a CUDA stream by pairs of events, which no training step waits for.

    (Not run yet: the project has no such machine.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return None  # what is captured in a graph has no time of its own
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_known(self, moment: Any) -> bool:
        return moment is None or bool(moment.query())

    def elapsed(self, start: Any, end: Any) -> float:
        if start is None or end is None:
            return 0.0
        if not end.query():
            end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class NoClock:
    """Stand in on devices whose time is not known here."""

    def now(self) -> None:
        return None

    def is_known(self, moment: None) -> bool:
        return True

    def elapsed(self, start: None, end: None) -> None:
        return None


def clock_for(device: torch.device, *, simulated: bool = False) -> Clock:
    """Return the clock for a model that computes on a device; on a virtual device all work is the host's."""
    if simulated or device.type in ("cpu", "vgpu"):
        return HostClock()
    return CudaClock(device) if device.type == "cuda" else NoClock()


# ---------------------------------------------------------------------- peaks


@dataclass(frozen=True)
class ObservedPeak:
    """A peak of memory that was measured.

    Attributes:
        nbytes: the peak; None if it is not known.
        kind: whose memory.
        since: since when; or, if it is not known, why.
    """

    nbytes: int | None
    kind: Literal["device memory", "process memory above that at attach", "not known"]
    since: str


NOT_WATCHED = ObservedPeak(None, "not known", "no plan was attached")


class PeakWatch:
    """Reads the peak of a device, or of the process for a model on the CPU. See Note [Peaks without a reset]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._peak()
        self._resident = _read(rss_bytes) if device.type == "cpu" else 0

    def read(self) -> ObservedPeak:
        """Return the peak since this object was made."""
        peak, before, resident = self._peak(), self._before, self._resident
        if peak is None or before is None or resident is None:
            return ObservedPeak(None, "not known", f"there is no such figure for {self._device.type} here")
        on_cpu = self._device.type == "cpu"
        kind: Any = "process memory above that at attach" if on_cpu else "device memory"
        if peak == before:
            why = "it was higher before the plan was attached, and has not been reset since"
            return ObservedPeak(None, kind, why)
        since = "the plan was attached" if peak > before else "the system's figure was last reset"
        return ObservedPeak(max(0, peak - resident), kind, since)

    def _peak(self) -> int | None:
        if self._device.type == "cpu":
            return _read(peak_rss_bytes)
        peak = getattr(torch.get_device_module(self._device), "max_memory_allocated", None)
        return None if peak is None else int(peak(self._device))


def _read(figure: Callable[[], int]) -> int | None:
    try:
        return figure()
    except ProfileError:  # a system that does not tell
        return None
