"""The meter: what a plan does while a model trains, counted.

It is owned by the executor, and handed to techniques. Counting costs an addition, timing two looks at a clock; a
technique that is not on a model counts nothing.

Backward runs in threads of its own, transfers in others, and metrics are read from one more: everything here may be
called from any thread. Whoever counts never waits (Note [Finalizers]): a thread that holds the lock may just be
collecting garbage, and that may wait for a transfer which counts.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch

from memscale._util.locks import LateLock
from memscale.observe.clocks import Clock, HostClock, clock_for
from memscale.observe.peaks import NOT_WATCHED, ObservedPeak, PeakWatch

__all__ = ["Below", "Cost", "Meter", "What"]

What = Literal["parameters", "gradients", "activations", "optimizer state"]
"""What is moved."""

Below = Literal["host", "disk"]
"""Where it waits: from there it comes up, and there it goes down."""

Cost = Literal["recomputing", "offloading", "optimizer state", "8-bit optimizer"]
"""What time is lost to."""

_RECENT = 64  # backward passes that may be under way at once

_Key = TypeVar("_Key")


class Meter:
    """Counts of one executor, over all of its plans. A copy, by ``deepcopy`` or pickle, begins at nothing.

    Example:
        >>> meter = Meter()
        >>> meter.up("parameters", "host", 4096)
        >>> meter.recomputed("layers.0", flops=10)
        >>> meter.moved(), meter.recomputations()
        ({('parameters', 'host'): (4096, 0)}, {'layers.0': (1, 10)})
    """

    def __init__(self) -> None:
        self._lock: LateLock[Callable[[], None]] = LateLock(_do)
        self._open = _Open()
        self._clock: Clock = HostClock()
        self._device: torch.device | None = None
        self._simulated = False
        self._watch: PeakWatch | None = None
        self._last_peak: ObservedPeak = NOT_WATCHED
        self._moved: dict[tuple[What, Below], tuple[int, int]] = {}
        self._recomputed: dict[str, tuple[int, int]] = {}
        self._passes: deque[int] = deque(maxlen=_RECENT)
        self.forward_passes = 0
        self.backward_passes = 0
        self.plans = 0
        self.planning_seconds = 0.0
        self.dumps: list[str] = []
        """Files that were written when memory ran out."""

    # ------------------------------------------------------------------ from when to when

    def begin(self, device: torch.device, *, simulated: bool = False) -> None:
        """A plan is on a model that trains there."""
        if self._device != device or self._simulated != simulated:
            self._device, self._simulated = device, simulated
            self._clock = clock_for(device, simulated=simulated)
            self._watch = None if simulated else PeakWatch(device)
        self._last_peak = NOT_WATCHED

    def end(self) -> None:
        """It is off again: what memory is used for from now on is not its doing."""
        self._last_peak = self.peak()

    def peak(self) -> ObservedPeak:
        """The most memory in use while a plan was attached."""
        if self._watch is None or self._last_peak is not NOT_WATCHED:
            return self._last_peak
        return self._watch.read()

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Count a plan, and the time that it takes to make it."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.plans += 1
            self.planning_seconds += time.perf_counter() - began

    # ------------------------------------------------------------------ counting

    def forward_pass(self) -> None:
        """A forward pass in training begins."""
        self._lock.leave(self._count_forward)

    def backward_pass(self, task: int) -> None:
        """Backward has come to the model; a pass is counted once, by its graph task id."""
        self._lock.leave(lambda: self._count_backward(task))

    def up(self, what: What, below: Below, nbytes: int) -> None:
        """Bytes came up from the tier below."""
        self._move(what, below, nbytes, 0)

    def down(self, what: What, below: Below, nbytes: int) -> None:
        """Bytes went down to the tier below."""
        self._move(what, below, 0, nbytes)

    def _move(self, what: What, below: Below, up: int, down: int) -> None:
        if torch.compiler.is_compiling() or not (up or down):
            return  # the compiler runs through it once, and not for real
        self._lock.leave(lambda: _add(self._moved, (what, below), (up, down)))

    def recomputed(self, layer: str, flops: int) -> None:
        """A layer was computed again."""
        self._lock.leave(lambda: _add(self._recomputed, layer, (1, flops)))

    def _count_forward(self) -> None:
        self.forward_passes += 1

    def _count_backward(self, task: int) -> None:
        if task not in self._passes:
            self._passes.append(task)
            self.backward_passes += 1

    def moved(self) -> dict[tuple[What, Below], tuple[int, int]]:
        """Bytes up and down so far."""
        with self._lock:
            return dict(self._moved)

    def recomputations(self) -> dict[str, tuple[int, int]]:
        """How often each layer was computed again, and the floating-point operations of that."""
        with self._lock:
            return dict(self._recomputed)

    # ------------------------------------------------------------------ timing

    def timing(self, cost: Cost) -> _Span:
        """A block whose time is lost to something; what is inside of it lost to something else is not counted here."""
        return _Span(self, cost)

    def now(self) -> Any:
        """A moment, for `lost`."""
        return self._clock.now()

    def lost(self, cost: Cost, since: Any) -> None:
        """The time from then to now was lost to something."""
        outer = self._open.stack[-1] if self._open.stack else None
        self._clock.add(cost, since, self._clock.now(), outer)

    def seconds_lost(self) -> dict[str, float | None]:
        """So far, by what it was lost to; None where it cannot be measured."""
        return self._clock.seconds()

    # ------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        return {"device": self._device, "simulated": self._simulated}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        if state["device"] is not None:
            self.begin(state["device"], simulated=state["simulated"])


def _do(note: Callable[[], None]) -> None:
    note()


def _add(sums: dict[_Key, tuple[int, int]], key: _Key, more: tuple[int, int]) -> None:
    before = sums.get(key, (0, 0))
    sums[key] = (before[0] + more[0], before[1] + more[1])


class _Open(threading.local):
    """The blocks that are being timed in this thread, the outermost first."""

    def __init__(self) -> None:
        self.stack: list[Cost] = []


class _Span:
    """A block that is timed, also if it ends in an exception."""

    __slots__ = ("_cost", "_meter", "_start")

    def __init__(self, meter: Meter, cost: Cost) -> None:
        self._meter = meter
        self._cost: Cost = cost
        self._start: Any = None

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():
            self._start = self._meter.now()
            self._meter._open.stack.append(self._cost)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not torch.compiler.is_compiling():
            self._meter._open.stack.pop()
            self._meter.lost(self._cost, self._start)
