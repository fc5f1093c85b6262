"""The disk tier: which directory, how much room it has, and whether it is a disk at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from memscale.errors import ConfigTypeError, HardwareError, shown
from memscale.hardware.device import DiskSpec
from memscale.hardware.host import PROC

__all__ = ["OFFLOAD_DIR_VARIABLE", "find_disk"]

OFFLOAD_DIR_VARIABLE = "MEMSCALE_OFFLOAD_DIR"

# Assumptions, not measurements, so that plans are the same every time: below what NVMe drives sustain, above
# SATA.
_READ_BANDWIDTH = 2.0e9
_WRITE_BANDWIDTH = 1.0e9

_RAM_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "rootfs"})
_VAR_TMP = Path("/var/tmp")


def find_disk(
    directory: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    proc: Path = PROC,
    var_tmp: Path = _VAR_TMP,
) -> DiskSpec:
    """Choose the directory of the disk tier and look at its room.

    The directory is, in this order: the one given; the environment's `MEMSCALE_OFFLOAD_DIR`; the system's
    directory for temporary files. That last one is in RAM on many systems (tmpfs), where offloading to it
    would free nothing: then `/var/tmp` is taken, if it is on a real disk and writable. Nothing is created or
    written.

    Args:
        directory: Where offloaded tensors go. It need not exist yet; the nearest parent that does is looked
            at.
        environ: The environment; `os.environ` if None.
        proc: Where the process file system is; a test puts its own there.
        var_tmp: What stands in for a temporary directory in RAM.

    Raises:
        HardwareError: The directory is a file, no parent of it exists, or it can't be looked at.

    Example:
        >>> disk = find_disk(".")
        >>> disk.free_bytes <= disk.total_bytes
        True
    """
    chosen = _given(directory, os.environ if environ is None else environ)
    if chosen is None:
        chosen = Path(tempfile.gettempdir())
        if _filesystem(chosen, proc) in _RAM_FILESYSTEMS and _is_disk(var_tmp, proc):
            chosen = var_tmp
    try:
        existing = _existing_parent(chosen)
        usage = shutil.disk_usage(existing)
        filesystem = _filesystem(existing, proc)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise HardwareError(
            f"offload_dir={shown(str(chosen), 200)} can't be looked at: {reason}. Give another directory."
        ) from error
    return DiskSpec(
        directory=chosen,
        # disk_usage's "free" is f_bavail: what is left without the blocks reserved for root.
        free_bytes=min(usage.free, usage.total),
        total_bytes=usage.total,
        writable=os.access(existing, os.W_OK | os.X_OK),
        read_bandwidth=_READ_BANDWIDTH,
        write_bandwidth=_WRITE_BANDWIDTH,
        filesystem=filesystem,
        ram_backed=filesystem in _RAM_FILESYSTEMS,
    )


def _given(directory: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Path | None:
    if directory is None:
        # An empty variable is how a shell says "not set".
        from_environ = environ.get(OFFLOAD_DIR_VARIABLE, "")
        return _expanded(from_environ) if from_environ else None
    if not isinstance(directory, (str, os.PathLike)):
        raise ConfigTypeError(
            f"offload_dir={shown(directory)} is a {type(directory).__name__}: give a path, as str or Path."
        )
    if not os.fspath(directory):
        raise HardwareError("offload_dir is empty: give the path of a directory, or None for the default.")
    return _expanded(directory)


def _expanded(directory: str | os.PathLike[str]) -> Path:
    try:
        return Path(directory).expanduser()
    except RuntimeError as error:
        raise HardwareError(
            f"offload_dir={shown(os.fspath(directory), 200)}: no such user has a home directory. Give another path."
        ) from error


def _existing_parent(directory: Path) -> Path:
    for path in (directory, *directory.absolute().parents):
        if path.is_dir():
            return path
        if os.path.lexists(path):
            raise HardwareError(
                f"offload_dir={str(directory)!r}: {path} is not a directory. Give one, or a new path."
            )
    raise HardwareError(
        f"offload_dir={str(directory)!r}: no parent of it exists. Give a directory that does."
    )


def _is_disk(directory: Path, proc: Path) -> bool:
    return (
        directory.is_dir()
        and os.access(directory, os.W_OK | os.X_OK)
        and _filesystem(directory, proc) not in _RAM_FILESYSTEMS
    )


def _filesystem(directory: Path, proc: Path) -> str | None:
    """The type of the file system that `directory` is on, or None where `/proc/mounts` does not exist."""
    try:
        mounts = (proc / "mounts").read_text()
    except OSError:
        return None
    target = directory.resolve()
    best: tuple[int, str | None] = (-1, None)
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mount = Path(_unescape(fields[1]))
        depth = len(mount.parts)
        # The deepest mount holds the directory; of two on one point, the later hides the earlier.
        if depth >= best[0] and target.is_relative_to(mount):
            best = (depth, fields[2])
    return best[1]


def _unescape(field: str) -> str:
    """Undo the octal escapes of `/proc/mounts`, in which a space is written as backslash 040."""
    for code, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        field = field.replace(code, character)
    return field
