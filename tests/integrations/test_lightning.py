"""Lightning: the callback and `wrap(LightningModule)`, automatic and manual steps, precision, checkpoints, Fabric."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memscale
from memscale.executor import executor_of
from support.surfaces import Run, assert_gains, trained
from support.torchrun import torchrun
from support.wrapping import Stack

lightning = pytest.importorskip("lightning")

from memscale.integrations.lightning import MemScaleCallback  # noqa: E402
from support.lightning_runs import CALLS, QUIET, Module, build, data, fitted, silence  # noqa: E402


@pytest.fixture(autouse=True)
def quiet() -> None:
    silence()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("calls", CALLS)
def test_a_wrapped_module(calls: str, manual: bool, precision: str, tmp_path: Path) -> None:
    plain = fitted(build(calls, manual=manual), tmp_path, precision=precision)
    module = build(calls, manual=manual)
    before = [dict(vars(each)) for each in module.modules()]
    memscale.wrap(module, QUIET)
    wrapped = fitted(module, tmp_path, precision=precision)
    # Where the module itself is not called, the first step is planned for by structure alone.
    setting = f"wrap(module), {calls}(...), {'manual' if manual else 'automatic'}, {precision}"
    assert_gains("Lightning", setting, plain, wrapped)
    memscale.detach(module)
    for old, each in zip(before, module.modules(), strict=True):
        assert not [key for key in vars(each) if "memscale" in key]
        assert "forward" not in vars(each)
        assert old.keys() <= vars(each).keys()


OPTIONS: dict[str, dict[str, Any]] = {
    "32-true": {},
    "64-true": {"precision": "64-true"},
    "bf16-true": {"precision": "bf16-true"},
    "accumulation, clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_the_callback(option: str, tmp_path: Path) -> None:
    options = OPTIONS[option]
    plain = fitted(build("self.net"), tmp_path, **options)
    module = build("self.net")
    wrapped = fitted(module, tmp_path, callbacks=[MemScaleCallback(QUIET)], **options)
    assert_gains("Lightning", f"MemScaleCallback, {option}", plain, wrapped)
    assert executor_of(module) is None
    assert not any("forward" in vars(each) for each in module.modules())


def test_the_callback_detaches_after_an_error(tmp_path: Path) -> None:
    class Fails(Module):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            if len(self.losses) == 3:
                raise RuntimeError("as an example")

    module = Fails()
    with pytest.raises(RuntimeError, match="as an example"):
        fitted(module, tmp_path, callbacks=[MemScaleCallback(QUIET)])
    assert executor_of(module) is None


def checkpointed(where: Path, callbacks: list[Any]) -> Path:
    """Train with a checkpoint in the middle; return its file."""
    keep = lightning.pytorch.callbacks.ModelCheckpoint(where / "kept", every_n_train_steps=3, save_top_k=-1)
    fitted(build("self.net"), where, callbacks=[*callbacks, keep], enable_checkpointing=True)
    (file,) = (where / "kept").glob("*step=3.ckpt")
    return file


def test_checkpoints_are_those_of_a_plain_run_and_resume_anywhere(tmp_path: Path) -> None:
    files = [checkpointed(tmp_path / str(len(each)), each) for each in ([], [MemScaleCallback(QUIET)])]
    plain, wrapped = (torch.load(file, weights_only=True) for file in files)
    assert all(map(torch.equal, plain["state_dict"].values(), wrapped["state_dict"].values()))
    for name in ("exp_avg", "exp_avg_sq"):
        moments = [
            [each[name] for each in file["optimizer_states"][0]["state"].values()]
            for file in (plain, wrapped)
        ]
        assert all(map(torch.equal, *moments))
    expected = fitted(build("self.net"), tmp_path, checkpoint=files[0]).losses
    resumed = fitted(build("self.net"), tmp_path, checkpoint=files[1], callbacks=[MemScaleCallback(QUIET)])
    assert resumed.losses == expected
    assert "checkpointing" in resumed.techniques


def test_a_copy_of_a_module_whose_network_is_wrapped(tmp_path: Path) -> None:
    module = memscale.wrap(build("self.net"), QUIET)
    fitted(module, tmp_path)
    assert executor_of(module).model is module.net
    twin = copy.deepcopy(module)
    assert executor_of(twin) is None
    assert executor_of(twin.net) is not None
    assert all(map(torch.equal, twin.parameters(), module.parameters()))
    memscale.wrap(module, QUIET)  # anew, from the first batch on
    assert executor_of(module).model is module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("order", ["wrap, setup", "setup, wrap"])
def test_fabric(order: str, precision: str) -> None:
    def run(wrap: bool) -> tuple[Run, nn.Module]:
        torch.manual_seed(0)
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
        model = Stack(layers=4, width=16)
        if wrap and order == "wrap, setup":
            memscale.wrap(model, QUIET)
        covered, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        if wrap and order == "setup, wrap":
            memscale.wrap(covered, QUIET)

        def train() -> list[float]:
            losses = []
            for batch in data(64):  # so that activations, not the step, make the peak
                loss = covered(batch).float().pow(2).mean()
                fabric.backward(loss)
                fabric.clip_gradients(covered, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        return trained(model, train), covered

    plain, _ = run(wrap=False)
    wrapped, covered = run(wrap=True)
    assert_gains("Fabric", f"{order}, {precision}", plain, wrapped)
    memscale.detach(covered)
    assert not any("forward" in vars(each) for each in covered._original_module.modules())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes has seen under Lightning's DDP strategy, by what `training_step` calls."""
    folder = tmp_path_factory.mktemp("ddp")
    run = torchrun("support.lightning_runs", str(folder))
    assert run.returncode == 0, run.stdout
    for warning in ("was replaced after MemScale had set it", "makes a plan of its own"):
        assert warning not in run.stdout
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
)
@pytest.mark.parametrize("calls", CALLS)
def test_the_ddp_strategy(calls: str, ranks: list[dict[str, Any]]) -> None:
    """It puts a forward of its own over the module's to run `training_step` inside of DDP: no batch to plan for."""
    assert ranks[0][calls]["plan"] == ranks[1][calls]["plan"]
    first, second = ({name: Run(**run) for name, run in rank[calls]["runs"].items()} for rank in ranks)
    for how in ("wrap(module)", "MemScaleCallback"):
        assert len(second[how].losses) == 6, "calls of training_step"
        assert second[how].losses == second["plain"].losses
        assert_gains("Lightning", f"{how}, {calls}(...), DDP, 2 processes", first["plain"], first[how])


