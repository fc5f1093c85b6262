"""Host memory and cores: control groups of both versions, nested, hidden, unlimited; systems without /proc.

The trees under `tmp_path` are laid out as the kernel does under /proc and /sys/fs/cgroup.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memscale.hardware import HostSpec, read_host

GIB = 2**30
UNLIMITED_V1 = "9223372036854771712"  # 2**63 - 1, rounded down to a page


class Machine:
    """A fake /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path, total: int = 64 * GIB, available: int = 60 * GIB) -> None:
        self.proc = root / "proc"
        self.cgroup = root / "cgroup"
        self.write(
            self.proc / "meminfo",
            f"MemTotal: {total // 1024} kB\nMemFree: 5 kB\nMemAvailable: {available // 1024} kB\n",
        )
        self.cgroup.mkdir(parents=True)

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def belongs_to(self, *lines: str) -> None:
        self.write(self.proc / "self" / "cgroup", "".join(f"{line}\n" for line in lines))

    def group(self, path: str, **files: object) -> None:
        for name, text in files.items():
            self.write(self.cgroup / path / name.replace("__", "."), f"{text}\n")

    def read(self, **environ: str):
        return read_host(proc=self.proc, cgroup_root=self.cgroup, environ=environ)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_control_groups_the_machine_counts(machine: Machine) -> None:
    host = machine.read()
    assert (host.total_ram_bytes, host.available_ram_bytes) == (64 * GIB, 60 * GIB)


@pytest.mark.parametrize(("started", "processes"), [("4", 4), ("1", 1), ("", 1), ("0", 1), ("many", 1)])
def test_processes_that_torchrun_has_started_share_the_host(machine: Machine, started, processes) -> None:
    alone, host = machine.read(), machine.read(LOCAL_WORLD_SIZE=started)
    assert (alone.processes, host.processes) == (1, processes)
    assert host.offload_bytes == alone.offload_bytes // processes
    assert host.page_locked_bytes == host.offload_bytes // 2


