"""Where optimizer state is kept between steps, and how it gets to its parameter for one.

Note [Stored state]
~~~~~~~~~~~~~~~~~~~
A state tensor is stored once: the store allocates an ordinary tensor for it, its *stored tensor*, which stays the
same object from then on. For a step it is loaded: the stored tensor itself where a CPU can compute with it (a
memory-mapped tensor), else a copy on the parameter's device. After the arithmetic the values are copied back, and the
copy is dropped. ``optimizer.state`` always holds every tensor, stored or loaded: it is complete at any moment, also
after an error.

Stored are the tensors that torch's own arithmetic keeps (:data:`STATE_NAMES`), of a page or more. Step counters and
whatever a subclass adds to the state stay where they are, and so do tensors made of several (``DTensor``).

Note [Two buckets]
~~~~~~~~~~~~~~~~~~
State on the host goes to the device and back in both directions at once: when the arithmetic of a bucket was launched,
its state is copied back on one stream, and on another that of the next bucket comes. Before these copies begin, those
of the bucket before must be over, and what they read is released: the state of two buckets is in flight at most, also
on devices without streams, where a copy is over when the call returns. When ``step()`` returns, all copies are.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memscale._torch import is_traceable_wrapper_subclass
from memscale.config import AsyncOffloadConfig
from memscale.observe.counters import Meter, OffloadTier
from memscale.optimizer.eight_bit import BLOCK, Moment, is_dense, is_moment, stored_layout
from memscale.optimizer.interceptor import MOMENTS, STATE_NAMES, Member
from memscale.tiers.disk import HOST, PAGE, DiskStore
from memscale.tiers.engine import Engine, HostMemory, Lane, PinnedMemory, Transfer

# Where a tensor is in a parameter's state: ("exp_avg",), or ("exp_avg", "codes") of a moment in 8 bits.
Path = tuple[str, ...]


class StateStore:
    """Keeps state on the device of its parameter: the base class of stores on other tiers.

    `disk` is where parameters and gradients may be; `capacity` is the most host memory to take, in bytes.
    """

    tier: OffloadTier | None = None
    least_bytes = PAGE  # smaller tensors stay where they are

    def __init__(
        self, disk: DiskStore, capacity: int | None = None, pinned: PinnedMemory | None = None
    ) -> None:
        self.disk = disk
        self.capacity = capacity

    def accepts(self, parameter: Tensor) -> bool:
        """Return whether state of a parameter is kept here rather than beside it."""
        return False

    def allocate(self, like: Tensor, parameter: Tensor) -> Tensor:
        """Return an uninitialised tensor of the store for state of a parameter, as large as `like`.

        Raises:
            TierFullError: There is no room for it.
        """
        raise NotImplementedError

    def load(self, stored: Tensor, parameter: Tensor) -> Tensor:
        """Return a tensor for the parameter's step: the stored one if it can be used, else a copy on its device."""
        return stored.to(parameter.device)

    def prefetch(self, stored: Tensor, parameter: Tensor) -> Transfer[Tensor] | None:
        """Begin to load a stored tensor; None if that can't be done beside a step."""
        return None

    def write(self, stored: Tensor, values: Tensor) -> Transfer[None] | None:
        """Copy values to a stored tensor; return the transfer if it may go on, and needs the values so long."""
        stored.copy_(values)
        return None

    def release_pages(self, tensor: Tensor) -> None:
        """Release the pages of a tensor on disk that is not used for now: state, a parameter, a gradient, a slice."""
        self.disk.release_pages(tensor)


class DiskStateStore(StateStore):
    """Keeps state in memory-mapped files, with which a CPU computes directly."""

    tier = "disk"

    def accepts(self, parameter: Tensor) -> bool:
        return True

    def allocate(self, like: Tensor, parameter: Tensor) -> Tensor:
        return self.disk.empty_like(like)

    def write(self, stored: Tensor, values: Tensor) -> None:
        self.disk.fill(stored, values)

    def load(self, stored: Tensor, parameter: Tensor) -> Tensor:
        for each in (stored, parameter, parameter.grad):
            if each is not None:
                self.disk.prefetch_pages(each)
        return stored.to(parameter.device)


