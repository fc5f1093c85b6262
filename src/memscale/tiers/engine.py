"""Who runs transfers: the calling thread, worker threads, or the copy streams of a CUDA device.

Note [Copy streams]
~~~~~~~~~~~~~~~~~~~
Device to host: the copy waits for what computed the tensor (an event on the compute stream), and the tensor is held
until the compute stream has waited for the copy; then its memory is reused in the order of that stream. Host to device:
the copy waits for nothing on the compute stream, or it could not overlap with it; only for the copy from the device, if
that may still be running. Its result is allocated on the copy stream and used on the compute stream: `record_stream`
tells the allocator so. Copies are asynchronous only from and to page-locked memory; others are correct, and slower.
"""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from memscale.config import AsyncOffloadConfig, Config
from memscale.errors import ConfigError, TransferError, shown
from memscale.execution_plan import Plan
from memscale.tiers.host import PinnedMemory

__all__ = ["ENVIRONMENT", "Engine", "Lane", "Transfer", "async_settings"]

T = TypeVar("T")

_GRADIENT_SHARE = 8  # of the page-locked memory, an eighth is for gradients on their way to the host
_GRADIENT_BYTES = 256 * 2**20  # where the size is not configured


class Lane(enum.Enum):
    """Where a transfer runs."""

    CALLER = "caller"  # in the calling thread, before the call returns: simulated devices belong to a thread
    WORKER = "worker"  # in a worker thread
    STREAM = "stream"  # on a CUDA stream of its own, one for each direction


class Transfer(Generic[T]):
    """A transfer that has ended, with its result; subclasses are those that may still run.

    Example:
        >>> Transfer(3).wait()
        3
    """

    def __init__(self, value: T) -> None:
        self._value = value

    def wait(self) -> T:
        """Return its result, which what the caller computes from now on may use.

        Raises:
            TransferError: It failed; its cause is chained.
        """
        return self._value

    def finish(self) -> T:
        """Block until the bytes are where they belong, and return the result.

        Raises:
            As :meth:`wait`.
        """
        return self.wait()

    def abandon(self, source: torch.Tensor) -> None:
        """Keep the memory of its source from reuse until it was read, though nobody waits for the transfer."""


class StreamTransfer(Transfer[T]):
    """Copies that were put on a stream, and the event at their end."""

    def __init__(self, value: T, stream: torch.cuda.Stream, device: torch.device) -> None:
        super().__init__(value)
        self._stream = stream
        self._device = device
        self.event = stream.record_event()

    def wait(self) -> T:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self.event)
        _record_use(self._value, stream)
        return self._value

    def finish(self) -> T:
        self.event.synchronize()
        return self._value

    def abandon(self, source: torch.Tensor) -> None:
        _record_use(source, self._stream)


class WorkerTransfer(Transfer[T]):
    """Work that a thread does, which keeps its source alive."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def wait(self) -> T:
        error = self._future.exception()
        if error is None:
            return self._future.result()
        # A new error: what is raised gets a traceback, and the future's own is kept alive by it.
        if isinstance(error, TransferError):
            raise TransferError(str(error)) from error.__cause__
        raise TransferError(f"A transfer in a worker thread failed: {error!r}") from error


class Engine:
    """Runs transfers; threads and streams are made when the first transfer needs them, and end with it.

    Args:
        config: How transfers overlap with the computation; None if they do not.

    Attributes:
        depth: How many layers ahead of the one that computes are fetched; 0 if none are.
        pinned_bytes: The most page-locked memory for activations, None for no limit of its own.
        gradients: The page-locked memory for gradients on their way to the host.

    Example:
        >>> engine = Engine(AsyncOffloadConfig(prefetch_depth=3))
        >>> engine.run(lambda: 1 + 1, Lane.WORKER, torch.device("cpu")).wait(), engine.depth
        (2, 3)
    """

    def __init__(self, config: AsyncOffloadConfig | None = None) -> None:
        self._config = config
        self.depth = 0 if config is None else config.prefetch_depth
        pinned = None if config is None else config.pinned_pool_bytes
        for_gradients = _GRADIENT_BYTES if pinned is None else pinned // _GRADIENT_SHARE
        self.pinned_bytes = None if pinned is None else pinned - for_gradients
        self.gradients = PinnedMemory(for_gradients)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._workers: ThreadPoolExecutor | None = None
        self._streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}

    @property
    def is_async(self) -> bool:
        """Whether transfers may still run when a call returns."""
        return self._config is not None

    def run(
        self,
        work: Callable[[], T],
        lane: Lane,
        device: torch.device,
        *,
        outward: bool = False,
        after: Transfer[None] | None = None,
    ) -> Transfer[T]:
        """Run `work`, now or soon.

        Args:
            work: What to do. An error in it is raised here if it runs here, and else by `wait()`.
            lane: Where it runs, if the engine is asynchronous.
            device: The device that the tensors come from or go to.
            outward: Whether it copies away from the device, and so must wait for what is computed there.
            after: A transfer that must be over first; one in another thread is.
        """
        forked = os.getpid() != self._pid  # threads do not follow into a fork
        if self._config is None or lane is Lane.CALLER or (forked and lane is Lane.WORKER):
            return Transfer(work())
        if device.type != "cuda":
            return WorkerTransfer(self._executor(self._config.workers).submit(work))
        stream = self._stream(device, outward)
        compute = torch.cuda.current_stream(device)
        computed = compute.record_event() if outward else None

        def on_stream() -> T:
            with torch.cuda.stream(stream):
                if computed is not None:
                    stream.wait_event(computed)
                return work()

        if lane is Lane.STREAM:
            if isinstance(after, StreamTransfer):
                stream.wait_event(after.event)
            return StreamTransfer(on_stream(), stream, device)

        def in_worker() -> T:
            value = on_stream()
            stream.synchronize()
            _record_use(value, compute)
            return value

        return WorkerTransfer(self._executor(self._config.workers).submit(in_worker))

    def _executor(self, workers: int) -> ThreadPoolExecutor:
        with self._lock:
            if self._workers is None:
                self._workers = ThreadPoolExecutor(workers, thread_name_prefix="memscale-offload")
            return self._workers

    def _stream(self, device: torch.device, outward: bool) -> torch.cuda.Stream:
        with self._lock:
            if (device, outward) not in self._streams:
                self._streams[device, outward] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return self._streams[device, outward]


def _record_use(value: object, stream: torch.cuda.Stream) -> None:
    if isinstance(value, torch.Tensor) and value.device.type == "cuda":
        value.record_stream(stream)


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
    value = os.environ.get(ENVIRONMENT, "").strip().lower()
    if "async_offload" in config.explicit_fields:
        wanted = config.async_offload
    elif plan.async_offload or value in _ON:
        wanted = True
    elif value in _OFF:
        wanted = False
    else:
        raise ConfigError(
            f"{ENVIRONMENT}={shown(value)} in the environment is not allowed: set it to 1 or 0."
        )
    return (config.async_config or AsyncOffloadConfig()) if wanted else None
