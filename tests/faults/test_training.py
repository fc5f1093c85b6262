"""What goes wrong around a wrapped model: its numbers stay those of the plain one, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import memscale
from memscale import Config
from memscale.errors import TransferError
from memscale.offload import activations
from properties.soak import soak
from support.steps import plan_of

pytestmark = pytest.mark.cpu_only


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = (nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(4))
    return nn.Sequential(*blocks)


def rows(seed: int) -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))


class Training:
    """A plain model, or one with layers on disk; each step skips losses that are not finite."""

    def __init__(
        self, directory: Path | None = None, seed: int = 0, skip: bool = True, async_offload: bool = False
    ) -> None:
        self.model = build(seed)
        self.skip = skip
        self.losses: list[float] = []
        if directory is not None:
            lossless = {"use_mixed_precision": False, "use_8bit_optimizer": False, "enable_tiling": False}
            config = Config(mode="aggressive", enable_logging=False, offload_dir=directory, **lossless)
            config = config.replace(async_offload=async_offload)
            memscale.wrap(self.model, config, rows(0))
            assert plan_of(self.model).disk_bytes > 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, batch: torch.Tensor) -> None:
        loss = self.model(batch).pow(2).mean()
        self.losses.append(loss.item())
        loss.backward()
        if loss.isfinite() or not self.skip:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return [each.detach().nan_to_num(7.0) for each in self.model.parameters()]


def assert_same(one: Training, other: Training) -> None:
    assert str(one.losses) == str(other.losses)  # NaN is not equal to itself
    assert all(map(torch.equal, one.weights(), other.weights()))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Training, Training]]:
    """The plain training and the wrapped one, compared and detached at the end."""
    both = Training(), Training(tmp_path)
    yield both
    assert_same(*both)
    memscale.detach(both[1].model)
    assert_same(*both)
    assert not tmp_path.exists() or os.listdir(tmp_path) == []


@pytest.mark.parametrize("skip", [True, False], ids=["skipped", "stepped"])
def test_a_loss_that_is_not_a_number(skip: bool, pair: tuple[Training, Training]) -> None:
    for training in pair:
        training.skip = skip
        for number in range(4):
            batch = rows(number)
            if number == 1:
                batch[3, 5] = torch.nan
            training.step(batch)
        assert torch.tensor(training.losses[-1]).isfinite() == skip


def test_a_directory_that_is_removed(pair: tuple[Training, Training], tmp_path: Path) -> None:
    """The file has no name, so training goes on in it."""
    for training in pair:
        training.step(rows(0))
    shutil.rmtree(tmp_path)
    for training in pair:
        training.step(rows(1))


class Rows(Dataset[torch.Tensor]):
    def __init__(self, dies_at: int | None = None) -> None:
        self.dies_at = dies_at

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return rows(index)[0]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_and_one_that_dies(start: str, pair: tuple[Training, Training]) -> None:
    for training in pair:
        for batch in DataLoader(Rows(), 64, num_workers=2, multiprocessing_context=start):
            training.step(batch)
        with pytest.raises(RuntimeError, match=r"worker .*exited unexpectedly|killed by signal"):
            list(map(training.step, DataLoader(Rows(70), 64, num_workers=1, multiprocessing_context=start)))
        training.step(rows(9))
    assert len(pair[1].losses) >= 3


def test_two_models(tmp_path: Path) -> None:
    plain = Training(seed=1), Training(seed=2)
    wrapped = Training(tmp_path, seed=1), Training(tmp_path, seed=2)
    for number in range(3):
        for training in (*plain, *wrapped):
            training.step(rows(number))
    memscale.detach(wrapped[0].model)
    for training in (*plain, *wrapped):
        training.step(rows(3))
    memscale.detach(wrapped[1].model)
    for one, other in zip(plain, wrapped, strict=True):
        assert_same(one, other)


def test_threads(tmp_path: Path) -> None:
    """Each thread trains a model of its own, at the same time."""
    plain = [Training(seed=seed) for seed in range(3)]
    wrapped = [Training(tmp_path, seed=seed) for seed in range(3)]
    errors: list[BaseException] = []

    def run(training: Training) -> None:
        try:
            for number in range(5):
                training.step(rows(number))
        except BaseException as error:
            errors.append(error)

    for trainings in (plain, wrapped):
        threads = [threading.Thread(target=run, args=[each]) for each in trainings]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    for one, other in zip(plain, wrapped, strict=True):
        memscale.detach(other.model)
        assert_same(one, other)


CUT = """
import os, sys
from pathlib import Path
from faults.test_training import *

