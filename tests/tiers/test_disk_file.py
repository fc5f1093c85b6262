"""Room on disk: the cap, a full disk, a directory that can't be used, and forks."""

import contextlib
import errno
import gc
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memscale.errors import HardwareError, TierError, TierFullError
from memscale.tiers import disk
from memscale.tiers.disk import PAGE, WRITE_BYTES, DiskFile, DiskStore, FreeList, round_up


def blocks(where: DiskFile) -> int:
    """Bytes that the file system says the file has."""
    return os.fstat(where.fd).st_blocks * 512


def run(code: str, *args: object, ok: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not ok or done.returncode == 0, done.stderr
    return done.stdout if ok else done.stderr


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_free_ranges_never_overlap_and_lose_nothing(steps):
    free = FreeList()
    free.release(0, 200)
    taken: dict[int, int] = {}
    for take, length in steps:
        if take or not taken:
            offset = free.allocate(length)
            if offset is not None:
                assert all(
                    offset + length <= other or other + size <= offset for other, size in taken.items()
                )
                taken[offset] = length
        else:
            offset = sorted(taken)[length % len(taken)]
            free.release(offset, taken.pop(offset))
        assert free.total + sum(taken.values()) == 200
    for offset, length in taken.items():
        free.release(offset, length)
    assert free.allocate(200) == 0  # joined again


@settings(max_examples=20)
@given(st.lists(st.integers(1, 5 * PAGE), max_size=12), st.randoms())
def test_the_cap_holds_and_the_disk_gets_its_space_back(sizes, random):
    with contextlib.closing(DiskFile(capacity=20 * PAGE)) as where:
        extents = []
        for size in sizes:
            try:
                extents.append(where.allocate(size))
            except TierFullError:
                where.free(extents.pop(random.randrange(len(extents))))
            assert where.bytes_used == sum(extent.nbytes for extent in extents) <= where.capacity
            ranges = sorted((extent.offset, extent.offset + extent.nbytes) for extent in extents)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
            # Whole pages, and what the file system needs to remember where they are.
            assert blocks(where) <= where.bytes_on_disk + PAGE <= where.capacity + PAGE
        for extent in extents:
            where.free(extent)
        assert where.bytes_used == 0


def test_without_holes_the_file_itself_stays_within_the_cap(monkeypatch, tmp_path):
    monkeypatch.setattr(disk, "_punch_hole", lambda fd, offset, nbytes: False)
    with contextlib.closing(DiskFile(tmp_path, 4 * PAGE)) as where:
        first = where.allocate(2 * PAGE)
        where.allocate(2 * PAGE)
        where.free(first)
        where.allocate(PAGE)  # in the place of the first
        with pytest.raises(TierFullError):
            where.allocate(2 * PAGE)
        assert blocks(where) <= 4 * PAGE + PAGE


def test_a_second_step_allocates_nothing(tmp_path, monkeypatch):
    calls = []
    real = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: (calls.append(args), real(*args)))
    with contextlib.closing(DiskFile(tmp_path, 2**20)) as where:
        for _ in range(3):
            extents = [where.allocate(size) for size in (5 * PAGE, PAGE, 9 * PAGE)]
            for extent in extents:
                where.free(extent)
        assert len(calls) == 3
        assert where.bytes_used == 0
        assert where.bytes_on_disk == 15 * PAGE


def test_spares_make_way_for_other_sizes(tmp_path):
    with contextlib.closing(DiskFile(tmp_path, 10 * PAGE)) as where:
        extents = [where.allocate(PAGE) for _ in range(10)]
        for extent in extents[::2]:
            where.free(extent)
        where.allocate(3 * PAGE)  # no spare is that long
        assert blocks(where) <= 10 * PAGE + PAGE
        assert where.bytes_on_disk <= 10 * PAGE


def test_a_full_disk_takes_the_spares_first(tmp_path, monkeypatch):
    real, refusals = os.posix_fallocate, [True]

    def full_once(*args):
        if refusals.pop():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    with contextlib.closing(DiskFile(tmp_path, 2**20)) as where:
        where.free(where.allocate(PAGE))
        monkeypatch.setattr(os, "posix_fallocate", full_once)
        refusals.insert(0, False)
        where.allocate(2 * PAGE)
        assert where.bytes_on_disk == 2 * PAGE


def test_a_full_disk_is_an_error_at_once_and_takes_nothing(tmp_path, monkeypatch):
    def full(fd, offset, length):
        os.pwrite(fd, bytes(PAGE), offset)  # a part of it is allocated before it fails
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with contextlib.closing(DiskStore(tmp_path, 2**20)) as store:
        kept = torch.randn(1000)
        mapped = store.copy_of(kept)
        before = blocks(store.file)
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(TierFullError, match=r"no room for 16.0 KiB more: No space left") as error:
            store.copy_of(torch.randn(4096))
        assert "Config(offload_dir=...)" in str(error.value)
        assert isinstance(error.value.__cause__, OSError)
        assert blocks(store.file) == before
        monkeypatch.undo()
        assert torch.equal(mapped, kept)
        assert torch.equal(store.copy_of(kept * 2), kept * 2)


TINY_DISK = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
uid, gid = os.getuid(), os.getgid()
if libc.unshare(0x10000000 | 0x00020000) != 0:  # namespaces of its own: user, mounts
    sys.exit(77)
for file, text in ("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1"):
    with open(f"/proc/self/{file}", "w") as target:
        target.write(text)
if libc.mount(b"none", b"/", None, 0x44000, None) != 0:  # nothing of it is seen outside
    sys.exit(77)
if libc.mount(b"tmpfs", sys.argv[1].encode(), b"tmpfs", 0, b"size=1m") != 0:
    sys.exit(77)

