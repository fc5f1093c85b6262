"""Records of allocations: which are alive on which device, each device's peak, and summaries of them.

Note [Finalizers during allocation]
A storage in a reference cycle dies when Python's garbage collector runs, which may be inside the allocator model, or
in another thread. Meanwhile a death is only queued, and processed right after.

Note [Replaying a step]
A caching allocator returns a block that may be up to a MiB larger than the request, depending on which blocks are free:
the second step of training may need more than the first, or less, with the same tensors. A step need not be run twice
to know that: its requests are logged and repeated on the allocator model.

Note [Capacity]
Of its blocks, a caching allocator can hand out only those that are large enough, so that it reserves more than is in
use. Where nothing more can be reserved it releases the segments that are wholly free, and tries again: a step may run
with less than it reserves where there is plenty. With how little is found by repeating its requests with less and less.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memscale.memory.allocator import (
    LARGE_ROUNDING,
    AllocatedBlock,
    CachingAllocator,
    ExactAllocator,
    OutOfDeviceMemory,
)
from memscale.units import format_bytes

AllocatorFactory = Callable[[], ExactAllocator]

HISTORY = 100_000  # allocations and releases that the timeline goes back


class _Text(str, enum.Enum):
    def __str__(self) -> str:
        return str(self.value)


class Category(_Text):
    WEIGHTS = "weights"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"  # allocated in forward, still in use when backward begins
    INPUTS = "inputs"
    TEMPORARY = "temporary"  # everything else
    WORKSPACE = "workspace"  # a library's scratch memory (cuBLAS)


class Phase(_Text):
    SETUP = "setup"
    FORWARD = "forward"
    EVALUATION = "evaluation"  # a forward without gradients: nothing is saved for backward
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(slots=True, eq=False)
class Allocation:
    nbytes: int
    device: str
    born: int  # a tick of the ledger's clock
    phase: Phase
    op: object  # None: it existed before the tracker
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    category: Category | None = None  # set once it is known, at death at the latest, for its whole life
    copied: bool = False  # by a transfer to the device: on CUDA in memory of the stream of such copies

    def current_category(self) -> Category:
        """Return the category as far as it is known: what forward allocated may yet become an activation."""
        if self.category is not None:
            return self.category
        return Category.ACTIVATIONS if self.phase is Phase.FORWARD else Category.TEMPORARY

    def describe(self) -> str:
        """Return one line for a person: "float32[2] by aten.mul.Tensor in h.0.mlp (forward)"."""
        dtype = str(self.dtype).removeprefix("torch.")
        by = "from before" if self.op is None else f"by {self.op}"
        where = f" in {self.module}" if self.module else ""
        return f"{dtype}{list(self.shape)} {by}{where} ({self.phase})"


@dataclass(frozen=True)
class Mark:
    """The beginning of a phase."""

    tick: int
    phase: Phase


@dataclass(frozen=True)
class TopTensor:
    nbytes: int
    category: Category
    description: str
    module: str


@dataclass(frozen=True)
class Snapshot:
    """The memory of a device at one tick, by category."""

    device: str
    tick: int
    phase: Phase
    total: int
    by_category: tuple[tuple[Category, int], ...]
    top: tuple[TopTensor, ...]

    def of(self, category: Category) -> int:
        return dict(self.by_category).get(category, 0)


@dataclass(frozen=True)
class Timeline:
    """Bytes in use over time, by category; `ticks[i]` is the time of every series' i-th value."""

    device: str
    ticks: tuple[int, ...]
    series: tuple[tuple[Category, tuple[int, ...]], ...]
    marks: tuple[Mark, ...]

    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(values for _, values in self.series), strict=True)))


