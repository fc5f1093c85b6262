"""Copies beside the computation on a CUDA device: one stream down, one up, and the events between.

Note [Streams]
~~~~~~~~~~~~~~
Down: the copy waits for what computed the tensor (an event on the compute stream), and the tensor is held
until the compute stream has waited for the copy; then its memory can be reused in the order of that stream,
at a moment that does not depend on how fast the copy was. Up: the copy waits for nothing on the compute
stream, or it could not run ahead; only for the copy down, if that may still be under way. Its result is
allocated on the copy stream and used on the compute stream: `record_stream` tells the allocator so.

Copies are asynchronous only from and to page-locked memory (`pinned.py`); others are correct, and slower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from memscale.tiers.transfer import Transfer

__all__ = ["CopyStreams", "StreamTransfer"]

T = TypeVar("T")


class StreamTransfer(Transfer[T]):
    """Copies that were put on a stream, and the event at their end."""

    def __init__(self, value: T, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self._value = value
        self._device = device
        self._calls: list[Callable[[], None]] = []

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> T:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self.event)
        _used_on(self._value, stream)
        # The compute stream is ordered after the copy: what the copy read may be dropped.
        self._call_all()
        return self._value

    def finish(self) -> None:
        self.event.synchronize()
        self._call_all()

    def then(self, done: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        self._calls.append(done)  # a copy that fails is an error of the device: of whatever is run there next

    def _call_all(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call()


class CopyStreams:
    """The copy streams of every device, made when first used."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def run(
        self, work: Callable[[], T], device: torch.device, *, up: bool, after: Transfer[None] | None = None
    ) -> Transfer[T]:
        """Put the copies that `work` makes on a stream beside the computation. See Note [Streams]."""
        stream = self._stream(device, up)
        if not up:
            stream.wait_event(torch.cuda.current_stream(device).record_event())
        if isinstance(after, StreamTransfer):
            stream.wait_event(after.event)
        with torch.cuda.stream(stream):
            value = work()
            event = stream.record_event()
        return StreamTransfer(value, event, device)

    def in_worker(self, work: Callable[[], T], device: torch.device, *, up: bool) -> Callable[[], T]:
        """The same work for a worker thread: on a copy stream, and over when it returns.

        Threads have a current stream each, which would be the one that everything else waits for.
        """
        stream = self._stream(device, up)
        compute = torch.cuda.current_stream(device)
        computed = None if up else compute.record_event()

        def run() -> T:
            with torch.cuda.stream(stream):
                if computed is not None:
                    stream.wait_event(computed)
                value = work()
            stream.synchronize()
            _used_on(value, compute)
            return value

        return run

    def _stream(self, device: torch.device, up: bool) -> torch.cuda.Stream:
        with self._lock:
            stream = self._streams.get((device, up))
            if stream is None:
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self._streams[device, up] = stream
            return stream


def _used_on(value: object, stream: torch.cuda.Stream) -> None:
    if isinstance(value, torch.Tensor) and value.device.type == "cuda":
        value.record_stream(stream)
