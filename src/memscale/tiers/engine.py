"""Who runs transfers: the calling thread, worker threads, or the copy streams of a CUDA device.

A tier says what is to be copied and in which lane; the engine says when it runs.

Note [Sources must not change]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An asynchronous store reads its tensor after the call has returned: a copy made in the call would cost the memory that
offloading is to save. So the tensor must not be changed in place until it is stored (`flush()` waits for that), just as
autograd demands of what it saved; and as there, torch's version counter tells if it was: that is an error, never wrong
numbers. To drop the tensor is fine, it is held until its bytes are safe.

Note [Copy streams]
~~~~~~~~~~~~~~~~~~~
Device to host: the copy waits for what computed the tensor (an event on the compute stream), and the tensor is held
until the compute stream has waited for the copy; then its memory can be reused in the order of that stream, at a moment
that does not depend on how fast the copy was. Host to device: the copy waits for nothing on the compute stream, or it
could not overlap with it; only for the copy down, if that may still be running. Its result is allocated on the copy
stream and used on the compute stream: `record_stream` tells the allocator so. Copies are asynchronous only from and to
page-locked memory; others are correct, and slower.
"""

from __future__ import annotations

import enum
import functools
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

import torch

from memscale._util.locks import LateLock
from memscale.config import AsyncOffloadConfig, Config
from memscale.errors import ConfigError, TierError, TransferError, shown
from memscale.execution_plan import Plan

__all__ = ["ENVIRONMENT", "Engine", "Lane", "PinnedBudget", "Transfer", "async_settings"]

T = TypeVar("T")

OnEnd = Callable[[BaseException | None], None]
"""Called once when a transfer is known to be over, with its error; from whatever thread finds out."""

_THREADS = "memscale-offload"
_GRADIENT_SHARE = 8  # of the page-locked memory, an eighth is for gradients on their way to the host
_GRADIENT_BYTES = 256 * 2**20  # where the size is not configured


class Lane(enum.Enum):
    """Where a transfer can run."""

    CALLER = "caller"
    """In the calling thread, before the call returns: simulated devices belong to a thread."""
    READ = "read"
    """In a worker thread, towards the device."""
    WRITE = "write"
    """In a worker thread, away from the device."""
    D2H = "device to host"
    """On a CUDA stream of its own."""
    H2D = "host to device"
    """On another."""


# ---------------------------------------------------------------------- transfers


class Transfer(Generic[T]):
    """A transfer that has ended, with its result; subclasses are those that may still run.

    Example:
        >>> Transfer(3).wait()
        3
    """

    def __init__(self, value: T) -> None:
        self._value = value

    def done(self) -> bool:
        """Return whether it is over, well or not."""
        return True

    def busy(self) -> bool:
        """Return whether memory is still read or written for it."""
        return not self.done()

    def wait(self) -> T:
        """Return its result, which what the caller computes from now on may use.

        Raises:
            TransferError: It failed; its cause is chained.
        """
        return self._value

    def finish(self) -> None:
        """Block until the bytes are where they belong, well or not."""


class DeferredTransfer(Transfer[T]):
    """A transfer of a device without streams, that counts as running until someone waits for it.

    On a real device the source of a copy is held until then. A virtual device, which copies at once, must hold it as
    long, or it would show less memory than the real one may need.

    Example:
        >>> transfer = DeferredTransfer(3, print)
        >>> transfer.done(), transfer.busy()
        (False, False)
        >>> transfer.wait()
        None
        3
    """

    def __init__(self, value: T, on_end: OnEnd | None) -> None:
        super().__init__(value)
        self._over = False
        self._on_end = on_end

    def done(self) -> bool:
        return self._over

    def busy(self) -> bool:
        return False

    def wait(self) -> T:
        self.finish()
        return self._value

    def finish(self) -> None:
        self._over = True
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(None)


class StreamTransfer(Transfer[T]):
    """Copies that were put on a stream, and the event at their end."""

    def __init__(self, value: T, event: torch.cuda.Event, device: torch.device, on_end: OnEnd | None) -> None:
        super().__init__(value)
        self.event = event
        self._device = device
        self._on_end = on_end  # a copy that fails is an error of the device: of whatever runs there next

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> T:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self.event)
        _record_use(self._value, stream)
        self._end()  # the compute stream is ordered after the copy: what the copy read may be dropped
        return self._value

    def finish(self) -> None:
        self.event.synchronize()
        self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(None)


