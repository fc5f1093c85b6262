"""The ledger: which storages are alive on which device, which have died, and each device's peak.

Note [Finalizers during allocation]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A storage in a reference cycle dies when Python's garbage collector runs, which may be inside the allocator model, or
in another thread. Meanwhile a death is only queued, and processed right after.

Note [History]
~~~~~~~~~~~~~~
A long training must not fill the memory with records of what has died. The ledger keeps the last `history` dead
allocations, and of older ones those that were alive at a device's peak. So the peak is always known in full, and the
timeline begins after the last allocation that was dropped.

Note [Replaying a step]
~~~~~~~~~~~~~~~~~~~~~~~
A caching allocator returns a block that may be up to a MiB larger than the request, depending on which blocks are free:
the second step of training, which finds those of the first, may need more than the first, or less, with the same
tensors. A step need not be run twice to know that: its requests are logged and repeated on the allocator model.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memscale.memory.allocator import Allocator, Block, ExactAllocator
from memscale.memory.record import (
    Allocation,
    Category,
    Mark,
    Phase,
    Snapshot,
    Timeline,
    snapshot,
    timeline,
)

AllocatorFactory = Callable[[], Allocator]


class DeviceMemory:
    """One device's memory: its allocator and its peak."""

    __slots__ = ("allocator", "name", "peak", "peak_phase", "peak_reserved", "peak_tick")

    def __init__(self, name: str, allocator: Allocator) -> None:
        self.name = name
        self.allocator = allocator
        self.peak = allocator.allocated
        self.peak_reserved = allocator.reserved
        self.peak_tick = 0
        self.peak_phase = Phase.SETUP


class Entry(weakref.ref[Any]):
    """A weak reference to a storage that is alive, with its allocation."""

    __slots__ = ("allocation", "block", "device", "key", "size")
    key: int  # the storage's ``_cdata``
    size: int  # of the storage; a block may be larger
    block: Block | None
    device: DeviceMemory
    allocation: Allocation


