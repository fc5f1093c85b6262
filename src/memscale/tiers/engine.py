"""Transfers, by the calling thread, worker threads or the copy streams of a CUDA device; and the host memory for them.

Note [Page-locked memory]
~~~~~~~~~~~~~~~~~~~~~~~~~
Only between page-locked (pinned) host memory and a CUDA device are copies asynchronous, and as fast as the link. One
`PinnedMemory` per model hands it out, within `AsyncOffloadConfig.pinned_pool_gb`: to the masters of offloaded
parameters, to gradients, which stay in the memory that they arrived in, to optimizer state and to activations. What
does not fit is in ordinary memory. The default limit (`HostSpec.page_locked_bytes`) is for all models of a process
together, and is divided among the processes of a job: the system cannot swap such memory out, nor reclaim it.

Note [Copy streams]
~~~~~~~~~~~~~~~~~~~
Device to host: the copy waits for what computed the tensor (an event on the compute stream), and the tensor is held
until the compute stream has waited for the copy; then its memory is reused in the order of that stream. Host to device:
the memory is allocated on the compute stream before the copy begins, which waits for what had that memory before, and
so for all that was computed when it was asked for; it overlaps with what is computed from then on. It is freed in the
order of the compute stream as well, which waits for a copy that nobody has waited for.

So all memory of a step is of one stream, is reused at once, and is no more than what is alive: with memory of the copy
stream and `record_stream`, what a host that runs ahead has freed would stay reserved until the device has come so far,
in a deep model for many layers.

Each tensor is a copy of its own, some 15 µs each (`plan.step_time.overhead`). A flat buffer for all tensors of a layer
would be one copy, but masters would be views of one storage: `safetensors` refuses to save such, and `torch.save`
writes the whole of it for each file that has one.
"""

from __future__ import annotations

import enum
import functools
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from memscale._torch import is_fake
from memscale._util.interrupts import LateLock
from memscale.config import AsyncOffloadConfig, Config
from memscale.errors import TierFullError, TransferError
from memscale.execution_plan import Plan
from memscale.hardware.host import read_host
from memscale.tiers.disk import FreeList, round_up, storage_at
from memscale.units import format_bytes

T = TypeVar("T")

ALIGNMENT = 512  # bytes, as CUDA's own allocations have it
_BLOCK_BYTES = 64 * 2**20  # of page-locked memory that masters and gradients are cut from

MASTERS_SHARE = 7 / 8  # of page-locked memory, for masters: the rest is for gradients and activations


class Lane(enum.Enum):
    """Where a transfer runs."""

    CALLER = "caller"  # in the calling thread, before the call returns: simulated devices belong to a thread
    WORKER = "worker"  # in a worker thread
    STREAM = "stream"  # on a CUDA stream of its own, one for each direction


class Transfer(Generic[T]):
    """A transfer that has ended, with its result; subclasses are those that may still run."""

    def __init__(self, value: T) -> None:
        self._value = value

    def wait(self) -> T:
        """Return its result, which what the caller computes from now on may use, or raise a TransferError."""
        return self._value

    def finish(self) -> T:
        """Block until the bytes are where they belong, and return the result. Raises as `wait`."""
        return self.wait()

    def abandon(self) -> None:
        """Have the memory that it reads or writes reused only after it, whoever has waited for the transfer."""