class WorkerTransfer(Transfer[T]):
    """Work that a thread does."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future
        self._pid = os.getpid()

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> T:
        self.finish()
        error = self._future.exception()
        if error is None:
            return self._future.result()
        # A new error: what is raised gets a traceback, and the one of the future is kept alive by the job.
        if isinstance(error, TransferError):
            raise TransferError(str(error)) from error.__cause__
        raise TransferError(f"A transfer in a worker thread failed: {error!r}") from error

    def finish(self) -> None:
        if not self._future.done():
            _refuse_fork(self._pid)
            wait([self._future])


# ---------------------------------------------------------------------- engine


class Engine:
    """Runs transfers; threads and streams are made when the first transfer needs them.

    It is closed by being dropped: whoever still has
    something on a tier, as a graph whose backward is to come, keeps it.

    Args:
        config: How transfers overlap with the computation; None if they do not.

    Attributes:
        depth: How many layers ahead of the one that computes are fetched; 0 if none are.
        pinned_bytes: The most page-locked memory for a tier, None for its capacity.
        gradients: The page-locked memory for gradients on their way to the host.

    Example:
        >>> with Engine(AsyncOffloadConfig(prefetch_depth=3)) as engine:
        ...     engine.run(lambda: 1 + 1, Lane.WRITE, torch.device("cpu")).wait(), engine.depth
        (2, 3)
    """

    def __init__(self, config: AsyncOffloadConfig | None = None) -> None:
        self._config = config
        self.depth = 0 if config is None else config.prefetch_depth
        pinned = None if config is None else config.pinned_pool_bytes
        for_gradients = _GRADIENT_BYTES if pinned is None else pinned // _GRADIENT_SHARE
        self.pinned_bytes = None if pinned is None else pinned - for_gradients
        self.gradients = PinnedBudget(for_gradients)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._workers: ThreadPoolExecutor | None = None
        self._closed = False
        self._streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_async(self) -> bool:
        """Whether transfers may still run when a call returns."""
        return self._config is not None

    def run(
        self,
        work: Callable[[], T],
        lane: Lane,
        device: torch.device,
        after: Transfer[None] | None = None,
        on_end: OnEnd | None = None,
    ) -> Transfer[T]:
        """Run `work`, now or soon.

        Args:
            work: What to do. An error in it is raised here if it runs here, and else by `wait()`.
            lane: Where it can run.
            device: The device that the tensors come from or go to.
            after: A transfer on another stream that must be over first.
            on_end: Called when it is over.

        Raises:
            TierError: The engine is closed, or this process is a fork of the one that has its threads.
        """
        if not self.is_async:
            value = work()
            if on_end is not None:
                on_end(None)
            return Transfer(value)
        if lane is Lane.CALLER:
            return DeferredTransfer(work(), on_end) if on_end is not None else Transfer(work())
        if lane is Lane.D2H or lane is Lane.H2D:
            return self._run_on_stream(work, lane, device, after, on_end)
        if device.type == "cuda":
            work = self._on_worker_stream(work, lane, device)
        return self._run_in_worker(work, on_end)

    def close(self) -> None:
        """Finish what was begun and end the threads; nothing can be run afterwards."""
        self._closed = True
        if self._workers is not None and os.getpid() == self._pid:
            # Not by a worker, whose job was the last to have the engine: it can't wait for itself.
            self._workers.shutdown(wait=not threading.current_thread().name.startswith(_THREADS))

    def __del__(self) -> None:
        self.close()

    def _run_in_worker(self, work: Callable[[], T], on_end: OnEnd | None) -> Transfer[T]:
        _refuse_fork(self._pid)
        if self._closed:
            raise TierError("The offload engine is closed: make a new one to offload again.")
        with self._lock:
            if self._workers is None:
                assert self._config is not None
                self._workers = ThreadPoolExecutor(self._config.workers, thread_name_prefix=_THREADS)

        def job() -> T:
            # `on_end` belongs to the job, and not to the future's callbacks: who waited for it sees what it did.
            try:
                value = work()
            except BaseException as error:
                if on_end is not None:
                    on_end(error)
                raise
            if on_end is not None:
                on_end(None)
            return value

        return WorkerTransfer(self._workers.submit(job))

    # ------------------------------------------------------------------ CUDA: see Note [Copy streams]

    def _run_on_stream(
        self,
        work: Callable[[], T],
        lane: Lane,
        device: torch.device,
        after: Transfer[None] | None,
        on_end: OnEnd | None,
    ) -> Transfer[T]:
        stream = self._stream(device, lane)
        if lane is Lane.D2H:
            stream.wait_event(torch.cuda.current_stream(device).record_event())
        if isinstance(after, StreamTransfer):
            stream.wait_event(after.event)
        with torch.cuda.stream(stream):
            value = work()
            event = stream.record_event()
        return StreamTransfer(value, event, device, on_end)

    def _on_worker_stream(self, work: Callable[[], T], lane: Lane, device: torch.device) -> Callable[[], T]:
        """Return the same work on a copy stream: a thread's current stream is the one all others wait for."""
        stream = self._stream(device, lane)
        compute = torch.cuda.current_stream(device)
        computed = compute.record_event() if lane is Lane.WRITE else None

        def run() -> T:
            with torch.cuda.stream(stream):
                if computed is not None:
                    stream.wait_event(computed)
                value = work()
            stream.synchronize()
            _record_use(value, compute)
            return value

        return run

    def _stream(self, device: torch.device, lane: Lane) -> torch.cuda.Stream:
        key = device, lane in (Lane.H2D, Lane.READ)
        with self._lock:
            if key not in self._streams:
                self._streams[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return self._streams[key]


def _record_use(value: object, stream: torch.cuda.Stream) -> None:
    if isinstance(value, torch.Tensor) and value.device.type == "cuda":
        value.record_stream(stream)


def _refuse_fork(pid: int) -> None:
    if os.getpid() != pid:
        raise TierError(
            f"The offload engine's threads are in process {pid}, and {os.getpid()} is a fork of it: "
            "make an engine of its own there, or start the process by spawn."
        )


# ---------------------------------------------------------------------- page-locked memory


class PinnedBudget:
    """Page-locked memory of torch's own allocator, up to a limit.

    The allocator keeps blocks that were released, for the next request, and does not reuse one before the copies that
    read or write it are over. It rounds sizes up to powers of two, and so they are counted here.

    Args:
        limit: The most bytes in use at once.

    Attributes:
        bytes_in_use: Bytes that are handed out.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes_in_use = 0
        self._works = True  # until an allocation fails
        # Weakly: the lock is its own, and a cycle would wait for the garbage collector.
        self._lock: LateLock[int] = LateLock(functools.partial(_add_bytes, weakref.ref(self)))

    def allocate(self, nbytes: int, limit: int | None = None) -> torch.Tensor | None:
        """Return so many page-locked bytes; None where the limit, or the system, does not allow it.

        Args:
            nbytes: How many.
            limit: A lower limit than its own, for this time.
        """
        size = self.size_of(nbytes)
        limit = self.limit if limit is None else min(limit, self.limit)
        with self._lock:
            if not self._works or self.bytes_in_use + size > limit:
                return None
            memory = _allocate_pinned(nbytes)
            self._works = memory is not None
            if memory is not None:
                self.bytes_in_use += size
            return memory

    def release(self, nbytes: int) -> None:
        """Count so many bytes as free again, which :meth:`allocate` was asked for. Safe in finalizers."""
        self._lock.leave(-self.size_of(nbytes))

    @staticmethod
    def size_of(nbytes: int) -> int:
        """Return what an allocation takes."""
        return 1 << max(nbytes - 1, 0).bit_length()


def _add_bytes(budget: weakref.ref[PinnedBudget], nbytes: int) -> None:
    found = budget()
    if found is not None:
        found.bytes_in_use += nbytes


def _allocate_pinned(nbytes: int) -> torch.Tensor | None:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # no more pages can be locked, or there is no device to lock them for
        return None


# ---------------------------------------------------------------------- settings

ENVIRONMENT = "MEMSCALE_ASYNC_OFFLOAD"
"""Set to 1, transfers overlap with compute wherever a Config does not say."""

_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def async_settings(plan: Plan, config: Config | None) -> AsyncOffloadConfig | None:
    """Return how transfers overlap with the computation; None if they do not.

    What the user has set in the Config wins; else the environment or the plan can switch it on.

    Raises:
        ConfigError: The environment's variable is none of the words for yes and no.
    """
    config = config or Config()
    explicit = "async_offload" in config.explicit_fields
    wanted = config.async_offload if explicit else plan.async_offload or _environment_wants_it()
    return (config.async_config or AsyncOffloadConfig()) if wanted else None


def _environment_wants_it() -> bool:
    value = os.environ.get(ENVIRONMENT, "").strip().lower()
    if value not in (*_ON, *_OFF):
        raise ConfigError(
            f"{ENVIRONMENT}={shown(value)} in the environment is not allowed: set it to 1 or 0."
        )
    return value in _ON
