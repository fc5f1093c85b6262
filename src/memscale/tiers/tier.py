"""Tiers below the device, for saved activations: tensors are stored, prefetched, loaded and freed, under a hard cap.

`HostTier` keeps them in host memory and `DiskTier` in a file; transfers are run by an `Engine`.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from memscale._torch import is_fake
from memscale._util.locks import LateLock
from memscale.errors import ConfigError, TierError, TierFullError, TransferError, shown
from memscale.hardware.host import read_host
from memscale.tiers import disk_file
from memscale.tiers.disk_file import DiskFile, Extent
from memscale.tiers.engine import Engine, Lane, PinnedBudget, Transfer
from memscale.units import format_bytes

__all__ = ["DiskTier", "HostTier", "Ticket", "Tier"]

PlaceT = TypeVar("PlaceT")

_CPU = torch.device("cpu")


# ---------------------------------------------------------------------- what is stored


@dataclass(frozen=True)
class _Layout:
    """How a tensor lies in the flat run of elements that is stored.

    A run spans from the tensor's first element to its last, so that permuted and expanded tensors need no copy. Of a
    tensor that most of its span does not belong to (a column of a matrix) the elements are copied together (`packed`),
    and spread out again on loading.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    packed: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> _Layout:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        packed = 2 * tensor.numel() < _span(shape, stride) and not _overlaps(shape, stride)
        return _Layout(shape, stride, packed)

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return tensor.contiguous().view(-1)
        return tensor.as_strided((_span(self.shape, self.stride),), (1,))

    def rebuild(self, run: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape, stride and values, over the memory of the run."""
        if self.packed:
            tensor = torch.empty_strided(self.shape, self.stride, dtype=run.dtype, device=run.device)
            return tensor.copy_(run.view(self.shape))
        # Detached, as a view that was made without gradients may not be changed in place with them.
        return run.as_strided(self.shape, self.stride, run.storage_offset()).detach()


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the elements from the first to the last, gaps included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether elements may share memory, as those of an expanded tensor do."""
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


class Ticket:
    """Stands for one stored tensor, whose bytes are freed by `Tier.free`, or when the ticket is dropped."""

    __slots__ = ("__weakref__", "_free", "entry", "nbytes")

    def __init__(self, entry: Entry[Any], free: Callable[[Entry[Any]], None]) -> None:
        self.entry: Entry[Any] | None = entry
        """What it stands for; None once that is freed."""
        self.nbytes = entry.nbytes
        self._free = free

    def __del__(self) -> None:
        self.free()

    def free(self) -> None:
        entry, self.entry = self.entry, None
        if entry is not None:
            self._free(entry)


class Entry(Generic[PlaceT]):
    """A stored tensor: where it is, and the transfers that are running for it.

    Attributes:
        group: What it was stored together with, mostly a layer.
        place: Where the tier keeps it.
        source: Its elements, until their bytes are safe on the tier; kept if storing them failed.
        storing: The transfer to the tier.
        fetching: The transfer back, if it was prefetched.
        freed: Whether nobody has a ticket for it any more.
        torn: The error, if it was changed in place while it was being stored.
    """

    place: PlaceT

    def __init__(self, tensor: torch.Tensor, group: object) -> None:
        self.layout = _Layout.of(tensor)
        run = self.layout.flatten(tensor.detach())
        self.group = group
        self.dtype = run.dtype
        self.numel = run.numel()
        self.nbytes = run.nbytes
        self.device = run.device
        self.fake = is_fake(run)
        self.source: torch.Tensor | None = run
        self.storing: Transfer[None] | None = None
        self.fetching: Transfer[torch.Tensor] | None = None
        self.freed = False
        self.torn: TransferError | None = None
        self._version = None if self.layout.packed or run.is_inference() else run._version
        self._reads: list[Transfer[torch.Tensor]] = []

    @property
    def busy(self) -> bool:
        """Whether a transfer still reads or writes its place."""
        self._reads = [read for read in self._reads if not read.done()]
        return bool(self._reads) or (self.storing is not None and self.storing.busy())

    def began_read(self, read: Transfer[torch.Tensor]) -> None:
        """Note a transfer from its place."""
        if not read.done():
            self._reads.append(read)

    def finish(self) -> None:
        """Block until no transfer is running for it."""
        for transfer in (self.storing, *self._reads):
            if transfer is not None:
                transfer.finish()

    def intact_source(self) -> torch.Tensor | None:
        """Return its elements, if they are still here and as they were. See Note [Sources must not change]."""
        source = self.source
        if source is not None and self._version is not None and source._version != self._version:
            self.torn = TransferError(
                f"A tensor of {self.numel} {str(self.dtype).removeprefix('torch.')} was changed in place "
                "while it was being stored. Change it after flush(), or store a clone of it."
            )
        return source if self.torn is None else None

    def drop_source(self) -> None:
        """Forget its elements: their bytes are safe, unless they are `torn`."""
        self.intact_source()
        self.source = None


# ---------------------------------------------------------------------- tiers


class Tier(ABC, Generic[PlaceT]):
    """Memory below the device.

    Safe to use from several threads: autograd loads in threads of its own. An error of a transfer that ran beside the
    training is raised by the next call of `store`, `prefetch`, `load` or `flush`; the tensor concerned can still be
    loaded, as it is kept until its bytes are safe.

    Args:
        engine: Who runs the transfers; None for everything at once, in the caller's thread. It is not closed with the
            tier.
    """

    name: str
    """What messages call the tier."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or Engine()
        self._closed = False
        self._lock: LateLock[Entry[PlaceT]] = LateLock(self._drop)
        self._entries: set[Entry[PlaceT]] = set()
        self._storing: deque[list[Entry[PlaceT]]] = (
            deque()
        )  # groups on their way to the tier, the oldest first
        self._leaving: list[Entry[PlaceT]] = []  # freed, and still read or written
        self._prefetched: weakref.WeakSet[Entry[PlaceT]] = weakref.WeakSet()
        self._failures: deque[TransferError] = deque()

    def __enter__(self) -> Tier[PlaceT]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The most bytes it may take: a hard cap."""

    @property
    @abstractmethod
    def bytes_used(self) -> int:
        """Bytes that count against the capacity now."""

    # ------------------------------------------------------------------ what a kind of tier says of itself

    @abstractmethod
    def _allocate(self, entry: Entry[PlaceT]) -> PlaceT:
        """Return room for an entry, counted from here on; under the lock.

        Raises:
            TierFullError: There is none.
        """

    @abstractmethod
    def _release(self, place: PlaceT) -> None:
        """Take the room back; under the lock, perhaps in a finalizer."""

    @abstractmethod
    def _write(self, entry: Entry[PlaceT], source: torch.Tensor) -> None:
        """Copy the elements of an entry to its place; in any thread."""

    @abstractmethod
    def _read(self, entry: Entry[PlaceT]) -> torch.Tensor:
        """Return the elements of an entry in new memory on its device; in any thread."""

    @abstractmethod
    def _lanes(self, entry: Entry[PlaceT]) -> tuple[Lane, Lane]:
        """Return where its transfers run: to the tier, and back."""

    # ------------------------------------------------------------------ storing

    def store(self, tensor: torch.Tensor, group: object = None) -> Ticket:
        """Copy a tensor to the tier; with an asynchronous engine this returns before that is done.

        Until it is, the tensor must not be changed in place; it may be dropped at once.

        Args:
            tensor: A dense tensor on any device, without lazy conjugation.
            group: What it belongs to, as a layer: tensors that are given the same object one after the other count as
                one group to the engine's depth. None for a group of its own.

        Raises:
            TierFullError: It would exceed the capacity. Nothing was stored, and nothing that was is lost.
            TierError: It can't be stored.
            TransferError: An earlier transfer has failed.
        """
        self._begin()
        with torch.no_grad():
            entry: Entry[PlaceT] = Entry(tensor, object() if group is None else group)
        if entry.fake and not is_fake(tensor):
            raise TierError(
                "A tensor with data can't be stored inside a simulation: store it outside the block."
            )
        if entry.numel:
            self._place(entry)
        ticket = Ticket(entry, self._lock.leave)
        if entry.numel:
            self._start_store(entry)
            if self.engine.is_async:
                self._limit_stores(entry)
        return ticket

    def _place(self, entry: Entry[PlaceT]) -> None:
        for last_try in (False, True):
            try:
                with self._lock:
                    entry.place = self._allocate(entry)
                    self._entries.add(entry)
                return
            except TierFullError:
                if last_try or not self._leaving:
                    raise
                for leaving in list(self._leaving):
                    leaving.finish()
                self._tidy()

    def _start_store(self, entry: Entry[PlaceT]) -> None:
        def work() -> None:
            source = entry.source
            if source is not None and not entry.freed:  # else it was freed before its turn came
                with torch.no_grad():
                    self._write(entry, source)

        def on_end(error: BaseException | None) -> None:
            if error is not None:
                self._failures.append(self._explain(error, entry, "stored"))
                return
            entry.drop_source()
            if entry.torn is not None and not entry.freed:
                self._failures.append(entry.torn)

        lane, _ = self._lanes(entry)
        try:
            entry.storing = self.engine.run(work, lane, entry.device, on_end=on_end)
        except OSError as error:  # it ran here
            raise self._explain(error, entry, "stored") from error

    def _limit_stores(self, entry: Entry[PlaceT]) -> None:
        """Wait for the oldest groups beyond the engine's depth: each still holds its memory on the device."""
        excess: list[Entry[PlaceT]] = []
        with self._lock:
            if self._storing and self._storing[-1][0].group is entry.group:
                self._storing[-1].append(entry)
            else:
                self._storing.append([entry])
            while len(self._storing) > self.engine.depth + 1:
                excess += self._storing.popleft()
        for each in excess:
            _wait_quietly(each)

    # ------------------------------------------------------------------ loading

    def prefetch(self, ticket: Ticket) -> None:
        """Begin to load, so that `load` need not wait; does nothing with a synchronous engine."""
        self._begin()
        entry = self._entry_of(ticket)
        if not self.engine.is_async or not entry.numel or entry.torn is not None:
            return
        with self._lock:
            if entry.fetching is None:
                entry.fetching = self._fetch(entry, ahead=True)
                self._prefetched.add(entry)

    def drop_prefetched(self) -> None:
        """Give up what was prefetched and not loaded; it will be read when it is asked for."""
        with self._lock:
            for entry in self._prefetched:
                entry.fetching = None
            self._prefetched.clear()

    def load(self, ticket: Ticket) -> torch.Tensor:
        """Return the tensor on its own device: same values, shape, stride and dtype, without gradient.

        Its bytes stay stored until the ticket is freed: it may be loaded again.

        Raises:
            TierError: The ticket was freed, or its bytes can't be read.
            TransferError: A transfer has failed.
        """
        self._begin()
        entry = self._entry_of(ticket)
        layout = entry.layout
        with torch.no_grad():
            if not entry.numel:
                return torch.empty_strided(
                    layout.shape, layout.stride, dtype=entry.dtype, device=entry.device
                )
            with self._lock:
                fetching, entry.fetching = entry.fetching, None
                self._prefetched.discard(entry)
            return layout.rebuild((fetching or self._fetch(entry, ahead=False)).wait())

    def borrow(self, ticket: Ticket) -> torch.Tensor | None:
        """Return the tensor where it was stored from, if it is still there because it is on its way.

        Nothing is copied, so it must not be changed in place: the transfer may still read it.
        """
        self._begin()
        entry = self._entry_of(ticket)
        source = entry.intact_source()
        with torch.no_grad():
            return None if source is None or entry.layout.packed else entry.layout.rebuild(source)

    def _fetch(self, entry: Entry[PlaceT], *, ahead: bool) -> Transfer[torch.Tensor]:
        source = entry.intact_source()
        if entry.torn is not None:
            raise TransferError(str(entry.torn)) from entry.torn
        if source is not None:
            return Transfer(source.clone())  # its bytes are here still, and perhaps nowhere else
        _, lane = self._lanes(entry)
        if lane is Lane.READ and not ahead:
            lane = Lane.CALLER  # who would wait for a worker can as well do it

        def work() -> torch.Tensor:
            try:
                with torch.no_grad():
                    return self._read(entry)
            except OSError as error:
                raise self._explain(error, entry, "loaded") from error

        transfer = self.engine.run(work, lane, entry.device, after=entry.storing)
        entry.began_read(transfer)
        return transfer

    # ------------------------------------------------------------------ freeing

    def free(self, ticket: Ticket) -> None:
        """Free what a ticket stands for. Tensors that were loaded are not touched."""
        ticket.free()
        self._tidy()

    def flush(self) -> None:
        """Wait until everything is stored.

        Raises:
            TransferError: Something could not be.
        """
        self._finish_all()
        self._tidy()
        self._raise_failure()

    def close(self) -> None:
        """Finish what is running and free everything; tickets can't be loaded any more."""
        if self._closed:
            return
        self._closed = True
        self._finish_all()
        with self._lock:
            self._storing.clear()
            for entry in (*self._entries, *self._leaving):
                self._end(entry)
            self._entries.clear()
            self._leaving.clear()

    def _begin(self) -> None:
        if self._closed:
            raise TierError(f"The {self.name} is closed: make a new one to offload again.")
        self._tidy()
        self._raise_failure()

    def _entry_of(self, ticket: Ticket) -> Entry[PlaceT]:
        entry = ticket.entry
        if entry is None:
            raise TierError("This ticket was freed: keep it until its tensor is loaded for the last time.")
        if entry.numel and entry not in self._entries:
            raise TierError(f"This ticket is not one of this {self.name}.")
        return entry

    def _raise_failure(self) -> None:
        if self._failures:
            raise self._failures.popleft()

    def _tidy(self) -> None:
        """Let go of what is over."""
        if not self._storing and not self._leaving:
            return
        with self._lock:
            while self._storing and all(e.storing is None or e.storing.done() for e in self._storing[0]):
                for entry in self._storing.popleft():
                    _wait_quietly(entry)
            over = [entry for entry in self._leaving if not entry.busy]
            self._leaving = [entry for entry in self._leaving if entry not in over]
            for entry in over:
                self._end(entry)

    def _finish_all(self) -> None:
        with self._lock:
            entries = [*self._entries, *self._leaving]
        for entry in entries:
            entry.finish()

    def _drop(self, entry: Entry[PlaceT]) -> None:
        """Free an entry; under the lock, perhaps in a finalizer."""
        entry.freed = True
        if entry not in self._entries:
            return
        self._entries.discard(entry)
        if entry.busy:
            entry.fetching = None
            self._leaving.append(entry)
        else:
            self._end(entry)

    def _end(self, entry: Entry[PlaceT]) -> None:
        entry.fetching = None
        entry.drop_source()
        self._release(entry.place)

    def _explain(self, error: BaseException, entry: Entry[PlaceT], verb: str) -> TransferError:
        kept = " It is still in memory, and can be loaded." if verb == "stored" else ""
        failure = TransferError(
            f"{format_bytes(entry.nbytes)} could not be {verb} by the {self.name}: {error}.{kept} See the "
            "cause above, and save your model before you go on."
        )
        failure.__cause__ = error
        return failure


def _wait_quietly(entry: Entry[Any]) -> None:
    """Wait until an entry is stored, without raising an error, which was noted when it happened."""
    if entry.storing is not None:
        with contextlib.suppress(TransferError):
            entry.storing.wait()


@dataclass(eq=False)
class _HostPlace:
    """Where an entry is on the host.

    Attributes:
        charged: Bytes that it counts as.
        memory: The memory; of pageable memory, once it is written.
        pinned: Whether it is page-locked.
    """

    charged: int
    memory: torch.Tensor | None
    pinned: bool


class HostTier(Tier[_HostPlace]):
    """Keeps tensors in host memory.

    On CUDA the bytes go to page-locked memory, and to ordinary memory where no more pages can be locked. From every
    other device, the simulated and the executing one included, they go to ordinary CPU tensors by ordinary operations,
    so that whoever follows memory sees them.

    Args:
        capacity: The most bytes it may take, a hard cap (`max_cpu_offload_gb`); None for what the host has free now.
        engine: Who runs the transfers; None for everything at once, in the caller's thread.

    Raises:
        ConfigError: The capacity is negative.

    Example:
        >>> tier = HostTier(capacity=1000)
        >>> ticket = tier.store(torch.arange(4.0))
        >>> tier.load(ticket), tier.bytes_used
        (tensor([0., 1., 2., 3.]), 16)
        >>> tier.free(ticket)
        >>> tier.bytes_used
        0
    """

    name = "host tier"

    def __init__(self, capacity: int | None = None, *, engine: Engine | None = None) -> None:
        super().__init__(engine)
        if capacity is not None and capacity < 0:
            raise ConfigError(
                f"capacity={shown(capacity)} is not allowed: give a number of bytes, 0 or more."
            )
        self._capacity = read_host().available_ram_bytes if capacity is None else capacity
        limit = self.engine.pinned_bytes
        self._pinned = PinnedBudget(self._capacity if limit is None else min(limit, self._capacity))
        self._used = 0

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def bytes_used(self) -> int:
        return self._used

    def _allocate(self, entry: Entry[_HostPlace]) -> _HostPlace:
        if entry.device.type == "cuda" and not entry.fake:
            room = self._capacity - self._used + self._pinned.bytes_in_use
            memory = self._pinned.allocate(entry.nbytes, room)
            if memory is not None:
                charged = self._pinned.size_of(entry.nbytes)
                self._used += charged
                return _HostPlace(charged, memory.view(entry.dtype), pinned=True)
        if self._used + entry.nbytes > self._capacity:
            raise TierFullError(
                f"The host tier is full: {format_bytes(entry.nbytes)} more would exceed its cap of "
                f"{format_bytes(self._capacity)}, of which {format_bytes(self._used)} is used. The "
                "tensor stays where it is. Raise Config(max_cpu_offload_gb=...), or use a smaller batch."
            )
        self._used += entry.nbytes
        return _HostPlace(entry.nbytes, None, pinned=False)

    def _release(self, place: _HostPlace) -> None:
        self._used -= place.charged
        place.memory = None
        if place.pinned:
            self._pinned.release(place.charged)

    def _write(self, entry: Entry[_HostPlace], source: torch.Tensor) -> None:
        place = entry.place
        if place.pinned:
            assert place.memory is not None
            place.memory.copy_(source, non_blocking=self.engine.is_async)
        else:
            place.memory = source.to(_CPU, copy=True)

    def _read(self, entry: Entry[_HostPlace]) -> torch.Tensor:
        memory = entry.place.memory
        assert memory is not None, "an entry is read only after it was written"
        if not entry.place.pinned:
            return memory.to(entry.device, copy=True)
        return memory.to(entry.device, non_blocking=self.engine.is_async)

    def _lanes(self, entry: Entry[_HostPlace]) -> tuple[Lane, Lane]:
        return _lanes(entry, (Lane.D2H, Lane.H2D))


class DiskTier(Tier[Extent]):
    """Keeps tensors in a file, by way of the system's page cache. Nothing in the file is ever interpreted.

    Args:
        directory: Where the file is (`offload_dir`); None for what `find_disk` chooses.
        capacity: The most bytes it may take, a hard cap (`max_disk_offload_gb`); None for what is free now.
        engine: Who runs the transfers; None for everything at once, in the caller's thread.
        file: A file to share with others instead of the first two.

    Raises:
        HardwareError: The directory is a file, or no parent of it exists.
        ConfigError: The capacity is negative.

    Example:
        >>> with DiskTier(capacity=10**6) as tier:
        ...     ticket = tier.store(torch.arange(4.0))
        ...     tier.load(ticket), tier.bytes_used  # whole pages
        (tensor([0., 1., 2., 3.]), 4096)
    """

    name = "disk tier"

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        capacity: int | None = None,
        *,
        engine: Engine | None = None,
        file: DiskFile | None = None,
    ) -> None:
        super().__init__(engine)
        self._owns_file = file is None
        self.file = DiskFile(directory, capacity) if file is None else file

    @property
    def capacity(self) -> int:
        return self.file.capacity

    @property
    def bytes_used(self) -> int:
        return self.file.bytes_used

    def close(self) -> None:
        super().close()
        if self._owns_file:
            self.file.close()

    def _allocate(self, entry: Entry[Extent]) -> Extent:
        return self.file.allocate(entry.nbytes, counted_only=entry.fake)

    def _release(self, place: Extent) -> None:
        self.file.free(place)

    def _write(self, entry: Entry[Extent], source: torch.Tensor) -> None:
        host = source.to(_CPU)  # the same tensor, on a CPU
        if not entry.fake:
            disk_file.write_from(self.file.fd, host, entry.place.offset)

    def _read(self, entry: Entry[Extent]) -> torch.Tensor:
        host = torch.empty(entry.numel, dtype=entry.dtype, device=_CPU)
        if not entry.fake:
            disk_file.read_into(self.file.fd, host, entry.place.offset)
        return host.to(entry.device)

    def _lanes(self, entry: Entry[Extent]) -> tuple[Lane, Lane]:
        return _lanes(entry, (Lane.WRITE, Lane.READ))


def _lanes(entry: Entry[Any], on_cuda: tuple[Lane, Lane]) -> tuple[Lane, Lane]:
    if entry.fake or entry.device.type not in ("cpu", "cuda"):
        return Lane.CALLER, Lane.CALLER  # fake modes and wrapped tensors belong to the thread that has them
    return on_cuda if entry.device.type == "cuda" else (Lane.WRITE, Lane.READ)