class StreamTransfer(Transfer[T]):
    """Copies that were put on a stream, and the event at their end.

    Args:
        value: The result.
        stream: Where they are.
        compute: The stream that asked for them.
        allocated: Whether the memory that they read or write is of that stream, and not of `stream`.
    """

    def __init__(
        self, value: T, stream: torch.cuda.Stream, compute: torch.cuda.Stream, *, allocated: bool
    ) -> None:
        self.event = stream.record_event()
        super().__init__(value)
        self._compute = compute
        self._allocated = allocated
        self._is_awaited = not allocated  # by the stream that reuses the memory

    def wait(self) -> T:
        stream = torch.cuda.current_stream(self._compute.device)
        stream.wait_event(self.event)
        is_here = stream == self._compute
        self._is_awaited |= is_here
        if not (self._allocated and is_here):
            _record_use(self._value, stream)
        return self._value

    def finish(self) -> T:
        self.event.synchronize()
        self._is_awaited = True
        return self._value

    def abandon(self) -> None:
        if not self._is_awaited:
            self._is_awaited = True
            self._compute.wait_event(self.event)

    def __del__(self) -> None:
        # What a copy to the host reads is held by who started it. No event could be recorded: CUDA itself has failed.
        if getattr(self, "_value", None) is not None:
            self.abandon()


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
    """Runs transfers, asynchronously if there is a `config`; threads and streams are made at their first use."""

    def __init__(self, config: AsyncOffloadConfig | None = None, pinned: PinnedMemory | None = None) -> None:
        self._config = config
        self.depth = 0 if config is None else config.prefetch_depth  # how many layers are prefetched
        self.pinned = pinned or PinnedMemory(None if config is None else config.pinned_pool_bytes)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Which starts a thread when the first transfer needs one.
        self._workers = ThreadPoolExecutor(config.workers if config else 1, "memscale-offload")
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
        outward: bool = False,  # away from the device: it must wait for what is computed there
        allocated: bool = False,  # to memory that was allocated on the compute stream, which may be in use until then
        after: Transfer[Any] | None = None,  # must be over first
    ) -> Transfer[T]:
        """Run `work`, now or soon. An error in it is raised here if it runs here, and else by `wait()`."""
        forked = os.getpid() != self._pid  # threads do not follow into a fork
        if self._config is None or lane is Lane.CALLER or (forked and lane is Lane.WORKER):
            return Transfer(work())
        if device.type != "cuda":
            return WorkerTransfer(self._workers.submit(work))
        stream = self._stream(device, outward)
        compute = torch.cuda.current_stream(device)
        computed = compute.record_event() if outward or allocated else None

        def on_stream() -> T:
            with torch.cuda.stream(stream):
                if computed is not None:
                    stream.wait_event(computed)
                return work()

        if lane is Lane.STREAM:
            if isinstance(after, StreamTransfer):
                stream.wait_event(after.event)
            return StreamTransfer(on_stream(), stream, compute, allocated=outward or allocated)

        def in_worker() -> T:
            # A new thread's device is the first one, to which torch would go back after the block of the stream.
            torch.cuda.set_device(compute.device)
            value = on_stream()
            stream.synchronize()
            if not allocated:
                _record_use(value, compute)
            return value

        return WorkerTransfer(self._workers.submit(in_worker))

    def drain(self, device: torch.device) -> None:
        """Block until copies to the device are over: what they read may be changed then."""
        stream = self._streams.get((device, False))
        if stream is not None:
            stream.synchronize()

    def _stream(self, device: torch.device, outward: bool) -> torch.cuda.Stream:
        with self._lock:
            if (device, outward) not in self._streams:
                self._streams[device, outward] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return self._streams[device, outward]


def _record_use(value: object, stream: torch.cuda.Stream) -> None:
    if isinstance(value, torch.Tensor) and value.device.type == "cuda":
        value.record_stream(stream)


class _Block(NamedTuple):
    memory: torch.Tensor
    free: FreeList


_locked_bytes = 0  # by all models of this process


def _count_locked(change: int) -> None:
    global _locked_bytes
    _locked_bytes += change


_counting: LateLock[int] = LateLock(_count_locked)


