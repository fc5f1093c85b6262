"""The disk below one model: tensors on disk that are ordinary CPU tensors, because their memory is a mapped file.

Note [Mapped tensors]
~~~~~~~~~~~~~~~~~~~~~
A mapped tensor is an ordinary CPU tensor with a storage of its own, so that the optimizer steps on it, `state_dict`
saves it and `deepcopy` copies it (to ordinary memory). Its pages belong to a file: the system reads them when they are
touched, and `release_pages` takes them out of the process (RSS) without losing a bit, since the page cache, and then
the disk, has them. The mapping is shared and of a file, so it counts neither as private memory (RLIMIT_DATA) nor
towards overcommit, and under pressure the system can write it out, as it cannot with other memory when there is
no swap.

Its memory is freed when the last tensor over it dies. The finalizer hangs on the buffer that the storage holds, and not
on the storage: `share_memory_()` exchanges the memory of a storage that lives on. Storages over a buffer can't be
resized. In a forked child the memory is made private, see Note [Fork].
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from memscale._torch import is_fake
from memscale.memory.record import is_mapped, mark_mapped, new_storages_are_mapped
from memscale.tiers import disk_file
from memscale.tiers.disk_file import DiskFile, Extent, round_up
from memscale.tiers.engine import Engine
from memscale.tiers.tier import DiskTier

__all__ = ["DiskStore"]

_CPU = torch.device("cpu")
_PLAIN = (torch.Tensor, nn.Parameter)


class DiskStore:
    """A model's share of the disk: parameters, gradients, optimizer state, activations under one cap.

    The file is made when the first tensor goes there. A copy, by ``deepcopy`` or pickle, has the same settings and
    nothing in it: copies of mapped tensors are ordinary ones.

    Args:
        directory: Where (`offload_dir`); None for what `find_disk` chooses.
        capacity: The most bytes to take, a hard cap (`max_disk_offload_gb`); None for what is free then.

    Example:
        >>> store = DiskStore(capacity=2**20)
        >>> mapped = store.copy_of(torch.ones(1024))
        >>> store.release_pages(mapped), store.bytes_used, float(mapped.sum())
        (4096, 4096, 1024.0)
        >>> store.close()
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, capacity: int | None = None) -> None:
        self._directory = directory
        self._capacity = capacity
        self._file: DiskFile | None = None

    @property
    def file(self) -> DiskFile:
        """The file and the cap on it."""
        if self._file is None:
            self._file = DiskFile(self._directory, self._capacity)
        return self._file

    def tier(self, engine: Engine) -> DiskTier:
        """Return a tier over the same file, whose transfers an engine runs; the caller closes it."""
        return DiskTier(file=self.file, engine=engine)

    @property
    def bytes_used(self) -> int:
        """Bytes on the disk that are in use, in whole pages."""
        return 0 if self._file is None else self._file.bytes_used

    def empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a new contiguous mapped tensor without values.

        Raises:
            TierFullError: The cap would be exceeded, or the disk is full.
            TierError: The file can't be made or mapped.
        """
        dtype = dtype or torch.get_default_dtype()
        nbytes = math.prod(shape) * dtype.itemsize
        plain = torch.empty(0, dtype=dtype, device=_CPU)
        if not nbytes:
            return torch.empty(tuple(shape), dtype=dtype, device=_CPU)
        file = self.file
        extent = file.allocate(nbytes, counted_only=is_fake(plain))
        if is_fake(plain):
            return _simulated(tuple(shape), dtype, file, extent)
        try:
            address = file.map(extent)
        except BaseException:
            file.free(extent)
            raise
        buffer = (ctypes.c_char * nbytes).from_address(address)
        # Not at exit: tensors that are still alive then are still used.
        weakref.finalize(buffer, file.unmap, address).atexit = False
        storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
        mark_mapped(storage)
        return plain.set_(storage, 0, tuple(shape))  # type: ignore[call-overload,no-any-return]

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a mapped tensor of the same shape, type and order of dimensions, without values.

        Raises:
            As :meth:`empty`.
        """
        return _in_the_same_order(tensor, lambda dense: self.empty(dense.shape, dense.dtype))

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same values in a mapped tensor, without pages in memory.

        Raises:
            As :meth:`empty`.
        """
        return _in_the_same_order(tensor, self._dense_copy)

    def _dense_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            copy = self.empty(tensor.shape, tensor.dtype)
            if not is_fake(copy):
                self.fill(copy, tensor)
            return copy

    def fill(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write values to a tensor; through the file if it is mapped here, so that it takes no pages."""
        with torch.no_grad():
            extent = self._extent_of(tensor) if tensor.is_contiguous() and tensor.numel() else None
            if extent is None or self.file.is_forked or tensor.storage_offset():
                tensor.copy_(values)
                return
            dense = values.detach().resolve_conj().resolve_neg().to(_CPU, tensor.dtype).contiguous()
            disk_file.write_from(self.file.fd, dense, extent.offset)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is mapped here."""
        if self._file is None or tensor.layout is not torch.strided:
            return False
        if is_fake(tensor):
            return is_mapped(tensor.untyped_storage())
        return self._extent_of(tensor) is not None

    def prefetch_pages(self, tensor: torch.Tensor) -> None:
        """Have the system read a tensor's pages to the page cache, if it is mapped here. A hint."""
        if tensor.numel() and self._extent_of(tensor) is not None:
            start, stop = _bytes_of(tensor)
            start = start // disk_file.PAGE * disk_file.PAGE
            disk_file.prefetch_pages(start, round_up(stop) - start)

    def release_pages(self, tensor: torch.Tensor) -> int:
        """Take a tensor's pages out of this process until they are touched again, if it is mapped here.

        Returns:
            How many bytes of pages were released: of a view, the whole pages of what it spans.
        """
        extent = self._extent_of(tensor) if tensor.numel() else None
        if extent is None or self.file.is_forked:
            return 0  # in a fork, what was written would be lost with the pages: see Note [Fork]
        start, stop = _bytes_of(tensor)
        start = round_up(start)
        if stop == tensor.untyped_storage().data_ptr() + tensor.untyped_storage().nbytes():
            stop = round_up(stop)  # what is left of the last page is nobody's
        stop = stop // disk_file.PAGE * disk_file.PAGE
        if start < stop:
            disk_file.release_pages(start, stop - start)
        return max(0, stop - start)

    def close(self) -> None:
        """Give the disk back. What someone still has, a mapped tensor or a graph, keeps its values and its room."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _extent_of(self, tensor: torch.Tensor) -> Extent | None:
        # By address, and never a guess: to release the pages of ordinary memory would erase it.
        if self._file is None or type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return None
        return self._file.mapped_at(tensor.untyped_storage().data_ptr()) if tensor.device == _CPU else None

    def __getstate__(self) -> dict[str, object]:
        return {"directory": self._directory, "capacity": self._capacity}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _simulated(shape: tuple[int, ...], dtype: torch.dtype, file: DiskFile, extent: Extent) -> torch.Tensor:
    """Return a tensor without data, inside a simulation, that counts against the cap."""
    with new_storages_are_mapped():
        tensor = torch.empty(shape, dtype=dtype, device=_CPU)
    mark_mapped(tensor.untyped_storage())
    weakref.finalize(tensor.untyped_storage(), file.free, extent).atexit = False
    return tensor


def _in_the_same_order(tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Keep the order of dimensions: channels last, say, has kernels of its own, which give other bits."""
    if tensor.is_contiguous():
        return make(tensor)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return make(tensor.detach().permute(order)).permute(back)


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and of the one behind its last."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()
