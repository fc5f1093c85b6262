"""Read the host: RAM and cores within the limits of control groups, and the directory for the disk tier.

A container sees the memory of its whole machine in `/proc/meminfo` and is killed long before it has used that. The
limit is in its control group (version 1 or 2), or in any group above it: the tightest one counts.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from memscale.errors import ConfigTypeError, HardwareError, shown
from memscale.hardware.specs import DiskSpec, HostSpec

__all__ = ["OFFLOAD_DIR_VARIABLE", "PROC", "find_disk", "read_host"]

PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")
OFFLOAD_DIR_VARIABLE = "MEMSCALE_OFFLOAD_DIR"

# Assumptions, so that plans never depend on a measurement: below what NVMe drives sustain, above SATA.
_READ_BANDWIDTH = 2.0e9
_WRITE_BANDWIDTH = 1.0e9

_RAM_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "rootfs"})
_VAR_TMP = Path("/var/tmp")


def read_host(*, proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> HostSpec:
    """Read the RAM and the cores that this process may use.

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
    for limit, used in _memory_limits(proc, cgroup_root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    quota = _cpu_quota(proc, cgroup_root)
    if quota is not None:
        cores = max(1, min(cores, math.ceil(quota)))
    return HostSpec(total_ram_bytes=total, available_ram_bytes=min(available, total), cores=cores)


def _ram(proc: Path) -> tuple[int, int]:
    """Return total and available RAM in bytes from the first source that has them."""
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
        fields[key] = int(value.split()[0]) * 1024 if value else 0  # "  123456 kB"
    # MemAvailable came with Linux 3.14; before, free and cached memory are the nearest to it.
    if "MemAvailable" in fields:
        return fields["MemTotal"], fields["MemAvailable"]
    return fields["MemTotal"], sum(fields.get(key, 0) for key in ("MemFree", "Buffers", "Cached"))


def _psutil() -> tuple[int, int]:
    psutil = importlib.import_module("psutil")  # optional, and without type information
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _sysconf() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    # macOS does not report free memory without psutil; half is a guess that rarely promises too much.
    has_available = "SC_AVPHYS_PAGES" in os.sysconf_names
    return total, os.sysconf("SC_AVPHYS_PAGES") * page if has_available else total // 2


# -- control groups


def _memory_limits(proc: Path, cgroup_root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of every group from this process's to the root, in bytes.

    Use is without the file cache that the kernel can drop. "No limit" is "max" in version 2; in version 1 it is a
    number near 2**63, more than any machine has.
    """
    for group, version in _groups(proc, cgroup_root, "memory"):
        # Above memory.high the kernel slows a group down to nearly nothing, which is as good as a limit.
        files = ["memory.max", "memory.high"] if version == 2 else ["memory.limit_in_bytes"]
        use = "memory.current" if version == 2 else "memory.usage_in_bytes"
        cache = "inactive_file" if version == 2 else "total_inactive_file"
        limits = [limit for name in files if (limit := _number(_read(group / name))) is not None]
        if limits:
            used = _number(_read(group / use)) or 0
            yield min(limits), max(0, used - _statistic(group, cache))


def _cpu_quota(proc: Path, cgroup_root: Path) -> float | None:
    """Return how many cores' worth of time this process's groups may use; None if there is no limit."""
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
    """Yield the directories of this process's groups, innermost first, with their version.

    A line of `/proc/self/cgroup` is "0::/path" for version 2 and "4:memory:/path" for version 1; a machine may have
    both.
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
            for group in _group_and_parents(mount, path):
                yield group, version


def _group_and_parents(mount: Path, path: str) -> Iterator[Path]:
    """Yield the directory of the group `path` and those above it, up to `mount`.

    A container often sees the host's name of its group ("/docker/4f2a…/job") while its mount starts at that group
    ("/job"), so the longest tail of the path that exists below the mount is the group.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for start in range(len(parts) + 1):
        tail = parts[start:]
        if mount.joinpath(*tail).is_dir():
            for length in range(len(tail), -1, -1):
                yield mount.joinpath(*tail[:length])
            return


def _statistic(group: Path, name: str) -> int:
    for line in (_read(group / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value) or 0
    return 0


def _number(text: str | None) -> int | None:
    """Parse a control file; None for "max", for a missing file, and for what is not a number."""
    try:
        return None if text is None else int(text.strip())
    except ValueError:
        return None


def _read(path: Path) -> str | None:
    """Read a control file; None where the group has none, or the container hides it."""
    try:
        return path.read_text()
    except OSError:
        return None


# -- the disk tier


def find_disk(
    directory: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    proc: Path = PROC,
    var_tmp: Path = _VAR_TMP,
) -> DiskSpec:
    """Choose the directory of the disk tier and read how much it can hold. Nothing is created or written.

    The directory is, in this order: the one given; the environment's `MEMSCALE_OFFLOAD_DIR`; the system's
    directory for temporary files. The last is in RAM on many systems (tmpfs), where offloading would free nothing:
    then it is `/var/tmp`, if that is on a disk and writable.

    Args:
        directory: Where offloaded tensors go. It need not exist yet; the nearest existing parent is examined.
        environ: The environment; `os.environ` if None.
        proc: Where the process file system is; a test puts its own there.
        var_tmp: The replacement for a temporary directory in RAM.

    Raises:
        HardwareError: The directory is a file, no parent of it exists, or it can't be examined.

    Example:
        >>> disk = find_disk(".")
        >>> disk.free_bytes <= disk.total_bytes
        True
    """
    chosen = _requested_directory(directory, os.environ if environ is None else environ)
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
        # disk_usage's "free" is f_bavail: without the blocks reserved for root.
        free_bytes=min(usage.free, usage.total),
        total_bytes=usage.total,
        writable=os.access(existing, os.W_OK | os.X_OK),
        read_bandwidth=_READ_BANDWIDTH,
        write_bandwidth=_WRITE_BANDWIDTH,
        filesystem=filesystem,
        ram_backed=filesystem in _RAM_FILESYSTEMS,
    )


def _requested_directory(directory: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Path | None:
    if directory is None:
        # An empty variable is how a shell says "not set".
        directory = environ.get(OFFLOAD_DIR_VARIABLE) or None
        if directory is None:
            return None
    elif not isinstance(directory, (str, os.PathLike)):
        raise ConfigTypeError(
            f"offload_dir={shown(directory)} is a {type(directory).__name__}: give a path, as str or Path."
        )
    elif not os.fspath(directory):
        raise HardwareError("offload_dir is empty: give the path of a directory, or None for the default.")
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
    """Return the type of the file system that `directory` is on; None where there is no `/proc/mounts`."""
    try:
        mounts = (proc / "mounts").read_text()
    except OSError:
        return None
    target = directory.resolve()
    deepest: tuple[int, str | None] = (-1, None)
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        # Special characters are in octal: a space is backslash 040.
        mount = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[1]))
        depth = len(mount.parts)
        # The deepest mount holds the directory; of two on one point, the later hides the earlier.
        if depth >= deepest[0] and target.is_relative_to(mount):
            deepest = (depth, fields[2])
    return deepest[1]
