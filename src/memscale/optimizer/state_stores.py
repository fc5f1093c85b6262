"""Where optimizer state is kept between steps, and how it gets to its parameter for one.

Note [Stored state]
~~~~~~~~~~~~~~~~~~~
A state tensor is stored once: the store answers with an ordinary tensor, its *stored tensor*, which stays the same
object from then on. For a step it is loaded: the tensor itself, if it can be computed with (a memory-mapped tensor
on a CPU), else a copy on the parameter's device. After the arithmetic the values are copied back into the stored
tensor and the copy is dropped; an optimizer that replaces a tensor by a new one is served the same way.
``optimizer.state`` always holds every tensor, stored or loaded, so that it is complete at any moment, also after
an error.

Left where they are: scalars and what is smaller than a page (step counters, mostly); what is not on its
parameter's device (it was moved already); parts of a larger storage and aliases of the parameter or its gradient
(moving them would free nothing, and end the sharing); sparse tensors and those made of several (``DTensor``,
torchao's).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from memscale._torch import is_traceable_wrapper_subclass, tree_map_only
from memscale.errors import TierFullError
from memscale.observe.counters import WatchedState
from memscale.tiers.disk import DiskStore
from memscale.units import format_bytes

__all__ = ["PAGE", "DiskStateStore", "HostStateStore", "Origins", "StateMover", "StateStore"]

PAGE = 4096

_HOST = torch.device("cpu")

# Where a tensor is in a parameter's state: ("exp_avg",), ("preconditioners", 1); and the stored tensor it had.
Path = tuple[Any, ...]
Origins = dict[Path, Tensor]


class StateStore(Protocol):
    """Where optimizer state is kept between steps."""

    def store(self, tensor: Tensor) -> Tensor:
        """Return an ordinary tensor of the store with the same values; the original may be freed afterwards."""

    def load(self, stored: Tensor, parameter: Tensor) -> Tensor:
        """Return a tensor for the parameter's step: the stored one if it can be used, else a copy on its device."""

    def allocate(self, like: Tensor) -> Tensor:
        """Return an ordinary tensor of the store, as large as this one (which has no values), uninitialised."""

    def reserve(self, like: Tensor, parameter: Tensor) -> Tensor | None:
        """Allocate for state of this parameter that the next step makes; None if it takes no room in the store.

        Raises:
            TierFullError: There is no room for it.
        """

    def fill(self, stored: Tensor, values: Tensor) -> None:
        """Give values to a tensor that was reserved."""

    def release_pages(self, tensor: Tensor) -> None:
        """Give back the pages of a tensor that is not used for now: state, a parameter, a gradient, or slices."""


class DiskStateStore:
    """State is in memory-mapped files, with which a CPU computes directly.

    Args:
        disk: The disk.
    """

    def __init__(self, disk: DiskStore) -> None:
        self._disk = disk

    def store(self, tensor: Tensor) -> Tensor:
        return tensor if self._disk.holds(tensor) else self._disk.copy_of(tensor)

    def load(self, stored: Tensor, parameter: Tensor) -> Tensor:
        for each in (stored, parameter, parameter.grad):
            if each is not None:
                self._disk.prefetch_pages(each)
        return stored.to(parameter.device)

    def allocate(self, like: Tensor) -> Tensor:
        return self._disk.empty_like(like)

    def reserve(self, like: Tensor, parameter: Tensor) -> Tensor | None:
        return None if self._disk.holds(like) else self.allocate(like)

    def fill(self, stored: Tensor, values: Tensor) -> None:
        self._disk.fill(stored, values)

    def release_pages(self, tensor: Tensor) -> None:
        self._disk.release_pages(tensor)


class HostStateStore:
    """State is in host memory, and on the device while it is stepped.

    State of parameters that are on the host themselves takes no room here.

    Args:
        disk: The disk, which parameters and gradients may be on.
        capacity: The most host memory to take, a hard cap (`max_cpu_offload_gb`); None for no cap.
    """

    def __init__(self, disk: DiskStore, capacity: int | None = None) -> None:
        self._disk = disk
        self._capacity = capacity
        self.bytes_used = 0

    def store(self, tensor: Tensor) -> Tensor:
        if tensor.device == _HOST:
            return tensor
        return self._counted(tensor.nbytes, lambda: tensor.to(_HOST))

    def load(self, stored: Tensor, parameter: Tensor) -> Tensor:
        return stored.to(parameter.device)

    def allocate(self, like: Tensor) -> Tensor:
        return self._counted(like.nbytes, lambda: torch.empty_like(like, device=_HOST))

    def reserve(self, like: Tensor, parameter: Tensor) -> Tensor | None:
        return None if parameter.device == _HOST else self.allocate(like)

    def fill(self, stored: Tensor, values: Tensor) -> None:
        stored.copy_(values)

    def release_pages(self, tensor: Tensor) -> None:
        self._disk.release_pages(tensor)

    def _counted(self, nbytes: int, make: Callable[[], Tensor]) -> Tensor:
        if self._capacity is not None and self.bytes_used + nbytes > self._capacity:
            raise TierFullError(
                f"{format_bytes(nbytes)} more of optimizer state would exceed the cap on host memory of "
                f"{format_bytes(self._capacity)}, of which {format_bytes(self.bytes_used)} is used. Raise "
                "Config(max_cpu_offload_gb=...)."
            )
        stored = make()
        self.bytes_used += nbytes
        weakref.finalize(stored, self._release, nbytes).atexit = False
        return stored

    def _release(self, nbytes: int) -> None:
        self.bytes_used -= nbytes