class HostStateStore(StateStore):
    """Keeps state of parameters on an accelerator in host memory, page-locked below CUDA. See Note [Two buckets]."""

    tier = "host"

    def __init__(
        self, disk: DiskStore, capacity: int | None = None, pinned: PinnedMemory | None = None
    ) -> None:
        super().__init__(disk, capacity, pinned)
        self.memory = HostMemory(capacity, pinned)
        self.engine = Engine(AsyncOffloadConfig())

    def accepts(self, parameter: Tensor) -> bool:
        return parameter.device != HOST

    def allocate(self, like: Tensor, parameter: Tensor) -> Tensor:
        flat = torch.empty(like.numel(), dtype=like.dtype, device="meta")
        memory = self.memory.empty_like(flat, source=parameter)
        return memory.as_strided(like.shape, like.stride()) if is_dense(like) else memory.view(like.shape)

    def prefetch(self, stored: Tensor, parameter: Tensor) -> Transfer[Tensor]:
        device = parameter.device
        target = torch.empty_like(stored, device=device)
        return self.engine.run(
            lambda: target.copy_(stored, non_blocking=True), lane_of(device), device, allocated=True
        )

    def write(self, stored: Tensor, values: Tensor) -> Transfer[None]:
        device = values.device

        def copy() -> None:
            stored.copy_(values, non_blocking=True)

        return self.engine.run(copy, lane_of(device), device, outward=True)


def lane_of(device: torch.device) -> Lane:
    """Return where copies run beside a step on a device."""
    return Lane.STREAM if device.type == "cuda" else Lane.CALLER


class Stepped(NamedTuple):
    """A parameter, or a slice of one, in a call of the arithmetic."""

    member: Member
    stored: bool  # whether its state is kept in the store
    quantized: bool  # whether its moments are kept in 8 bits
    origins: dict[Path, Tensor]  # the stored tensors that its state was loaded from
    new: Mapping[str, Tensor] = {}  # what the step will add to its state, without values
    nbytes: int = 0  # with its gradient and the state that is loaded for the step

    @property
    def parameter(self) -> Tensor:
        return self.member.parameter


