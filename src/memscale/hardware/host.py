"""Read the host: RAM and cores within control groups, the directory for the disk tier, the processes of a job.

A container sees the memory of its whole machine in `/proc/meminfo` and is killed long before it has used that. The
limit is in its control group (version 1 or 2), or in any group above it: the tightest one counts.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from memscale.errors import ConfigTypeError, HardwareError, shown
from memscale.hardware.specs import DiskSpec, HostSpec

PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")
OFFLOAD_DIR_VARIABLE = "MEMSCALE_OFFLOAD_DIR"
PROCESSES_VARIABLE = "LOCAL_WORLD_SIZE"  # of torchrun: the processes that it has started on this host

# Assumptions, so that plans never depend on a measurement: below what NVMe drives sustain, above SATA.
_READ_BANDWIDTH = 2.0e9
_WRITE_BANDWIDTH = 1.0e9

_RAM_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "rootfs"})
_VAR_TMP = Path("/var/tmp")
_VERSION_1_USE = ("memory.usage_in_bytes", "total_inactive_file")


def read_host(
    *, proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT, environ: Mapping[str, str] = os.environ
) -> HostSpec:
    """Read the RAM and the cores that this process may use; tests give directories of their own.

    Example:
        >>> host = read_host()
        >>> 0 <= host.available_ram_bytes <= host.total_ram_bytes
        True
    """
    total, available = _ram(proc)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group, version in _groups(proc, cgroup_root, "memory"):
        for limit, used in _memory_limits(group, version):
            total = min(total, limit)
            available = min(available, max(0, limit - used))
    for group, version in _groups(proc, cgroup_root, "cpu"):
        quota = _cpu_quota(group, version)
        if quota is not None:
            cores = max(1, min(cores, math.ceil(quota)))
    processes = max(1, _number(environ.get(PROCESSES_VARIABLE, "")) or 1)
    return HostSpec(total, min(available, total), cores, processes)


def _ram(proc: Path) -> tuple[int, int]:
    """Return total and available RAM in bytes."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:  # not Linux
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total // 2  # half is a guess that rarely promises too much
    fields = dict(line.split(":", 1) for line in lines)
    total, available = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    return total, min(available, total)


# -- control groups


def _memory_limits(group: Path, version: int) -> Iterator[tuple[int, int]]:
    """Yield the limit of a group and its use without the file cache that the kernel can drop, in bytes.

    "No limit" is "max" in version 2; in version 1 it is a number near 2**63, more than any machine has.
    """
    # Above memory.high the kernel slows a group down to nearly nothing, which is as good as a limit.
    files = ["memory.max", "memory.high"] if version == 2 else ["memory.limit_in_bytes"]
    use, cache = ("memory.current", "inactive_file") if version == 2 else _VERSION_1_USE
    for limit in map(_number, (_read(group / name) for name in files)):
        if limit is not None:
            used = _number(_read(group / use)) or 0
            statistics = (line.partition(" ") for line in _read(group / "memory.stat").splitlines())
            droppable = sum(_number(value) or 0 for key, _, value in statistics if key == cache)
            yield limit, max(0, used - droppable)


