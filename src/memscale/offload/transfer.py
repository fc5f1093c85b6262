"""A transfer that is under way, as seen by whoever waits for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Done", "Transfer"]

T = TypeVar("T")


class Transfer(ABC, Generic[T]):
    """Something that is being moved."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it is over, well or not."""

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
