"""Training loops as people write them, on a model on disk: each equal to its plain twin, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memscale.executor import Executor
from support.disk import QUIET, adamw, assert_same, disk_plan, on_disk, result
from support.wrapping import Stack

Loop = Callable[[nn.Module], Any]
DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "DEVICE", device)


def build() -> Stack:
    torch.manual_seed(0)
    return Stack(3, 64).train().to(DEVICE)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step)).square().mean()


def accumulation(model: nn.Module) -> Any:
    optimizer, losses = adamw(model), []
    for step in range(6):
        loss = loss_of(model, step) / 2
        loss.backward()
        losses.append(float(loss.detach()))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return result(model, optimizer, losses)


def zeroed_in_place(model: nn.Module) -> Any:
    optimizer, losses = adamw(model), []
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return result(model, optimizer, losses)


def clipping(model: nn.Module) -> Any:
    optimizer, losses = adamw(model), []
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        losses.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)))
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-5)
        losses.append(sum(float(p.grad.abs().sum()) for p in model.parameters()))  # as a user looks at them
        optimizer.step()
        optimizer.zero_grad()
    return result(model, optimizer, losses)


def two_optimizers(model: nn.Module) -> Any:
    layers = list(model.layers.parameters())
    first = torch.optim.SGD(layers, lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return result(model, first, losses)


def scheduler(model: nn.Module) -> Any:
    optimizer, losses = adamw(model), []
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        losses.append(optimizer.param_groups[0]["lr"])
    return result(model, optimizer, losses)


def grad_scaler(model: nn.Module) -> Any:
    optimizer, losses = adamw(model), []
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10)
    for step in range(3):
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if step == 1:  # an overflow: the step is left out
            next(iter(model.parameters())).grad.view(-1)[0] = float("inf")
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses += [float(loss.detach()), scaler.get_scale()]
    return result(model, optimizer, losses)


def evaluation_in_between(model: nn.Module) -> Any:
    optimizer, losses = adamw(model), []
    for step in range(4):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 2:
            model.eval()
            with torch.no_grad():
                losses.append(float(loss_of(model, 100 + step)))
            with torch.inference_mode():
                losses.append(float(loss_of(model, 100 + step)))
            model.train()
    return result(model, optimizer, losses)


def unfrozen_in_mid_run(model: nn.Module) -> Any:
    model.layers.requires_grad_(False)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(5):
        if step == 2:
            model.layers[2].requires_grad_(True)
        if step == 3:
            model.layers.requires_grad_(True)
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return result(model, optimizer, losses)


def with_closure(model: nn.Module) -> Any:
    optimizer, losses = adamw(model), []
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
    return result(model, optimizer, losses)


def average_of_weights(model: nn.Module) -> Any:
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, count: 0.9 * old + 0.1 * new)
    optimizer, losses = adamw(model), []
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        losses.append(float(loss.detach()))
    losses += [float(parameter.detach().sum()) for parameter in average.parameters()]
    return result(model, optimizer, losses)


def gradients_twice_through_one_graph(model: nn.Module) -> Any:
    optimizer = adamw(model)
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    return result(model, optimizer, [float(loss.detach())])


def coupled_optimizer(model: nn.Module) -> Any:
    optimizer, losses = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2), []
    for step in range(2):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            torch.manual_seed(step)
            loss = loss_of(model, step)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
    run = result(model, optimizer, losses)
    run.state = {}  # its caches differ in nothing but their place in memory
    return run


LOOPS = [
    accumulation,
    zeroed_in_place,
    clipping,
    two_optimizers,
    scheduler,
    grad_scaler,
    evaluation_in_between,
    unfrozen_in_mid_run,
    with_closure,
    average_of_weights,
    gradients_twice_through_one_graph,
    coupled_optimizer,
]


@pytest.mark.matrix(5)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("checkpointing", [True, False])
def test_equals_its_plain_twin(loop: Loop, checkpointing: bool) -> None:
    plain, model = build(), build()
    torch.manual_seed(3)
    expected = loop(plain)
    with on_disk(model, checkpointing=checkpointing) as executor:
        torch.manual_seed(3)
        got = loop(model)
        assert executor.placement.store.bytes_used > 0
    assert_same(got, expected)


def test_gradients_of_parameters_unfrozen_in_mid_run_go_home() -> None:
    model = build()
    model.layers[0].requires_grad_(False)
    with on_disk(model) as executor:
        loss_of(model, 0).backward()
        assert model.layers[0].up.weight.grad is None
        model.layers[0].requires_grad_(True)
        loss_of(model, 0).backward()
        assert executor.placement.store.holds(model.layers[0].up.weight.grad)


@pytest.mark.parametrize("when", ["before", "after", "before, with state"])
def test_optimizer_built_before_or_after(when: str) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, begin: int, end: int) -> list[float]:
        losses = []
        for step in range(begin, end):
            torch.manual_seed(step)
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    plain, model = build(), build()
    theirs = adamw(plain)
    expected = steps(plain, theirs, 0, 4)
    ours = adamw(model) if when != "after" else None
    got = steps(model, ours, 0, 2) if when == "before, with state" else []
    with on_disk(model) as executor:
        ours = ours or adamw(model)
        got += steps(model, ours, len(got), 4)
        state = ours.state[model.layers[0].up.weight]
        assert executor.placement.states.is_stored(state["exp_avg"])
        assert executor.placement.store.holds(state["exp_avg_sq"])
        assert_same(result(model, ours, got), result(plain, theirs, expected))
    assert not executor.placement.states.is_stored(ours.state[model.layers[0].up.weight]["exp_avg"])
    assert_same(result(model, ours, got), result(plain, theirs, expected))


RESUME = """
import json, sys
import torch
from support.disk import adamw, on_disk
from offload.test_disk_loops import build, steps_from
from contextlib import nullcontext

path, wrapped = sys.argv[1], sys.argv[2] == "wrapped"
model = build()
with on_disk(model) if wrapped else nullcontext():
    optimizer = adamw(model)
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    print(json.dumps(steps_from(model, optimizer, 2, 4)))
"""


def steps_from(model: nn.Module, optimizer: torch.optim.Optimizer, begin: int, end: int) -> list[float]:
    losses = []
    for step in range(begin, end):
        torch.manual_seed(step)
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [
        ("wrapped", "plain"),
        ("plain", "wrapped"),
        pytest.param("wrapped", "wrapped", marks=pytest.mark.slow),
        pytest.param("plain", "plain", marks=pytest.mark.slow),
    ],
)
def test_resumed_in_a_new_process(tmp_path: Path, saved_by: str, resumed_by: str) -> None:
    plain = build()
    expected = steps_from(plain, adamw(plain), 0, 4)
    model = build()
    executor = Executor(model, disk_plan(model), QUIET)
    if saved_by == "wrapped":
        executor.attach()
    optimizer = adamw(model)
    first = steps_from(model, optimizer, 0, 2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    executor.detach()
    command = [sys.executable, "-c", RESUME, str(tmp_path / "saved.pt"), resumed_by]
    paths = [str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=paths[0], timeout=300)
    assert done.returncode == 0, done.stderr
    assert first + json.loads(done.stdout) == expected
