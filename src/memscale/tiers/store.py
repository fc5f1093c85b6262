"""The disk below one model: a file under one cap, for its parameters, gradients, optimizer state, activations."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from memscale.memory.ledger import is_mapped
from memscale.tiers.disk import DiskTier
from memscale.tiers.engine import Engine
from memscale.tiers.layout import is_fake
from memscale.tiers.mapped import MappedArena
from memscale.tiers.space import DiskSpace

__all__ = ["DiskStore"]

_ORDINARY = (torch.Tensor, nn.Parameter)


class DiskStore:
    """A model's share of the disk. The file is made when the first tensor goes there.

    A copy, by ``deepcopy`` or pickle, has the same settings and nothing in it: copies of mapped tensors are
    ordinary ones.

    Args:
        directory: Where (`offload_dir`); None for what `find_disk` chooses.
        capacity: The most bytes to take, a hard cap (`max_disk_offload_gb`); None for what is free then.

    Example:
        >>> store = DiskStore(capacity=2**20)
        >>> home = store.copy_of(torch.ones(1024))
        >>> store.rest(home)
        >>> store.bytes_used, float(home.sum())
        (4096, 1024.0)
        >>> store.close()
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, capacity: int | None = None) -> None:
        self._directory = directory
        self._capacity = capacity
        self._space: DiskSpace | None = None
        self._arena: MappedArena | None = None

    @property
    def arena(self) -> MappedArena:
        """Makes the tensors that are mapped."""
        if self._arena is None:
            self._arena = MappedArena(self._opened())
        return self._arena

    def tier_of(self, engine: Engine) -> DiskTier:
        """A tier over the same file, whose transfers an engine runs; whoever asks for it closes it first."""
        return DiskTier(space=self._opened(), engine=engine)

    @property
    def bytes_used(self) -> int:
        """Bytes on the disk that are in use, in whole pages."""
        return 0 if self._space is None else self._space.bytes_used

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in a mapped tensor, without pages in memory; dimensions are in the same order there.

        Raises:
            TierFullError: The cap would be exceeded, or the disk is full.
            TierError: The directory can't be used.
        """
        return _in_the_same_order(tensor, self.arena.copy_of)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """As :meth:`copy_of`, without the values; it may be on the meta device.

        Raises:
            As :meth:`copy_of`.
        """
        return _in_the_same_order(tensor, lambda dense: self.arena.empty(dense.shape, dense.dtype))

    def fill(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Give a tensor values, in the file itself if it is one of these, so that it takes no pages."""
        with torch.no_grad():
            if self._arena is not None and self.holds(tensor) and tensor.is_contiguous():
                self._arena.write(tensor, values)
            else:
                tensor.copy_(values)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is mapped here."""
        if self._arena is None or tensor.layout is not torch.strided:
            return False
        if is_fake(tensor):
            return is_mapped(tensor.untyped_storage())
        if type(tensor) not in _ORDINARY:
            return False
        return self._arena.holds(tensor)

    def ahead(self, tensor: torch.Tensor) -> None:
        """Have the system read a tensor's pages in one go, before they are touched one by one, if it is one of these.

        They come to the page cache, not into this process; where they are there already it costs next to nothing.
        """
        if self._arena is not None and self.holds(tensor):
            self._arena.read_ahead(tensor)

    def rest(self, tensor: torch.Tensor) -> None:
        """Give a tensor's pages back until it is used again, if it is one of these."""
        if self._arena is not None and self.holds(tensor):
            self._arena.give_back(tensor)

    def close(self) -> None:
        """Give the disk back. What someone still has, a mapped tensor or a graph, keeps its values and its room."""
        if self._space is not None:
            if self._space.bytes_used:
                self._space.retire()
            else:
                self._space.close()
        self._space = self._arena = None

    def _opened(self) -> DiskSpace:
        if self._space is None:
            self._space = DiskSpace(self._directory, self._capacity)
        return self._space

    def __getstate__(self) -> dict[str, object]:
        return {"directory": self._directory, "capacity": self._capacity}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _in_the_same_order(tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Channels last, say, has kernels of its own, which give other bits."""
    if tensor.is_contiguous():
        return make(tensor)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return make(tensor.detach().permute(order)).permute(back)
