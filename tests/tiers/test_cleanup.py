"""Nothing is left on disk: after a normal end, an exception, SIGTERM or SIGKILL, and the next start."""

import gc
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from memscale.tiers import directory
from memscale.tiers.directory import PrivateDirectory, remove_leftovers
from memscale.tiers.disk import DiskTier

CHILD = """
import os, sys, threading, time, torch
from memscale.tiers.disk import DiskTier
from memscale.tiers.engine import AsyncEngine
from memscale.tiers.mapped import MappedArena

engine = AsyncEngine()
tier = DiskTier(sys.argv[1], 2**30, engine=engine)
arena = MappedArena(tier.space)
tickets = [tier.store(torch.randn(2**20)) for _ in range(4)]
home = arena.copy_of(torch.randn(2**20))
tier.prefetch(tickets[0])
{end}
"""
WAIT = 'tier.flush(); print("stored", flush=True); time.sleep(600)'


def start(tmp_path, end):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD.format(end=end), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("tier.flush()", 0),
        ("tier.close(); engine.close()", 0),
        ("raise RuntimeError('crash')", 1),
        ("sys.exit(3)", 3),
        ("threading.Thread(target=lambda: [tier.store(torch.ones(9)) for _ in range(99)]).start()", 0),
    ],
    ids=["end", "flushed", "closed", "crash", "exit", "in use"],
)
def test_a_process_that_ends_leaves_nothing(tmp_path, end, code):
    child = start(tmp_path, end)
    _, stderr = child.communicate(timeout=120)
    assert child.returncode == code, stderr
    assert "crash" in stderr or not stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_leaves_no_bytes_and_the_next_start_cleans_up(tmp_path, kill):
    child = start(tmp_path, WAIT)
    assert child.stdout.readline() == "stored\n"
    (private,) = tmp_path.iterdir()
    # Alive: its directory is left alone.
    with DiskTier(tmp_path, 2**20) as tier:
        tier.store(torch.ones(1))
        assert private.exists()
        assert len(list(tmp_path.iterdir())) == 2
    child.send_signal(kill)
    child.wait(timeout=60)
    child.communicate()
    # The tensors went with it; its directory and lock are left.
    left = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert private.exists()
    assert left == 0
    with DiskTier(tmp_path, 2**20) as tier:
        tier.store(torch.ones(1))
        assert not private.exists()
    assert list(tmp_path.iterdir()) == []


def abandoned(parent, name):
    path = parent / name
    path.mkdir()
    (path / "tensors").write_bytes(bytes(100))
    return path


def name_of(pid, start=None, boot=None):
    start = directory._start_time(pid) or 0 if start is None else start
    return f"memscale-{pid}-{start}-{boot or directory._boot()}-00000000"


def make_old(path):
    before = time.time() - 3600
    os.utime(path, (before, before))


@pytest.mark.parametrize(
    "name",
    [name_of(2**22 + 1, start=5), name_of(os.getpid(), start=5), name_of(os.getpid(), boot="00000000")],
    ids=["no such process", "its id is someone else's now", "before the last boot"],
)
def test_what_a_dead_process_left_while_it_made_it(tmp_path, name):
    path = abandoned(tmp_path, name)
    assert remove_leftovers(tmp_path) == []  # perhaps it is being made now, by a process not seen from here
    make_old(path)
    assert remove_leftovers(tmp_path) == [path]


def test_with_a_free_lock_it_is_dead(tmp_path):
    path = abandoned(tmp_path, name_of(os.getpid()))
    (path / "lock").touch()
    assert remove_leftovers(tmp_path) == [path]


def test_where_there_are_no_locks_the_process_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "fcntl", None)
    alive, dead = abandoned(tmp_path, name_of(os.getpid())), abandoned(tmp_path, name_of(2**22 + 1, start=5))
    for path in (alive, dead):
        (path / "lock").touch()
    assert remove_leftovers(tmp_path) == [dead]


def test_nothing_else_is_touched(tmp_path, monkeypatch):
    others = [tmp_path / "memscale-notes", tmp_path / "memscale-1-2-3", tmp_path / "data"]
    for path in others:
        path.mkdir()
    file = tmp_path / name_of(2**22 + 1, start=5)
    file.write_text("a file")
    link = tmp_path / name_of(2**22 + 2, start=5)
    link.symlink_to(others[0])
    foreign = abandoned(tmp_path, name_of(2**22 + 3, start=5))
    make_old(foreign)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert remove_leftovers(tmp_path) == []
    assert all(path.exists() for path in (*others, file, link, foreign))


def test_two_in_one_process(tmp_path):
    first, second = PrivateDirectory(tmp_path), PrivateDirectory(tmp_path)
    assert first.path.exists()
    assert second.path.exists()
    first.close()
    assert not first.path.exists()
    assert second.path.exists()
    second.close()


def test_dropped_without_closing(tmp_path):
    tier = DiskTier(tmp_path, 2**20)
    tier.store(torch.ones(5))
    fds = len(os.listdir("/proc/self/fd"))
    del tier
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) < fds
