"""What can go wrong with the disk below a model: a clear error, and everything still there to be saved."""

from __future__ import annotations

import errno
import gc
import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memscale import Config
from memscale.errors import TierError, TierFullError
from memscale.executor import Executor
from support.disk import adamw, disk_plan, on_disk
from support.wrapping import Stack

pytestmark = pytest.mark.cpu_only

GB = 10**9


def build() -> Stack:
    torch.manual_seed(0)
    return Stack(3, 64).train()


def bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def settings(directory: Path, cap_bytes: float | None = None) -> Config:
    cap = None if cap_bytes is None else cap_bytes / GB
    return Config(enable_logging=False, offload_dir=directory, max_disk_offload_gb=cap)


def assert_saveable(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer and optimizer.state_dict()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert all(torch.isfinite(value).all() for value in loaded["model"].values())
    build().load_state_dict(loaded["model"])


def test_a_cap_that_is_too_small_for_the_parameters(tmp_path: Path) -> None:
    model, plain = build(), build()
    executor = Executor(model, disk_plan(model), settings(tmp_path, bytes_of(model) / 2))
    with pytest.raises(TierFullError, match=r"cap of .*max_disk_offload_gb"):
        executor.attach()
    assert not executor.attached
    assert "_memscale_executor" not in vars(model)
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert list(tmp_path.iterdir()) == []
    model(torch.randn(2, 64)).sum().backward()


def test_a_cap_that_is_reached_by_gradients(tmp_path: Path) -> None:
    model = build()
    with on_disk(model, settings(tmp_path, bytes_of(model) * 1.5)) as executor:
        with pytest.raises(TierFullError, match="cap"):
            model(torch.randn(2, 64)).sum().backward()
        assert executor.placement.store.bytes_used <= bytes_of(model) * 1.5
        assert any(parameter.grad is not None for parameter in model.parameters())
        assert_saveable(model)
    assert_saveable(model)


def test_a_cap_that_is_reached_by_state(tmp_path: Path) -> None:
    model = build()
    with on_disk(model, settings(tmp_path, bytes_of(model) * 2.5)) as executor:
        optimizer = adamw(model)
        model(torch.randn(2, 64)).sum().backward()
        with pytest.raises(TierFullError, match="cap"):
            optimizer.step()
        assert executor.placement.store.bytes_used <= bytes_of(model) * 2.5
        assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
        assert_saveable(model, optimizer)
    assert_saveable(model, optimizer)


KINDS = {
    "AdamW": (3.75, lambda model: torch.optim.AdamW(model.parameters())),
    "amsgrad": (4.75, lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True)),
    "momentum": (2.75, lambda model: torch.optim.SGD(model.parameters(), momentum=0.9)),
    "centered": (4.75, lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True)),
}


@pytest.mark.parametrize("full", ["cap", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_made_wholly_or_not_at_all(
    kind: str, full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    times, make = KINDS[kind]
    with on_disk(model, settings(tmp_path, bytes_of(model) * times if full == "cap" else None)) as executor:
        optimizer = make(model)
        model(torch.randn(2, 64)).sum().backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        used = executor.placement.store.bytes_used
        if full == "disk":
            left = [3]
            fallocate = os.posix_fallocate

            def until_full(*args: int) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                fallocate(*args)

            monkeypatch.setattr(os, "posix_fallocate", until_full)
        with pytest.raises(TierFullError, match=r"was not made, and no parameter was changed"):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
        assert not optimizer.state
        gc.collect()
        assert executor.placement.store.bytes_used == used  # what was reserved is given back
        if full == "disk":
            monkeypatch.undo()
            optimizer.step()  # with room for it, the same step
            assert executor.placement.store.bytes_used > used
            assert not any(map(torch.equal, before, model.parameters()))
        assert_saveable(model, optimizer)


def test_the_cap_is_never_exceeded(tmp_path: Path) -> None:
    model = build()
    cap = 5 * bytes_of(model)
    config = settings(tmp_path, cap)
    with on_disk(model, config) as executor:
        optimizer = adamw(model)
        for _ in range(4):
            model(torch.randn(512, 64)).sum().backward()
            optimizer.step()
            assert 0 < executor.placement.store.file.bytes_on_disk <= cap
            assert os.fstat(executor.placement.store.file.fd).st_blocks * 512 <= cap + 2**16
            optimizer.zero_grad()


def test_no_disk_is_allowed(tmp_path: Path) -> None:
    model = build()
    with pytest.raises(TierFullError, match="max_disk_offload_gb"):
        Executor(model, disk_plan(model), settings(tmp_path, 0)).attach()
    assert_saveable(model)


def test_a_directory_that_can_not_be_made() -> None:
    model = build()
    with pytest.raises(TierError, match="offload_dir"):
        Executor(model, disk_plan(model), settings(Path("/proc/memscale"))).attach()
    assert "_memscale_executor" not in vars(model)
    model(torch.randn(2, 64)).sum().backward()


def test_a_read_only_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    model = build()
    monkeypatch.setattr(Path, "mkdir", refuse)  # the tests may run as root, who may write anywhere
    with pytest.raises(TierError, match="Read-only file system"):
        Executor(model, disk_plan(model), settings(tmp_path)).attach()
    assert_saveable(model)


def test_a_disk_that_gets_full_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    allocate = os.posix_fallocate
    with on_disk(model, settings(tmp_path)):
        optimizer = adamw(model)
        model(torch.randn(2, 64)).sum().backward()

        def full(fd: int, offset: int, length: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(TierFullError, match="has no room"):
            optimizer.step()
        assert_saveable(model, optimizer)
        monkeypatch.setattr(os, "posix_fallocate", allocate)
        optimizer.step()
        assert_saveable(model, optimizer)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_goes_away_while_it_trains(tmp_path: Path) -> None:
    plain, model = build(), build()
    there = tmp_path / "offload"
    with on_disk(model, settings(there)):
        optimizers = [adamw(plain), adamw(model)]
        for step in range(3):
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                torch.manual_seed(step)
                each(torch.randn(2, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if step == 1:
                shutil.rmtree(there)  # the file has no name there anyway
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert not there.exists()


CHILD = """
import sys, time, torch
from pathlib import Path
from memscale.executor import Executor
from support.disk import adamw, disk_plan
from offload.test_disk_failures import build, settings

model = build()
Executor(model, disk_plan(model), settings(Path(sys.argv[1]))).attach()
optimizer = adamw(model)
for step in range(2):
    loss = model(torch.randn(512, 64)).sum()
    if step == 1:
        {end}
    loss.backward()
    optimizer.step()
"""


def run_child(tmp_path: Path, end: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD.format(end=end), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)])
def test_a_process_that_ends_leaves_nothing(tmp_path: Path, end: str, code: int) -> None:
    child = run_child(tmp_path, end)
    _, stderr = child.communicate(timeout=300)
    assert child.returncode == code, stderr
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    child = run_child(tmp_path, "print('now', flush=True); time.sleep(600)")
    assert child.stdout is not None
    assert child.stdout.readline() == "now\n"
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []
