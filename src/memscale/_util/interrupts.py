"""Ctrl-C, held back while a model is between two states.

Python raises `KeyboardInterrupt` between any two instructions of the main thread. Inside `interrupts_deferred` it
is held back until the end of the block, or until the block itself asks by `raise_pending_interrupt`, where nothing
is half done. A second Ctrl-C gets through at once: nobody is to be locked in by a block that hangs.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["interrupts_deferred", "raise_pending_interrupt"]


class _Deferral:
    """What to call with an interrupt that was held back, and the one that came, if any."""

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
    """Hold back Ctrl-C until the end of the block; a block inside another one waits for the end of that.

    Example:
        >>> with interrupts_deferred():
        ...     done = True
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or _active or not callable(signal.getsignal(signal.SIGINT)):
        yield
        return
    deferral = _Deferral()
    _active.append(deferral)
    signal.signal(signal.SIGINT, deferral.hold)
    try:
        yield
    finally:
        _active.clear()
        signal.signal(signal.SIGINT, deferral.handler)
        deferral.deliver()


def raise_pending_interrupt() -> None:
    """Let go of an interrupt that is held back, if there is one: to be called where nothing is half done."""
    if _active and threading.current_thread() is threading.main_thread():
        _active[0].deliver()
