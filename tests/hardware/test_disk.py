"""The disk tier: which directory is chosen, and what is said about it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from memscale.errors import ConfigTypeError, HardwareError
from memscale.hardware import find_disk


def mounts(proc: Path, *lines: str) -> Path:
    proc.mkdir(exist_ok=True)
    (proc / "mounts").write_text("".join(f"{line} rw 0 0\n" for line in lines))
    return proc


@pytest.fixture
def tmp_in_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose directory for temporary files is on tmpfs, with a disk beside it."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "var tmp").mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path


def escaped(path: Path) -> str:
    return str(path).replace(" ", r"\040")


def test_the_directory_given_wins(tmp_path: Path) -> None:
    disk = find_disk(tmp_path, environ={"MEMSCALE_OFFLOAD_DIR": "/elsewhere"})
    assert disk.directory == tmp_path
    assert disk.writable
    assert disk.free_bytes > 0
    assert disk.read_bandwidth > 0 < disk.write_bandwidth


def test_the_environment_comes_next(tmp_path: Path) -> None:
    assert find_disk(environ={"MEMSCALE_OFFLOAD_DIR": str(tmp_path)}).directory == tmp_path


@pytest.mark.parametrize("environ", [{}, {"MEMSCALE_OFFLOAD_DIR": ""}])
def test_then_the_directory_for_temporary_files(tmp_in_ram: Path, environ) -> None:
    proc = mounts(tmp_in_ram / "proc", "/dev/sda / ext4")
    disk = find_disk(environ=environ, proc=proc, var_tmp=tmp_in_ram / "var tmp")
    assert disk.directory == tmp_in_ram / "tmp"
    assert not disk.ram_backed


def test_a_disk_is_preferred_to_a_tmp_in_ram(tmp_in_ram: Path) -> None:
    proc = mounts(tmp_in_ram / "proc", "/dev/sda / ext4", f"tmpfs {tmp_in_ram / 'tmp'} tmpfs")
    disk = find_disk(environ={}, proc=proc, var_tmp=tmp_in_ram / "var tmp")
    assert disk.directory == tmp_in_ram / "var tmp"
    assert not disk.ram_backed


@pytest.mark.parametrize("other", ["missing", "in ram too"])
def test_a_tmp_in_ram_is_used_and_named_where_there_is_nothing_better(tmp_in_ram: Path, other: str) -> None:
    var_tmp = tmp_in_ram / ("var tmp" if other == "in ram too" else "missing")
    proc = mounts(
        tmp_in_ram / "proc",
        "/dev/sda / ext4",
        f"tmpfs {tmp_in_ram / 'tmp'} tmpfs",
        f"tmpfs {escaped(var_tmp)} tmpfs",
    )
    disk = find_disk(environ={}, proc=proc, var_tmp=var_tmp)
    assert disk.directory == tmp_in_ram / "tmp"
    assert disk.ram_backed


def test_a_directory_given_in_ram_is_taken_and_named(tmp_path: Path) -> None:
    proc = mounts(tmp_path / "proc", "/dev/sda / ext4", f"tmpfs {tmp_path} tmpfs")
    assert find_disk(tmp_path, proc=proc).ram_backed


def test_of_two_mounts_on_one_point_the_later_counts(tmp_path: Path) -> None:
    proc = mounts(tmp_path / "proc", "rootfs / rootfs", "/dev/sda / xfs", "short")
    assert not find_disk(tmp_path, proc=proc).ram_backed


def test_a_mount_whose_name_only_begins_alike_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "data-2").mkdir()
    proc = mounts(tmp_path / "proc", "/dev/sda / ext4", f"tmpfs {tmp_path / 'data'} tmpfs")
    assert not find_disk(tmp_path / "data-2", proc=proc).ram_backed


def test_without_proc_the_filesystem_is_not_known(tmp_path: Path) -> None:
    disk = find_disk(tmp_path, proc=tmp_path / "nothing")
    assert not disk.ram_backed


def test_a_directory_need_not_exist_and_is_not_made(tmp_path: Path) -> None:
    disk = find_disk(tmp_path / "a" / "b")
    assert disk.directory == tmp_path / "a" / "b"
    assert disk.writable
    assert not (tmp_path / "a").exists()


def test_a_relative_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_disk("new/er").writable


def test_home_is_expanded() -> None:
    assert find_disk("~").directory == Path.home()


def test_a_directory_that_is_not_writable_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # to root every directory is writable
    assert not find_disk(tmp_path).writable


@pytest.mark.parametrize("below", ["", "/further"])
def test_a_file_is_no_directory(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HardwareError, match="is not a directory"):
        find_disk(f"{tmp_path}/file{below}")


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(HardwareError, match="offload_dir is empty"):
        find_disk("")


def test_a_path_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, message in (
        (tmp_path / ("x" * 300), "can't be looked at: File name too long"),
        (tmp_path / "loop", "is not a directory"),
    ):
        with pytest.raises(HardwareError, match=message):
            find_disk(path)


@pytest.mark.parametrize("directory", [3, True, ["/tmp"]])
def test_a_path_is_text_or_a_path(directory: object) -> None:
    with pytest.raises(ConfigTypeError, match="give a path"):
        find_disk(directory)  # type: ignore[arg-type]
