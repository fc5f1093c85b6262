"""Room on a disk: one file without a name, handed out in extents under a hard cap, read, written and mapped.

Note [Space on disk]
~~~~~~~~~~~~~~~~~~~~
The file is a ``tempfile.TemporaryFile``: it has no name, so its space returns to the disk when the process ends,
however it ends, and nothing is ever left to clean up.

The room for a tensor is allocated (`posix_fallocate`) before a byte of it is written, in the thread that asks for it.
So a full disk is an error there and then, with the tensor still in memory; a file that was only made long would say it
later, in a worker, or as a SIGBUS that ends the process if it is mapped.

An extent that is freed stays allocated: in a training loop the next step wants the same sizes, and pages that the
system has already are written to several times faster than new ones. Such spare extents count against the cap, and are
punched out of the file, which gives them back to the disk, as soon as the cap or the disk needs it.

Note [Fork]
~~~~~~~~~~~
A child made by `os.fork` has the same file and the same list of what is free, and from then on the two lists are two.
It may read what was stored before; to allocate is refused, and what dies in the child is not freed in the file, as the
parent still has it. Its mappings are made private as soon as it begins to run (copy-on-write): what it writes to a
mapped tensor is its own, as with all other memory. What it has not written to is read from the file, so that it may see
what the parent has written since.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import sys
import tempfile
import threading
import weakref
from bisect import bisect_left, insort
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from memscale._util.locks import LateLock
from memscale.errors import ConfigError, TierError, TierFullError, shown
from memscale.hardware.host import find_disk
from memscale.units import format_bytes

__all__ = ["PAGE", "DiskFile", "Extent", "FreeList", "read_into", "release_pages", "round_up", "write_from"]

PAGE = mmap.PAGESIZE

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# Bytes of one write. The page cache takes memory in blocks as large as the write, and large ones are hard to come by:
# on a virtual machine 6 GB were written at 0.3 GB/s by 40 MiB, and at 0.5 to 1.0 by 256 KiB (Linux 6.18, ext4).
WRITE_BYTES = 2**18


@dataclass(frozen=True, eq=False)
class Extent:
    """A range of the file that belongs to whoever asked for it.

    Attributes:
        offset: Where it starts, at a page; -1 for room that is only counted (fake tensors have no bytes).
        nbytes: Its length, in whole pages.
    """

    offset: int
    nbytes: int


class DiskFile:
    """The file of one model or tier in `offload_dir`, made when the first byte is stored. See Note [Space on disk].

    Args:
        directory: Where; None for what `find_disk` chooses.
        capacity: The most bytes to take of the disk, a hard cap; None for what is free now.

    Raises:
        HardwareError: The directory is a file, or no parent of it exists.
        ConfigError: The capacity is negative.

    Example:
        >>> with DiskFile(capacity=2**20) as file:
        ...     extent = file.allocate(5000)
        ...     file.bytes_used
        8192
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, capacity: int | None = None) -> None:
        disk = find_disk(directory)
        if capacity is not None and capacity < 0:
            raise ConfigError(
                f"capacity={shown(capacity)} is not allowed: give a number of bytes, 0 or more."
            )
        self.directory: Path = disk.directory
        self.capacity: int = disk.free_bytes if capacity is None else capacity
        self._used = 0
        self._end = 0
        self._spare = FreeList()  # freed, and still allocated on the disk
        self._holes = FreeList()  # given back to the disk
        self._can_punch = True  # until the file system says that it can't
        self._file: IO[bytes] | None = None
        self._pid = os.getpid()
        self._closed = False
        self._opening = threading.Lock()
        self._lock: LateLock[Extent] = LateLock(self._release)
        self._mapped: dict[int, Extent] = {}  # by address
        self._unmapping: LateLock[int] = LateLock(self._unmap)
        self._is_private = False
        _files.add(self)

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def bytes_used(self) -> int:
        """Bytes handed out now, in whole pages; never above the capacity."""
        return self._used

    @property
    def bytes_on_disk(self) -> int:
        """Those, and spare extents for the next; never above the capacity either."""
        return self._used + self._spare.total

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that the file belongs to. See Note [Fork]."""
        return os.getpid() != self._pid

    @property
    def fd(self) -> int:
        """The descriptor of the file, which is made if there is none yet.

        Raises:
            TierError: The directory can't be made or written to, or the file is closed.
        """
        with self._opening:
            if self._file is None:
                if self._closed:
                    raise TierError("This disk tier is closed: make a new one to offload again.")
                try:
                    self.directory.mkdir(parents=True, exist_ok=True)
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
        """Return room for so many bytes.

        Args:
            nbytes: More than 0; rounded up to whole pages.
            counted_only: Take it off the capacity, and nothing off the disk.

        Raises:
            TierFullError: The cap would be exceeded, or the disk is full. Nothing was taken.
            TierError: The directory is unusable, the file is closed, or this process is a fork.
        """
        length = round_up(nbytes)
        if self.is_forked:
            raise TierError(
                f"This disk tier belongs to process {self._pid}, and {os.getpid()} is a fork of it: make a "
                "tier of its own there, or start the process by spawn."
            )
        if self._closed:
            raise TierError("This disk tier is closed: make a new one to offload again.")
        fd = -1 if counted_only else self.fd
        with self._lock:
            offset = None if counted_only else self._spare.take(length)
            if offset is None:
                self._punch_spares(self.capacity - self._used - length)
                if self.bytes_on_disk + length > self.capacity:
                    raise TierFullError(self._over_cap(nbytes))
                offset = -1 if counted_only else self._grow(fd, length, nbytes)
            self._used += length
            return Extent(offset, length)

    def free(self, extent: Extent) -> None:
        """Take an extent back. Safe in finalizers, see Note [Finalizers]."""
        self._lock.leave(extent)

    def trim(self) -> None:
        """Give spare extents back to the disk."""
        with self._lock:
            self._punch_spares(0)

    def close(self) -> None:
        """Take nothing more. What is stored keeps its values, and its room, until it is freed."""
        self._closed = True
        if not self.bytes_used and not self.is_forked:
            self._spare, self._holes = FreeList(), FreeList()
            if self._file is not None:
                self._file.close()
            self._file = None

    # ------------------------------------------------------------------ mappings

    def map(self, extent: Extent) -> int:
        """Map an extent, shared and writable, and return its address.

        Raises:
            TierError: It can't be mapped.
        """
        flags = mmap.MAP_SHARED
        address = _libc().mmap(None, extent.nbytes, _READ_WRITE, flags, self.fd, extent.offset)
        if address is None or address == _MAP_FAILED:
            code = ctypes.get_errno()
            advice = (
                "Raise it with sysctl, or offload fewer tensors"
                if code == errno.ENOMEM
                else "Try another disk"
            )
            raise TierError(
                f"Can't map {extent.nbytes} bytes of the file in {self.directory}: {os.strerror(code)}. A process may "
                f"have as many mappings as vm.max_map_count says, and this file has {len(self._mapped)}. {advice}."
            )
        with self._unmapping:
            self._mapped[int(address)] = extent
        return int(address)

    def unmap(self, address: int) -> None:
        """Free a mapping and its extent. Safe in finalizers."""
        self._unmapping.leave(address)

    def mapped_at(self, address: int) -> Extent | None:
        """Return the extent that is mapped at an address."""
        return self._mapped.get(address)

    def make_private(self) -> None:
        """Keep what this process writes from the file, in a child that has just been forked. See Note [Fork]."""
        self._lock.renew()
        self._unmapping.renew()
        self._opening = threading.Lock()
        if self._is_private:
            return  # since an earlier fork: what was written since is not in the file
        self._is_private = True
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        for address, extent in self._mapped.items():
            assert self._file is not None
            fd = self._file.fileno()
            if _libc().mmap(address, extent.nbytes, _READ_WRITE, flags, fd, extent.offset) != address:
                _libc().mprotect(address, extent.nbytes, mmap.PROT_READ)  # to write ends the process

    def _unmap(self, address: int) -> None:
        extent = self._mapped.pop(address)
        _libc().munmap(address, extent.nbytes)
        self.free(extent)

    # ------------------------------------------------------------------ room, under the lock

    def _grow(self, fd: int, length: int, nbytes: int) -> int:
        """Allocate a new extent, in a hole or at the end; returns its offset."""
        hole = self._holes.find(length)
        offset = self._end if hole is None else hole
        try:
            try:
                _allocate(fd, offset, length)
            except OSError as error:
                if error.errno not in _FULL or not self._spare.total:
                    raise
                self._punch_spares(0)
                _allocate(fd, offset, length)
        except OSError as error:
            with contextlib.suppress(OSError):  # what was allocated before it failed goes back
                if hole is None:
                    os.ftruncate(fd, offset)
                else:
                    _punch_hole(fd, offset, length)
            if error.errno in _FULL:
                raise TierFullError(self._disk_full(nbytes, error)) from error
            raise TierError(
                f"Can't take {format_bytes(nbytes)} of the disk at {self.directory}: {error.strerror}. The "
                "tensor was not moved. Give another directory by Config(offload_dir=...)."
            ) from error
        if hole is None:
            self._end += length
        else:
            self._holes.take(length)
        return offset

    def _punch_spares(self, limit: int) -> None:
        """Give spare extents back to the disk until there are no more bytes of them than that."""
        if self.is_forked or self._file is None:
            return  # the parent may have used them since
        while self._can_punch and self._spare.total > max(0, limit):
            offset, length = self._spare.pop()
            try:
                self._can_punch = _punch_hole(self._file.fileno(), offset, length)
            except OSError:
                self._can_punch = False
            (self._holes if self._can_punch else self._spare).add(offset, length)

    def _release(self, extent: Extent) -> None:
        if self.is_forked:
            return  # see Note [Fork]
        self._used -= extent.nbytes
        if extent.offset >= 0:
            self._spare.add(extent.offset, extent.nbytes)

    def _over_cap(self, nbytes: int) -> str:
        return (
            f"The disk tier at {self.directory} is full: {format_bytes(nbytes)} more would exceed its cap of "
            f"{format_bytes(self.capacity)}, of which {format_bytes(self._used)} is used. The tensor stays "
            "where it is. Raise Config(max_disk_offload_gb=...)."
        )

    def _disk_full(self, nbytes: int, error: OSError) -> str:
        if error.errno == errno.EFBIG:
            room = "files may not grow that large here (ulimit -f)"
        else:
            room = f"{error.strerror}, with {format_bytes(find_disk(self.directory).free_bytes)} free"
        return (
            f"The disk at {self.directory} has no room for {format_bytes(nbytes)} more: {room}; MemScale "
            f"holds {format_bytes(self.bytes_on_disk)} of it. The tensor stays where it is. Free some space, "
            "or give another disk by Config(offload_dir=...)."
        )


class FreeList:
    """Ranges that are free, in order; neighbours are joined.

    Example:
        >>> free = FreeList()
        >>> free.add(0, 64); free.add(64, 64)
        >>> free.take(96), free.take(96), free.total
        (0, None, 32)
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # (offset, length), in order
        self.total = 0

    def add(self, offset: int, length: int) -> None:
        """Add a range."""
        self.total += length
        index = bisect_left(self._ranges, (offset, 0))
        if index < len(self._ranges) and self._ranges[index][0] == offset + length:
            length += self._ranges.pop(index)[1]
        if index and sum(self._ranges[index - 1]) == offset:
            offset, before = self._ranges.pop(index - 1)
            length += before
        insort(self._ranges, (offset, length))

    def find(self, length: int) -> int | None:
        """Return where the first range that is long enough starts."""
        return next((offset for offset, size in self._ranges if size >= length), None)

    def take(self, length: int) -> int | None:
        """Cut a range of this length off the first that has it; returns its offset, None if there is none."""
        offset = self.find(length)
        if offset is None:
            return None
        _, size = self._ranges.pop(bisect_left(self._ranges, (offset, 0)))
        if size > length:
            insort(self._ranges, (offset + length, size - length))
        self.total -= length
        return offset

    def pop(self) -> tuple[int, int]:
        """Take the last range, whole; returns its offset and length."""
        offset, length = self._ranges.pop()
        self.total -= length
        return offset, length