class StateMover:
    """Moves the state of single parameters between a store and the parameters. See Note [Stored state].

    Args:
        store: Where it is kept.
        least_bytes: Smaller tensors stay where they are.
        watched: Counts what is moved.
    """

    def __init__(
        self, store: StateStore, least_bytes: int = PAGE, watched: WatchedState | None = None
    ) -> None:
        self.store = store
        self.watched = watched or WatchedState()
        self.least_bytes = least_bytes
        self.bytes_moved = 0
        self._reserved: dict[tuple[int, Path], Tensor] = {}  # by parameter, for the step that runs
        # By id: tensors can't be members of a WeakSet, which compares them by value.
        self._stored: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def is_stored(self, tensor: Tensor) -> bool:
        """Return whether this is a stored tensor."""
        return self._stored.get(id(tensor)) is tensor

    def bytes_of(self, value: Any, parameter: Tensor) -> int:
        """Return the bytes of state that is stored, or would be."""
        total = 0

        def count(path: Path, tensor: Tensor) -> Tensor:
            nonlocal total
            if self.is_stored(tensor) or self._may_store(tensor, parameter):
                total += tensor.nbytes
            return tensor

        replace_tensors(value, count)
        return total

    # ------------------------------------------------------------------ reservation

    def reserve(self, parameter: Tensor, path: Path, like: Tensor) -> None:
        """Allocate room now for state that the step will store.

        Raises:
            TierFullError: There is none.
        """
        if like.nbytes >= self.least_bytes and like.dim():
            stored = self.store.reserve(like, parameter)
            if stored is not None:
                self._reserved[id(parameter), path] = stored

    def reserve_for(self, state: Any, parameter: Tensor) -> None:
        """Allocate room for state that exists and is not stored yet."""

        def visit(path: Path, tensor: Tensor) -> Tensor:
            if not self.is_stored(tensor) and self._may_store(tensor, parameter):
                self.reserve(parameter, path, tensor)
            return tensor

        replace_tensors(state, visit)

    def end_reservation(self) -> None:
        """Release what was reserved and not needed."""
        self._reserved.clear()

    def allocate(self, like: Tensor, parameter: Tensor, path: Path) -> Tensor:
        """Return a tensor for state that is made a slice at a time: in the store, or beside the parameter if small."""
        if like.nbytes < self.least_bytes:
            return torch.empty_like(like, device=parameter.device)
        stored = self._reserved.pop((id(parameter), path), None)
        if stored is None or not _fits(stored, like):
            stored = self.store.allocate(like)
        self._stored[id(stored)] = stored
        return stored

    # ------------------------------------------------------------------ moving

    def load(self, state: Any, parameter: Tensor, origins: Origins) -> None:
        """Load a parameter's state, and note in ``origins`` which stored tensors it came from."""
        loaded: dict[int, Tensor] = {}

        def visit(path: Path, tensor: Tensor) -> Tensor:
            if self.is_stored(tensor):
                if id(tensor) not in loaded:
                    self.note_load(tensor, parameter)
                origins[path] = tensor
            return self._loaded(tensor, parameter, loaded)

        replace_tensors(state, visit)

    def save(self, state: Any, parameter: Tensor, origins: Origins) -> None:
        """Store a parameter's state, what is new included, and release its pages."""
        # What was seen, with its stored tensor; holding on to it, because an id belongs to a tensor while it lives.
        seen: dict[int, tuple[Tensor, Tensor]] = {}
        # An optimizer may pass a tensor on from one entry to another: such an entry's stored tensor is not free.
        taken: set[int] = set()
        replace_tensors(state, lambda path, tensor: _note(tensor, taken))

        def visit(path: Path, tensor: Tensor) -> Tensor:
            if id(tensor) in seen:
                return seen[id(tensor)][1]
            stored = origins.get(path)
            was_loaded = stored is not None or not self.is_stored(tensor)
            if self.is_stored(tensor):
                stored = tensor
            elif stored is not None and id(stored) not in taken and _fits(stored, tensor):
                stored.copy_(tensor)
                taken.add(id(stored))
            elif self._may_store(tensor, parameter):
                stored = self._store_new(tensor, parameter, path)
            else:
                return tensor
            seen[id(tensor)] = (tensor, stored)
            self.bytes_moved += stored.nbytes
            if was_loaded:
                self.watched.down(stored, parameter)
            self.store.release_pages(stored)
            return stored

        replace_tensors(state, visit)

    def store_existing(self, state: Any, parameter: Tensor) -> None:
        """Store what is not stored yet: state from before, or that was loaded from a checkpoint."""

        def visit(path: Path, tensor: Tensor) -> Tensor:
            if self.is_stored(tensor) or not self._may_store(tensor, parameter):
                return tensor
            stored = self._store_new(tensor, parameter, path)
            self.note_save(stored, parameter)
            self.store.release_pages(stored)
            return stored

        replace_tensors(state, visit)

    def bring_back(self, state: Any, parameter: Tensor) -> None:
        """Move state beside its parameter for good, as ordinary tensors of their own."""
        loaded: dict[int, Tensor] = {}

        def visit(path: Path, tensor: Tensor) -> Tensor:
            new = self._loaded(tensor, parameter, loaded)
            if new is tensor and self.is_stored(tensor):
                new = loaded[id(tensor)] = tensor.clone()
            return new

        replace_tensors(state, visit)

    def copied(self, state: Any, parameter: Tensor) -> Any:
        """Return the state as it would be without the store; the original stays stored."""
        loaded: dict[int, Tensor] = {}
        return tree_map_only(Tensor, lambda tensor: self._loaded(tensor, parameter, loaded), state)

    def note_load(self, stored: Tensor, parameter: Tensor) -> None:
        """Count a stored tensor, or a slice of one, that was loaded."""
        self.bytes_moved += stored.nbytes
        self.watched.up(stored, parameter)

    def note_save(self, stored: Tensor, parameter: Tensor) -> None:
        """Count one that was saved."""
        self.bytes_moved += stored.nbytes
        self.watched.down(stored, parameter)

    def _store_new(self, tensor: Tensor, parameter: Tensor, path: Path) -> Tensor:
        stored = self._reserved.pop((id(parameter), path), None)
        if stored is not None and _fits(stored, tensor):
            self.store.fill(stored, tensor)
        else:
            stored = self.store.store(tensor)
        self._stored[id(stored)] = stored
        return stored

    def _loaded(self, tensor: Tensor, parameter: Tensor, loaded: dict[int, Tensor]) -> Tensor:
        if not self.is_stored(tensor):
            return tensor
        if id(tensor) not in loaded:
            loaded[id(tensor)] = self.store.load(tensor, parameter)
        return loaded[id(tensor)]

    def _may_store(self, tensor: Tensor, parameter: Tensor) -> bool:
        if tensor.device != parameter.device or tensor.layout is not torch.strided or tensor.dim() == 0:
            return False
        if (
            tensor.nbytes < self.least_bytes
            or tensor.grad_fn is not None
            or is_traceable_wrapper_subclass(tensor)
        ):
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() <= tensor.nbytes and storage._cdata not in _storages(parameter)


