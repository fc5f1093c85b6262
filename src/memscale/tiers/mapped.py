"""Homes on disk for a CPU host: ordinary tensors whose memory is a mapped file.

Note [Mapped homes]
~~~~~~~~~~~~~~~~~~~
The CPU is the device here, and disk the tier below it. A tensor of an arena is an ordinary CPU tensor with a
storage of its own, so that the optimizer steps on it, `state_dict` saves it and `deepcopy` copies it (to
ordinary memory). Its pages belong to a file: the system reads them when they are touched, and `give_back`
takes them out of the process (RSS) without losing a bit, since the page cache, and then the disk, has them.
The mapping is shared and of a file, so it counts neither as private memory (RLIMIT_DATA) nor towards
overcommit, and under pressure the system can write it out, as it cannot with other memory when there is no
swap.

Its memory is freed when the last tensor over it dies. The finalizer hangs on the buffer that the storage
holds, and not on the storage: `share_memory_()` exchanges the memory of a storage that lives on. Storages
over a buffer can't be resized. In a forked child the memory is made private, see Note [Fork].

Tensors below a page share slabs, and only whole pages are given back: of a model that is a thousandth part.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memscale._util.locks import LateLock
from memscale.errors import TierError
from memscale.memory.ledger import mark_mapped, new_storages_are_mapped
from memscale.tiers import _libc
from memscale.tiers.disk import write_from
from memscale.tiers.engine import Engine, Lane, SyncEngine
from memscale.tiers.gaps import Gaps
from memscale.tiers.layout import is_fake
from memscale.tiers.space import DiskSpace, Extent, round_up

__all__ = ["MappedArena"]

_CPU = torch.device("cpu")
_ALIGNMENT = 64  # what torch's own CPU allocator gives
_SLAB = 2**16


@dataclass(eq=False)
class _Mapping:
    """A piece of the file in memory; `gaps` for a slab of small tensors."""

    extent: Extent
    address: int
    gaps: Gaps | None = None


@dataclass(frozen=True, eq=False)
class _Chunk:
    """The memory of one storage."""

    mapping: _Mapping
    address: int
    nbytes: int

    @property
    def file_offset(self) -> int:
        return self.mapping.extent.offset + self.address - self.mapping.address


class MappedArena:
    """Makes tensors whose home is on disk. See Note [Mapped homes].

    Args:
        space: The file and the cap on it, which may be shared with a `DiskTier`.
        engine: If it is asynchronous, `read_ahead` has a worker bring the pages in.

    Example:
        >>> with DiskSpace(capacity=2**20) as space:
        ...     arena = MappedArena(space)
        ...     x = arena.empty((1000, 2), dtype=torch.float32).fill_(1)
        ...     given = arena.give_back(x)
        ...     given, space.bytes_used, float(x.sum())
        (8192, 8192, 2000.0)
    """

    def __init__(self, space: DiskSpace, engine: Engine | None = None) -> None:
        self.space = space
        self._engine = engine or SyncEngine()
        self._chunks: dict[int, _Chunk] = {}  # by address
        self._slabs: list[_Mapping] = []
        self._lock: LateLock[_Chunk] = LateLock(self._release)
        self._is_private = False
        _arenas.add(self)

    def empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new contiguous CPU tensor in the file; what is in it is undefined.

        Raises:
            TierFullError: The cap would be exceeded, or the disk is full.
            TierError: The file can't be made or mapped.
        """
        dtype = dtype or torch.get_default_dtype()
        nbytes = math.prod(shape) * dtype.itemsize
        plain = torch.empty(0, dtype=dtype, device=_CPU)
        if is_fake(plain):
            return self._simulated(tuple(shape), dtype, nbytes)
        if not nbytes:
            return plain.view(tuple(shape))
        chunk = self._allocate(nbytes)
        buffer = (ctypes.c_char * nbytes).from_address(chunk.address)
        # Not at exit: tensors that are still alive then are still used.
        weakref.finalize(buffer, self._lock.leave, chunk).atexit = False
        storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
        mark_mapped(storage)
        return plain.set_(storage, 0, tuple(shape))  # type: ignore[call-overload,no-any-return]

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in the file, without pages in memory; contiguous, and without gradient.

        Raises:
            As :meth:`empty`.
        """
        with torch.no_grad():
            copy = self.empty(tensor.shape, tensor.dtype)
            if not is_fake(copy):
                self.write(copy, tensor)
            return copy

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write values to a whole tensor of this arena, without pages in memory.

        Raises:
            TierError: It is not a tensor of this arena.
        """
        if self.space.is_forked:
            tensor.copy_(values)
        elif tensor.numel():
            dense = values.detach().resolve_conj().resolve_neg().to(_CPU, tensor.dtype).contiguous()
            write_from(self.space.fd, dense, self._find(tensor).file_offset)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is in this arena's file."""
        return (
            tensor.device.type == "cpu"
            and not is_fake(tensor)
            and tensor.untyped_storage().data_ptr() in self._chunks
        )

    def give_back(self, tensor: torch.Tensor, *, cached: bool = True) -> int:
        """Take a tensor's pages out of this process; when they are touched they return, with their values.

        Args:
            tensor: One of this arena, or a view of one: then the whole pages of what it spans.
            cached: Leave them in the page cache, whence they return at the speed of memory. If False, they
                are written to the disk first and leave memory altogether.

        Returns:
            How many bytes of pages were given back.

        Raises:
            TierError: It is not a tensor of this arena.
        """
        if is_fake(tensor) or not tensor.numel() or self.space.is_forked:
            return 0  # in a fork, what was written would be lost with the pages: see Note [Fork]
        chunk = self._find(tensor)
        start, stop = _pages(tensor, chunk)
        if start >= stop:
            return 0
        _libc.advise(start, stop - start, _libc.DONT_NEED)
        if not cached:
            offset = chunk.file_offset + start - chunk.address
            _libc.drop_cache(self.space.fd, offset, stop - start)
        return stop - start

    def read_ahead(self, tensor: torch.Tensor) -> None:
        """Have the system read a tensor's pages before they are touched. A hint: nothing depends on it.

        Raises:
            TierError: It is not a tensor of this arena.
        """
        if is_fake(tensor) or not tensor.numel():
            return
        start, stop = _pages(tensor, self._find(tensor), outwards=True)
        if not self._engine.is_async:
            _libc.advise(start, stop - start, _libc.WILL_NEED)
            return
        held = tensor.detach()  # its memory must not go before the worker is done

        def populate() -> None:
            nonlocal held
            with contextlib.suppress(OSError):
                if not _libc.advise(start, stop - start, _libc.POPULATE_READ):
                    _libc.advise(start, stop - start, _libc.WILL_NEED)
            del held

        self._engine.run(populate, Lane.READ, _CPU)

    # ------------------------------------------------------------------ memory

    def make_private(self) -> None:
        """Keep what this process writes from the file, in a child that has just been forked. See Note [Fork]."""
        self._lock.renew()
        if self._is_private:
            return  # since an earlier fork: what was written since is not in the file
        self._is_private = True
        for mapping in {chunk.mapping for chunk in self._chunks.values()}:
            _libc.make_private(mapping.address, mapping.extent.nbytes, self.space._fd, mapping.extent.offset)

    def _allocate(self, nbytes: int) -> _Chunk:
        with self._lock:
            if nbytes < _libc.PAGE:
                chunk = self._allocate_small(nbytes)
            else:
                mapping = self._map(nbytes)
                chunk = _Chunk(mapping, mapping.address, nbytes)
            self._chunks[chunk.address] = chunk
            return chunk

    def _allocate_small(self, nbytes: int) -> _Chunk:
        length = round_up(nbytes, _ALIGNMENT)
        for slab in self._slabs:
            assert slab.gaps is not None
            offset = slab.gaps.take(length)
            if offset is not None:
                return _Chunk(slab, slab.address + offset, nbytes)
        room = self.space.capacity - self.space.bytes_used
        slab = self._map(_SLAB if room >= _SLAB else length)
        slab.gaps = Gaps()
        slab.gaps.add(length, slab.extent.nbytes - length)
        self._slabs.append(slab)
        return _Chunk(slab, slab.address, nbytes)

    def _map(self, nbytes: int) -> _Mapping:
        extent = self.space.allocate(nbytes)
        try:
            return _Mapping(extent, _libc.map_shared(self.space.fd, extent.offset, extent.nbytes))
        except OSError as error:
            self.space.free(extent)
            hint = (
                "Raise it with sysctl, or offload fewer tensors"
                if error.errno == errno.ENOMEM
                else "Try another disk"
            )
            raise TierError(
                f"Can't map {nbytes} bytes of the file in {self.space.directory}: {error.strerror}. A "
                f"process may have as many mappings as vm.max_map_count says, and this arena has "
                f"{len(self._chunks)} tensors. {hint}."
            ) from error

    def _release(self, chunk: _Chunk) -> None:
        """Under the lock, mostly in a finalizer."""
        self._chunks.pop(chunk.address, None)
        mapping = chunk.mapping
        if mapping.gaps is not None:
            mapping.gaps.add(chunk.address - mapping.address, round_up(chunk.nbytes, _ALIGNMENT))
            if mapping.gaps.total < mapping.extent.nbytes:
                return
            self._slabs.remove(mapping)
        _libc.unmap(mapping.address, mapping.extent.nbytes)
        self.space.free(mapping.extent)

    def _find(self, tensor: torch.Tensor) -> _Chunk:
        chunk = self._chunks.get(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else None
        if chunk is None:
            # Never guess: the same advice on ordinary memory would erase it.
            raise TierError(
                f"A {tuple(tensor.shape)} tensor on {tensor.device} is not one of this arena: make it by "
                "empty() or copy_of()."
            )
        return chunk

    def _simulated(self, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        """Inside a simulation: a tensor without data, that counts against the cap."""
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device=_CPU)
        extent = self.space.allocate(nbytes, counted_only=True)
        with new_storages_are_mapped():
            tensor = torch.empty(shape, dtype=dtype, device=_CPU)
        mark_mapped(tensor.untyped_storage())
        weakref.finalize(tensor.untyped_storage(), self.space.free, extent).atexit = False
        return tensor


_arenas: weakref.WeakSet[MappedArena] = weakref.WeakSet()


def _after_fork() -> None:
    for arena in list(_arenas):
        arena.make_private()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _pages(tensor: torch.Tensor, chunk: _Chunk, *, outwards: bool = False) -> tuple[int, int]:
    """The addresses of the pages that are a tensor's alone; or of all that it touches."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    stop = start + span * tensor.element_size()
    if outwards:
        return start // _libc.PAGE * _libc.PAGE, round_up(stop)
    if chunk.mapping.gaps is None and stop == chunk.address + chunk.nbytes:
        stop = round_up(stop)  # what is left of the last page is nobody's
    return round_up(start), stop // _libc.PAGE * _libc.PAGE
