"""The ledger: which storages are alive on which device, which have died, and when each device was fullest.

Note [Deaths at any time]
~~~~~~~~~~~~~~~~~~~~~~~~~
A storage in a reference cycle dies when Python's garbage collector runs, which may be in the middle of the
allocator's book-keeping, or in another thread. While that is going on a death is only noted, and dealt with
right after.

Note [History]
~~~~~~~~~~~~~~
A long training must not fill the memory with records of what has died. The last ``history`` dead pieces are
remembered, and of older ones those that were alive at a device's peak. So what was alive at the peak is
always known in full, and the timeline begins after the last piece that was forgotten.

What a training step asks of a device's memory, and the same asked again.

Note [Steps again and again]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A caching allocator gives a tensor a block that may be up to a MiB larger than it, depending on which blocks are free:
so the second step of training, which finds those of the first, may need more than the first, or less, though its
tensors are the same. A step need not be run twice to know it: what it asked for and gave back is written down, and
asked for once more.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
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

__all__ = ["Replay", "StepLog"]

AllocatorFactory = Callable[[], Allocator]


class DeviceMemory:
    """One device's memory: its allocator and its high-water mark."""

    __slots__ = ("allocator", "name", "peak", "peak_phase", "peak_reserved", "peak_tick")

    def __init__(self, name: str, allocator: Allocator) -> None:
        self.name = name
        self.allocator = allocator
        self.peak = allocator.allocated
        self.peak_reserved = allocator.reserved
        self.peak_tick = 0
        self.peak_phase = Phase.SETUP


class Entry(weakref.ref[Any]):
    """A storage that is alive: a weak reference to it that knows what was written down."""

    __slots__ = ("allocation", "block", "device", "key", "size")
    key: int  # the storage's ``_cdata``
    size: int  # of the storage; a block may be larger
    block: Block | None
    device: DeviceMemory
    allocation: Allocation