class DeviceMemory:
    """One device's memory: its allocator and its peak."""

    __slots__ = ("allocator", "dead_at_peak", "name", "peak", "peak_phase", "peak_reserved", "peak_tick")

    def __init__(self, name: str, allocator: ExactAllocator) -> None:
        self.name = name
        self.allocator = allocator
        self.dead_at_peak: list[Allocation] = []  # what was alive at the peak and has died since
        self.start_peak(0, Phase.SETUP)

    def start_peak(self, tick: int, phase: Phase) -> None:
        """Set the peak to what is in use now."""
        self.peak = self.allocator.allocated
        self.peak_reserved = self.allocator.reserved
        self.peak_tick = tick
        self.peak_phase = phase
        self.dead_at_peak.clear()


class Entry(weakref.ref[Any]):
    """A weak reference to a storage that is alive, with its allocation."""

    __slots__ = ("allocation", "block", "device", "key", "size")
    key: int  # the storage's ``_cdata``
    size: int  # of the storage; a block may be larger
    block: AllocatedBlock | None
    device: DeviceMemory
    allocation: Allocation


class Ledger:
    """Every allocation, by the storage it belongs to (`storage._cdata`)."""

    def __init__(self, allocators: Mapping[str, AllocatorFactory]) -> None:
        self.clock = 0  # ticks: one for each allocation and release, and for each phase that began
        self.phase = Phase.SETUP
        self._live: dict[int, Entry] = {}
        self._devices: dict[torch.device, DeviceMemory] = {}
        self._log: StepLog | None = None
        self._factories = dict(allocators)
        self._phase_began = 0
        self._held: list[Allocation] = []  # allocations without a storage
        # Allocations and releases (size None) with their tick, and phases: a long training must not fill the memory.
        self._events: deque[tuple[int, Allocation, int | None]] = deque(maxlen=HISTORY)
        self._marks: deque[Mark] = deque(maxlen=HISTORY)
        self._since = 0  # where the timeline begins
        self._busy = False
        self._died_while_busy: list[Entry] = []
        self._on_death = self._died  # bound once

    def _device(self, device: torch.device) -> DeviceMemory:
        memory = self._devices.get(device)
        if memory is None:
            factory = self._factories.get(device.type, ExactAllocator)
            memory = self._devices[device] = DeviceMemory(str(device), factory())
        return memory

    def _find(self, device: str | torch.device) -> DeviceMemory:
        """Return the memory of a device, empty if none was seen there; "cuda" means "cuda:0"."""
        wanted = torch.device(device)
        first = torch.device(wanted.type, wanted.index or 0)
        found = self._devices.get(wanted) or self._devices.get(first)
        return found or DeviceMemory(str(device), ExactAllocator())

    def _claim_all(self) -> None:
        """Set the categories that are known by now."""

    def _current_module(self) -> str:
        """Return the name of the module that is running; empty if unknown."""
        return ""

    def _allocate(self, memory: DeviceMemory, nbytes: int, what: str | torch.Tensor) -> AllocatedBlock:
        """Allocate a block from the device's allocator and update the peaks."""
        allocator = memory.allocator
        self._busy = True
        try:
            block = allocator.allocate(nbytes)
        except OutOfDeviceMemory as full:
            self._busy = False  # the message counts what is alive
            raise self._out_of_memory(memory, full.requested, what) from None
        finally:
            self._busy = False
        self.clock += 1
        if allocator.allocated > memory.peak:
            memory.peak = allocator.allocated
            memory.peak_tick = self.clock
            memory.peak_phase = self.phase
            memory.dead_at_peak.clear()
        if allocator.reserved > memory.peak_reserved:
            memory.peak_reserved = allocator.reserved
        self._release_queued()
        return block

    def _out_of_memory(
        self, memory: DeviceMemory, requested: int, what: str | torch.Tensor
    ) -> torch.OutOfMemoryError:
        if not isinstance(what, str):
            what = f"for {str(what.dtype)[6:]}{list(what.shape)}"
        module = self._current_module()
        where = f" in {module}" if module else ""
        allocator = memory.allocator
        capacity, allocated, reserved = allocator.capacity or 0, allocator.allocated, allocator.reserved
        here = self.now(memory.name, 5)
        categories = ", ".join(f"{name} {format_bytes(count)}" for name, count in here.by_category)
        largest = "".join(f"\n  {format_bytes(each.nbytes)}  {each.description}" for each in here.top)
        return torch.OutOfMemoryError(
            f"{memory.name} out of memory. Tried to allocate {format_bytes(requested)} {what}{where} "
            f"({self.phase}). The device has a total capacity of {format_bytes(capacity)}, of which "
            f"{format_bytes(capacity - reserved)} is free; {format_bytes(allocated)} is allocated and "
            f"{format_bytes(reserved - allocated)} is reserved but unallocated.\n"
            f"In use: {categories or 'nothing yet'}.\nLargest:{largest or ' none'}"
        )

    def _follow(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor, device: torch.device, op: object
    ) -> Entry:
        """Follow a storage until it dies; also an empty one, which may be resized later."""
        memory = self._devices.get(device) or self._device(device)
        size = storage.nbytes()
        block = self._allocate(memory, size, tensor) if size else None
        entry = Entry(storage, self._on_death)
        entry.key, entry.size, entry.block, entry.device = storage._cdata, size, block, memory
        nbytes = block.size if block else 0
        entry.allocation = Allocation(
            nbytes,
            memory.name,
            self.clock,
            self.phase,
            op,
            self._current_module(),
            tensor.shape,
            tensor.dtype,
            copied=_copying > 0,
        )
        self._live[entry.key] = entry
        self._record(entry.allocation, size)
        return entry

    def hold(
        self, nbytes: int, device: torch.device, what: str, category: Category | None = None
    ) -> Callable[[], None]:
        """Account for memory without a tensor until the returned function is called."""
        memory = self._device(device)
        block = self._allocate(memory, nbytes, f"for {what}")
        allocation = Allocation(
            block.size, memory.name, self.clock, self.phase, what, "", (nbytes,), torch.uint8, category
        )
        self._held.append(allocation)
        self._record(allocation, nbytes)

        def release() -> None:
            self._held.remove(allocation)
            self._end(allocation, block, memory)

        return release

    def _replace(self, entry: Entry, block: AllocatedBlock | None, size: int) -> None:
        """Give a storage another block; its category stays."""
        old, old_block = entry.allocation, entry.block
        nbytes = block.size if block else 0
        entry.allocation = replace(old, nbytes=nbytes, born=self.clock, phase=self.phase)
        entry.block, entry.size = block, size
        self._record(entry.allocation, size)  # before the old one is freed: torch copies
        self._end(old, old_block, entry.device)

    def _died(self, entry: weakref.ref[Any]) -> None:
        assert isinstance(entry, Entry)
        self._died_while_busy.append(entry)
        if not self._busy:  # see Note [Finalizers during allocation]
            self._release_queued()

    def _release_queued(self) -> None:
        while self._died_while_busy:
            entry = self._died_while_busy.pop()
            del self._live[entry.key]
            self._end(entry.allocation, entry.block, entry.device)

    def _end(self, allocation: Allocation, block: AllocatedBlock | None, memory: DeviceMemory) -> None:
        self.clock += 1
        if allocation.category is None:
            # Allocated in forward and alive when the next phase began: saved for backward.
            kept = allocation.phase is Phase.FORWARD and self._phase_began > allocation.born
            allocation.category = Category.ACTIVATIONS if kept else Category.TEMPORARY
        if allocation.born <= memory.peak_tick:
            memory.dead_at_peak.append(allocation)
        self._record(allocation, None)
        if block is not None:
            self._busy = True
            memory.allocator.free(block)
            self._busy = False

    def _record(self, allocation: Allocation, size: int | None) -> None:
        if len(self._events) == self._events.maxlen:
            self._since = self._events[0][0]
        self._events.append((self.clock, allocation, size))
        if self._log is not None and allocation.device == self._log.device:
            self._log.events.append((allocation, size))

    def _enter_phase(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self.clock += 1
            self._phase_began = self.clock
            self._marks.append(Mark(self.clock, phase))

    def reset_peak(self) -> None:
        """Set every device's peak to what is in use now, and drop what has died."""
        self._claim_all()
        for memory in self._devices.values():
            memory.start_peak(self.clock, self.phase)
        self._events.clear()
        self._since = self.clock

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(memory.name for memory in self._devices.values())

    def live_bytes(self, device: str | torch.device = "cpu") -> int:
        return self._find(device).allocator.allocated

    def workspace_bytes(self, device: str | torch.device = "cpu") -> int:
        """Return the bytes in use now by `reserve`."""
        name = self._find(device).name
        held = (each for each in self._held if each.category is Category.WORKSPACE and each.device == name)
        return sum(each.nbytes for each in held)

    def peak_bytes(self, device: str | torch.device = "cpu") -> int:
        """Return the most bytes in use at once since the start or the last `reset_peak`."""
        return self._find(device).peak

    def reserved_bytes(self, device: str | torch.device = "cpu") -> int:
        """Return the bytes that the allocator holds now, in use or cached."""
        return self._find(device).allocator.reserved

    def peak_reserved_bytes(self, device: str | torch.device = "cpu") -> int:
        """Return the most bytes that the allocator held."""
        return self._find(device).peak_reserved

    def now(self, device: str | torch.device = "cpu", top: int = 10) -> Snapshot:
        """Return what is in use now, with the `top` largest tensors."""
        self._claim_all()
        name = self._find(device).name
        return _snapshot(self._alive(name), name, self.clock, self.phase, top)

    def at_peak(self, device: str | torch.device = "cpu", top: int = 10) -> Snapshot:
        """Return what was in use at the peak, with the `top` largest tensors and the modules they belong to."""
        memory = self._find(device)
        self._claim_all()
        alive = [each for each in self._alive(memory.name) if each.born <= memory.peak_tick]
        allocations = [*memory.dead_at_peak, *alive]
        return _snapshot(allocations, memory.name, memory.peak_tick, memory.peak_phase, top)

    def timeline(self, device: str | torch.device = "cpu") -> Timeline:
        """Return the memory over time, by category, with the phases of each step, for the last events."""
        self._claim_all()
        name = self._find(device).name
        now: Counter[Category] = Counter()
        for allocation in self._alive(name):
            if allocation.nbytes:
                now[allocation.current_category()] += allocation.nbytes
        events = [
            (tick, each.current_category(), each.nbytes if size is not None else -each.nbytes)
            for tick, each, size in self._events
            if each.device == name and each.nbytes
        ]
        states = [now]
        for _, category, change in reversed(events):
            now = now.copy()
            now[category] -= change
            states.append(now)
        states.reverse()
        present = [category for category in Category if any(category in state for state in states)]
        begun = [mark.phase for mark in self._marks if mark.tick <= self._since]
        return Timeline(
            device=name,
            ticks=(self._since, *(tick for tick, _, _ in events)) if present else (),
            series=tuple((category, tuple(state[category] for state in states)) for category in present),
            marks=(
                *(Mark(self._since, phase) for phase in begun[-1:]),
                *(mark for mark in self._marks if mark.tick > self._since),
            ),
        )

    def alive_since(self, tick: int, device: str | torch.device, until: int | None = None) -> dict[int, int]:
        """Return the bytes of what was allocated after `tick` (up to `until`) and is alive, by `storage._cdata`."""
        memory = self._find(device)
        last = self.clock if until is None else until
        return {
            key: entry.allocation.nbytes
            for key, entry in list(self._live.items())
            if entry.device is memory and tick < entry.allocation.born <= last
        }

    def bytes_of_storage(self, key: int) -> int:
        """Return the bytes of a storage by its `_cdata`; 0 if it is not tracked."""
        entry = self._live.get(key)
        return entry.allocation.nbytes if entry else 0

    @contextlib.contextmanager
    def logging(self, device: str | torch.device) -> Iterator[StepLog]:
        """Log the requests to a device's allocator inside the block, to be replayed."""
        name = self._find(device).name
        alive = sorted(self._alive(name), key=lambda each: each.born)
        log = self._log = StepLog(name, alive)
        try:
            yield log
        finally:
            self._log = None

    def replay(self, log: StepLog, mark: int = 0) -> Replay:
        """Repeat a step's requests, but for what was not released; record what is in use before the event `mark`."""
        # See Note [Replaying a step].
        allocator = self._find(log.device).allocator
        released = {id(allocation) for allocation, size in log.events if size is None}
        peak = start = at_mark = allocator.allocated
        peak_event = 0
        blocks: dict[int, AllocatedBlock] = {}
        for number, (allocation, size) in enumerate(log.events):
            key = id(allocation)
            if size is None:
                block = blocks.pop(key, None)  # None: it is older than the log
                if block is not None:
                    allocator.free(block)
            elif key in released and size:
                blocks[key] = allocator.allocate(size)
                if allocator.allocated > peak:
                    peak, peak_event = allocator.allocated, number
            if number < mark:
                at_mark = allocator.allocated
        return Replay(peak, at_mark - start, peak_event)

    def use_of(self, log: StepLog) -> StepUse:
        """Return the memory over a logged step, if it is repeated from now on."""
        return step_use(log, self._alive(log.device))

    def _log_scratch(self, nbytes: int) -> None:
        if self._log is not None and nbytes:
            self._log.scratch[len(self._log)] = max(nbytes, self._log.scratch.get(len(self._log), 0))

    def empty_cache(self) -> None:
        """Release what the allocators hold without using it."""
        for memory in self._devices.values():
            memory.allocator.empty_cache()

    def _alive(self, device: str) -> list[Allocation]:
        found = [*self._held, *(entry.allocation for entry in list(self._live.values()))]
        return [allocation for allocation in found if allocation.device == device]


def _snapshot(alive: list[Allocation], device: str, tick: int, phase: Phase, top: int) -> Snapshot:
    sums: Counter[Category] = Counter()
    for allocation in alive:
        sums[allocation.current_category()] += allocation.nbytes
    largest = sorted(alive, key=lambda allocation: (-allocation.nbytes, allocation.born))[:top]
    return Snapshot(
        device=device,
        tick=tick,
        phase=phase,
        total=sum(sums.values()),
        by_category=tuple((category, sums[category]) for category in Category if category in sums),
        top=tuple(
            TopTensor(each.nbytes, each.current_category(), each.describe(), each.module) for each in largest
        ),
    )


@dataclass
class StepLog:
    """The requests to one device's allocator during a step, in order; size None: released."""

    device: str
    alive: Sequence[Allocation] = ()  # what was in use when it began
    events: list[tuple[Allocation, int | None]] = field(default_factory=list)
    # By the number of events before it: scratch memory that an operation takes, and releases before it returns.
    scratch: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.events)

    def reserved_bytes(self, repeats: int, capacity: int | None = None) -> int | None:
        """Return what CUDA's caching allocator reserves at most in the step and so many like it.

        None if it runs out of memory with `capacity` bytes. What was not released is not asked for again.
        """
        allocator = CachingAllocator(capacity)
        allocate, free = allocator.allocate, allocator.free
        blocks: dict[int, AllocatedBlock] = {}
        released = {id(allocation) for allocation, size in self.events if size is None}
        peak = 0
        try:
            for each in self.alive:
                blocks[id(each)] = allocate(each.nbytes)
            for repeat in range(1 + repeats):
                for number, (allocation, size) in enumerate(self.events, start=1):
                    key = id(allocation)
                    if size is None:
                        if key in blocks:
                            free(blocks.pop(key))
                    elif size and (not repeat or key in released):
                        blocks[key] = allocate(size, int(allocation.copied))
                    if number in self.scratch:
                        free(allocate(self.scratch[number]))
                    if allocator.reserved > peak:
                        peak = allocator.reserved
        except OutOfDeviceMemory:
            return None
        return peak

    def least_capacity(self, repeats: int, peak: int, reserved: int) -> int:
        """Return with how many bytes the step and so many like it run, to half a per cent: Note [Capacity].

        Args:
            repeats: steps after the first.
            peak: what is in use at most.
            reserved: what is reserved where there is plenty.
        """
        while reserved - peak > max(LARGE_ROUNDING, reserved // 200):
            middle = (peak + reserved) // 2
            found = self.reserved_bytes(repeats, middle)
            if found is None:
                peak = middle
            else:
                reserved = found
        return reserved


@dataclass(frozen=True)
class Replay:
    peak_bytes: int
    above_start: int  # what was in use at the mark, above the start
    peak_event: int  # the event of the log that reached the peak


@dataclass(frozen=True)
class StepUse:
    """Bytes in use over a step, by category: of each part of its events, the moment with the most in use."""

    categories: tuple[Category, ...]
    samples: tuple[tuple[int, ...], ...]  # bytes of each category
    ends: tuple[int, ...]  # the event before which each part ends
    peak: int  # the sample with the most in use
    largest: tuple[TopTensor, ...]  # what is in use then


def step_use(log: StepLog, alive: Collection[Allocation], parts: int = 120, top: int = 12) -> StepUse:
    """Return the memory over a step that is repeated, after which `alive` is in use."""
    released = {id(allocation) for allocation, size in log.events if size is None}
    now: Counter[Category] = Counter()
    for allocation in alive:
        now[allocation.current_category()] += allocation.nbytes
    holding: dict[int, Allocation] = {}
    total, highest = sum(now.values()), -1
    at_peak: dict[int, Allocation] = {}
    samples: list[Counter[Category]] = []
    ends: list[int] = []
    length = -(-len(log.events) // parts) or 1
    for start in range(0, max(1, len(log.events)), length):
        most, best = total, now.copy()
        for allocation, size in log.events[start : start + length]:
            key = id(allocation)
            if size is None:
                if holding.pop(key, None) is None:
                    continue  # it is older than the log
                change = -allocation.nbytes
            elif key in released and size:
                holding[key] = allocation
                change = allocation.nbytes
            else:
                continue
            now[allocation.current_category()] += change
            total += change
            if total > most:
                most, best = total, now.copy()
                if most > highest:
                    highest, at_peak = most, dict(holding)
        samples.append(best)
        ends.append(start + length)
    present = tuple(category for category in Category if any(sample[category] for sample in samples))
    totals = [sum(sample.values()) for sample in samples]
    largest = _snapshot([*alive, *at_peak.values()], log.device, 0, Phase.SETUP, top).top
    return StepUse(
        categories=present,
        samples=tuple(tuple(sample[category] for category in present) for sample in samples),
        ends=tuple(ends),
        peak=totals.index(max(totals)),
        largest=largest,
    )


_copying = 0


@contextlib.contextmanager
def on_copy_stream() -> Iterator[None]:
    """Take what is allocated inside the block, on a simulated device, for memory of the stream of copies to it."""
    global _copying
    _copying += 1
    try:
        yield
    finally:
        _copying -= 1


# Memory-mapped storages, which trackers leave out. To torch they are ordinary CPU tensors, but their pages come and go,
# and the system can reclaim them at any time: who uses them accounts for them (`ResidentPages`).
_mapped_storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
_counting_as_mapped = 0


def mark_mapped(storage: torch.UntypedStorage) -> None:
    """Exclude a memory-mapped storage from trackers; to be called before one sees it."""
    _mapped_storages[storage._cdata] = storage


def is_mapped(storage: torch.UntypedStorage) -> bool:
    if _counting_as_mapped:
        mark_mapped(storage)
    return _mapped_storages.get(storage._cdata) is storage


@contextlib.contextmanager
def new_storages_are_mapped() -> Iterator[None]:
    """Treat every storage that a tracker sees first inside the block as mapped: for simulated tensors."""
    global _counting_as_mapped
    _counting_as_mapped += 1
    try:
        yield
    finally:
        _counting_as_mapped -= 1
