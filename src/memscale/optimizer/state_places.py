"""The places in which optimizer state waits between steps: host memory, and mapped files."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from memscale.errors import TierFullError
from memscale.tiers.store import DiskStore
from memscale.units import format_bytes

__all__ = ["HostPlace", "MappedPlace"]

_HOST = torch.device("cpu")


class MappedPlace:
    """State is in mapped files, with which the CPU computes as they are.

    Args:
        store: The disk.
    """

    def __init__(self, store: DiskStore) -> None:
        self._store = store

    def down(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._store.holds(tensor) else self._store.copy_of(tensor)

    def up(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        for each in (tensor, parameter, parameter.grad):
            if each is not None:
                self._store.prefetch_pages(each)
        return tensor.to(parameter.device)

    def new(self, like: torch.Tensor) -> torch.Tensor:
        return self._store.empty_like(like)

    def reserve(self, like: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
        return None if self._store.holds(like) else self.new(like)

    def fill(self, home: torch.Tensor, values: torch.Tensor) -> None:
        self._store.fill(home, values)

    def rest(self, tensor: torch.Tensor) -> None:
        self._store.release_pages(tensor)


class HostPlace:
    """State is in host memory, and on the device while it is stepped.

    State of parameters that are on the host themselves is at home there already.

    Args:
        store: The disk, which parameters and gradients may be on.
        capacity: The most host memory to take, a hard cap (`max_cpu_offload_gb`); None for no other limit than
            the host's own.
    """

    def __init__(self, store: DiskStore, capacity: int | None = None) -> None:
        self._store = store
        self._capacity = capacity
        self._taken = 0

    @property
    def bytes_used(self) -> int:
        """Bytes of state that are on the host instead of on the device."""
        return self._taken

    def down(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == _HOST:
            return tensor
        return self._counted(tensor.nbytes, lambda: tensor.to(_HOST))

    def up(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return tensor.to(parameter.device)

    def new(self, like: torch.Tensor) -> torch.Tensor:
        return self._counted(like.nbytes, lambda: torch.empty_like(like, device=_HOST))

    def reserve(self, like: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
        return None if parameter.device == _HOST else self.new(like)

    def fill(self, home: torch.Tensor, values: torch.Tensor) -> None:
        home.copy_(values)

    def rest(self, tensor: torch.Tensor) -> None:
        self._store.release_pages(tensor)

    def _counted(self, nbytes: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._capacity is not None and self._taken + nbytes > self._capacity:
            raise TierFullError(
                f"{format_bytes(nbytes)} more of optimizer state would exceed the cap on host memory of "
                f"{format_bytes(self._capacity)}, of which {format_bytes(self._taken)} is used. Raise "
                "Config(max_cpu_offload_gb=...)."
            )
        home = make()
        self._taken += nbytes
        weakref.finalize(home, self._give_up, nbytes).atexit = False
        return home

    def _give_up(self, nbytes: int) -> None:
        self._taken -= nbytes
