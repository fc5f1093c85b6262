"""Code that may run at any moment: Ctrl-C, deferred while a model is between two states, and finalizers.

Inside `interrupts_deferred`, `KeyboardInterrupt` is deferred to the end of the block, or to a call of
`raise_pending_interrupt`. A second Ctrl-C is raised at once, so that a block that hangs can be left. `LateLock` is a
lock for state that finalizers change too.
"""

from __future__ import annotations

import contextlib
import inspect
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Generic, TypeVar

T = TypeVar("T")


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


class LateLock(Generic[T]):
    """A lock with a queue for finalizers, which must not wait for it.

    Note [Finalizers]
    ~~~~~~~~~~~~~~~~~
    The garbage collector may run a finalizer in any thread, also in one that holds this lock: to wait for it would be a
    deadlock. So a finalizer queues an item, which whoever holds the lock handles on release. The method that handles
    items is referred to weakly: its object mostly owns the lock.

    Ctrl-C is deferred while the lock is held: between the call that acquires it and the block that releases it, it
    would leave the lock locked for good.

    Example:
        >>> done = []
        >>> lock = LateLock(done.append)
        >>> with lock:
        ...     lock.submit("an item")
        ...     len(done)
        0
        >>> done
        ['an item']
    """

    def __init__(self, handle: Callable[[T], None]) -> None:
        is_method = inspect.ismethod(handle)
        self._handle = weakref.WeakMethod(handle) if is_method else lambda: handle
        self._lock = threading.Lock()
        self._deferral: AbstractContextManager[None]  # of who holds it
        self._items: deque[T] = deque()  # its append and popleft are atomic

    def __enter__(self) -> None:
        deferral = interrupts_deferred()
        deferral.__enter__()
        try:
            self._lock.acquire()
        except BaseException:
            deferral.__exit__(None, None, None)
            raise
        self._deferral = deferral

    def __exit__(self, *_: object) -> None:
        deferral = self._deferral
        self._lock.release()
        try:
            self._handle_items()
        finally:
            deferral.__exit__(None, None, None)

    def renew(self) -> None:
        """Replace the lock, in a child that was forked while a thread of its parent held it."""
        self._lock = threading.Lock()

    def submit(self, item: T) -> None:
        """Handle `item` under the lock: now if it is free, else by its holder on release."""
        self._items.append(item)
        self._handle_items()

    def _handle_items(self) -> None:
        # After each release: what was queued while the lock was held is found here; later items find it free.
        with interrupts_deferred():
            while self._items and self._lock.acquire(blocking=False):
                try:
                    while self._items:
                        item, handle = self._items.popleft(), self._handle()
                        if handle is not None:
                            handle(item)
                finally:
                    self._lock.release()
