"""The few calls of the C library that the disk tier needs and Python lacks, or makes while it holds the GIL.

`mmap` of the standard library keeps a file descriptor for each mapping (a model has more tensors than a
process may have open files), and its `madvise` stops every other thread until the kernel is done. Calls
through ctypes do neither.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from typing import Any

__all__ = ["PAGE", "advise", "drop_cache", "make_private", "map_shared", "punch_hole", "unmap"]

PAGE = mmap.PAGESIZE

# From linux/mman.h and linux/falloc.h; the numbers are the same on every architecture torch has.
DONT_NEED = 4
WILL_NEED = 3
POPULATE_READ = 22  # since Linux 5.14

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000 if sys.platform.startswith("linux") else 0

_FALLOC_KEEP_SIZE = 1
_FALLOC_PUNCH_HOLE = 2
_SYNC_FILE_RANGE = 1 | 2 | 4  # wait for what is being written, write the rest, and wait for it
_MAP_FAILED = ctypes.c_void_p(-1).value

_functions: Any = None


def _libc() -> Any:
    """The C library with its signatures declared: without them 64-bit offsets are cut to 32 bits."""
    global _functions
    if _functions is None:
        functions = ctypes.CDLL(None, use_errno=True)
        address, size, integer, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
        for name, result, arguments in (
            ("mmap", address, (address, size, integer, integer, integer, offset)),
            ("munmap", integer, (address, size)),
            ("mprotect", integer, (address, size, integer)),
            ("madvise", integer, (address, size, integer)),
            ("fallocate", integer, (integer, integer, offset, offset)),
            ("sync_file_range", integer, (integer, offset, offset, ctypes.c_uint)),
        ):
            function = getattr(functions, name, None)
            if function is not None:  # the last two are Linux's own
                function.restype, function.argtypes = result, arguments
        _functions = functions
    return _functions


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")


def map_shared(fd: int, offset: int, nbytes: int) -> int:
    """Map a range of a file, shared and writable; returns its address."""
    address = _libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address is None or address == _MAP_FAILED:
        raise _error("mmap")
    return int(address)


def make_private(address: int, nbytes: int, fd: int, offset: int) -> bool:
    """Replace a shared mapping by a private one of the same range of the file: writes no longer reach the file.

    Returns:
        False if that can't be done: then the range can't be written at all any more, and to try ends the process.
    """
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    if _libc().mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset) == address:
        return True
    _libc().mprotect(address, nbytes, mmap.PROT_READ)
    return False


def unmap(address: int, nbytes: int) -> None:
    if _libc().munmap(address, nbytes) != 0:
        raise _error("munmap")


def advise(address: int, nbytes: int, advice: int) -> bool:
    """Tell the kernel what a range of pages is for; False where it does not know this advice."""
    while _libc().madvise(address, nbytes, advice) != 0:
        code = ctypes.get_errno()
        if code == errno.EINVAL:
            return False
        if code not in (errno.EINTR, errno.EAGAIN):
            raise _error("madvise")
    return True


def punch_hole(fd: int, offset: int, nbytes: int) -> bool:
    """Give a range of a file back to its disk; False where the file system can't."""
    if not sys.platform.startswith("linux"):
        return False
    if _libc().fallocate(fd, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, offset, nbytes) == 0:
        return True
    if ctypes.get_errno() in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise _error("fallocate")


def drop_cache(fd: int, offset: int, nbytes: int) -> None:
    """Write a range's changed pages to the disk, and let them go from the page cache."""
    start = getattr(_libc(), "sync_file_range", None)
    if start is None or start(fd, offset, nbytes, _SYNC_FILE_RANGE) != 0:
        os.fsync(fd)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
