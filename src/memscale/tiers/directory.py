"""The private directory of one process below `offload_dir`, and the removal of what dead processes left.

Note [Nothing left behind]
~~~~~~~~~~~~~~~~~~~~~~~~~~
The file with the tensors is unlinked as soon as it is open: its space returns to the disk when the process
ends, however it ends, without anyone's help. What can be left by a crash is the directory with its lock file
(and the data file, for one that dies in between): its name says whose it is, and the next start removes it.
The owner holds a lock (`flock`) on the lock file while it lives, which the kernel drops with the process;
this also holds between containers, which do not see each other's process ids. Where the file system has no
locks, the process id, the time that process started and the boot of the system decide.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import time
import weakref
from pathlib import Path

from memscale.errors import TierError
from memscale.hardware.host import PROC

try:
    import fcntl
except ImportError:  # Windows: no locks, and the process ids decide
    fcntl = None  # type: ignore[assignment]

__all__ = ["PrivateDirectory", "remove_leftovers"]

_NAME = re.compile(r"memscale-(?P<pid>\d+)-(?P<start>\d+)-(?P<boot>[0-9a-f]{8})-[0-9a-f]{8}")
_LOCK = "lock"
_MAKING_SECONDS = 60.0


class PrivateDirectory:
    """A new directory below `parent` that no other process uses, gone when this process is.

    Args:
        parent: Made if it does not exist. What dead processes left in it is removed.

    Raises:
        TierError: It can't be made or written to.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     private = PrivateDirectory(Path(parent))
        ...     there = private.path.is_dir()
        ...     private.close()
        ...     there, private.path.exists()
        (True, False)
    """

    def __init__(self, parent: Path) -> None:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(parent)
            self.path = _make(parent)
            self._lock = _take_lock(self.path / _LOCK)
        except OSError as error:
            raise TierError(unusable(parent, error)) from error
        self.close = weakref.finalize(self, _remove_own, self.path, self._lock, os.getpid())

    def open_file(self) -> int:
        """A new file for reading and writing, known by its descriptor alone. See Note [Nothing left behind].

        Raises:
            TierError: It can't be made.
        """
        path = self.path / "tensors"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
        except OSError as error:
            raise TierError(unusable(self.path.parent, error)) from error
        with contextlib.suppress(OSError):  # Windows keeps open files; they go with the directory
            path.unlink()
        return fd


def unusable(directory: Path, error: OSError) -> str:
    """What to say of a directory that can't hold the tier's file."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return (
        f"Can't offload to {directory}: {reason}. Give a directory on a disk with room that you may write "
        "to, by Config(offload_dir=...) or MEMSCALE_OFFLOAD_DIR. No tensor was moved."
    )


def remove_leftovers(parent: Path) -> list[Path]:
    """Remove the directories below `parent` whose processes are gone; returns them.

    Example:
        >>> remove_leftovers(Path("/nowhere"))
        []
    """
    removed = []
    try:
        candidates = [entry for entry in parent.iterdir() if _NAME.fullmatch(entry.name)]
    except OSError:
        return []
    for path in candidates:
        # Others may be cleaning up at the same time: whatever is gone already is as good.
        with contextlib.suppress(OSError):
            status = path.lstat()
            # Temporary directories are open to all: a name alone proves nothing.
            if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "geteuid") and status.st_uid != os.geteuid()):
                continue
            if _is_abandoned(path):
                shutil.rmtree(path)
                removed.append(path)
    return removed


def _make(parent: Path) -> Path:
    own = f"memscale-{os.getpid()}-{_start_time(os.getpid()) or 0}-{_boot()}"
    while True:
        path = parent / f"{own}-{secrets.token_hex(4)}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path


def _take_lock(path: Path) -> int:
    # Under another name until it is locked: who finds a free lock file may be sure that its owner is dead.
    new = path.with_suffix(".new")
    fd = os.open(new, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    if fcntl is not None:
        with contextlib.suppress(OSError):  # no locks on this file system
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(path)
    return fd


def _is_abandoned(path: Path) -> bool:
    try:
        fd = os.open(path / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        # Its process died while it made it, or is making it now, perhaps where its id is not seen from here.
        return time.time() - path.lstat().st_mtime > _MAKING_SECONDS and not _is_alive(path)
    try:
        if fcntl is None:
            return not _is_alive(path)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held = error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
        return not held and not _is_alive(path)
    else:
        return True
    finally:
        os.close(fd)


def _is_alive(path: Path) -> bool:
    """Whether the process that a directory belongs to still runs: the same id, start time and boot."""
    match = _NAME.fullmatch(path.name)
    if match is None or match["boot"] != _boot():
        return match is None
    return str(_start_time(int(match["pid"])) or 0) == match["start"]


def _start_time(pid: int) -> int | None:
    """When a process started, in ticks since the boot; None where it does not run, or without /proc."""
    try:
        status = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The name in the second field may hold spaces and parentheses: count from its end.
    return int(status.rpartition(")")[2].split()[19])


def _boot() -> str:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return "0" * 8


def _remove_own(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child ends: the directory is its parent's
    with contextlib.suppress(OSError):
        os.close(lock)
    shutil.rmtree(path, ignore_errors=True)
