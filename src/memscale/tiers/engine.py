"""Who runs transfers: the caller itself, worker threads, or the copy streams of a CUDA device.

A tier says what is to be done and in which lane; the engine says when. What needs a CUDA device is in
`streams.py` and nowhere else.

Note [Sources must not change]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An asynchronous store reads its tensor after the call has returned, as a copy made in the call would cost the
memory that offloading is to save. So the tensor must not be changed in place until it is stored (`flush()`
waits for that), just as autograd demands of what it saved; and as there, torch's version counter tells if it
was: that is an error, never wrong numbers. To drop the tensor is fine, it is held until its bytes are safe.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch

from memscale.config import AsyncOffloadConfig
from memscale.tiers.streams import CopyStreams
from memscale.tiers.transfer import Done, Transfer
from memscale.tiers.workers import WorkerPool

__all__ = ["AsyncEngine", "Engine", "Lane", "SyncEngine"]

T = TypeVar("T")


class Lane(enum.Enum):
    """Where a transfer can run."""

    HERE = "here"
    """In the thread that asks, before the call returns: what belongs to a thread, like a simulated device."""
    READ = "read"
    """In a worker thread, before anything that is only to be written: someone will wait for it."""
    WRITE = "write"
    """In a worker thread."""
    DOWN = "down"
    """Copies from a CUDA device to the host, in order, on a stream of their own."""
    UP = "up"
    """Copies from the host to a CUDA device, on another."""


class Engine(ABC):
    """Runs transfers. Tiers share one; whoever made it closes it.

    Attributes:
        prefetch_depth: How many groups of tensors may be on their way at once, in each direction; 0 if none.
        pinned_pool_bytes: The most page-locked memory that a tier may take, None for its capacity.
    """

    prefetch_depth: int
    pinned_pool_bytes: int | None = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_async(self) -> bool:
        """Whether transfers may still run when a call returns."""
        return self.prefetch_depth > 0

    @abstractmethod
    def run(
        self,
        work: Callable[[], T],
        lane: Lane,
        device: torch.device,
        after: Transfer[None] | None = None,
    ) -> Transfer[T]:
        """Run `work`, now or soon.

        Args:
            work: What to do. An error in it is raised here if it runs here, and else by `wait()`.
            lane: Where it can run.
            device: The device that the tensors come from or go to.
            after: A transfer on another stream that must be over first.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish what was begun and let the threads go; nothing can be run afterwards."""


class SyncEngine(Engine):
    """Everything runs at once, in the caller's thread.

    Example:
        >>> SyncEngine().run(lambda: 1 + 1, Lane.WRITE, torch.device("cpu")).wait()
        2
    """

    prefetch_depth = 0

    def run(
        self,
        work: Callable[[], T],
        lane: Lane,
        device: torch.device,
        after: Transfer[None] | None = None,
    ) -> Transfer[T]:
        return Done(work())

    def close(self) -> None:
        pass


class AsyncEngine(Engine):
    """Transfers beside the computation. Threads and streams are made when the first transfer needs them.

    Args:
        config: Depth, pinned memory and number of threads; the defaults of `AsyncOffloadConfig` if None.

    Example:
        >>> with AsyncEngine() as engine:
        ...     engine.run(lambda: 1 + 1, Lane.WRITE, torch.device("cpu")).wait()
        2
    """

    def __init__(self, config: AsyncOffloadConfig | None = None) -> None:
        config = config or AsyncOffloadConfig()
        self.prefetch_depth = config.prefetch_depth
        self.pinned_pool_bytes = config.pinned_pool_bytes
        self._workers = WorkerPool(config.workers)
        self._streams = CopyStreams()

    def run(
        self,
        work: Callable[[], T],
        lane: Lane,
        device: torch.device,
        after: Transfer[None] | None = None,
    ) -> Transfer[T]:
        if lane is Lane.HERE:
            return Done(work())
        if lane is Lane.DOWN or lane is Lane.UP:
            return self._streams.run(work, device, up=lane is Lane.UP, after=after)
        if device.type == "cuda":
            work = self._streams.in_worker(work, device, up=lane is Lane.READ)
        return self._workers.submit(work, urgent=lane is Lane.READ)

    def close(self) -> None:
        self._workers.close()