class Ledger:
    """Every allocation, by the storage it belongs to (`storage._cdata`)."""

    def __init__(self, allocators: Mapping[str, AllocatorFactory], history: int) -> None:
        self.live: dict[int, Entry] = {}
        self.devices: dict[torch.device, DeviceMemory] = {}
        self.clock = 0
        self.phase = Phase.SETUP
        self._factories = dict(allocators)
        self._history = history
        self._phase_began = 0
        self._marks: list[Mark] = []
        self._reserved: list[Allocation] = []  # allocations without a storage
        self._dead: list[Allocation] = []  # in the order of death
        self._dead_at_peak: list[Allocation] = []  # of what was dropped, what was alive at a peak
        self._since = 0  # what died up to this tick may be dropped
        self._busy = False
        self._died_while_busy: list[Entry] = []
        self._on_death = self._died  # bound once
        self.log: StepLog | None = None

    # ------------------------------------------------------------------ devices

    def device(self, device: torch.device) -> DeviceMemory:
        memory = self.devices.get(device)
        if memory is None:
            factory = self._factories.get(device.type, ExactAllocator)
            memory = self.devices[device] = DeviceMemory(str(device), factory())
        return memory

    def find(self, device: str | torch.device) -> DeviceMemory | None:
        """Return a device that memory was seen on; "cuda" means "cuda:0"."""
        wanted = torch.device(device)
        for candidate in (wanted, torch.device(wanted.type, wanted.index or 0)):
            if candidate in self.devices:
                return self.devices[candidate]
        return None

    # ------------------------------------------------------------------ birth and death

    def allocate(self, memory: DeviceMemory, nbytes: int) -> Block:
        """Allocate a block from the device's allocator and update the peaks.

        Raises:
            OutOfDeviceMemory: the device does not have that much left.
        """
        allocator = memory.allocator
        self._busy = True
        try:
            block = allocator.allocate(nbytes)
        finally:
            self._busy = False
        self.clock += 1
        if allocator.allocated > memory.peak:
            memory.peak = allocator.allocated
            memory.peak_tick = self.clock
            memory.peak_phase = self.phase
        if allocator.reserved > memory.peak_reserved:
            memory.peak_reserved = allocator.reserved
        if self._died_while_busy:
            self._release_queued()
        return block

    def add(
        self,
        storage: torch.UntypedStorage,
        tensor: torch.Tensor,
        device: torch.device,
        op: object,
        module: str,
    ) -> Entry:
        """Follow a storage until it dies; also an empty one, which may be resized later."""
        memory = self.devices.get(device) or self.device(device)
        size = storage.nbytes()
        block = self.allocate(memory, size) if size else None
        allocation = Allocation(
            block.size if block else 0,
            memory.name,
            self.clock,
            self.phase,
            op,
            module,
            tensor.shape,
            tensor.dtype,
        )
        entry = Entry(storage, self._on_death)
        entry.key = storage._cdata
        entry.size = size
        entry.block = block
        entry.device = memory
        entry.allocation = allocation
        self.live[entry.key] = entry
        if self.log is not None:
            self.log.born(allocation, size)
        return entry

    def hold(
        self, nbytes: int, device: torch.device, what: str, category: Category | None = None
    ) -> Callable[[], None]:
        """Account for memory without a storage until the returned function is called."""
        memory = self.device(device)
        block = self.allocate(memory, nbytes)
        allocation = Allocation(
            block.size, memory.name, self.clock, self.phase, what, "", (nbytes,), torch.uint8
        )
        allocation.category = category
        self._reserved.append(allocation)
        if self.log is not None:
            self.log.born(allocation, nbytes)

        def release() -> None:
            self._reserved.remove(allocation)
            self._end(allocation, block, memory)

        return release

    def workspace_bytes(self, device: str | torch.device) -> int:
        """Return the bytes that libraries hold on a device."""
        memory = self.find(device)
        return sum(
            each.nbytes
            for each in self._reserved
            if memory and each.device == memory.name and each.category is Category.WORKSPACE
        )

    def replace(self, entry: Entry, block: Block | None, size: int) -> None:
        """Give a storage another block; its category stays."""
        old = entry.allocation
        allocation = Allocation(
            block.size if block else 0,
            old.device,
            self.clock,
            self.phase,
            old.op,
            old.module,
            old.shape,
            old.dtype,
        )
        allocation.category = old.category
        if self.log is not None:
            self.log.born(allocation, size)  # before the old one is freed: torch copies
        self._release(entry)
        entry.allocation, entry.block, entry.size = allocation, block, size

    def _died(self, entry: weakref.ref[Any]) -> None:
        assert isinstance(entry, Entry)
        if self._busy:  # see Note [Finalizers during allocation]
            self._died_while_busy.append(entry)
            return
        del self.live[entry.key]
        self._release(entry)
        if self._died_while_busy:
            self._release_queued()

    def _release_queued(self) -> None:
        while self._died_while_busy:
            entry = self._died_while_busy.pop()
            del self.live[entry.key]
            self._release(entry)

    def _release(self, entry: Entry) -> None:
        self._end(entry.allocation, entry.block, entry.device)

    def _end(self, allocation: Allocation, block: Block | None, memory: DeviceMemory) -> None:
        self.clock += 1
        allocation.died = self.clock
        if self.log is not None:
            self.log.died(allocation)
        if allocation.category is None:
            # Allocated in forward and alive when the next phase began: saved for backward.
            kept = allocation.phase is Phase.FORWARD and self._phase_began > allocation.born
            allocation.category = Category.ACTIVATIONS if kept else Category.TEMPORARY
        self._dead.append(allocation)
        if block is not None:
            self._busy = True
            memory.allocator.free(block)
            self._busy = False
        if len(self._dead) > self._history:
            self._forget()

    # ------------------------------------------------------------------ time

    def enter_phase(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self.clock += 1
            self._phase_began = self.clock
            self._marks.append(Mark(self.clock, phase))

    def reset_peak(self) -> None:
        """Set every device's peak to what is in use now, and drop what has died."""
        for memory in self.devices.values():
            memory.peak = memory.allocator.allocated
            memory.peak_reserved = memory.allocator.reserved
            memory.peak_tick = self.clock
            memory.peak_phase = self.phase
        self._dead.clear()
        self._dead_at_peak.clear()
        self._forget_marks(self.clock)

    def _forget(self) -> None:
        """Drop the older half of the dead, except what was alive at a peak. See Note [History]."""
        half = (len(self._dead) + 1) // 2
        old = [*self._dead_at_peak, *self._dead[:half]]
        peaks = {memory.name: memory.peak_tick for memory in self.devices.values()}
        self._dead_at_peak = [
            allocation for allocation in old if allocation.alive_at(peaks[allocation.device])
        ]
        self._forget_marks(self._dead[half - 1].died or 0)
        del self._dead[:half]

    def _forget_marks(self, since: int) -> None:
        position = bisect_right(self._marks, since, key=lambda mark: mark.tick)
        current = [Mark(since, self._marks[position - 1].phase)] if position else []
        self._marks = current + self._marks[position:]
        self._since = since

    # ------------------------------------------------------------------ summaries

    def now(self, device: str, top: int) -> Snapshot:
        return snapshot(self._alive(), device, self.clock, self.phase, top)

    def at_peak(self, memory: DeviceMemory, top: int) -> Snapshot:
        allocations = [*self._dead_at_peak, *self._dead, *self._alive()]
        return snapshot(allocations, memory.name, memory.peak_tick, memory.peak_phase, top)

    def timeline(self, device: str) -> Timeline:
        return timeline([*self._dead, *self._alive()], self._marks, device, self._since)

    def _alive(self) -> list[Allocation]:
        return [*self._reserved, *(entry.allocation for entry in list(self.live.values()))]


class StepLog:
    """The requests to one device's allocator during a step, in order."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._events: list[tuple[Allocation, int | None]] = []  # None: released

    def __len__(self) -> int:
        return len(self._events)

    def born(self, allocation: Allocation, nbytes: int) -> None:
        if allocation.device == self.device:
            self._events.append((allocation, nbytes))

    def died(self, allocation: Allocation) -> None:
        if allocation.device == self.device:
            self._events.append((allocation, None))

    def replay(self, allocator: Allocator, marks: Iterable[int] = ()) -> Replay:
        """Repeat the requests whose memory was released in between; the rest is there to stay.

        Args:
            allocator: has the same in use afterwards as before.
            marks: numbers of events before which to record what is in use.
        """
        released = {id(allocation) for allocation, size in self._events if size is None}
        marked, start = set(marks), allocator.allocated
        peak, above_start = start, {}
        blocks: dict[int, Block] = {}
        for number, (allocation, size) in enumerate(self._events):
            if number in marked:
                above_start[number] = allocator.allocated - start
            key = id(allocation)
            if size is None:
                block = blocks.pop(key, None)  # None: it is older than the log
                if block is not None:
                    allocator.free(block)
            elif key in released and size:
                blocks[key] = allocator.allocate(size)
                peak = max(peak, allocator.allocated)
        return Replay(peak, above_start)


@dataclass(frozen=True)
class Replay:
    """The result of replaying a step.

    Attributes:
        peak_bytes: the most in use at once.
        above_start: by mark, what was in use above the start.
    """

    peak_bytes: int
    above_start: dict[int, int]


# Memory-mapped storages, which trackers leave out. To torch they are ordinary CPU tensors, but their pages come and go,
# and the system can reclaim them at any time: who uses them accounts for them (`ResidentPages`).
_mapped_storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by the address of the C++ object
_counting_as_mapped = 0


def mark_mapped(storage: torch.UntypedStorage) -> None:
    """Exclude a memory-mapped storage from trackers; to be called before one sees it.

    Example:
        >>> x = torch.ones(2)
        >>> mark_mapped(x.untyped_storage())
        >>> is_mapped(x.untyped_storage()), is_mapped(torch.ones(2).untyped_storage())
        (True, False)
    """
    key = storage._cdata
    _mapped_storages[key] = weakref.ref(storage, functools.partial(_forget, key))


def is_mapped(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage is memory-mapped."""
    if _counting_as_mapped:
        mark_mapped(storage)
        return True
    found = _mapped_storages.get(storage._cdata)
    return found is not None and found() is storage


@contextlib.contextmanager
def new_storages_are_mapped() -> Iterator[None]:
    """Treat every storage that a tracker sees first inside the block as mapped: for simulated tensors."""
    global _counting_as_mapped
    _counting_as_mapped += 1
    try:
        yield
    finally:
        _counting_as_mapped -= 1


def _forget(key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
    if _mapped_storages.get(key) is reference:
        del _mapped_storages[key]
