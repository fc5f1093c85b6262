"""The file that is left when memory has run out and nothing could help."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch

import memscale
from memscale import Config, Plan
from memscale._torch import LightDispatchMode
from memscale.recovery import shortage
from support.observed import Stack, batch, train


class NeverEnough(LightDispatchMode):
    """Every product is out of memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.addmm.default:
            raise torch.OutOfMemoryError("out of memory (injected)")
        return func(*args, **(kwargs or {}))


def fail(model: Stack) -> str:
    with pytest.raises(torch.OutOfMemoryError) as caught, NeverEnough():
        model(batch())
    return "\n".join(caught.value.__notes__)


def wrapped(directory: Path) -> Stack:
    config = Config(offload_dir=str(directory), max_disk_offload_gb=0, enable_logging=False)
    return memscale.wrap(Stack(), config, batch())


def test_the_file_has_the_plan_the_report_and_the_peak(tmp_path: Path) -> None:
    model = wrapped(tmp_path / "not there yet")
    train(model, 2)
    note = fail(model)
    (path,) = (tmp_path / "not there yet").glob("memscale-oom-*.json")
    assert str(path) in note
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    contents = json.loads(path.read_text())
    assert Plan.from_json(json.dumps(contents["plan"])) == model._memscale_executor.plan
    assert contents["where"] == "forward"
    assert contents["report"]["forward_passes"] == 3
    assert contents["report"]["backward_passes"] == 2
    assert contents["plans_tried"]
    assert contents["torch"] == torch.__version__
    assert contents["device"] == "cpu"
    peak = contents["simulated_peak"]
    assert sum(size for _, size in peak["by_category"]) == peak["total"] > 0
    assert peak["top"][0]["nbytes"] > 0


def test_without_a_directory_of_the_users_it_goes_to_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortage.tempfile, "tempdir", str(tmp_path))
    model = memscale.wrap(Stack(), Config(enable_logging=False, enable_offloading=False), batch())
    note = fail(model)
    (path,) = tmp_path.glob("memscale-oom-*.json")
    assert str(path) in note


def test_no_file_is_written_twice_and_there_are_few(tmp_path: Path) -> None:
    model = wrapped(tmp_path)
    notes = [fail(model) for _ in range(shortage.MAX_DUMPS + 2)]
    files = sorted(tmp_path.glob("memscale-oom-*.json"))
    assert len(files) == shortage.MAX_DUMPS
    assert all(json.loads(file.read_text())["what"] == "out of memory" for file in files)
    assert all(str(file) in notes[-1] for file in files)


def test_a_file_that_cannot_be_written_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    model = wrapped(tmp_path)
    monkeypatch.setattr(shortage.tempfile, "NamedTemporaryFile", refuse)
    note = fail(model)
    assert "a dump of this could not be written: OSError: [Errno 28] No space left on device" in note
    assert "the plan:" in note
