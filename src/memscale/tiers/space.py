"""Room on a disk: one file, handed out in pieces, under a hard cap.

Note [Space on disk]
~~~~~~~~~~~~~~~~~~~~
The room for a tensor is allocated (`posix_fallocate`) before a byte of it is written, in the thread that asks
for it. So a full disk is an error there and then, with the tensor still in memory; a file that was only made
long would say it later, in a worker, or as a SIGBUS that ends the process if it is mapped.

A piece that is freed stays allocated, as a spare: in a training loop the next step wants the same sizes, and
pages that the system has already are written to several times faster than new ones. Spares count against the
cap, and are punched out of the file, which gives them back to the disk, as soon as the cap or the disk needs
it.

All pieces start at a page, and count as whole pages. Where many are small, their owner packs them
(`mapped.py`).

Note [Fork]
~~~~~~~~~~~
A child made by `os.fork` has the same file and the same list of what is free, and from then on the two lists are
two. It may read what was stored before; to allocate is refused, and what dies in the child is not freed in
the file, as the parent still has it. Its mappings are made private as soon as it begins to run (copy-on-write): what it
writes to a mapped tensor is its own, as with all other memory. What it has not written to is read from the
file, so that it may see what the parent has written since; all of it is copied by `detach`, if it must not change.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

from memscale._util.locks import LateLock
from memscale.errors import ConfigError, TierError, TierFullError, shown
from memscale.hardware.host import find_disk
from memscale.tiers import _libc
from memscale.tiers.directory import PrivateDirectory
from memscale.tiers.gaps import Gaps
from memscale.units import format_bytes

__all__ = ["DiskSpace", "Extent", "round_up"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, eq=False)
class Extent:
    """A range of the file that belongs to whoever asked for it.

    Attributes:
        offset: Where it starts, at a page; -1 for room that is only counted (fake tensors have no bytes).
        nbytes: Its length, in whole pages.
    """

    offset: int
    nbytes: int


class DiskSpace:
    """The file of this process below `offload_dir`, made when the first byte is stored.

    Args:
        directory: Where; None for what `find_disk` chooses.
        capacity: The most bytes to take of the disk, a hard cap; None for what is free now.

    Raises:
        HardwareError: The directory is a file, or no parent of it exists.
        ConfigError: The capacity is negative.

    Example:
        >>> with DiskSpace(capacity=2**20) as space:
        ...     extent = space.allocate(5000)
        ...     space.bytes_used
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
        self._end = 0  # of the file
        self._spare = Gaps()  # freed, and still allocated on the disk
        self._holes = Gaps()  # given back to the disk
        self._punches = True  # until the file system says that it can't
        self._private: PrivateDirectory | None = None
        self._fd = -1
        self._pid = os.getpid()
        self._closed = False
        self._opening = threading.Lock()
        self._lock: LateLock[Extent] = LateLock(self._release)
        self._close_file: weakref.finalize[..., DiskSpace] | None = None

    def __enter__(self) -> DiskSpace:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def bytes_used(self) -> int:
        """Bytes handed out now, in whole pages; never above the capacity."""
        return self._used

    @property
    def bytes_on_disk(self) -> int:
        """Those, and spares for the next; never above the capacity either."""
        return self._used + self._spare.total

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that the file belongs to. See Note [Fork]."""
        return os.getpid() != self._pid

    @property
    def fd(self) -> int:
        """The descriptor of the file."""
        if self._fd < 0:
            self.open()
        return self._fd

    def open(self) -> None:
        """Make the file now, so that a directory that can't be used is found out now.

        Raises:
            TierError: The directory can't be made or written to, or this space is closed.
        """
        if self._closed:
            raise TierError("This disk tier is closed: make a new one to offload again.")
        if self._fd < 0:
            with self._opening:
                if self._fd < 0:
                    self._private = PrivateDirectory(self.directory)
                    self._fd = self._private.open_file()
                    self._close_file = weakref.finalize(self, os.close, self._fd)
                    # Not at exit: a thread that still writes would write to whatever gets the number next.
                    self._close_file.atexit = False

    def allocate(self, nbytes: int, *, counted_only: bool = False) -> Extent:
        """Room for so many bytes.

        Args:
            nbytes: More than 0; rounded up to whole pages.
            counted_only: Take it off the capacity, and nothing off the disk.

        Raises:
            TierFullError: The cap would be exceeded, or the disk is full. Nothing was taken.
            TierError: The directory is unusable, the space is closed, or this process is a fork.
        """
        length = round_up(nbytes)
        if self.is_forked:
            raise TierError(
                f"This disk tier belongs to process {self._pid}, and {os.getpid()} is a fork of it: make a "
                "tier of its own there, or start the process by spawn."
            )
        if not counted_only:
            self.open()
        with self._lock:
            offset = None if counted_only else self._spare.take(length)
            if offset is None:
                self._punch_spares(self.capacity - self._used - length)
                if self.bytes_on_disk + length > self.capacity:
                    raise TierFullError(self._full(nbytes))
                offset = -1 if counted_only else self._grow(length, nbytes)
            self._used += length
            return Extent(offset, length)

    def free(self, extent: Extent) -> None:
        """Give a piece back. Safe in finalizers, see Note [Finalizers]."""
        self._lock.leave(extent)

    def trim(self) -> None:
        """Give spares back to the disk."""
        with self._lock:
            self._punch_spares(0)

    def retire(self) -> None:
        """Take nothing more, and leave no name on the disk; what is stored can be read until it is freed."""
        self._closed = True
        if self._private is not None:
            self._private.close()

    def close(self) -> None:
        """Give everything back to the disk. Tensors that are mapped go on working until they die."""
        self._closed = True
        self._spare, self._holes = Gaps(), Gaps()
        if not self.is_forked and self._close_file is not None:
            self._close_file()
            self._fd = -1
        if self._private is not None:
            self._private.close()

    def _grow(self, length: int, nbytes: int) -> int:
        """Allocate a new piece, in a hole or at the end; returns its offset."""
        hole = self._holes.find(length)
        offset = self._end if hole is None else hole
        try:
            try:
                _allocate(self._fd, offset, length)
            except OSError as error:
                if error.errno not in _FULL or not self._spare.total:
                    raise
                self._punch_spares(0)
                _allocate(self._fd, offset, length)
        except OSError as error:
            # What was allocated before it failed goes back.
            with contextlib.suppress(OSError):
                if hole is None:
                    os.ftruncate(self._fd, offset)
                else:
                    _libc.punch_hole(self._fd, offset, length)
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
        """Give spares back to the disk until there are no more bytes of them than that; under the lock."""
        if self.is_forked:
            return  # the parent may have used them since
        while self._punches and self._spare.total > max(0, limit):
            offset, length = self._spare.pop()
            try:
                self._punches = _libc.punch_hole(self._fd, offset, length)
            except OSError:
                self._punches = False
            (self._holes if self._punches else self._spare).add(offset, length)

    def _release(self, extent: Extent) -> None:
        if self.is_forked:
            return  # see Note [Fork]
        self._used -= extent.nbytes
        if extent.offset >= 0:
            self._spare.add(extent.offset, extent.nbytes)

    def _full(self, nbytes: int) -> str:
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


def _allocate(fd: int, offset: int, length: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, length)
        return
    for start in range(offset, offset + length, _libc.PAGE):  # macOS: write it once
        os.pwrite(fd, bytes(_libc.PAGE), start)


def round_up(nbytes: int, unit: int = _libc.PAGE) -> int:
    """The next multiple of `unit`.

    Example:
        >>> round_up(65, 64), round_up(128, 64)
        (128, 128)
    """
    return -(-nbytes // unit) * unit
