"""The host: how much RAM this process may use, and how many cores."""

from __future__ import annotations

import importlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from memscale.errors import HardwareError
from memscale.hardware.cgroups import cpu_quota, memory_limits
from memscale.hardware.device import HostSpec

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PROC", "read_host"]

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
