"""Room on a disk: one file, handed out in pieces, under a hard cap.

Note [Space on disk]
~~~~~~~~~~~~~~~~~~~~
The room for a tensor is allocated (`posix_fallocate`) before a byte of it is written, in the thread that asks
for it. So a full disk is an error there and then, with the tensor still in memory; a file that was only made
long would say it later, in a worker, or as a SIGBUS that ends the process if it is mapped. Pieces that are
freed are punched out of the file: their space returns to the disk, and what was in them need never be
written.

All pieces start at a page, and count as whole pages. Where many are small, their owner packs them
(`mapped.py`).

Note [Fork]
~~~~~~~~~~~
A child made by `fork` has the same file and the same list of what is free, and from then on the two lists are
two. It may read what was stored before; to allocate is refused, and what dies in the child is not freed in
the file, as the parent still has it. Mapped tensors stay shared: what a child writes to one the parent sees,
unlike all other memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

from memscale.errors import ConfigError, TierError, TierFullError, shown
from memscale.hardware.disk import find_disk
from memscale.offload import _libc
from memscale.offload.directory import PrivateDirectory
from memscale.offload.gaps import Gaps
from memscale.offload.locks import LateLock
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
        self._gaps = Gaps()  # what is free before the end
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
    def fd(self) -> int:
        """The descriptor of the file."""
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
        if os.getpid() != self._pid:
            raise TierError(
                f"This disk tier belongs to process {self._pid}, and {os.getpid()} is a fork of it: make a "
                "tier of its own there, or start the process by spawn."
            )
        if not counted_only:
            self.open()
        with self._lock:
            # Without holes a freed piece keeps its place on the disk, and only growing the file takes more.
            gap = None if counted_only else self._gaps.find(length)
            more = 0 if gap is not None and not self._punches else length
            taken = self._used if self._punches or counted_only else self._end
            if taken + more > self.capacity:
                raise TierFullError(self._full(nbytes))
            if counted_only:
                self._used += length
                return Extent(-1, length)
            offset = self._end if gap is None else gap
            self._reserve(offset, length, nbytes)
            if gap is None:
                self._end += length
            else:
                self._gaps.take(length)
            self._used += length
            return Extent(offset, length)

    def free(self, extent: Extent) -> None:
        """Give a piece back. Safe in finalizers, see Note [Finalizers]."""
        self._lock.leave(extent)

    def close(self) -> None:
        """Give everything back to the disk. Tensors that are mapped go on working until they die."""
        self._closed = True
        if os.getpid() == self._pid and self._close_file is not None:
            self._close_file()
        if self._private is not None:
            self._private.close()

    def _reserve(self, offset: int, length: int, nbytes: int) -> None:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, offset, length)
            else:  # macOS: write it once
                for start in range(offset, offset + length, _libc.PAGE):
                    os.pwrite(self._fd, bytes(_libc.PAGE), start)
        except OSError as error:
            # What was allocated before it failed goes back.
            with contextlib.suppress(OSError):
                if offset == self._end:
                    os.ftruncate(self._fd, offset)
                else:
                    _libc.punch_hole(self._fd, offset, length)
            if error.errno in _FULL:
                raise TierFullError(self._disk_full(nbytes, error)) from error
            raise TierError(
                f"Can't take {format_bytes(nbytes)} of the disk at {self.directory}: {error.strerror}. The "
                "tensor was not moved. Give another directory by Config(offload_dir=...)."
            ) from error

    def _release(self, extent: Extent) -> None:
        if os.getpid() != self._pid:
            return  # see Note [Fork]
        self._used -= extent.nbytes
        if extent.offset < 0 or self._closed:
            return
        if self._punches:
            try:
                self._punches = _libc.punch_hole(self._fd, extent.offset, extent.nbytes)
            except OSError:
                self._punches = False
        self._gaps.add(extent.offset, extent.nbytes)

    def _full(self, nbytes: int) -> str:
        return (
            f"The disk tier at {self.directory} is full: {format_bytes(nbytes)} more would exceed its cap of "
            f"{format_bytes(self.capacity)}, of which {format_bytes(self._used)} is used. The tensor stays "
            "where it is. Raise Config(max_disk_offload_gb=...), or use a smaller batch."
        )

    def _disk_full(self, nbytes: int, error: OSError) -> str:
        if error.errno == errno.EFBIG:
            room = "files may not grow that large here (ulimit -f)"
        else:
            room = f"{error.strerror}, with {format_bytes(find_disk(self.directory).free_bytes)} free"
        return (
            f"The disk at {self.directory} has no room for {format_bytes(nbytes)} more: {room}; MemScale "
            f"holds {format_bytes(self._used)} of it. The tensor stays where it is. Free some space, or give "
            "another disk by Config(offload_dir=...)."
        )


def round_up(nbytes: int, unit: int = _libc.PAGE) -> int:
    """The next multiple of `unit`.

    Example:
        >>> round_up(65, 64), round_up(128, 64)
        (128, 128)
    """
    return -(-nbytes // unit) * unit
