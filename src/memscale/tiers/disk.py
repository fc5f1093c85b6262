"""The disk tier: tensors on disk that are ordinary CPU tensors, because their memory is mapped from a file.

Note [Mapped tensors]
~~~~~~~~~~~~~~~~~~~~~
A mapped tensor is a CPU tensor with a storage of its own: the optimizer steps on it, `state_dict` saves it, `deepcopy`
copies it to ordinary memory. `release_pages` takes its pages out of the process (RSS) without losing a bit. The
mapping is shared and of a file, so it counts neither as private memory (RLIMIT_DATA) nor towards overcommit. It is
unmapped by a finalizer on the buffer that the storage holds: `share_memory_()` exchanges the memory of a storage.

Note [Space on disk]
~~~~~~~~~~~~~~~~~~~~
All tensors of a model are in one `tempfile.TemporaryFile`, whose space returns to the disk however the process ends.
Space is allocated (`posix_fallocate`) before a byte is written, so a full disk is an error in the thread that asks, and
never a SIGBUS. Freed extents stay allocated for the next step, which is faster than new pages; they count against the
cap, and are punched out of the file when the cap or the disk needs their space.

Note [Fork]
~~~~~~~~~~~
A child made by `os.fork` has the same file. It may read what was stored before. Allocating is refused, what dies in the
child is not freed in the file, and its mappings become private (copy-on-write) as soon as it runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
import mmap
import os
import sys
import tempfile
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import nn

from memscale._torch import is_fake
from memscale._util.interrupts import LateLock
from memscale.errors import TierError, TierFullError
from memscale.hardware.host import find_disk
from memscale.memory.record import is_mapped, mark_mapped, new_storages_are_mapped
from memscale.units import format_bytes

PAGE = mmap.PAGESIZE

HOST = torch.device("cpu")
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# Bytes of one write. The page cache takes memory in blocks as large as the write, and large ones are hard to come by:
# on a virtual machine 6 GB were written at 0.3 GB/s by 40 MiB, and at 0.5 to 1.0 by 256 KiB (Linux 6.18, ext4).
WRITE_BYTES = 2**18


class DiskStore:
    """A model's share of the disk: parameters, gradients, optimizer state and activations under one cap.

    By default, `find_disk` chooses the directory, and the cap is what is free at first use.

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

    @property
    def bytes_used(self) -> int:
        """Bytes on the disk that are in use, in whole pages."""
        return 0 if self._file is None else self._file.bytes_used

    def empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a new contiguous mapped tensor without values; in a simulation one that only counts.

        Raises a TierFullError if the cap would be exceeded or the disk is full, a TierError if it can't be used.
        """
        dtype = dtype or torch.get_default_dtype()
        nbytes = math.prod(shape) * dtype.itemsize
        plain = torch.empty(0, dtype=dtype, device=HOST)
        if not nbytes:
            return plain.view(tuple(shape))
        file = self.file
        extent = file.allocate(nbytes, counted_only=is_fake(plain))
        if is_fake(plain):
            with new_storages_are_mapped():
                simulated = torch.empty(tuple(shape), dtype=dtype, device=HOST)
            mark_mapped(simulated.untyped_storage())
            weakref.finalize(simulated.untyped_storage(), file.free, extent).atexit = False
            return simulated
        storage = storage_at(extent.address, nbytes, lambda: file.free(extent))
        mark_mapped(storage)
        return plain.set_(storage, 0, tuple(shape))  # type: ignore[call-overload,no-any-return]

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a mapped tensor of the same shape, type and order of dimensions, without values. Raises as `empty`."""
        return _in_the_same_order(tensor, lambda dense: self.empty(dense.shape, dense.dtype))

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same values in a mapped tensor, without pages in memory. Raises as `empty`."""

        def dense_copy(dense: torch.Tensor) -> torch.Tensor:
            copy = self.empty(dense.shape, dense.dtype)
            self.fill(copy, dense)
            return copy

        with torch.no_grad():
            return _in_the_same_order(tensor, dense_copy)

    def fill(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write values to a tensor; through the file if it is mapped here, so that it takes no pages."""
        if is_fake(tensor):
            return
        with torch.no_grad():
            extent = self._extent_of(tensor) if tensor.is_contiguous() and tensor.numel() else None
            if extent is None or self.file.is_forked or tensor.storage_offset():
                tensor.copy_(values)
                return
            dense = values.detach().resolve_conj().resolve_neg().to(HOST, tensor.dtype).contiguous()
            write_from(self.file.fd, dense, extent.offset)
            # Not of a part of a storage, whose words may be elsewhere.
            extent.checksum = None if dense.storage_offset() else (dense.nbytes, checksum(dense))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what `fill` has written to a contiguous mapped tensor; through the file, without pages.

        Raises an OSError if the file has other bytes there. So it is not for tensors that are changed in place.
        """
        values = torch.empty_like(tensor)
        extent = self._extent_of(tensor)
        if extent is not None and not self.file.is_forked:
            read_into(self.file.fd, values, extent.offset)
            if extent.checksum not in (None, (values.nbytes, checksum(values))):
                raise OSError(errno.EIO, "the file has other bytes than were written: someone has changed it")
        elif not is_fake(tensor):
            values.copy_(tensor)
        return values

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
            start, stop = _addresses_of(tensor)
            start = start // PAGE * PAGE
            _advise(start, round_up(stop) - start, _MADV_WILLNEED)

    def release_pages(self, tensor: torch.Tensor) -> int:
        """Take a mapped tensor's pages out of this process until they are touched again; return the bytes released."""
        extent = self._extent_of(tensor) if tensor.numel() else None
        if extent is None or self.file.is_forked:
            return 0  # in a fork, what was written would be lost with the pages: see Note [Fork]
        start, stop = _addresses_of(tensor)
        start = round_up(start)
        if stop == tensor.untyped_storage().data_ptr() + tensor.untyped_storage().nbytes():
            stop = round_up(stop)  # what is left of the last page is nobody's
        stop = stop // PAGE * PAGE
        if start < stop:
            _advise(start, stop - start, _MADV_DONTNEED)
        return max(0, stop - start)

    def close(self) -> None:
        """Free the disk space. Mapped tensors that are still alive keep their values and their space."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _extent_of(self, tensor: torch.Tensor) -> Extent | None:
        # By address, and never a guess: to release the pages of ordinary memory would erase it.
        if self._file is None or type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device != HOST:
            return None
        strided = tensor.layout is torch.strided
        return self._file.mapped.get(tensor.untyped_storage().data_ptr()) if strided else None


def _in_the_same_order(tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Keep the order of dimensions: channels last, say, has kernels of its own, which give other bits."""
    if tensor.is_contiguous():
        return make(tensor)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return make(tensor.detach().permute(order)).permute(back)


