"""Defer Ctrl-C while a model is between two states.

Inside `interrupts_deferred`, `KeyboardInterrupt` is deferred to the end of the block, or to a call of
`raise_pending_interrupt`. A second Ctrl-C is raised at once, so that a block that hangs can be left.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class _Deferral:
    """The handler of SIGINT, and a pending interrupt, if any."""

    def __init__(self) -> None:
        self.handler = signal.getsignal(signal.SIGINT)
        self.frame: FrameType | None = None
        self.is_pending = False

    def hold(self, number: int, frame: FrameType | None) -> None:
        if self.is_pending:
            self.deliver()
        self.frame, self.is_pending = frame, True

    def deliver(self) -> None:
        if self.is_pending and callable(self.handler):
            frame, self.frame, self.is_pending = self.frame, None, False
            self.handler(signal.SIGINT, frame)


_active: list[_Deferral] = []  # at most one: signals are the main thread's


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C to the end of the outermost such block."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or _active or not callable(signal.getsignal(signal.SIGINT)):
        yield
        return
    deferral = _Deferral()
    try:
        _active.append(deferral)
        signal.signal(signal.SIGINT, deferral.hold)
        yield
    finally:
        _active.clear()
        signal.signal(signal.SIGINT, deferral.handler)
        deferral.deliver()


def raise_pending_interrupt() -> None:
    """Raise a deferred interrupt, if there is one; to be called where nothing is half done."""
    if _active and threading.current_thread() is threading.main_thread():
        _active[0].deliver()