class PinnedMemory:
    """Page-locked memory of torch's own allocator, up to a limit in bytes. See Note [Page-locked memory].

    That allocator rounds sizes up to powers of two, and so they are counted here. Masters and gradients are many, and
    live long: they are cut from large blocks, without rounding.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self.bytes_locked = 0
        self._works = True  # until an allocation fails
        self._blocks: list[_Block] = []
        self._lock: LateLock[tuple[_Block | None, int, int]] = LateLock(self._release)

    @functools.cached_property
    def limit(self) -> int:
        if self._limit is not None:
            return self._limit
        host = read_host()  # on which other processes of the job have locked as much
        unlocked = host.available_ram_bytes + host.processes * _locked_bytes
        return replace(host, available_ram_bytes=min(unlocked, host.total_ram_bytes)).page_locked_bytes

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Return so many page-locked bytes; None where the limit, or the system, does not allow it."""
        # When they are freed, torch's allocator does not reuse them before the copies that read or write them are over.
        with self._lock:
            memory = self._lock_pages(nbytes, 1.0)
        if memory is not None:
            size = self.size_of(nbytes)
            weakref.finalize(memory.untyped_storage(), self._lock.submit, (None, 0, size)).atexit = False
        return memory

    def empty_like(
        self, tensor: torch.Tensor, device: torch.device, share: float = 1.0
    ) -> torch.Tensor | None:
        """Return page-locked memory, with a storage of its own, for a tensor in its order of dimensions.

        None for another device than CUDA's, or where `share` of the limit is locked. When the memory is freed it may be
        reused at once: no copy may be reading or writing it then.
        """
        if device.type != "cuda" or is_fake(tensor) or not tensor.numel():
            return None
        size = round_up(tensor.nbytes, ALIGNMENT)
        with self._lock:
            found = self._allocate_in_blocks(size) or (
                self._allocate_in_blocks(size) if self._add_block(size, share) else None
            )
        if found is None:
            return None
        block, offset = found
        address = block.memory.data_ptr() + offset
        storage = storage_at(address, tensor.nbytes, lambda: self._lock.submit((block, offset, size)))
        strides = torch.empty_like(tensor, device="meta").stride()
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(storage, 0, tensor.shape, strides)

    def trim(self) -> None:
        """Unlock blocks that nothing is in."""
        with self._lock:
            used = [each for each in self._blocks if each.free.total < each.memory.nbytes]
            self.bytes_locked -= sum(each.memory.nbytes for each in self._blocks)
            self.bytes_locked += sum(each.memory.nbytes for each in used)
            self._blocks = used

    @staticmethod
    def size_of(nbytes: int) -> int:
        """Return what torch's allocator takes."""
        return 1 << max(nbytes - 1, 0).bit_length()

    def _allocate_in_blocks(self, size: int) -> tuple[_Block, int] | None:
        for block in self._blocks:
            offset = block.free.allocate(size)
            if offset is not None:
                return block, offset
        return None

    def _add_block(self, size: int, share: float) -> bool:
        for nbytes in (max(size, _BLOCK_BYTES), size):
            memory = self._lock_pages(self.size_of(nbytes), share)
            if memory is not None:
                self._blocks.append(_Block(memory, FreeList()))
                self._blocks[-1].free.release(0, memory.nbytes)
                return True
        return False

    def _lock_pages(self, nbytes: int, share: float) -> torch.Tensor | None:
        size, locked = self.size_of(nbytes), _locked_bytes if self._limit is None else self.bytes_locked
        if not self._works or locked + size > share * self.limit:
            return None
        memory = _allocate_pinned(nbytes)
        self._works = memory is not None
        if memory is not None:
            self.bytes_locked += size
            _counting.submit(size)
            weakref.finalize(memory.untyped_storage(), _counting.submit, -size).atexit = False
        return memory

    def _release(self, item: tuple[_Block | None, int, int]) -> None:
        block, offset, size = item
        if block is None:
            self.bytes_locked -= size
        else:
            block.free.release(offset, size)


def _allocate_pinned(nbytes: int) -> torch.Tensor | None:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:  # no more pages can be locked, or there is no device to lock them for
        return None


class HostMemory:
    """Host memory for what leaves the device, under a hard cap in bytes.

    None: what the host has free for this process when the first tensor comes; none for simulated ones, as the host that
    is planned for need not be this one.
    """

    def __init__(self, capacity: int | None = None, pinned: PinnedMemory | None = None) -> None:
        self._cap = capacity
        self.bytes_used = 0
        self._pinned = pinned or PinnedMemory()
        self._lock: LateLock[int] = LateLock(self._release)

    @functools.cached_property
    def capacity(self) -> int:
        if self._cap is not None:
            return self._cap
        host = read_host()
        return host.available_ram_bytes // host.processes

    def empty_like(self, flat: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
        """Return host memory for a flat tensor, page-locked where CUDA copies from `source` (by default `flat`) to it.

        Raises a TierFullError at the cap.
        """
        memory, size = None, PinnedMemory.size_of(flat.nbytes)
        source = flat if source is None else source
        is_limited = self._cap is not None or not is_fake(source)
        if source.device.type == "cuda" and not is_fake(source) and self.bytes_used + size <= self.capacity:
            memory = self._pinned.allocate(flat.nbytes)
        size = flat.nbytes if memory is None else size
        with self._lock:
            if is_limited and self.bytes_used + size > self.capacity:
                raise TierFullError(
                    f"The host tier is full: {format_bytes(flat.nbytes)} more would exceed its cap of "
                    f"{format_bytes(self.capacity)}, of which {format_bytes(self.bytes_used)} is used. The "
                    "tensor stays where it is. Raise Config(max_cpu_offload_gb=...), or use a smaller batch."
                )
            self.bytes_used += size
        if memory is None:
            memory = torch.empty(flat.numel(), dtype=flat.dtype, device="cpu")
        weakref.finalize(memory.untyped_storage(), self._lock.submit, size).atexit = False
        return memory if memory.dtype == flat.dtype else memory.view(flat.dtype)

    def _release(self, size: int) -> None:
        self.bytes_used -= size


def async_settings(plan: Plan, config: Config) -> AsyncOffloadConfig | None:
    """Return how transfers overlap with the computation, as the user or else the plan says; None if they do not."""
    explicit = "async_offload" in config.explicit_fields
    wanted = config.async_offload if explicit else plan.async_offload
    return (config.async_config or AsyncOffloadConfig()) if wanted else None
