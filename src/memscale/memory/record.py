"""Records of allocations: which are alive on which device, each device's peak, and summaries of them.

Note [Finalizers during allocation]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A storage in a reference cycle dies when Python's garbage collector runs, which may be inside the allocator model, or
in another thread. Meanwhile a death is only queued, and processed right after.

Note [Replaying a step]
~~~~~~~~~~~~~~~~~~~~~~~
A caching allocator returns a block that may be up to a MiB larger than the request, depending on which blocks are free:
the second step of training, which finds those of the first, may need more than the first, or less, with the same
tensors. A step need not be run twice to know that: its requests are logged and repeated on the allocator model.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memscale.memory.allocator import Block, ExactAllocator

AllocatorFactory = Callable[[], ExactAllocator]

HISTORY = 100_000  # allocations and releases that the timeline goes back


class Category(str, enum.Enum):
    """What memory is used for."""

    WEIGHTS = "weights"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"  # allocated in forward, still in use when backward begins
    INPUTS = "inputs"
    TEMPORARY = "temporary"  # everything else
    WORKSPACE = "workspace"  # a library's scratch memory (cuBLAS)

    def __str__(self) -> str:
        return self.value


class Phase(str, enum.Enum):
    """The phase of a training step."""

    SETUP = "setup"
    FORWARD = "forward"
    EVALUATION = "evaluation"  # a forward without gradients: nothing is saved for backward
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"

    def __str__(self) -> str:
        return self.value


@dataclass(slots=True, eq=False)
class Allocation:
    """One allocation; times are ticks of the ledger's clock.

    `category` is set once it is known (a tensor is known to be a gradient only when it has become one), at death at the
    latest, and then holds for the whole life of the allocation. Without an `op` it existed before the tracker.
    """

    nbytes: int
    device: str
    born: int
    phase: Phase
    op: object
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    category: Category | None = None

    def current_category(self) -> Category:
        """Return the category as far as it is known: what forward allocated may yet become an activation."""
        if self.category is not None:
            return self.category
        return Category.ACTIVATIONS if self.phase is Phase.FORWARD else Category.TEMPORARY

    def describe(self) -> str:
        """Return one line for a person.

        >>> Allocation(nbytes=8, device="cpu", born=0, phase=Phase.FORWARD, op="aten.mul.Tensor",
        ...            module="h.0.mlp", shape=(2,), dtype=torch.float32).describe()
        'float32[2] by aten.mul.Tensor in h.0.mlp (forward)'
        """
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
    """One of the largest tensors of a snapshot."""

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
        """Return the bytes of one category."""
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
    block: Block | None
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

    def _find(self, device: str | torch.device) -> DeviceMemory | None:
        """Return a device that memory was seen on; "cuda" means "cuda:0"."""
        wanted = torch.device(device)
        return self._devices.get(wanted) or self._devices.get(torch.device(wanted.type, wanted.index or 0))

    def _claim_all(self) -> None:
        """Set the categories that are known by now."""

    # ------------------------------------------------------------------ birth and death

    def _allocate(self, memory: DeviceMemory, nbytes: int) -> Block:
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
            memory.dead_at_peak.clear()
        if allocator.reserved > memory.peak_reserved:
            memory.peak_reserved = allocator.reserved
        self._release_queued()
        return block

    def _follow(
        self,
        storage: torch.UntypedStorage,
        tensor: torch.Tensor,
        device: torch.device,
        op: object,
        module: str,
    ) -> Entry:
        """Follow a storage until it dies; also an empty one, which may be resized later."""
        memory = self._devices.get(device) or self._device(device)
        size = storage.nbytes()
        block = self._allocate(memory, size) if size else None
        entry = Entry(storage, self._on_death)
        entry.key, entry.size, entry.block, entry.device = storage._cdata, size, block, memory
        entry.allocation = Allocation(
            block.size if block else 0,
            memory.name,
            self.clock,
            self.phase,
            op,
            module,
            tensor.shape,
            tensor.dtype,
        )
        self._live[entry.key] = entry
        self._record(entry.allocation, size)
        return entry

    def _hold(
        self, nbytes: int, device: torch.device, what: str, category: Category | None = None
    ) -> Callable[[], None]:
        """Account for memory without a storage until the returned function is called."""
        memory = self._device(device)
        block = self._allocate(memory, nbytes)
        allocation = Allocation(
            block.size, memory.name, self.clock, self.phase, what, "", (nbytes,), torch.uint8, category
        )
        self._held.append(allocation)
        self._record(allocation, nbytes)

        def release() -> None:
            self._held.remove(allocation)
            self._end(allocation, block, memory)

        return release

    def _replace(self, entry: Entry, block: Block | None, size: int) -> None:
        """Give a storage another block; its category stays."""
        old, old_block = entry.allocation, entry.block
        entry.allocation = Allocation(
            block.size if block else 0,
            old.device,
            self.clock,
            self.phase,
            old.op,
            old.module,
            old.shape,
            old.dtype,
            old.category,
        )
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

    def _end(self, allocation: Allocation, block: Block | None, memory: DeviceMemory) -> None:
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

    # ------------------------------------------------------------------ time

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

    # ------------------------------------------------------------------ results

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that memory was seen on."""
        return tuple(memory.name for memory in self._devices.values())

    def live_bytes(self, device: str | torch.device = "cpu") -> int:
        """Return the bytes in use now."""
        memory = self._find(device)
        return memory.allocator.allocated if memory else 0

    def workspace_bytes(self, device: str | torch.device = "cpu") -> int:
        """Return the bytes in use now by `reserve`."""
        name = self._name(device)
        held = (each for each in self._held if each.category is Category.WORKSPACE and each.device == name)
        return sum(each.nbytes for each in held)

    def peak_bytes(self, device: str | torch.device = "cpu") -> int:
        """Return the most bytes in use at once since the start or the last `reset_peak`."""
        memory = self._find(device)
        return memory.peak if memory else 0

    def reserved_bytes(self, device: str | torch.device = "cpu") -> int:
        """Return the bytes that the allocator holds now, in use or cached."""
        memory = self._find(device)
        return memory.allocator.reserved if memory else 0

    def peak_reserved_bytes(self, device: str | torch.device = "cpu") -> int:
        """Return the most bytes that the allocator held."""
        memory = self._find(device)
        return memory.peak_reserved if memory else 0

    def now(self, device: str | torch.device = "cpu", top: int = 10) -> Snapshot:
        """Return what is in use now, with the `top` largest tensors."""
        self._claim_all()
        name = self._name(device)
        return _snapshot(self._alive(name), name, self.clock, self.phase, top)

    def at_peak(self, device: str | torch.device = "cpu", top: int = 10) -> Snapshot:
        """Return what was in use at the peak, with the `top` largest tensors and the modules they belong to."""
        memory = self._find(device)
        if memory is None:
            return self.now(device, top)
        self._claim_all()
        alive = [each for each in self._alive(memory.name) if each.born <= memory.peak_tick]
        allocations = [*memory.dead_at_peak, *alive]
        return _snapshot(allocations, memory.name, memory.peak_tick, memory.peak_phase, top)

    def timeline(self, device: str | torch.device = "cpu") -> Timeline:
        """Return the memory over time, by category, with the phases of each step, for the last events."""
        self._claim_all()
        name = self._name(device)
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
        log = self._log = StepLog(self._name(device))
        try:
            yield log
        finally:
            self._log = None

    def replay(self, log: StepLog, marks: Collection[int] = ()) -> Replay:
        """Repeat the requests of a step whose memory was released in it. See Note [Replaying a step].

        Args:
            log: the requests; what was not released is there to stay, and is not requested again.
            marks: numbers of events before which to record what is in use.
        """
        memory = self._find(log.device)
        assert memory is not None  # the log is of it
        allocator = memory.allocator
        released = {id(allocation) for allocation, size in log.events if size is None}
        peak = start = allocator.allocated
        above_start: dict[int, int] = {}
        blocks: dict[int, Block] = {}
        for number, (allocation, size) in enumerate(log.events):
            if number in marks:
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

    def empty_cache(self) -> None:
        """Release what the allocators hold without using it."""
        for memory in self._devices.values():
            memory.allocator.empty_cache()

    def _name(self, device: str | torch.device) -> str:
        memory = self._find(device)
        return memory.name if memory else str(device)

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
    events: list[tuple[Allocation, int | None]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.events)


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
_mapped_storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
_counting_as_mapped = 0


def mark_mapped(storage: torch.UntypedStorage) -> None:
    """Exclude a memory-mapped storage from trackers; to be called before one sees it.

    Example:
        >>> x = torch.ones(2)
        >>> mark_mapped(x.untyped_storage())
        >>> is_mapped(x.untyped_storage()), is_mapped(torch.ones(2).untyped_storage())
        (True, False)
    """
    _mapped_storages[storage._cdata] = storage


def is_mapped(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage is memory-mapped."""
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
