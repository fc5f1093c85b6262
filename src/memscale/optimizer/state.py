"""The state of a parameter: beside it while it is stepped, in a cheaper place otherwise.

Note [Homes of state]
~~~~~~~~~~~~~~~~~~~~~
A state tensor goes down once: the place answers with an ordinary tensor, its *home*, which stays the same
object from then on. Up, it is either the home itself (a memory-mapped tensor that the CPU computes with) or
a copy beside the parameter. After the arithmetic the values go back into the home, and the copy is dropped;
an optimizer that puts a new tensor in the place of the old one is served the same way. ``state`` always
holds every tensor, home or copy, so that it is complete at any moment, after an error too.

Left where they are: scalars and what is smaller than a page (step counters, mostly); what is not on its
parameter's device (it waits elsewhere already); parts of a larger storage and aliases of the parameter or
its gradient (moving them would free nothing, and end the sharing); sparse tensors and those made of several
(``DTensor``, torchao's).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from memscale._torch import is_traceable_wrapper_subclass, tree_map_only
from memscale.observe.counters import WatchedState

__all__ = ["PAGE", "MovingState", "Origins", "StatePlace"]

PAGE = 4096

# Where a tensor is in a parameter's state: ("exp_avg",), ("preconditioners", 1), and the home it had.
Path = tuple[Any, ...]
Origins = dict[Path, Tensor]


class StatePlace(Protocol):
    """Where optimizer state waits between steps."""

    def down(self, tensor: Tensor) -> Tensor:
        """Return an ordinary tensor of that place with the same values; the original may be freed afterwards."""
        ...

    def up(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """Return the tensor for use in the parameter's step: itself if it can be used, else a copy on its device."""
        ...

    def new(self, like: Tensor) -> Tensor:
        """Return an uninitialised ordinary tensor of that place, as large as this one."""
        ...

    def reserve(self, like: Tensor, parameter: Tensor) -> Tensor | None:
        """As `new`, for state of this parameter that is made in the next step; None if it takes no room there.

        Raises:
            TierFullError: There is no room for it.
        """
        ...

    def fill(self, home: Tensor, values: Tensor) -> None:
        """Give values to a tensor that was reserved."""
        ...

    def rest(self, tensor: Tensor) -> None:
        """Not needed for now: pages can be given back. Also said of parameters, gradients, and slices of them."""
        ...