@pytest.mark.parametrize("total", [64 * GIB, 10**9 + 7, 5])
def test_what_may_be_offloaded_is_free_less_a_reserve_in_steps(total: int) -> None:
    assert HostSpec(total, total, 1).offload_bytes == total  # nobody else is there: the host of a virtual GPU
    step = max(1, total // 16)
    rooms = [HostSpec(total, total * part // 1000, 1).offload_bytes for part in range(1000)]
    assert rooms == sorted(rooms)
    assert len(set(rooms)) <= 18
    for part, room in enumerate(rooms):
        free = total * part // 1000
        reserve = min(total - free, step)
        assert room == 0 or free - reserve - step < room <= free - reserve


def test_version_2_limit(machine: Machine) -> None:
    machine.belongs_to("0::/job")
    machine.group("job", memory__max=8 * GIB, memory__current=3 * GIB)
    host = machine.read()
    assert (host.total_ram_bytes, host.available_ram_bytes) == (8 * GIB, 5 * GIB)


def test_file_cache_that_can_be_dropped_is_not_in_use(machine: Machine) -> None:
    machine.belongs_to("0::/job")
    machine.group(
        "job",
        memory__max=8 * GIB,
        memory__current=6 * GIB,
        memory__stat=f"anon 1\ninactive_file {2 * GIB}\nactive_file 7",
    )
    assert machine.read().available_ram_bytes == 4 * GIB


def test_version_2_without_a_limit(machine: Machine) -> None:
    machine.belongs_to("0::/job")
    machine.group("job", memory__max="max", memory__high="max", memory__current=3 * GIB)
    host = machine.read()
    assert (host.total_ram_bytes, host.available_ram_bytes) == (64 * GIB, 60 * GIB)


def test_the_high_mark_is_a_limit_too(machine: Machine) -> None:
    machine.belongs_to("0::/job")
    machine.group("job", memory__max="max", memory__high=4 * GIB, memory__current=1 * GIB)
    assert machine.read().total_ram_bytes == 4 * GIB


@pytest.mark.parametrize(
    ("outer", "inner", "tightest"), [(4, 16, 4), (16, 4, 4), ("max", 4, 4), (4, "max", 4)]
)
def test_the_tightest_limit_on_the_way_up_counts(machine: Machine, outer, inner, tightest) -> None:
    def limit(gib: object) -> object:
        return gib * GIB if isinstance(gib, int) else gib

    machine.belongs_to("0::/slice/job/task")
    machine.group("slice", memory__max=limit(outer), memory__current=0)
    machine.group("slice/job", memory__max="max", memory__current=0)
    machine.group("slice/job/task", memory__max=limit(inner), memory__current=0)
    assert machine.read().total_ram_bytes == tightest * GIB


def test_what_is_available_is_the_least_of_all_levels(machine: Machine) -> None:
    """The group has room, but its neighbours have filled the one above."""
    machine.belongs_to("0::/slice/job")
    machine.group("slice", memory__max=32 * GIB, memory__current=31 * GIB)
    machine.group("slice/job", memory__max=8 * GIB, memory__current=1 * GIB)
    host = machine.read()
    assert (host.total_ram_bytes, host.available_ram_bytes) == (8 * GIB, 1 * GIB)


def test_a_group_past_its_limit_has_nothing_left(machine: Machine) -> None:
    machine.belongs_to("0::/job")
    machine.group("job", memory__max=2 * GIB, memory__current=3 * GIB)
    assert machine.read().available_ram_bytes == 0


def test_version_1_limit(machine: Machine) -> None:
    machine.belongs_to("9:name=systemd:/", "4:memory:/job", "1:cpu:/")
    machine.group(
        "memory/job",
        memory__limit_in_bytes=8 * GIB,
        memory__usage_in_bytes=5 * GIB,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {GIB}",
    )
    machine.group("memory", memory__limit_in_bytes=UNLIMITED_V1, memory__usage_in_bytes=50 * GIB)
    host = machine.read()
    assert (host.total_ram_bytes, host.available_ram_bytes) == (8 * GIB, 4 * GIB)


def test_version_1_without_a_limit_is_a_huge_number(machine: Machine) -> None:
    machine.belongs_to("4:memory:/job")
    machine.group("memory/job", memory__limit_in_bytes=UNLIMITED_V1, memory__usage_in_bytes=5 * GIB)
    host = machine.read()
    assert (host.total_ram_bytes, host.available_ram_bytes) == (64 * GIB, 60 * GIB)


@pytest.mark.parametrize("seen", ["/docker/4f2a9c", "/docker/4f2a9c/", "/../../4f2a9c", "/"])
def test_a_container_sees_its_own_group_at_the_mount(machine: Machine, seen: str) -> None:
    """The path is the host's, and the mount starts at the container's group."""
    machine.belongs_to(f"4:memory:{seen}")
    machine.group("memory", memory__limit_in_bytes=6 * GIB, memory__usage_in_bytes=0)
    assert machine.read().total_ram_bytes == 6 * GIB


def test_a_group_made_inside_a_container(machine: Machine) -> None:
    machine.belongs_to("4:memory:/docker/4f2a9c/job")
    machine.group("memory", memory__limit_in_bytes=6 * GIB, memory__usage_in_bytes=0)
    machine.group("memory/job", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=0)
    assert machine.read().total_ram_bytes == 2 * GIB


def test_both_versions_at_once(machine: Machine) -> None:
    machine.belongs_to("4:memory:/job", "0::/job")
    machine.group("unified/job", cgroup__procs="1")
    machine.group("memory/job", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=0)
    assert machine.read().total_ram_bytes == 3 * GIB


@pytest.mark.parametrize("text", ["", "garbage", "12"])
def test_control_files_that_make_no_sense_are_no_limit_or_a_small_one(machine: Machine, text: str) -> None:
    machine.belongs_to("0::/job", "nonsense", "")
    machine.group("job", memory__max=text)
    assert machine.read().total_ram_bytes == (12 if text == "12" else 64 * GIB)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu__max": "max 100000"}, None),
        ({"cpu__max": "100000 100000"}, 1),
        ({"cpu__max": "50000 100000"}, 1),
        ({"cpu__max": "nonsense"}, None),
    ],
)
def test_the_cpu_quota_limits_the_cores(machine: Machine, files, cores) -> None:
    machine.belongs_to("0::/job")
    machine.group("job", **files)
    assert machine.read().cores == (cores or len(os.sched_getaffinity(0)))


def test_the_cpu_quota_of_version_1(machine: Machine) -> None:
    machine.belongs_to("1:cpu,cpuacct:/job")
    machine.group("cpu,cpuacct/job", cpu__cfs_quota_us=100000, cpu__cfs_period_us=100000)
    machine.group("cpu,cpuacct", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert machine.read().cores == 1


def test_this_machine() -> None:
    host = read_host()
    assert 2**28 < host.available_ram_bytes <= host.total_ram_bytes < 2**46
    assert 1 <= host.cores <= (os.cpu_count() or 1)


def test_without_proc_half_of_the_memory_is_taken_for_free(tmp_path: Path) -> None:
    host = read_host(proc=tmp_path, cgroup_root=tmp_path)
    assert host.total_ram_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host.available_ram_bytes == host.total_ram_bytes // 2
