"""A transfer that is under way, as seen by whoever waits for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Done", "InOrder", "Transfer"]

T = TypeVar("T")


class Transfer(ABC, Generic[T]):
    """Something that is being moved."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it is over, well or not."""

    def busy(self) -> bool:
        """Whether memory is still read or written for it."""
        return not self.done()

    @abstractmethod
    def wait(self) -> T:
        """Its result, which what the caller computes from now on may use.

        Raises:
            TransferError: It failed; its cause is chained.
        """

    @abstractmethod
    def finish(self) -> None:
        """Block until the bytes are where they belong, well or not."""

    @abstractmethod
    def then(self, done: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Call one of these when it is known to be over. Once, from whatever thread finds out."""


class Done(Transfer[T]):
    """A transfer that was over before anyone could wait for it.

    Example:
        >>> Done(3).wait()
        3
    """

    def __init__(self, value: T) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def wait(self) -> T:
        return self._value

    def finish(self) -> None:
        pass

    def then(self, done: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        done()


class InOrder(Transfer[T]):
    """A transfer of a device without streams, that counts as under way until someone waits for it.

    On a real device what a copy reads is held until then. A virtual one, which copies at once, must hold it as long:
    else it would show less memory than the real one may need.

    Example:
        >>> transfer = InOrder(3)
        >>> transfer.then(lambda: print("over"), print)
        >>> transfer.done(), transfer.busy()
        (False, False)
        >>> transfer.wait()
        over
        3
    """

    def __init__(self, value: T) -> None:
        self._value = value
        self._over = False
        self._calls: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self._over

    def busy(self) -> bool:
        return False

    def wait(self) -> T:
        self.finish()
        return self._value

    def finish(self) -> None:
        self._over = True
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    def then(self, done: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        self._calls.append(done)