_files: weakref.WeakSet[DiskFile] = weakref.WeakSet()


def _after_fork() -> None:
    for file in list(_files):
        file.make_private()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# ---------------------------------------------------------------------- bytes


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


def _memory_of(tensor: torch.Tensor) -> memoryview:
    # Not by numpy, which is no dependency and lacks bfloat16 and float8.
    kind = ctypes.c_char * tensor.nbytes
    return memoryview(kind.from_address(tensor.data_ptr())).cast("B")


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """Return the next multiple of `unit`.

    Example:
        >>> round_up(65, 64), round_up(128, 64)
        (128, 128)
    """
    return -(-nbytes // unit) * unit


def _allocate(fd: int, offset: int, length: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, length)
        return
    for start in range(offset, offset + length, PAGE):  # macOS: write it once
        os.pwrite(fd, bytes(PAGE), start)


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


def release_pages(address: int, nbytes: int) -> None:
    """Take mapped pages out of this process; when they are touched they return, with their values."""
    _advise(address, nbytes, _MADV_DONTNEED)


def prefetch_pages(address: int, nbytes: int) -> None:
    """Have the system read mapped pages before they are touched."""
    _advise(address, nbytes, _MADV_WILLNEED)


def _advise(address: int, nbytes: int, advice: int) -> None:
    while _libc().madvise(address, nbytes, advice) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, f"madvise: {os.strerror(code)}")


def _punch_hole(fd: int, offset: int, nbytes: int) -> bool:
    """Give a range of a file back to its disk; False where the file system can't."""
    if not sys.platform.startswith("linux"):
        return False
    if _libc().fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, offset, nbytes) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(code, f"fallocate: {os.strerror(code)}")