def replace_tensors(value: Any, visit: Callable[[Path, Tensor], Tensor], path: Path = ()) -> Any:
    """Put ``visit(path, tensor)`` in the place of each tensor, in the containers that are there."""
    if isinstance(value, Tensor):
        return visit(path, value)
    if isinstance(value, dict):
        for key, each in list(value.items()):
            new = replace_tensors(each, visit, (*path, key))
            if new is not each:
                value[key] = new
    elif isinstance(value, list):
        for index, each in enumerate(value):
            value[index] = replace_tensors(each, visit, (*path, index))
    elif type(value) is tuple:
        new = tuple(replace_tensors(each, visit, (*path, index)) for index, each in enumerate(value))
        return value if all(a is b for a, b in zip(new, value, strict=True)) else new
    return value


def _note(tensor: Tensor, ids: set[int]) -> Tensor:
    ids.add(id(tensor))
    return tensor


def _fits(stored: Tensor, tensor: Tensor) -> bool:
    return stored.shape == tensor.shape and stored.dtype == tensor.dtype and tensor.layout is torch.strided


def _storages(parameter: Tensor) -> set[int]:
    """Return the storages of the parameter itself."""
    tensors = (parameter, parameter.grad)
    return {
        each.untyped_storage()._cdata
        for each in tensors
        if each is not None and each.layout is torch.strided and not is_traceable_wrapper_subclass(each)
    }
