"""The host: how much RAM this process may use, and how many cores.

What the control groups of Linux allow this process: memory and CPU time, version 1 and version 2.

A container sees the memory of its whole machine in `/proc/meminfo` and is killed long before it has used
that. The limit is in its control group, or in any group above it: the tightest one counts.

The disk tier: which directory, how much room it has, and whether it is a disk at all.
"""

from __future__ import annotations

import importlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from memscale.errors import ConfigTypeError, HardwareError, shown
from memscale.hardware.specs import DiskSpec, HostSpec

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "OFFLOAD_DIR_VARIABLE",
    "PROC",
    "CgroupMemory",
    "cpu_quota",
    "find_disk",
    "memory_limits",
    "read_host",
]

PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")


def read_host(*, proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> HostSpec:
    """Read the RAM and the cores of this host, within the limits of the control groups this process is in.

    Args:
        proc: Where the process file system is; a test puts its own there.
        cgroup_root: Where the control groups are mounted.

    Raises:
        HardwareError: Neither `/proc/meminfo`, nor `os.sysconf`, nor psutil says how much RAM there is.

    Example:
        >>> host = read_host()
        >>> 0 <= host.available_ram_bytes <= host.total_ram_bytes
        True
    """
    total, available = _ram(proc)
    for limit in memory_limits(proc, cgroup_root):
        if limit.limit_bytes < total:
            total = limit.limit_bytes
        available = min(available, limit.available_bytes)
    return HostSpec(
        total_ram_bytes=total,
        available_ram_bytes=min(available, total),
        cores=_cores(cpu_quota(proc, cgroup_root)),
    )


def _ram(proc: Path) -> tuple[int, int]:
    """Total and available RAM in bytes, from the first source that knows."""
    reasons = []
    sources: tuple[Callable[[], tuple[int, int]], ...] = (lambda: _meminfo(proc), _psutil, _sysconf)
    for source in sources:
        try:
            total, available = source()
        except (OSError, ImportError, LookupError, ValueError, AttributeError) as error:
            reasons.append(f"{type(error).__name__}: {error}")
        else:
            if total > 0:
                return total, max(0, min(available, total))
            reasons.append(f"a source answered {total} bytes")
    raise HardwareError(
        f"The RAM of this host could not be read ({'; '.join(reasons)}): `pip install psutil`, which "
        "knows how on more systems."
    )


def _meminfo(proc: Path) -> tuple[int, int]:
    fields = {}
    for line in (proc / "meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields[key] = value
    total = _kib(fields["MemTotal"])
    # MemAvailable came with Linux 3.14; before, what is free or cached is the nearest to it.
    if "MemAvailable" in fields:
        return total, _kib(fields["MemAvailable"])
    return total, sum(_kib(fields.get(key, "0 kB")) for key in ("MemFree", "Buffers", "Cached"))


def _kib(field: str) -> int:
    return int(field.split()[0]) * 1024


def _psutil() -> tuple[int, int]:
    # Optional, and without type information: by name, so that neither is asked for.
    psutil = importlib.import_module("psutil")
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _sysconf() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    # macOS does not say how much is free without psutil; half is a guess that rarely promises too much.
    has_available = "SC_AVPHYS_PAGES" in os.sysconf_names
    return total, os.sysconf("SC_AVPHYS_PAGES") * page if has_available else total // 2


def _cores(quota: float | None) -> int:
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """The memory limit of one control group, and how much of it is taken.

    Attributes:
        group: The directory of the group.
        limit_bytes: What its processes may hold together.
        used_bytes: What they hold, without the file cache that the kernel gives back when asked.
    """

    group: Path
    limit_bytes: int
    used_bytes: int

    @property
    def available_bytes(self) -> int:
        """What is left under the limit."""
        return max(0, self.limit_bytes - self.used_bytes)


def memory_limits(proc: Path, cgroup_root: Path) -> tuple[CgroupMemory, ...]:
    """Every memory limit on the way from this process's group to the root, innermost first.

    "No limit" is spelled "max" in version 2; in version 1 it is a number near 2**63, which is returned as it
    is: it is more than any machine has, so taking the least of it and the RAM is right.
    """
    limits = []
    for group, version in _groups(proc, cgroup_root, "memory"):
        found = _memory_v2(group) if version == 2 else _memory_v1(group)
        if found is not None:
            limits.append(found)
    return tuple(limits)


def cpu_quota(proc: Path, cgroup_root: Path) -> float | None:
    """The cores' worth of time that this process's groups may take, or None if they may take all."""
    quotas = []
    for group, version in _groups(proc, cgroup_root, "cpu"):
        if version == 2:
            words = (_read(group / "cpu.max") or "").split()
            quota, period = (_number(words[0]), _number(words[1])) if len(words) == 2 else (None, None)
        else:
            quota = _number(_read(group / "cpu.cfs_quota_us"))  # -1: no quota
            period = _number(_read(group / "cpu.cfs_period_us"))
        if quota is not None and period is not None and quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(proc: Path, cgroup_root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The directories of this process's groups, innermost first, with their version.

    A line of `/proc/self/cgroup` is "0::/path" for version 2 and "4:memory:/path" for version 1; a machine
    may have both.
    """
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            # With version 1 in use as well, version 2 is mounted beside its controllers.
            candidates = [cgroup_root / "unified", cgroup_root]
            version = 2
        elif controller in controllers.split(","):
            candidates = [cgroup_root / controllers, cgroup_root / controller]
            version = 1
        else:
            continue
        mount = next((directory for directory in candidates if directory.is_dir()), None)
        if mount is not None:
            for group in _upwards(mount, path):
                yield group, version


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The directory of the group `path` and those above it, up to `mount`.

    A container often sees the host's name for its group ("/docker/4f2a…/job") while its mount starts at that
    group ("/job"). So the longest tail of the path that exists below the mount is the group.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for start in range(len(parts) + 1):
        tail = parts[start:]
        if mount.joinpath(*tail).is_dir():
            for length in range(len(tail), -1, -1):
                yield mount.joinpath(*tail[:length])
            return


def _memory_v2(group: Path) -> CgroupMemory | None:
    # Above memory.high the kernel slows a group down to nearly nothing, which to training is as good as a
    # limit.
    limits = [_number(_read(group / name)) for name in ("memory.max", "memory.high")]
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    used = _number(_read(group / "memory.current")) or 0
    return CgroupMemory(group, min(known), max(0, used - _statistic(group, "inactive_file")))


def _memory_v1(group: Path) -> CgroupMemory | None:
    limit = _number(_read(group / "memory.limit_in_bytes"))
    if limit is None:
        return None
    used = _number(_read(group / "memory.usage_in_bytes")) or 0
    return CgroupMemory(group, limit, max(0, used - _statistic(group, "total_inactive_file")))


def _statistic(group: Path, name: str) -> int:
    for line in (_read(group / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value) or 0
    return 0


def _number(text: str | None) -> int | None:
    """The number in a control file; None for "max", for a missing file, and for what is no number."""
    try:
        return None if text is None else int(text.strip())
    except ValueError:
        return None


def _read(path: Path) -> str | None:
    """The text of a control file; None where the group has none, or the container hides it."""
    try:
        return path.read_text()
    except OSError:
        return None


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