def _addresses_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and of the one behind its last."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


def storage_at(address: int, nbytes: int, free: Callable[[], None]) -> torch.UntypedStorage:
    """Return a storage over memory that `free` is called for when nothing refers to it any more."""
    buffer = (ctypes.c_char * nbytes).from_address(address)
    # Not at exit: tensors that are still alive then are still used.
    weakref.finalize(buffer, free).atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


@dataclass(eq=False)
class Extent:
    """A range of the file that belongs to whoever asked for it."""

    offset: int  # of its first page; -1 for space that is only counted (fake tensors have no bytes)
    nbytes: int  # in whole pages
    address: int = 0  # where it is mapped; 0 if it is not
    checksum: tuple[int, int] | None = None  # bytes that `DiskStore.fill` wrote last, and their `checksum`


class DiskFile:
    """The file of one `DiskStore`, made when the first byte is stored. See Note [Space on disk]."""

    def __init__(self, directory: str | os.PathLike[str] | None = None, capacity: int | None = None) -> None:
        disk = find_disk(directory)
        self.directory = disk.directory
        self.capacity = disk.free_bytes if capacity is None else capacity
        self.bytes_used = 0  # in whole pages; never above the capacity
        self.mapped: dict[int, Extent] = {}  # by address
        self._end = 0
        self._spare = FreeList()  # freed, and still allocated on the disk
        self._holes = FreeList()  # punched out: their space is the disk's again
        self._can_punch = True  # until the file system says that it can't
        self._file: IO[bytes] | None = None
        self._pid = os.getpid()
        self._closed = False
        self._lock: LateLock[Extent] = LateLock(self._release)
        self._is_private = False
        _files.add(self)

    @property
    def bytes_on_disk(self) -> int:
        """Bytes in use and of spare extents; never above the capacity either."""
        return self.bytes_used + self._spare.total

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that the file belongs to. See Note [Fork]."""
        return os.getpid() != self._pid

    @property
    def fd(self) -> int:
        """The descriptor of the file, which is made if there is none yet, or a TierError is raised."""
        if self._file is None:
            try:
                self.directory.mkdir(0o700, parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self.directory, prefix="memscale-", buffering=0)  # noqa: SIM115
                weakref.finalize(self, self._file.close)  # else Python warns of an unclosed file
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno else str(error)
                raise TierError(
                    f"Can't offload to {self.directory}: {reason}. Give a directory on a disk with room that you "
                    "may write to, by Config(offload_dir=...) or MEMSCALE_OFFLOAD_DIR. No tensor was moved."
                ) from error
        return self._file.fileno()

    def allocate(self, nbytes: int, *, counted_only: bool = False) -> Extent:
        """Return an extent of so many bytes, in whole pages, mapped; if `counted_only`, only taken off the capacity.

        Raises a TierError, and takes nothing, if the cap would be exceeded or the disk is full (TierFullError), if the
        directory can't be used or the file is closed, or in a fork.
        """
        length = round_up(nbytes)
        if self.is_forked:
            raise TierError(
                f"This disk tier belongs to process {self._pid}, and {os.getpid()} is a fork of it: wrap a "
                "model there, or start the process by spawn."
            )
        if self._closed:
            raise TierError("This disk tier is closed: make a new one to offload again.")
        with self._lock:
            fd = -1 if counted_only else self.fd
            offset = None if counted_only else self._spare.allocate(length)
            if offset is None:
                self._punch_spares(self.capacity - self.bytes_used - length)
                if self.bytes_on_disk + length > self.capacity:
                    raise TierFullError(
                        f"The disk tier at {self.directory} is full: {format_bytes(nbytes)} more would exceed its cap "
                        f"of {format_bytes(self.capacity)}, of which {format_bytes(self.bytes_used)} is used. The "
                        "tensor stays where it is. Raise Config(max_disk_offload_gb=...)."
                    )
                offset = -1 if counted_only else self._grow(fd, length, nbytes)
            self.bytes_used += length
            extent = Extent(offset, length)
            if not counted_only:
                self._map(extent)
            return extent

    def free(self, extent: Extent) -> None:
        """Unmap and free an extent. Safe in finalizers, see Note [Finalizers]."""
        self._lock.submit(extent)

    def close(self) -> None:
        """Allocate nothing more. Extents stay valid until they are freed."""
        self._closed = True
        if self._file is not None and not self.bytes_used and not self.is_forked:
            self._file.close()

    def make_private(self) -> None:
        """Keep what this process writes from the file, in a child that has just been forked. See Note [Fork]."""
        self._lock.renew()
        if self._is_private:
            return  # since an earlier fork: what was written since is not in the file
        self._is_private = True
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        for address, extent in self.mapped.items():
            if _libc().mmap(address, extent.nbytes, _READ_WRITE, flags, self.fd, extent.offset) != address:
                _libc().mprotect(address, extent.nbytes, mmap.PROT_READ)  # to write ends the process

    # The rest runs under the lock.

    def _map(self, extent: Extent) -> None:
        """Map an extent, shared and writable, or free it and raise a TierError."""
        address = _libc().mmap(None, extent.nbytes, _READ_WRITE, mmap.MAP_SHARED, self.fd, extent.offset)
        if address is None or address == _MAP_FAILED:
            code = ctypes.get_errno()
            self._release(extent)
            advice = "Raise it with sysctl, or offload less" if code == errno.ENOMEM else "Try another disk"
            raise TierError(
                f"Can't map {extent.nbytes} bytes of the file in {self.directory}: {os.strerror(code)}. A process may "
                f"have as many mappings as vm.max_map_count says, and this file has {len(self.mapped)}. {advice}."
            )
        extent.address = int(address)
        self.mapped[extent.address] = extent

    def _grow(self, fd: int, length: int, nbytes: int) -> int:
        """Allocate a new extent, in a hole or at the end; returns its offset."""
        hole = self._holes.allocate(length)
        offset = self._end if hole is None else hole
        try:
            try:
                _allocate(fd, offset, length)
            except OSError as error:
                if error.errno not in _DISK_FULL or not self._spare.total:
                    raise
                self._punch_spares(0)
                _allocate(fd, offset, length)
        except OSError as error:
            with contextlib.suppress(OSError):  # free what was allocated before it failed
                if hole is None:
                    os.ftruncate(fd, offset)
                else:
                    self._holes.release(offset, length)
                    _punch_hole(fd, offset, length)
            kind = TierFullError if error.errno in _DISK_FULL else TierError
            reason = f"{error.strerror}, with {format_bytes(find_disk(self.directory).free_bytes)} free"
            if error.errno == errno.EFBIG:
                reason = "files may not grow that large here (ulimit -f)"
            raise kind(
                f"The disk at {self.directory} has no room for {format_bytes(nbytes)} more: {reason}; MemScale "
                f"holds {format_bytes(self.bytes_on_disk)} of it. The tensor stays where it is. Free some space, "
                "or give another disk by Config(offload_dir=...)."
            ) from error
        self._end = max(self._end, offset + length)
        return offset

    def _punch_spares(self, limit: int) -> None:
        """Return spare extents to the disk until no more bytes of them are left than the limit."""
        while self._can_punch and self._spare.total > max(0, limit):
            offset, length = self._spare.pop()
            self._can_punch = _punch_hole(self.fd, offset, length)
            (self._holes if self._can_punch else self._spare).release(offset, length)

    def _release(self, extent: Extent) -> None:
        if extent.address:
            del self.mapped[extent.address]
            _libc().munmap(extent.address, extent.nbytes)
        if self.is_forked:
            return  # see Note [Fork]
        self.bytes_used -= extent.nbytes
        if extent.offset >= 0:
            self._spare.release(extent.offset, extent.nbytes)


class FreeList:
    """Free ranges of a file or of memory, in order; neighbours are joined."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # (offset, length), in order
        self.total = 0

    def release(self, offset: int, length: int) -> None:
        self.total += length
        index = bisect_left(self._ranges, (offset, 0))
        if index < len(self._ranges) and self._ranges[index][0] == offset + length:
            length += self._ranges.pop(index)[1]
        if index and sum(self._ranges[index - 1]) == offset:
            offset, before = self._ranges.pop(index - 1)
            length += before
        insort(self._ranges, (offset, length))

    def allocate(self, length: int) -> int | None:
        """Cut a range of this length off the first that has it; returns its offset, None if there is none."""
        for index, (offset, size) in enumerate(self._ranges):
            if size >= length:
                self._ranges[index : index + 1] = [(offset + length, size - length)] if size > length else []
                self.total -= length
                return offset
        return None

    def pop(self) -> tuple[int, int]:
        """Remove the last range, whole; returns its offset and length."""
        offset, length = self._ranges.pop()
        self.total -= length
        return offset, length


