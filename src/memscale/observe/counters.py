"""Counts of what a plan does while a model trains: bytes moved, layers recomputed, passes, time, and the peak.

Note [Counting never waits]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Several threads count, metrics are read from one more, and a finalizer may count in any of them, also while that thread
holds a lock. So whoever counts only appends to a deque, which is atomic; events are added up by whoever reads, or in
passing when many have gathered.

Note [Peaks without a reset]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch and the kernel keep one peak each for the whole process, and a user may be watching it too. So it is never reset
here, but read when the plan is attached and again when someone asks. If it has grown, the peak was reached since the
plan was attached; if it is lower, since someone has reset it; if it is the same, the plan's own peak is not known.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from memscale.errors import ProfileError
from memscale.memory.process import peak_rss_bytes, rss_bytes

What = Literal["parameters", "gradients", "activations", "optimizer state"]  # what is moved

OffloadTier = Literal["host", "disk"]  # the tier that it is kept on

Cost = Literal["recomputing", "offloading", "optimizer state", "8-bit optimizer"]  # what time is lost to

MAX_EVENTS = 512  # events that may gather before whoever counts adds them up in passing
MAX_BACKWARD_PASSES = 64  # that may be under way at once


class Clock:
    """Reads the time of a device: of CUDA by events that no step waits for, of others than the CPU not at all."""

    def __init__(self, device: torch.device | None = None, *, simulated: bool = False) -> None:
        on_host = simulated or device is None or device.type in ("cpu", "vgpu")
        self._device = None if on_host else device

    def now(self) -> Any:
        """Return the present moment; None if it has no time of its own."""
        if self._device is None:
            return time.perf_counter()
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_known(self, moment: Any) -> bool:
        """Return whether `elapsed` up to that moment returns at once."""
        return moment is None or isinstance(moment, float) or bool(moment.query())

    def elapsed(self, start: Any, end: Any) -> float | None:
        """Return the seconds between two moments; None if they cannot be known."""
        if self._device is None:
            return float(end - start)
        if start is None or end is None:
            return 0.0 if self._device.type == "cuda" else None
        if not end.query():
            end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class ObservedPeak:
    """A peak of memory that was measured."""

    nbytes: int | None
    kind: Literal["device memory", "process memory above that at attach", "not known"]
    since: str  # since when; or, if it is not known, why


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


@dataclass
class Totals:
    forward_passes: int = 0  # in training that were begun
    backward_passes: int = 0  # that came to the model
    # Bytes from and to tiers.
    moved: dict[tuple[What, OffloadTier], tuple[int, int]] = field(default_factory=dict)
    recomputed: dict[str, tuple[int, int]] = field(default_factory=dict)  # by layer: times, and FLOPs
    seconds_lost: dict[str, float | None] = field(default_factory=dict)  # None where it cannot be measured


class Accumulation:
    """Counts the batches whose gradients add up for each of an optimizer's first steps.

    Example:
        >>> watch = Accumulation(steps=2)
        >>> for _ in range(2):
        ...     for has_gradients in (False, True, True):
        ...         watch.begin_batch(lambda: has_gradients)
        ...     watch.end_step()
        >>> watch.batches_per_step
        3
    """

    def __init__(self, steps: int) -> None:
        self._to_watch = steps
        self._batches = 0  # since the last step
        self._least = 0  # of the steps so far: one that was skipped has its batches in the next
        self.steps = 0  # of all optimizers
        self.was_called = False  # the model, or a part of it that has layers, in training

    def begin_batch(self, has_gradients: Callable[[], bool]) -> None:
        """Count a forward pass in training, which adds to a batch before it if that has left gradients."""
        self.was_called = True
        if self._to_watch:
            self._batches = self._batches + 1 if self._batches and has_gradients() else 1

    def end_step(self) -> None:
        """Note an optimizer's step; of several optimizers the first one's."""
        self.steps += 1
        if self._to_watch and self._batches:
            self._least = min(self._least or self._batches, self._batches)
            self._to_watch -= 1
            self._batches = 0

    @property
    def batches_per_step(self) -> int | None:
        """Batches for each step; None until enough steps were watched."""
        return None if self._to_watch else self._least


class Meter:
    """Counts of one executor, over all of its plans."""

    def __init__(self) -> None:
        self._events: deque[tuple[Any, ...]] = deque()  # see Note [Counting never waits]
        self._max_events = MAX_EVENTS
        self._lock = threading.Lock()  # of those who add up
        self._of_thread = threading.local()
        self._clock = Clock()
        self._device: torch.device | None = None
        self._simulated = False
        self._watch: PeakWatch | None = None
        self._last_peak: ObservedPeak = NOT_WATCHED
        self._totals = Totals()
        self._recent_passes: deque[int] = deque(maxlen=MAX_BACKWARD_PASSES)
        self.plans = 0
        self.planning_seconds = 0.0
        # Steps of single parameters that were computed in backward: committed by the optimizer's step, and dropped.
        self.steps_committed = 0
        self.steps_dropped = 0

    def begin(self, device: torch.device, *, simulated: bool = False) -> None:
        """Watch the memory of a device, to which a plan is being attached."""
        if self._device != device or self._simulated != simulated:
            self._device, self._simulated = device, simulated
            self._clock = Clock(device, simulated=simulated)
            self._watch = None if simulated else PeakWatch(device)
        self._last_peak = NOT_WATCHED

    def end(self) -> None:
        """Keep the peak as it is: from now on memory is not used by the plan."""
        self._last_peak = self.peak()

    def peak(self) -> ObservedPeak:
        """Return the most memory in use while a plan was attached."""
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

    def forward_pass(self) -> None:
        self._add("forward")

    def backward_pass(self, task: int) -> None:
        """Count a backward pass once, however often it comes by with its graph task id."""
        self._add("backward", task)

    def count_read(self, what: What, tier: OffloadTier, nbytes: int) -> None:
        """Count bytes that were copied to the device (or to host memory) from the tier they are kept on."""
        self._add("moved", (what, tier), nbytes, 0)

    def count_written(self, what: What, tier: OffloadTier, nbytes: int) -> None:
        """Count bytes that were copied to the tier they are kept on."""
        self._add("moved", (what, tier), 0, nbytes)

    def recomputed(self, layer: str, flops: int) -> None:
        self._add("recomputed", layer, 1, flops)

    @contextlib.contextmanager
    def timing(self, cost: Cost) -> Iterator[None]:
        """Time a block, also if it raises; what is timed inside of it under another name is not counted here."""
        if torch.compiler.is_compiling():
            yield
            return
        outer: Cost | None = getattr(self._of_thread, "timed", None)
        self._of_thread.timed = cost
        start = self._clock.now()
        try:
            yield
        finally:
            self._of_thread.timed = outer
            self._add("lost", self._clock, start, self._clock.now(), cost, outer)

    def watched(self, function: Callable[..., Any], layer: str, flops: int) -> Callable[..., Any]:
        """Return a function whose first call is a layer's forward, and every later one a recomputation to count."""
        has_run = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            if not has_run:
                has_run = True
                return function(*args, **kwargs)
            self.recomputed(layer, flops)
            with self.timing("recomputing"):  # it mostly ends early, by an exception
                return function(*args, **kwargs)

        return call

    def totals(self) -> Totals:
        self._add_up(wait=True)
        return copy.deepcopy(self._totals)

    def _add(self, *event: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the compiler traces the call once without running it
        self._events.append(event)
        if len(self._events) >= self._max_events:
            self._add_up(wait=False)

    def _add_up(self, *, wait: bool) -> None:
        if not self._lock.acquire(blocking=wait):
            return
        try:
            for _ in range(len(self._events)):
                event = self._events.popleft()
                if not self._count(event, wait):
                    self._events.append(event)  # for the next time
            self._max_events = len(self._events) + MAX_EVENTS
        finally:
            self._lock.release()

    def _count(self, event: tuple[Any, ...], wait: bool) -> bool:
        """Add an event to the sums; return False if it has a time that the device has not reached."""
        totals = self._totals
        match event:
            case ("forward",):
                totals.forward_passes += 1
            case ("backward", task):
                if task not in self._recent_passes:
                    self._recent_passes.append(task)
                    totals.backward_passes += 1
            case ("moved", key, read, written) if read or written:
                before = totals.moved.get(key, (0, 0))
                totals.moved[key] = (before[0] + read, before[1] + written)
            case ("recomputed", layer, times, flops):
                so_far = totals.recomputed.get(layer, (0, 0))
                totals.recomputed[layer] = (so_far[0] + times, so_far[1] + flops)
            case ("lost", clock, start, end, cost, outer):
                if not wait and not clock.is_known(end):
                    return False
                seconds = clock.elapsed(start, end)
                for name, sign in ((cost, 1), (outer, -1)):
                    if name is not None:
                        sum_before = totals.seconds_lost.get(name) or 0.0
                        totals.seconds_lost[name] = None if seconds is None else sum_before + sign * seconds
        return True
