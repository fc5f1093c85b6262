"""Times that add up, and peaks that are not made up."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from memscale.memory.process import measure_in_fresh_process
from memscale.observe import counters
from memscale.observe.counters import Clock, Meter, PeakWatch
from memscale.testing import executing
from support.observed import Stack, attached, batch, plan

CPU = torch.device("cpu")


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the host's clock says next."""
    moments: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: moments.pop(0))
    return moments


def test_time_inside_another_is_counted_once(ticks: list[float]) -> None:
    meter = Meter()
    ticks += [0.0, 1.0, 3.0, 10.0]
    with meter.timing("recomputing"), meter.timing("offloading"):
        pass
    assert meter.totals().seconds_lost == {"recomputing": 8.0, "offloading": 2.0}


def test_time_is_counted_also_after_an_error(ticks: list[float]) -> None:
    meter = Meter()
    ticks += [0.0, 5.0, 5.0, 6.0]
    with pytest.raises(ValueError, match="stop"), meter.timing("recomputing"):
        raise ValueError("stop")
    with meter.timing("offloading"):
        pass
    assert meter.totals().seconds_lost == {"recomputing": 5.0, "offloading": 1.0}


def test_what_other_threads_do_is_not_inside(ticks: list[float]) -> None:
    meter = Meter()
    ticks += [0.0, 1.0, 2.0, 4.0]

    def other() -> None:
        with meter.timing("offloading"):
            pass

    with meter.timing("recomputing"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert meter.totals().seconds_lost == {"recomputing": 4.0, "offloading": 1.0}


def test_counts_of_many_threads_are_all_there() -> None:
    meter = Meter()

    def count() -> None:
        for task in range(500):
            meter.count_read("parameters", "host", 3)
            meter.recomputed("layer", 2)
            meter.backward_pass(task)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.totals().moved == {("parameters", "host"): (8 * 500 * 3, 0)}
    assert meter.totals().recomputed == {"layer": (8 * 500, 8 * 500 * 2)}


def test_whoever_counts_never_waits() -> None:
    """See Note [Counting never waits]: who holds the lock may be waiting for the one that counts."""
    meter = Meter()

    def count() -> None:
        meter.count_read("parameters", "host", 3)
        meter.recomputed("layer", 2)
        meter.forward_pass()
        meter.backward_pass(1)
        with meter.timing("offloading"):
            pass

    thread = threading.Thread(target=count, daemon=True)
    with meter._lock:
        thread.start()
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert meter.totals().moved == {("parameters", "host"): (3, 0)}
    assert meter.totals().recomputed == {"layer": (1, 2)}
    assert (meter.totals().forward_passes, meter.totals().backward_passes) == (1, 1)
    assert meter.totals().seconds_lost.keys() == {"offloading"}


class FakeEvent:
    """A CUDA event that is recorded at a known moment and can be read once it was waited for."""

    clock = 0.0
    waits = 0
    behind = 0.0  # how far the device is behind the host

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.is_done = False

    def record(self, stream: Any) -> None:
        assert stream == "the stream"
        FakeEvent.clock += 1.0
        self.moment = FakeEvent.clock

    def synchronize(self) -> None:
        self.is_done = True
        FakeEvent.waits += 1

    def query(self) -> bool:
        self.is_done = self.is_done or self.moment <= FakeEvent.clock - FakeEvent.behind
        return self.is_done

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.is_done
        return 1e3 * (end.moment - self.moment)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Clock:
    FakeEvent.clock, FakeEvent.waits, FakeEvent.behind = 0.0, 0, 0.0
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Clock(torch.device("cuda", 0))


def test_events_of_a_stream_are_read_when_someone_asks(cuda: Clock) -> None:
    meter = Meter()
    meter._clock = cuda
    for _ in range(3):
        with meter.timing("recomputing"), meter.timing("offloading"):
            pass
    assert FakeEvent.waits == 0
    assert meter.totals().seconds_lost == {"recomputing": 3 * 2.0, "offloading": 3 * 1.0}
    assert meter.totals().seconds_lost == {"recomputing": 3 * 2.0, "offloading": 3 * 1.0}


@pytest.mark.parametrize("behind", [0, 100, 10_000])
def test_events_do_not_pile_up_and_are_not_waited_for(cuda: Clock, behind: int) -> None:
    FakeEvent.behind = behind
    meter = Meter()
    meter._clock = cuda
    for _ in range(2000):
        with meter.timing("recomputing"):
            pass
    assert FakeEvent.waits == 0
    assert len(meter._events) < (600 if behind < 1000 else 2001)
    assert meter.totals().seconds_lost == {"recomputing": 2000.0}
    assert not meter._events


def test_what_is_captured_in_a_graph_has_no_time(cuda: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cuda.elapsed(cuda.now(), cuda.now()) == 0


def test_the_time_of_a_device_that_is_not_known(ticks: list[float]) -> None:
    meter = Meter()
    meter._clock = Clock(torch.device("mps"))
    with meter.timing("recomputing"):
        pass
    assert meter.totals().seconds_lost == {"recomputing": None}
    ticks.append(7.0)
    assert Clock(torch.device("cuda"), simulated=True).now() == 7.0


# ---------------------------------------------------------------------- peaks


@pytest.mark.parametrize(
    ("now", "expected", "since"),
    [
        (150, 150 - 80, "the plan was attached"),
        (100, None, "it was higher before the plan was attached, and has not been reset since"),
        (90, 90 - 80, "the system's figure was last reset"),
        (70, 0, "the system's figure was last reset"),
    ],
)
def test_the_peak_of_the_process(
    monkeypatch: pytest.MonkeyPatch, now: int, expected: int | None, since: str
) -> None:
    peak = [100]
    monkeypatch.setattr(counters, "rss_bytes", lambda: 80)
    monkeypatch.setattr(counters, "peak_rss_bytes", lambda: peak[0])
    watch = PeakWatch(CPU)
    peak[0] = now
    found = watch.read()
    assert (found.nbytes, found.kind, found.since) == (expected, "process memory above that at attach", since)


def test_the_peak_of_a_device_is_what_its_allocator_says() -> None:
    with executing() as gpu:
        model = Stack().to(gpu.device)
        executor = attached(model, plan("checkpointing"))
        before = executor.report()
        assert before.observed_peak_bytes is None
        assert "higher before" in before.observed_since
        model(batch(gpu.device)).backward()
        report = executor.report()
        assert report.observed_peak_bytes == gpu.peak_bytes
        assert (report.observed_peak_kind, report.observed_since) == (
            "device memory",
            "the plan was attached",
        )
        executor.detach()
        more = torch.ones(2**20, device=gpu.device)
        assert executor.report().observed_peak_bytes == report.observed_peak_bytes < gpu.peak_bytes
        del more


def test_a_device_without_such_a_figure_has_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    found = PeakWatch(torch.device("mps")).read()
    assert (found.nbytes, found.kind) == (None, "not known")


def grow(megabytes: int) -> int | None:
    """In a process of its own: what a watch sees of memory that is taken and given back."""
    watch = PeakWatch(CPU)
    taken = torch.ones(megabytes * 2**18)
    del taken
    return watch.read().nbytes


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="needs Linux")
def test_the_peak_of_a_process_that_takes_memory_and_gives_it_back() -> None:
    seen = measure_in_fresh_process(grow, 64).result
    assert seen is not None
    assert 64 * 2**20 <= seen < 80 * 2**20
