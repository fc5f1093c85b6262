"""Muon, Adafactor, Lion, schedule-free AdamW, GaLore: streamed where that is exact, else left alone with the reason."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import memscale
from memscale import Config, Plan
from memscale.execution_plan import LayerPlan, Offloading, OptimizerPlan
from memscale.executor import Executor
from memscale.testing import executing
from support.optimizers import Lion
from support.wrapping import Stack, lossless

WIDTH = 64


class GaLore(optim.AdamW):
    """AdamW on gradients that are projected to a low rank, and back before they are applied, as subclasses do it."""

    def __init__(self, params: Iterable[nn.Parameter], rank: int = 4) -> None:
        super().__init__(params, lr=0.01)
        self._rank = rank
        self.seen: list[int] = []

    def step(self, closure: Any = None) -> Any:
        members = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        self.seen.append(len(members))
        for each in members:
            left = torch.linalg.svd(each.grad, full_matrices=False).U[:, : self._rank]
            each.grad = left @ (left.T @ each.grad)
        return super().step(closure)


def schedule_free(parameters: Iterable[nn.Parameter]) -> Optimizer:
    made = pytest.importorskip("schedulefree").AdamWScheduleFree(parameters, lr=0.01, warmup_steps=2)
    made.train()
    return made


# Whether state moves, or the reason why it stays.
OPTIMIZERS: dict[str, tuple[Callable[[Iterable[nn.Parameter]], Optimizer], str | None]] = {
    "Muon": (lambda parameters: optim.Muon(parameters, lr=0.01), None),
    "Adafactor": (lambda parameters: optim.Adafactor(parameters, lr=0.01), None),
    "GaLore": (GaLore, None),
    "Lion": (Lion, "its step is not one of torch.optim's"),
    "schedule-free": (schedule_free, "its step is not one of torch.optim's"),
}

PLACES: dict[str, tuple[Offloading, OptimizerPlan]] = {
    "disk": (Offloading("disk"), OptimizerPlan("disk", bucket_bytes=3 * 4 * WIDTH * WIDTH)),
    "host": (Offloading("host"), OptimizerPlan("host", bucket_bytes=3 * 4 * WIDTH * WIDTH)),
    "state on host": (Offloading("device"), OptimizerPlan("host", bucket_bytes=3 * 4 * WIDTH * WIDTH)),
}


@contextlib.contextmanager
def device_for(place: str) -> Iterator[torch.device]:
    if place == "disk":
        yield torch.device("cpu")
    else:
        with executing("1GiB", seed=0) as gpu:
            yield gpu.device


def train(
    make: Callable[[Iterable[nn.Parameter]], Optimizer], place: str, *, wrapped: bool
) -> tuple[list[Tensor], int, int]:
    """Losses, weights and state after five steps; bytes of state that were moved, and buckets that were stepped."""
    with device_for(place) as device:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH * (1 + index % 2), bias=False) for index in range(2)]
        layers.append(nn.Linear(2 * WIDTH, WIDTH, bias=False))
        model = nn.Sequential(*layers).to(device)
        executor = None
        if wrapped:
            offloading, optimizer_plan = PLACES[place]
            names = ("0", "1", "2") if offloading.to != "device" else ()
            plan = tuple(
                LayerPlan(each, (each,), ("offloading",), "", "", offloading=offloading) for each in names
            )
            executor = Executor(model, Plan(plan, optimizer=optimizer_plan), Config(fused_host_step=False))
            executor.attach()
        optimizer = make(model.parameters())
        batch = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).to(device)
        losses = []
        for _ in range(5):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        moved = buckets = 0
        if executor is not None:
            moved = executor.placement.states.bytes_moved
            buckets = executor.placement.states.buckets_run
            executor.detach()
        state = [value for each in optimizer.state.values() for value in each.values()]
        tensors = [each for each in (*model.parameters(), *state) if isinstance(each, Tensor)]
        assert isinstance(optimizer, Optimizer)
        if isinstance(optimizer, GaLore):
            assert optimizer.seen == [3] * 5  # its own code runs once a step, with all parameters
        return [*losses, *(each.detach().cpu().clone() for each in tensors)], moved, buckets


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bit_equal_and_state_moves_or_the_log_says_why_not(
    name: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, reason = OPTIMIZERS[name]
    plain, _, _ = train(make, place, wrapped=False)
    with caplog.at_level(logging.WARNING, "memscale"):
        ours, moved, buckets = train(make, place, wrapped=True)
    assert len(ours) == len(plain)
    assert all(map(torch.equal, ours, plain))
    said = [message for message in caplog.messages if "stays on its device" in message]
    if place == "host":  # masters have their state beside them, whatever steps them
        assert (moved, said) == (0, [])
    elif reason is None:
        assert not said
        # One of the three is larger than a bucket. Adafactor's rows and columns are less than a page, and stay.
        assert buckets >= 5 * 2
        assert moved > 0 or name == "Adafactor"
    else:
        assert (moved, buckets) == (0, 0)
        assert reason in said[0]


def test_muon_for_matrices_and_adamw_for_the_rest() -> None:
    """As Muon is used: each of the two steps a part of what `wrap` has moved."""

    def run(wrap: bool) -> tuple[list[Tensor], Plan | None, int]:
        torch.manual_seed(0)
        model = Stack(layers=4, width=16)
        if wrap:
            memscale.wrap(model, lossless("aggressive", force_optimize=True))
        matrices = [each for each in model.layers.parameters() if each.dim() == 2]
        rest = [each for each in model.parameters() if not any(each is one for one in matrices)]
        optimizers = [optim.Muon(matrices, lr=0.01), optim.AdamW(rest, lr=0.01)]
        losses = []
        for step in range(4):
            torch.manual_seed(step)
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
            losses.append(loss.detach())
        if not wrap:
            return [*losses, *model.parameters()], None, 0
        executor = model._memscale_executor
        memscale.detach(model)
        return [*losses, *model.parameters()], executor.plan, executor.placement.states.bytes_moved

    plain, _, _ = run(wrap=False)
    ours, plan, moved = run(wrap=True)
    assert plan is not None
    assert plan.optimizer is not None
    assert plan.optimizer.state == "disk"
    assert moved > 0
    assert all(map(torch.equal, ours, plain))