import torch
from memscale.errors import TierFullError
from memscale.tiers.disk import DiskStore

store = DiskStore(sys.argv[1], 2**30)
stored = [torch.full((100_000,), 1.0), torch.full((100_000,), 2.0)]
mapped = [store.copy_of(each) for each in stored]
try:
    store.empty((100_000,))
except TierFullError as error:
    print(error)
else:
    sys.exit("it fitted")
assert torch.equal(mapped[0], stored[0]) and torch.equal(mapped[1], stored[1])
del mapped
assert torch.equal(store.copy_of(stored[1]), stored[1])
"""


def test_a_disk_that_is_really_full(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TINY_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("mounting a small disk is not permitted here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("has no room for 390.63 KiB more: No space left on device") == 1


SMALL_FILES = """
import resource, sys, torch
from memscale.errors import TierFullError
from memscale.tiers.disk import DiskStore
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
store = DiskStore(sys.argv[1], 2**30)
mapped = store.copy_of(torch.ones(100_000))
try:
    store.copy_of(torch.zeros(1_000_000))
except TierFullError as error:
    print(error)
assert bool((mapped == 1).all())
"""


def test_files_that_may_not_grow(tmp_path):
    assert "files may not grow that large here (ulimit -f)" in run(SMALL_FILES, tmp_path)


def test_a_file_in_place_of_the_directory(tmp_path):
    place = tmp_path / "file"
    place.write_text("")
    with pytest.raises(HardwareError, match="is not a directory"):
        DiskFile(place)
    with pytest.raises(HardwareError):
        DiskFile(place / "below")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_directory_that_may_not_be_written_to(tmp_path, monkeypatch, code):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", refuse)
    where = DiskFile(tmp_path / "new", 2**20)
    for call in (lambda: where.fd, lambda: where.allocate(10)):
        with pytest.raises(TierError, match=f"{os.strerror(code)}.*MEMSCALE_OFFLOAD_DIR") as error:
            call()
        assert isinstance(error.value.__cause__, OSError)
    assert where.bytes_used == 0


def test_the_directory_is_made_with_the_first_byte_and_the_file_has_no_name(tmp_path):
    with contextlib.closing(DiskStore(tmp_path / "a" / "b", 2**20)) as store:
        assert not (tmp_path / "a").exists()
        mapped = store.copy_of(torch.ones(1))
        assert list((tmp_path / "a" / "b").iterdir()) == []
        assert float(mapped) == 1


def test_a_file_that_is_cut_is_an_error_not_garbage(tmp_path):
    with contextlib.closing(DiskStore(tmp_path, 2**20)) as store:
        mapped = store.copy_of(torch.randn(10_000))
        os.ftruncate(store.file.fd, PAGE)
        with pytest.raises(OSError, match="the file ends"):
            store.read(mapped)


def test_room_that_is_only_counted_takes_no_disk(tmp_path):
    with contextlib.closing(DiskFile(tmp_path, 10 * PAGE)) as where:
        extent = where.allocate(10 * PAGE, counted_only=True)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(TierFullError):
            where.allocate(1, counted_only=True)
        where.free(extent)
        assert where.bytes_used == 0


FORK = """
import os, sys, torch
from memscale.errors import TierError
from memscale.tiers.disk import DiskStore

store = DiskStore(sys.argv[1], 2**24)
mapped = store.copy_of(torch.ones(5000))
if os.fork() == 0:
    assert bool((mapped == 1).all())
    mapped.fill_(2)
    assert bool((store.read(mapped) == 2).all())
    try:
        store.copy_of(torch.ones(1))
    except TierError as error:
        print(error, flush=True)
    del mapped
    sys.exit(0)  # finalizers and exit handlers run
assert os.wait()[1] == 0
assert not os.listdir(sys.argv[1])
assert bool((store.read(mapped) == 1).all()) and bool((mapped == 1).all())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_can_read_and_neither_allocates_nor_frees(tmp_path):
    assert "is a fork of it" in run(FORK, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_default_directory_is_the_one_of_the_hardware(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMSCALE_OFFLOAD_DIR", str(tmp_path))
    with contextlib.closing(DiskStore(capacity=2**20)) as store:
        assert store.file.directory == Path(tmp_path)


def test_round_up():
    assert [round_up(n) for n in (1, PAGE, PAGE + 1)] == [PAGE, PAGE, 2 * PAGE]


# ---------------------------------------------------------------------- writes


def test_writes_are_in_pieces(monkeypatch):
    sizes: list[int] = []
    pwrite = os.pwrite

    def noted(fd, data, offset):
        sizes.append(len(data))
        return pwrite(fd, data, offset)

    values = torch.arange(WRITE_BYTES, dtype=torch.float32)[: WRITE_BYTES - 5]  # four, the last one shorter
    with contextlib.closing(DiskStore(capacity=2**22)) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", noted)
            mapped = store.copy_of(values)
        written = [size for size in sizes if size > 4096]
        assert written == [WRITE_BYTES] * 3 + [WRITE_BYTES - 20]
        assert torch.equal(mapped, values)


def test_a_write_that_takes_less_is_continued(monkeypatch):
    pwrite = os.pwrite
    values = torch.arange(1000, dtype=torch.float32)
    with contextlib.closing(DiskStore(capacity=2**20)) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:700], offset))
            mapped = store.copy_of(values)
        assert torch.equal(mapped, values)


def test_dropped_without_closing(tmp_path):
    store = DiskStore(tmp_path, 2**20)
    store.copy_of(torch.ones(5))
    fds = len(os.listdir("/proc/self/fd"))
    del store
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < fds
