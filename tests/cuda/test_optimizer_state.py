"""Optimizer state on the host of a CUDA device: page-locked, two buckets in flight, and to the bit as a plain run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from memscale import Config
from memscale.execution_plan import OptimizerPlan, Plan
from memscale.executor import Executor

KIB = 1024
WIDTH, LAYERS = 256, 6  # 256 KiB a weight, as much each of its moments
QUIET = Config(enable_logging=False)
Computing = Callable[[], AbstractContextManager[None]]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, WIDTH).cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = [value for each in optimizer.state.values() for value in each.values() if value.dim()]
    # Read at once: when a step returns, its copies are over.
    return [each.detach().cpu().clone() for each in (*model.parameters(), *state)]


@pytest.mark.parametrize("bucket", [1, 600 * KIB, 2**30], ids=["slices", "buckets", "one bucket"])
def test_trains_as_a_plain_model(bucket: int, copies: str, computing: Computing) -> None:
    with computing():
        plain, model = build(), build()
        expected = train(plain, torch.optim.AdamW(plain.parameters()))
        executor = Executor(model, Plan((), optimizer=OptimizerPlan("host", bucket)), QUIET)
        executor.attach()
        optimizer = torch.optim.AdamW(model.parameters())
        ours = train(model, optimizer)
        moments = [value for each in optimizer.state.values() for value in each.values() if value.dim()]
        assert all(each.device.type == "cpu" and each.is_pinned() for each in moments)
        assert executor.placement.states.bytes_moved == 5 * sum(each.nbytes for each in moments)
        executor.detach()
    assert all(map(torch.equal, expected, ours))


def test_two_buckets_are_in_flight(copies: str, computing: Computing) -> None:
    with computing():
        model = build()
        weight = WIDTH * WIDTH * 4
        executor = Executor(model, Plan((), optimizer=OptimizerPlan("host", 4 * weight)), QUIET)
        executor.attach()
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, 2)
        model(torch.ones(4, WIDTH).cuda()).square().mean().backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        above = torch.cuda.max_memory_allocated() - before
        executor.detach()
    # Two moments each of two weights, and the temporaries of one.
    assert 4 * weight <= above <= 6 * weight


def test_pageable_memory_serves_as_well(runtime: ctypes.CDLL, computing: Computing) -> None:
    runtime.fakecuda_set_page_locks(1)
    with computing():
        plain, model = build(), build()
        expected = train(plain, torch.optim.AdamW(plain.parameters()))
        executor = Executor(model, Plan((), optimizer=OptimizerPlan("host", 2**20)), QUIET)
        executor.attach()
        ours = train(model, torch.optim.AdamW(model.parameters()))
        executor.detach()
    assert all(map(torch.equal, expected, ours))


def test_a_removed_wait_is_found(
    computing: Computing, runtime: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: without the wait for state on its way to the host, it is read too early."""
    runtime.fakecuda_set_copies(b"poisoned")
    with computing():
        plain, model = build(), build()
        expected = train(plain, torch.optim.AdamW(plain.parameters()))
        executor = Executor(model, Plan((), optimizer=OptimizerPlan("host", 2**20)), QUIET)
        executor.attach()
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: None)
        ours = train(model, torch.optim.AdamW(model.parameters()))
        monkeypatch.undo()
        executor.detach()
    assert not all(map(torch.equal, expected, ours))
