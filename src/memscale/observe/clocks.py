"""Clocks for the time that techniques cost: of the host where it waits for its work, of the stream on CUDA."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Protocol

import torch

from memscale._util.locks import LateLock

__all__ = ["Clock", "CudaClock", "HostClock", "NoClock", "clock_for"]

_AT_ONCE = 512  # pairs of events, after which those that are over are read

_Interval = tuple[str, float, str | None]  # its name, its length, and what it is inside of


class Clock(Protocol):
    """Adds up intervals under names. What is inside an interval of another name is not counted there as well."""

    def now(self) -> Any:
        """A moment."""

    def add(self, name: str, start: Any, end: Any, outer: str | None) -> None:
        """An interval, and the name of the one that it is inside of."""

    def seconds(self) -> dict[str, float | None]:
        """The sum of each name so far; None where it cannot be known."""


class HostClock:
    """For work that is done when its call returns.

    Example:
        >>> clock = HostClock()
        >>> clock.add("outer", 0.0, 5.0, None)
        >>> clock.add("inner", 1.0, 3.0, "outer")
        >>> clock.seconds()
        {'outer': 3.0, 'inner': 2.0}
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        seconds = self._seconds
        self._lock: LateLock[_Interval] = LateLock(lambda one: _add(seconds, *one))  # without a cycle

    def now(self) -> float:
        return time.perf_counter()

    def add(self, name: str, start: float, end: float, outer: str | None) -> None:
        self._lock.leave((name, end - start, outer))

    def seconds(self) -> dict[str, float | None]:
        with self._lock:
            return dict(self._seconds)


class CudaClock:
    """For work that is put on a CUDA stream: pairs of events, which are read late and never waited for in a step.

    (Not run yet: the project has no such machine.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()  # of those who read
        self._seconds: dict[str, float] = {}
        self._pending: deque[tuple[str, Any, Any, str | None]] = deque()  # its append and popleft are atomic
        self._next_look = _AT_ONCE

    def now(self) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return None  # what is captured in a graph has no time of its own
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add(self, name: str, start: Any, end: Any, outer: str | None) -> None:
        if start is None or end is None:
            return
        self._pending.append((name, start, end, outer))
        if len(self._pending) >= self._next_look and self._lock.acquire(blocking=False):
            try:
                self._settle(wait=False)
                self._next_look = len(self._pending) + _AT_ONCE
            finally:
                self._lock.release()

    def seconds(self) -> dict[str, float | None]:
        with self._lock:
            self._settle(wait=True)
            return dict(self._seconds)

    def _settle(self, *, wait: bool) -> None:
        for _ in range(len(self._pending)):
            name, start, end, outer = self._pending.popleft()
            if wait:
                end.synchronize()
            elif not end.query():
                self._pending.append((name, start, end, outer))  # for the next time; their order is no matter
                continue
            _add(self._seconds, name, start.elapsed_time(end) / 1e3, outer)


class NoClock:
    """For devices whose time is not known here: that names were used, and nothing else."""

    def __init__(self) -> None:
        self._seconds: dict[str, float | None] = {}

    def now(self) -> None:
        return None

    def add(self, name: str, start: None, end: None, outer: str | None) -> None:
        self._seconds[name] = None

    def seconds(self) -> dict[str, float | None]:
        return dict(self._seconds)


def clock_for(device: torch.device, *, simulated: bool = False) -> Clock:
    """The clock for a model that computes there; on a virtual device all work is the host's."""
    if simulated or device.type in ("cpu", "vgpu"):
        return HostClock()
    return CudaClock(device) if device.type == "cuda" else NoClock()


def _add(sums: dict[str, float], name: str, seconds: float, outer: str | None) -> None:
    sums[name] = sums.get(name, 0.0) + seconds
    if outer is not None:
        sums[outer] = sums.get(outer, 0.0) - seconds