class MovingState:
    """Takes the state of single parameters up and down.

    Args:
        place: where it waits.
        least_bytes: smaller tensors stay where they are.
        watched: told of what is moved.
    """

    def __init__(
        self, place: StatePlace, least_bytes: int = PAGE, watched: WatchedState | None = None
    ) -> None:
        self.place = place
        self.watched = watched or WatchedState()
        self.least_bytes = least_bytes
        self.bytes_moved = 0
        self._reserved: dict[tuple[int, Path], Tensor] = {}  # by parameter, for the step that runs
        # By id: tensors can't be members of a WeakSet, which compares them by value.
        self._homes: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def is_home(self, tensor: Tensor) -> bool:
        """Whether this tensor is at rest in the place."""
        return self._homes.get(id(tensor)) is tensor

    def reserve(self, parameter: Tensor, path: Path, like: Tensor) -> None:
        """Take room now for state that the step will leave there.

        Raises:
            TierFullError: There is none.
        """
        if like.nbytes >= self.least_bytes and like.dim():
            home = self.place.reserve(like, parameter)
            if home is not None:
                self._reserved[id(parameter), path] = home

    def reserve_for(self, state: Any, parameter: Tensor) -> None:
        """Do the same for state that exists and has not been offloaded yet."""

        def take(path: Path, tensor: Tensor) -> Tensor:
            if not self.is_home(tensor) and self._goes_down(tensor, parameter):
                self.reserve(parameter, path, tensor)
            return tensor

        exchange(state, take)

    def end_reservation(self) -> None:
        """Give back what was reserved and not needed."""
        self._reserved.clear()

    def new_home(self, like: Tensor, parameter: Tensor, name: str) -> Tensor:
        """Return a tensor for state that is made a slice at a time: in the place, or beside the parameter if small."""
        if like.nbytes < self.least_bytes:
            return torch.empty_like(like, device=parameter.device)
        home = self._reserved.pop((id(parameter), (name,)), None)
        if home is None or not _fits(home, like):
            home = self.place.new(like)
        self._homes[id(home)] = home
        return home

    def moved_up(self, home: Tensor, parameter: Tensor) -> None:
        """Note that this, or a slice of such, came up."""
        self.bytes_moved += home.nbytes
        self.watched.up(home, parameter)

    def moved_down(self, home: Tensor, parameter: Tensor) -> None:
        """Note that it went down."""
        self.bytes_moved += home.nbytes
        self.watched.down(home, parameter)

    def bytes_of(self, state: Any, parameter: Tensor) -> int:
        """How much of this state is down, or would go."""
        total = 0

        def count(path: Path, tensor: Tensor) -> Tensor:
            nonlocal total
            if self.is_home(tensor) or self._goes_down(tensor, parameter):
                total += tensor.nbytes
            return tensor

        exchange(state, count)
        return total

    def up(self, state: Any, parameter: Tensor, origins: Origins) -> None:
        """Bring a parameter's state beside it, and note in ``origins`` where it came from."""
        beside: dict[int, Tensor] = {}

        def bring(path: Path, tensor: Tensor) -> Tensor:
            if self.is_home(tensor):
                if id(tensor) not in beside:
                    self.moved_up(tensor, parameter)
                origins[path] = tensor
            return self._beside(tensor, parameter, beside)

        exchange(state, bring)

    def down(self, state: Any, parameter: Tensor, origins: Origins) -> None:
        """Take a parameter's state home, what is new included, and let it rest."""
        # What was met, with its home; holding on to it, because an id belongs to a tensor while it lives.
        seen: dict[int, tuple[Tensor, Tensor]] = {}
        # An optimizer may pass a tensor on from one entry to another: such an entry's home is not free.
        taken: set[int] = set()
        exchange(state, lambda path, tensor: _note(tensor, taken))

        def take(path: Path, tensor: Tensor) -> Tensor:
            if id(tensor) in seen:
                return seen[id(tensor)][1]
            home = origins.get(path)
            at_rest = home is None and self.is_home(tensor)  # it was never up
            if self.is_home(tensor):
                home = tensor
            elif home is not None and id(home) not in taken and _fits(home, tensor):
                home.copy_(tensor)
                taken.add(id(home))
            elif self._goes_down(tensor, parameter):
                home = self._new(tensor, parameter, path)
            else:
                return tensor
            seen[id(tensor)] = (tensor, home)
            self.bytes_moved += home.nbytes
            if not at_rest:
                self.watched.down(home, parameter)
            self.place.rest(home)
            return home

        exchange(state, take)

    def settle(self, state: Any, parameter: Tensor) -> None:
        """Take home what is not there yet: state from before the place was, or that was loaded."""

        def take(path: Path, tensor: Tensor) -> Tensor:
            if self.is_home(tensor) or not self._goes_down(tensor, parameter):
                return tensor
            home = self._new(tensor, parameter, path)
            self.moved_down(home, parameter)
            self.place.rest(home)
            return home

        exchange(state, take)

    def bring_back(self, state: Any, parameter: Tensor) -> None:
        """State beside its parameter for good, as ordinary tensors of their own."""
        beside: dict[int, Tensor] = {}

        def bring(path: Path, tensor: Tensor) -> Tensor:
            new = self._beside(tensor, parameter, beside)
            if new is tensor and self.is_home(tensor):
                new = beside[id(tensor)] = tensor.clone()
            return new

        exchange(state, bring)

    def _new(self, tensor: Tensor, parameter: Tensor, path: Path) -> Tensor:
        home = self._reserved.pop((id(parameter), path), None)
        if home is not None and _fits(home, tensor):
            self.place.fill(home, tensor)
        else:
            home = self.place.down(tensor)
        self._homes[id(home)] = home
        return home

    def copied(self, state: Any, parameter: Tensor) -> Any:
        """Return the state as it would be without the place; the original stays down."""
        beside: dict[int, Tensor] = {}
        return tree_map_only(Tensor, lambda tensor: self._beside(tensor, parameter, beside), state)

    def _beside(self, tensor: Tensor, parameter: Tensor, beside: dict[int, Tensor]) -> Tensor:
        if not self.is_home(tensor):
            return tensor
        if id(tensor) not in beside:
            beside[id(tensor)] = self.place.up(tensor, parameter)
        return beside[id(tensor)]

    def _goes_down(self, tensor: Tensor, parameter: Tensor) -> bool:
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


def exchange(value: Any, visit: Callable[[Path, Tensor], Tensor], path: Path = ()) -> Any:
    """Put ``visit(path, tensor)`` in the place of each tensor, in the containers that are there."""
    if isinstance(value, Tensor):
        return visit(path, value)
    if isinstance(value, dict):
        for key, each in list(value.items()):
            new = exchange(each, visit, (*path, key))
            if new is not each:
                value[key] = new
    elif isinstance(value, list):
        for index, each in enumerate(value):
            value[index] = exchange(each, visit, (*path, index))
    elif type(value) is tuple:
        new = tuple(exchange(each, visit, (*path, index)) for index, each in enumerate(value))
        return value if all(a is b for a, b in zip(new, value, strict=True)) else new
    return value


def _note(tensor: Tensor, ids: set[int]) -> Tensor:
    ids.add(id(tensor))
    return tensor


def _fits(home: Tensor, tensor: Tensor) -> bool:
    return home.shape == tensor.shape and home.dtype == tensor.dtype and tensor.layout is torch.strided


def _storages(parameter: Tensor) -> set[int]:
    """Return what belongs to the parameter itself."""
    tensors = (parameter, parameter.grad)
    return {
        each.untyped_storage()._cdata
        for each in tensors
        if each is not None and each.layout is torch.strided and not is_traceable_wrapper_subclass(each)
    }