class StateMover:
    """Moves the state of single parameters between a store and their device. See Note [Stored state]."""

    def __init__(self, store: StateStore, meter: Meter) -> None:
        self.store = store  # another one may take its place while nothing is stored
        self.bytes_moved = 0
        self._meter = meter
        self._reserved: dict[tuple[int, Path], Tensor] = {}  # by parameter, for the step that runs
        self._loading: dict[int, Transfer[Tensor]] = {}  # by stored tensor
        self._writing: list[tuple[Tensor, Transfer[None]]] = []  # with what is copied
        # By id: tensors can't be members of a WeakSet, which compares them by value.
        self._stored: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def is_stored(self, tensor: Tensor) -> bool:
        return self._stored.get(id(tensor)) is tensor

    def reserve(self, state: Any, each: Stepped) -> int:
        """Allocate room now for all state of a parameter that the step will store.

        Returns:
            The bytes of state that are on the device for the step, and not between steps.

        Raises:
            TierFullError: There is no room.
        """
        loaded = 0
        for name, value in _entries(state):
            if isinstance(value, Moment):
                loaded += 4 * value.shape.numel()
            elif isinstance(value, Tensor):
                is_dequantized = each.quantized and is_moment(name, value, each.parameter)
                is_moved = self.is_stored(value) or self._may_store(value, each)
                loaded += value.nbytes if is_dequantized or is_moved else 0
        wanted = [(path, tensor) for path, _, tensor in tensors_in(state) if self._may_store(tensor, each)]
        for name, like in each.new.items():
            loaded += like.nbytes if each.stored or (each.quantized and name in MOMENTS) else 0
            wanted += stored_layout(name, like, quantized=each.quantized) if each.stored else ()
        for path, like in wanted:
            if like.nbytes >= self.store.least_bytes and like.dim():
                self._reserved[id(each.parameter), path] = self.store.allocate(like, each.parameter)
        return loaded

    def allocate(self, path: Path, like: Tensor, each: Stepped) -> Tensor:
        """Return a tensor for state that a step makes: in the store, or beside the parameter if that has it."""
        parameter = each.parameter
        if like.nbytes < self.store.least_bytes or not each.stored:
            return torch.empty_like(like, device=parameter.device)
        stored = self._reserved.pop((id(parameter), path), None)
        if stored is None or not _fits(stored, like):
            return self.allocate_stored(like, parameter)
        self._stored[id(stored)] = stored
        return stored

    def allocate_stored(self, like: Tensor, parameter: Tensor) -> Tensor:
        """Return a tensor of the store for state of a parameter, as large as `like`, or raise a TierFullError."""
        stored = self.store.allocate(like, parameter)
        self._stored[id(stored)] = stored
        return stored

    def prefetch(self, state: Any, parameter: Tensor) -> None:
        """Begin to load a parameter's state."""
        with contextlib.suppress(torch.OutOfMemoryError):  # it is loaded when its bucket is stepped
            for _, _, tensor in tensors_in(state):
                transfer = self.store.prefetch(tensor, parameter) if self.is_stored(tensor) else None
                if transfer is not None:
                    self._loading[id(tensor)] = transfer

    def load(self, state: Any, each: Stepped) -> None:
        """Load a parameter's state, and note the stored tensors that it came from."""
        for path, holder, tensor in tensors_in(state):
            if self.is_stored(tensor):
                each.origins[path] = tensor
                self.count_read(tensor)
                transfer = self._loading.pop(id(tensor), None)
                holder[path[-1]] = transfer.wait() if transfer else self.store.load(tensor, each.parameter)

    def save(self, state: Any, each: Stepped) -> None:
        """Store a parameter's state, what is new included, and release its pages."""
        for path, holder, tensor in tensors_in(state):
            stored = each.origins.get(path)
            if self.is_stored(tensor):
                if stored is None:
                    continue  # it was not loaded
                stored = tensor
            elif tensor is stored:
                continue  # a slice that is beside its parameter
            elif stored is not None and _fits(stored, tensor):
                self._write(stored, tensor)
            elif self._may_store(tensor, each):
                stored = self.allocate(path, tensor, each)
                self._write(stored, tensor)
            else:
                continue
            holder[path[-1]] = stored
            if self.is_stored(stored):
                self.count_written(stored)
                self.store.release_pages(stored)

    def _write(self, stored: Tensor, values: Tensor) -> None:
        if not self.is_stored(stored):  # a slice of state beside its parameter
            stored.copy_(values)
        elif (transfer := self.store.write(stored, values)) is not None:
            self._writing.append((values, transfer))

    def finish_writing(self) -> None:
        """Wait for the copies to the store, and release what they read."""
        while self._writing:
            self._writing.pop()[1].finish()

    def end_step(self) -> None:
        """Wait for all copies, and release what was reserved and not needed."""
        self.finish_writing()
        self._loading.clear()
        self._reserved.clear()

    def bring_back(self, state: Any, parameter: Tensor) -> None:
        """Move state beside its parameter for good, as ordinary tensors of their own."""
        for path, holder, tensor in tensors_in(state):
            if self.is_stored(tensor):
                loaded = self.store.load(tensor, parameter)
                holder[path[-1]] = tensor.clone() if loaded is tensor else loaded

    def part_of(self, name: str, value: Any, part: slice) -> Any:
        """Return an entry of a parameter's state for a slice of the parameter: a view, stored if the whole is."""
        if isinstance(value, Moment):
            blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
            codes, scales = self._view(value["codes"], part), self._view(value["scales"], blocks)
            return Moment(codes, scales, signed=value.signed, shape=codes.shape, stride=(1,))
        if name in STATE_NAMES and isinstance(value, Tensor):
            return self._view(value, part)
        return value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value

    def _view(self, whole: Tensor, part: slice) -> Tensor:
        view = whole.view(-1)[part]
        if self.is_stored(whole):
            self._stored[id(view)] = view
        return view

    def count_read(self, stored: Tensor) -> None:
        self._count(stored, self._meter.count_read)

    def count_written(self, stored: Tensor) -> None:
        self._count(stored, self._meter.count_written)

    def _count(self, stored: Tensor, count: Callable[..., None]) -> None:
        self.bytes_moved += stored.nbytes
        if self.store.tier is not None:
            count("optimizer state", self.store.tier, stored.nbytes)

    def _may_store(self, tensor: Tensor, each: Stepped) -> bool:
        return (
            each.stored
            and not self.is_stored(tensor)
            and tensor.dim() > 0
            and tensor.nbytes >= self.store.least_bytes
            and tensor.device == each.parameter.device
            and tensor.layout is torch.strided
            and not is_traceable_wrapper_subclass(tensor)
        )


def _entries(state: Any) -> list[tuple[str, Any]]:
    """Return the entries of a parameter's state that torch's arithmetic keeps there."""
    return [(name, value) for name, value in (state or {}).items() if name in STATE_NAMES]


def tensors_in(state: Any) -> Iterator[tuple[Path, dict[str, Any], Tensor]]:
    """Yield the tensors among them: where each is, the dict that holds it under the path's last name, and itself."""
    for name, value in _entries(state):
        if isinstance(value, Moment):
            for part, tensor in list(value.items()):
                yield (name, part), value, tensor
        elif isinstance(value, Tensor):
            yield (name,), state, value


def _fits(stored: Tensor, tensor: Tensor) -> bool:
    return stored.shape == tensor.shape and stored.dtype == tensor.dtype and tensor.layout is torch.strided
