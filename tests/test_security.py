"""What docs/security.md promises."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import pickle
import re
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import memscale
from memscale import Config, Plan
from memscale.errors import HardwareError, MemScaleError, PlanError, WeightsError
from memscale.executor import Executor
from memscale.hardware import detect
from memscale.hardware.calibrate import measure_disk, read_calibration
from memscale.hardware.host import find_disk
from memscale.report import exporters

X = torch.ones(64, 32)
ON_DISK = Config(mode="aggressive", force_optimize=True, enable_logging=False, use_mixed_precision=False)


def build() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)) for _ in range(3))
    )


def train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).square().mean().backward()
    optimizer.step()


def test_nothing_is_fetched_or_sent() -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*args, **kwargs): raise AssertionError('a socket')\n"
        "socket.socket.connect = socket.socket.bind = socket.getaddrinfo = refuse\n"
        "import torch, memscale\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))\n"
        "memscale.wrap(model, memscale.Config(mode='aggressive', force_optimize=True), torch.ones(4, 8))\n"
        "model(torch.ones(4, 8)).sum().backward()\n"
        "torch.optim.AdamW(model.parameters()).step()\n"
        "memscale.plan(model, torch.ones(4, 8), hardware='RTX 3090')\n"
        "memscale.detach(model)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_pickle_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was unpickled")

    model = build()
    torch.save(model.state_dict(), tmp_path / "model.safetensors")
    for owner, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    memscale.wrap(model, ON_DISK, X)
    train(model)
    Plan.from_json(model._memscale_executor.plan.to_json())
    memscale.detach(model)
    with pytest.raises(WeightsError, match="never pickles"):
        memscale.load_safetensors(model, tmp_path)
    with pytest.raises(HardwareError):
        read_calibration(tmp_path / "model.safetensors", detect("cpu"))


def test_files_of_the_disk_tier_have_no_name_and_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: list[int] = []
    open_file = os.open

    def noted(path: Any, flag: int, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith(str(tmp_path)):
            flags.append(flag)
        return open_file(path, flag, *args, **kwargs)

    monkeypatch.setattr(os, "open", noted)
    model = memscale.wrap(build(), ON_DISK.replace(offload_dir=tmp_path), X)
    train(model)
    assert model._memscale_executor.bytes_on_disk > 0
    assert flags
    for flag in flags:  # without a name, or with a new one that is no link
        assert flag & os.O_TMPFILE == os.O_TMPFILE or flag & os.O_EXCL
    assert list(tmp_path.iterdir()) == []
    opened = [
        os.stat(f"/proc/self/fd/{number}")
        for number in os.listdir("/proc/self/fd")
        if _is_in(number, tmp_path)
    ]
    assert opened
    assert all(stat.S_IMODE(each.st_mode) == 0o600 and each.st_nlink == 0 for each in opened)
    memscale.detach(model)


def _is_in(number: str, directory: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}").startswith(str(directory))
    except OSError:  # that of the listing itself
        return False


def _train_with_layers_on_disk(directory: Path) -> None:
    model = memscale.wrap(build(), ON_DISK.replace(offload_dir=directory), X)
    train(model)
    assert model._memscale_executor.bytes_on_disk > 0
    memscale.detach(model)


@pytest.mark.parametrize(
    "use",
    [
        _train_with_layers_on_disk,
        lambda directory: measure_disk(find_disk(directory), 2**20),
    ],
    ids=["the disk tier", "calibration"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_new_directory_is_private_and_an_existing_one_stays_as_it_is(
    use: Callable[[Path], object], tmp_path: Path
) -> None:
    existing = tmp_path / "existing"
    existing.mkdir()
    existing.chmod(0o755)
    umask = os.umask(0)
    try:
        for directory in (tmp_path / "new", existing):
            use(directory)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE(existing.stat().st_mode) == 0o755


def test_a_planted_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the system has no files without a name, and the name was guessed."""
    target, link = tmp_path / "target", tmp_path / "memscale-guessed"
    target.write_text("mine")
    link.symlink_to(target)
    names = itertools.chain(["guessed"], map(str, itertools.count()))
    monkeypatch.setattr(tempfile, "_name_sequence", names)
    open_file, modes = os.open, []

    def open_with_a_name(path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if str(path).startswith(str(tmp_path)):
            modes.append(mode)
        return open_file(path, flags, mode, **kwargs)

    monkeypatch.setattr(os, "open", open_with_a_name)
    model = memscale.wrap(build(), ON_DISK.replace(offload_dir=tmp_path), X)
    train(model)
    assert model._memscale_executor.bytes_on_disk > 0
    assert modes == [0o600, 0o600]  # the guessed name is refused, the next one is taken
    assert sorted(tmp_path.iterdir()) == [link, target]
    memscale.detach(model)
    assert link.is_symlink()
    assert target.read_text() == "mine"


def test_the_port_for_metrics_is_on_loopback_and_has_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(exporters, "TIMEOUT", 0.2)
    model = memscale.wrap(build(), ON_DISK.replace(observability_port=0), X)
    (server,) = exporters._servers
    assert server._http.server_address[0] == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as idle:
        assert idle.recv(1) == b""  # closed by the server, though nothing was asked
    memscale.detach(model)


def was_closed(connection: socket.socket) -> bool:
    """Send one more byte, and see whether the other end is there."""
    try:
        connection.sendall(b"G")
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_client_that_asks_slowly_does_not_hold_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(exporters, "TIMEOUT", 0.2)
    model = memscale.wrap(build(), ON_DISK.replace(observability_port=0), X)
    (server,) = exporters._servers
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.05) as slow:
        assert any(was_closed(slow) for _ in range(600))
    memscale.detach(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(code="import os"),
        lambda data: data["layers"][0].update(techniques="checkpointing"),
        lambda data: data["layers"][0].update(members=[]),
        lambda data: data.update(predicted_peak_bytes=-1),
        lambda data: data.update(schema=99),
        lambda data: data.pop("layers"),
    ],
)
def test_a_plan_from_outside_is_checked(change: Any) -> None:
    data = json.loads(memscale.plan(build(), X, ON_DISK).to_json())
    change(data)
    with pytest.raises(PlanError):
        Plan.from_json(json.dumps(data))


def test_a_plan_from_outside_runs_no_code() -> None:
    """A name in it is looked up among techniques and the model's own modules, and nowhere else."""
    data = json.loads(memscale.plan(build(), X, ON_DISK).to_json())
    model = build()
    for field, value in (("techniques", "os.system"), ("members", "__import__('os')")):
        changed = json.loads(json.dumps(data))
        changed["layers"][0][field].append(value)
        plan = Plan.from_json(json.dumps(changed))
        with pytest.raises(MemScaleError, match=re.escape(value)):
            Executor(model, plan, ON_DISK).attach()


def test_what_is_patched_in_torch_is_gone_after_the_last_detach() -> None:
    def functions() -> list[object]:
        holders = (torch.autograd, torch.amp.GradScaler, torch.Tensor, nn.Module, torch.optim.Optimizer)
        return [value for holder in holders for value in vars(holder).values()]

    def hooks() -> list[int]:
        return [len(hooks) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)]

    gc.collect()
    memscale.detach(memscale.wrap(build(), ON_DISK, X))
    before, hooks_before = functions(), hooks()
    first, second = (memscale.wrap(build(), ON_DISK, X) for _ in range(2))
    train(first)
    train(second)
    assert functions() != before
    assert all(hooks())
    memscale.detach(first)
    assert functions() != before  # the second one still needs them
    memscale.detach(second)
    assert functions() == before
    assert hooks() == hooks_before