training = Training(Path(sys.argv[1]))
training.step(rows(0))
fds = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
mine = [each for each in fds if os.path.lexists(each) and os.readlink(each).startswith(sys.argv[1])]
assert len(mine) == 1
os.truncate(mine[0], 4096)
print("cut", flush=True)
for number in range(3):
    training.step(rows(number))
print("trained", flush=True)
"""


@pytest.mark.parametrize("what", ["a transfer ends its thread", "no thread can be started"])
def test_offload_workers_that_die(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails with an error, nothing hangs, and training goes on with the same numbers."""
    monkeypatch.setattr(activations, "LEAST_BYTES", 4096)
    plain, wrapped = Training(), Training(tmp_path, async_offload=True)
    threads = []
    write = activations.Activations.write

    def die(*args: Any) -> None:
        threads.append(threading.current_thread())
        raise SystemExit

    def no_thread(thread: threading.Thread) -> None:
        threads.append(thread)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as broken:
        if what == "no thread can be started":
            broken.setattr(threading.Thread, "start", no_thread)
        else:
            broken.setattr(activations.Activations, "write", die)
        with pytest.raises((TransferError, RuntimeError), match=r"worker thread failed|start new thread"):
            # Of several batches: what is still on the device needs no worker.
            sum(wrapped.model(rows(number)).pow(2).mean() for number in range(4)).backward()
    assert activations.Activations.write is write
    assert threads
    assert all(each.name.startswith("memscale") for each in threads)
    wrapped.optimizer.zero_grad()
    for number in range(3):
        for training in (plain, wrapped):
            training.step(rows(number))
    memscale.detach(wrapped.model)
    assert_same(plain, wrapped)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_file_that_is_cut_is_never_trained_on(tmp_path: Path) -> None:
    """Its pages are gone: to touch one ends the process, to read one is an error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CUT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.stdout.split() == ["cut"], done.stderr
    assert done.returncode == -signal.SIGBUS or "someone has cut it" in done.stderr


def test_damaged_activations_are_never_trained_on(tmp_path: Path) -> None:
    """Backward raises before it has used them, and the step can be made again."""
    plain, wrapped = Training(), Training(tmp_path)
    file = wrapped.model._memscale_executor.placement.store.file
    for training in (plain, wrapped):
        training.step(rows(0))
    before = set(file.mapped)
    with patch.object(activations, "LEAST_BYTES", 4096):
        loss = wrapped.model(rows(1)).pow(2).mean()
    stored = [extent for address, extent in file.mapped.items() if address not in before]
    assert stored
    for extent in stored:
        os.pwrite(file.fd, bytes(64), extent.offset + extent.nbytes // 2)
    with pytest.raises(TransferError, match="someone has changed it"):
        loss.backward()
    del loss
    wrapped.optimizer.zero_grad()
    for training in (plain, wrapped):
        training.step(rows(1))
    memscale.detach(wrapped.model)
    assert_same(plain, wrapped)


@pytest.mark.slow
def test_a_short_soak(capsys: pytest.CaptureFixture[str]) -> None:
    """The twin of `make soak`."""
    assert soak(steps=24, cycles=4, runs=2) == []
    lines = capsys.readouterr().out.splitlines()
    assert sum("steps" in line for line in lines) >= 20
    assert sum("cycles" in line for line in lines) == 4