_files: weakref.WeakSet[DiskFile] = weakref.WeakSet()


def _after_fork() -> None:
    for file in list(_files):
        file.make_private()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def write_from(fd: int, tensor: torch.Tensor, offset: int) -> None:
    """Write the memory of a dense CPU tensor to a file."""
    memory = _memory_of(tensor)
    done = 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done : done + WRITE_BYTES], offset + done)


def read_into(fd: int, tensor: torch.Tensor, offset: int) -> None:
    """Fill the memory of a dense CPU tensor from a file."""
    memory = _memory_of(tensor)
    done = 0
    while done < len(memory):
        count = os.preadv(fd, [memory[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends {len(memory) - done} bytes early: someone has cut it")
        done += count


def checksum(tensor: torch.Tensor) -> int:
    """Return the sum of a dense CPU tensor's memory in words of 64 bits: 20 GB/s, where a CRC of zlib has 1.3."""
    return int(tensor.reshape(-1).view(torch.uint8 if tensor.nbytes % 8 else torch.int64).sum())


def _memory_of(tensor: torch.Tensor) -> memoryview:
    # Not by numpy, which is no dependency and lacks bfloat16 and float8.
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def round_up(nbytes: int, unit: int = PAGE) -> int:
    return -(-nbytes // unit) * unit


# ---------------------------------------------------------------------- the C library
# `mmap` of the standard library keeps a file descriptor for each mapping (a model has more tensors than a process may
# have open files), its `madvise` holds the GIL, and Python has no `fallocate`.

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FAILED = ctypes.c_void_p(-1).value
# From linux/mman.h and linux/falloc.h; the numbers are the same on every architecture torch has.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000 if sys.platform.startswith("linux") else 0
_MADV_WILLNEED = 3
_MADV_DONTNEED = 4
_PUNCH_HOLE_KEEP_SIZE = 2 | 1


@functools.cache
def _libc() -> Any:
    """Return the C library with its signatures declared: without them 64-bit offsets are cut to 32 bits."""
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, integer, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    for name, result, arguments in (
        ("mmap", address, (address, size, integer, integer, integer, offset)),
        ("munmap", integer, (address, size)),
        ("mprotect", integer, (address, size, integer)),
        ("madvise", integer, (address, size, integer)),
        ("fallocate", integer, (integer, integer, offset, offset)),
    ):
        function = getattr(libc, name, None)
        if function is not None:  # the last is Linux's own
            function.restype, function.argtypes = result, arguments
    return libc


def _advise(address: int, nbytes: int, advice: int) -> None:
    while _libc().madvise(address, nbytes, advice) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, f"madvise: {os.strerror(code)}")


def _allocate(fd: int, offset: int, length: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, length)
        return
    for start in range(offset, offset + length, PAGE):  # macOS: write it once
        os.pwrite(fd, bytes(PAGE), start)


def _punch_hole(fd: int, offset: int, nbytes: int) -> bool:
    """Return a range of a file to its disk; False where the file system can't."""
    if not sys.platform.startswith("linux"):
        return False
    return bool(_libc().fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, offset, nbytes) == 0)