class Ledger:
    """Every piece of memory, by the storage it belongs to (``storage._cdata``)."""

    def __init__(self, allocators: Mapping[str, AllocatorFactory], history: int) -> None:
        self.live: dict[int, Entry] = {}
        self.devices: dict[torch.device, DeviceMemory] = {}
        self.clock = 0
        self.phase = Phase.SETUP
        self._factories = dict(allocators)
        self._history = history
        self._phase_began = 0
        self._marks: list[Mark] = []
        self._reserved: list[Allocation] = []  # memory that no storage stands for
        self._dead: list[Allocation] = []  # in the order of their deaths
        self._dead_at_peak: list[Allocation] = []  # of what is forgotten, the part that peaks are made of
        self._since = 0  # what died up to this tick may be forgotten
        self._busy = False
        self._died_meanwhile: list[Entry] = []
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
        """A device that memory was seen on; "cuda" is the first of its kind."""
        wanted = torch.device(device)
        for candidate in (wanted, torch.device(wanted.type, wanted.index or 0)):
            if candidate in self.devices:
                return self.devices[candidate]
        return None

    # ------------------------------------------------------------------ birth and death

    def take(self, memory: DeviceMemory, nbytes: int) -> Block:
        """Memory from the device's allocator.

        Raises:
            OutOfDeviceMemory: the device has not that much left.
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
        if self._died_meanwhile:
            self._bury_late()
        return block

    def add(
        self,
        storage: torch.UntypedStorage,
        tensor: torch.Tensor,
        device: torch.device,
        op: object,
        module: str,
    ) -> Entry:
        """Follow a storage from now until it dies; one that is empty too, as it may be resized later."""
        memory = self.devices.get(device) or self.device(device)
        size = storage.nbytes()
        block = self.take(memory, size) if size else None
        piece = Allocation(
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
        entry.allocation = piece
        self.live[entry.key] = entry
        if self.log is not None:
            self.log.born(piece, size)
        return entry

    def hold(self, nbytes: int, device: torch.device, what: str) -> Callable[[], None]:
        """Account for memory that no storage stands for, until what is returned is called."""
        memory = self.device(device)
        block = self.take(memory, nbytes)
        piece = Allocation(block.size, memory.name, self.clock, self.phase, what, "", (nbytes,), torch.uint8)
        self._reserved.append(piece)
        if self.log is not None:
            self.log.born(piece, nbytes)

        def let_go() -> None:
            self._reserved.remove(piece)
            self._end(piece, block, memory)

        return let_go

    def reserve(self, nbytes: int, device: torch.device, what: str) -> None:
        """Account for memory that no storage stands for, from now on."""
        memory = self.device(device)
        block = self.take(memory, nbytes)
        piece = Allocation(block.size, memory.name, self.clock, self.phase, what, "", (nbytes,), torch.uint8)
        piece.category = Category.WORKSPACE
        self._reserved.append(piece)

    def reserved_for_libraries(self, device: str | torch.device) -> int:
        """Bytes that :meth:`reserve` has taken on a device."""
        memory = self.find(device)
        return sum(
            piece.nbytes
            for piece in self._reserved
            if memory and piece.device == memory.name and piece.category is Category.WORKSPACE
        )

    def replace(self, entry: Entry, block: Block | None, size: int) -> None:
        """A storage has got other memory than it had: what it is for does not change."""
        old = entry.allocation
        piece = Allocation(
            block.size if block else 0,
            old.device,
            self.clock,
            self.phase,
            old.op,
            old.module,
            old.shape,
            old.dtype,
        )
        piece.category = old.category
        if self.log is not None:
            self.log.born(piece, size)  # first: torch copies from the old memory to the new
        self._bury(entry)
        entry.allocation, entry.block, entry.size = piece, block, size

    def _died(self, entry: weakref.ref[Any]) -> None:
        assert isinstance(entry, Entry)
        if self._busy:  # see Note [Deaths at any time]
            self._died_meanwhile.append(entry)
            return
        del self.live[entry.key]
        self._bury(entry)
        if self._died_meanwhile:
            self._bury_late()

    def _bury_late(self) -> None:
        while self._died_meanwhile:
            entry = self._died_meanwhile.pop()
            del self.live[entry.key]
            self._bury(entry)

    def _bury(self, entry: Entry) -> None:
        self._end(entry.allocation, entry.block, entry.device)

    def _end(self, piece: Allocation, block: Block | None, memory: DeviceMemory) -> None:
        self.clock += 1
        piece.died = self.clock
        if self.log is not None:
            self.log.died(piece)
        if piece.category is None:
            # Made in forward and still there when the next phase began: it was kept for that.
            kept = piece.phase is Phase.FORWARD and self._phase_began > piece.born
            piece.category = Category.ACTIVATIONS if kept else Category.TEMPORARY
        self._dead.append(piece)
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
        """Every device's peak is what is in use now; what has died is forgotten."""
        for memory in self.devices.values():
            memory.peak = memory.allocator.allocated
            memory.peak_reserved = memory.allocator.reserved
            memory.peak_tick = self.clock
            memory.peak_phase = self.phase
        self._dead.clear()
        self._dead_at_peak.clear()
        self._forget_marks(self.clock)

    def _forget(self) -> None:
        """Drop the older half of the dead, except what a peak is made of. See Note [History]."""
        half = (len(self._dead) + 1) // 2
        old = [*self._dead_at_peak, *self._dead[:half]]
        peaks = {memory.name: memory.peak_tick for memory in self.devices.values()}
        self._dead_at_peak = [piece for piece in old if piece.alive_at(peaks[piece.device])]
        self._forget_marks(self._dead[half - 1].died or 0)
        del self._dead[:half]

    def _forget_marks(self, since: int) -> None:
        position = bisect_right(self._marks, since, key=lambda mark: mark.tick)
        current = [Mark(since, self._marks[position - 1].phase)] if position else []
        self._marks = current + self._marks[position:]
        self._since = since

    # ------------------------------------------------------------------ what is there

    def now(self, device: str, top: int) -> Snapshot:
        return snapshot(self._alive(), device, self.clock, self.phase, top)

    def at_peak(self, memory: DeviceMemory, top: int) -> Snapshot:
        pieces = [*self._dead_at_peak, *self._dead, *self._alive()]
        return snapshot(pieces, memory.name, memory.peak_tick, memory.peak_phase, top)

    def timeline(self, device: str) -> Timeline:
        return timeline([*self._dead, *self._alive()], self._marks, device, self._since)

    def _alive(self) -> list[Allocation]:
        return [*self._reserved, *(entry.allocation for entry in list(self.live.values()))]


class StepLog:
    """Pieces of one device's memory that came and went, in that order.

    Attributes:
        device: its name.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._events: list[tuple[Allocation, int | None]] = []

    def __len__(self) -> int:
        return len(self._events)

    def born(self, piece: Allocation, nbytes: int) -> None:
        """A piece of so many bytes was asked for."""
        if piece.device == self.device:
            self._events.append((piece, nbytes))

    def died(self, piece: Allocation) -> None:
        """A piece was given back."""
        if piece.device == self.device:
            self._events.append((piece, None))

    def replay(self, allocator: Allocator, marks: Iterable[int] = ()) -> Replay:
        """Ask for the same again: for what was given back in between, as the rest is there to stay.

        Args:
            allocator: whom; it has in use afterwards what it has now.
            marks: numbers of events before which to look at what is in use.
        """
        gone = {id(piece) for piece, size in self._events if size is None}
        looked, start = set(marks), allocator.allocated
        peak, seen = start, {}
        blocks: dict[int, Block] = {}
        for number, (piece, size) in enumerate(self._events):
            if number in looked:
                seen[number] = allocator.allocated - start
            key = id(piece)
            if size is None:
                block = blocks.pop(key, None)  # else it is older than the log
                if block is not None:
                    allocator.free(block)
            elif key in gone and size:
                blocks[key] = allocator.allocate(size)
                peak = max(peak, allocator.allocated)
        return Replay(peak, seen)


class Replay:
    """What was seen while a step was replayed.

    Attributes:
        peak_bytes: the most in use at once.
        above_start: at each mark, what was in use above what was at the start.
    """

    def __init__(self, peak_bytes: int, above_start: dict[int, int]) -> None:
        self.peak_bytes = peak_bytes
        self.above_start = above_start