def _cpu_quota(group: Path, version: int) -> float | None:
    """Return how many cores' worth of time a group may use; None if there is no limit."""
    if version == 2:
        words = _read(group / "cpu.max").split()
    else:
        words = [_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")]  # quota -1: none
    quota, period = map(_number, words) if len(words) == 2 else (None, None)
    return quota / period if quota and period and quota > 0 and period > 0 else None


def _groups(proc: Path, cgroup_root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the directories of this process's groups, innermost first, with their version.

    A line of `/proc/self/cgroup` is "0::/path" for version 2, "4:memory:/path" for version 1; there may be both.
    """
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            # With version 1 in use as well, version 2 is mounted beside its controllers.
            version, candidates = 2, [cgroup_root / "unified", cgroup_root]
        elif controller in controllers.split(","):
            version, candidates = 1, [cgroup_root / controllers, cgroup_root / controller]
        else:
            continue
        mount = next((directory for directory in candidates if directory.is_dir()), None)
        if mount is not None:
            for group in _group_and_parents(mount, path):
                yield group, version


def _group_and_parents(mount: Path, path: str) -> Iterator[Path]:
    """Yield the directory of the group `path` and those above it, up to `mount`.

    A container often sees the host's name of its group ("/docker/4f2a…/job") while its mount starts at that group
    ("/job"), so the longest tail of the path that exists below the mount is the group.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    while parts and not mount.joinpath(*parts).is_dir():
        parts = parts[1:]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _number(text: str) -> int | None:
    """Parse a control file; None for "max", for a missing file, and for what is not a number."""
    try:
        return int(text)
    except ValueError:
        return None


def _read(path: Path) -> str:
    """Read a control file; empty where the group has none, or the container hides it."""
    try:
        return path.read_text()
    except OSError:
        return ""


# -- the disk tier


def find_disk(
    directory: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    proc: Path = PROC,
    var_tmp: Path = _VAR_TMP,
) -> DiskSpec:
    """Choose the directory of the disk tier and read how much it can hold. Nothing is created or written.

    The directory is the one given, or that of `MEMSCALE_OFFLOAD_DIR`, or the system's for temporary files; where the
    last is in RAM (tmpfs), it is `/var/tmp`, if that is on a disk and writable. It need not exist yet: the nearest
    existing parent is examined.

    Raises:
        HardwareError: The directory is a file, no parent of it exists, or it can't be examined.

    Example:
        >>> disk = find_disk(".")
        >>> disk.free_bytes > 0
        True
    """
    if directory is not None and not isinstance(directory, (str, os.PathLike)):
        raise ConfigTypeError(
            f"offload_dir={shown(directory)} is a {type(directory).__name__}: give a path, as str or Path."
        )
    if directory is not None and not os.fspath(directory):
        raise HardwareError("offload_dir is empty: give the path of a directory, or None for the default.")
    # An empty variable is how a shell says "not set".
    requested = directory or environ.get(OFFLOAD_DIR_VARIABLE)
    if requested:
        chosen = Path(os.path.expanduser(requested))
    else:
        chosen = Path(tempfile.gettempdir())
        usable = var_tmp.is_dir() and os.access(var_tmp, os.W_OK | os.X_OK)
        if usable and _is_in_ram(chosen, proc) and not _is_in_ram(var_tmp, proc):
            chosen = var_tmp
    try:
        existing = _existing_parent(chosen)
        usage = shutil.disk_usage(existing)
        in_ram = _is_in_ram(existing, proc)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise HardwareError(
            f"offload_dir={shown(str(chosen), 200)} can't be looked at: {reason}. Give another directory."
        ) from error
    return DiskSpec(
        directory=chosen,
        # disk_usage's "free" is f_bavail: without the blocks reserved for root.
        free_bytes=min(usage.free, usage.total),
        writable=os.access(existing, os.W_OK | os.X_OK),
        read_bandwidth=_READ_BANDWIDTH,
        write_bandwidth=_WRITE_BANDWIDTH,
        ram_backed=in_ram,
    )


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


def _is_in_ram(directory: Path, proc: Path) -> bool:
    """Return whether `directory` is on a file system in RAM; False where there is no `/proc/mounts`."""
    target = directory.resolve()
    deepest: tuple[int, str] = (-1, "")
    for line in _read(proc / "mounts").splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        # Special characters are in octal: a space is backslash 040.
        mount = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[1]))
        depth = len(mount.parts)
        # The deepest mount holds the directory; of two on one point, the later hides the earlier.
        if depth >= deepest[0] and target.is_relative_to(mount):
            deepest = (depth, fields[2])
    return deepest[1] in _RAM_FILESYSTEMS


def in_process_group() -> bool:
    """Return whether torch.distributed has been initialised, be it for this process alone."""
    import torch  # here, as `import memscale` does not import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def process_count() -> int:
    """Return how many processes train together; 1 where torch.distributed is not in use."""
    import torch

    return torch.distributed.get_world_size() if in_process_group() else 1


def process_rank() -> int:
    """Return the number of this process among them, from 0 on."""
    import torch

    return torch.distributed.get_rank() if process_count() > 1 else 0
