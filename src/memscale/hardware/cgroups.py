"""What the control groups of Linux allow this process: memory and CPU time, version 1 and version 2.

A container sees the memory of its whole machine in `/proc/meminfo` and is killed long before it has used
that. The limit is in its control group, or in any group above it: the tightest one counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["CgroupMemory", "cpu_quota", "memory_limits"]


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