RESUME = """
import sys
from pathlib import Path
sys.path[:0] = ["tests"]
import conftest
from support.lightning_runs import QUIET, MemScaleCallback, build, fitted, silence
silence()

module = build("self.net")
run = fitted(module, Path(sys.argv[1]), checkpoint=Path(sys.argv[2]), callbacks=[MemScaleCallback(QUIET)])
assert "checkpointing" in run.techniques
print(run.losses)
"""


@pytest.mark.slow
def test_a_new_process_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    file = checkpointed(tmp_path, [MemScaleCallback(QUIET)])
    expected = fitted(build("self.net"), tmp_path, checkpoint=file).losses
    command = [sys.executable, "-c", RESUME, str(tmp_path), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(expected)


def fabric_of() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = memscale.wrap(Stack(layers=4, width=16), QUIET)
    return fabric, *fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def train_with(fabric: Any, model: Any, optimizer: Any) -> list[float]:
    torch.manual_seed(9)
    losses = []
    for batch in data(8):
        loss = model(batch).float().pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


RESUME_FABRIC = """
import sys
sys.path[:0] = ["tests", "tests/integrations"]
import conftest
from test_lightning import *

silence()
fabric, model, optimizer = fabric_of()
fabric.load(sys.argv[1], {"model": model, "optimizer": optimizer})
print(train_with(fabric, model, optimizer))
assert executor_of(model._original_module).report().recomputations > 0
"""


@pytest.mark.slow
def test_a_new_process_resumes_with_fabric(tmp_path: Path) -> None:
    fabric, model, optimizer = fabric_of()
    train_with(fabric, model, optimizer)
    fabric.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    expected = train_with(fabric, model, optimizer)
    command = [sys.executable, "-c", RESUME_FABRIC, str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(expected)
