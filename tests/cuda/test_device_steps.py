"""Masters on the host of a CUDA device, stepped on it: to the bit as a plain run, however late copies are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from memscale import AsyncOffloadConfig, Config
from memscale.execution_plan import OptimizerPlan
from memscale.executor import Executor
from support.offloaded import plan_of

KIB = 1024
WIDTH, LAYERS = 256, 6  # 256 KiB a weight, as much its gradient and each of its moments
WEIGHT = WIDTH * WIDTH * 4
QUIET = Config(enable_logging=False)
Computing = Callable[[], AbstractContextManager[None]]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).cuda()


def attach(model: nn.Module, bucket: int, config: Config = QUIET) -> Executor:
    optimizer = OptimizerPlan(bucket_bytes=bucket, host_step="device")
    executor = Executor(model, plan_of(model, to="host", activations=False, optimizer=optimizer), config)
    executor.attach()
    assert executor.placement.bytes_on_host > 0
    return executor


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, WIDTH).cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # Read at once: when a step returns, its copies are over.
    return [each.detach().cpu().clone() for each in (*model.parameters(), *moments_of(optimizer))]


def moments_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if torch.is_tensor(value) and value.dim()]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop], ids=["AdamW", "RMSprop"])
@pytest.mark.parametrize("bucket", [1, 1100 * KIB, 2**30], ids=["slices", "buckets", "one bucket"])
def test_trains_as_a_plain_model(
    bucket: int, kind: type[torch.optim.Optimizer], is_async: bool, copies: str, computing: Computing
) -> None:
    with computing():
        plain, model = build(), build()
        expected = train(plain, kind(plain.parameters(), lr=1e-3))
        executor = attach(model, bucket, QUIET.replace(async_offload=is_async))
        optimizer = kind(model.parameters(), lr=1e-3)
        ours = train(model, optimizer)
        assert all(each.device.type == "cpu" and each.is_pinned() for each in moments_of(optimizer))
        steps = executor.placement.device_steps
        assert steps is not None
        assert steps.buckets_run >= 3
        executor.detach()
        assert all(each.device.type == "cuda" for each in moments_of(optimizer))
    assert all(map(torch.equal, expected, ours))


def test_two_buckets_are_on_the_device(copies: str, computing: Computing) -> None:
    bucket = 4 * WEIGHT + 16 * KIB
    with computing():
        model = build()
        executor = attach(model, bucket)
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, 2)
        model(torch.ones(4, WIDTH).cuda()).square().mean().backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        above = torch.cuda.max_memory_allocated() - before
        executor.detach()
    # And the temporaries of one weight.
    assert 8 * WEIGHT <= above <= 2 * bucket + 1.5 * WEIGHT


def test_pageable_memory_serves_as_well(copies: str, computing: Computing) -> None:
    config = QUIET.replace(async_config=AsyncOffloadConfig(pinned_pool_gb=1e-6))
    with computing():
        plain, model = build(), build()
        expected = train(plain, torch.optim.AdamW(plain.parameters()))
        executor = attach(model, 2**20, config)
        optimizer = torch.optim.AdamW(model.parameters())
        ours = train(model, optimizer)
        assert not any(each.is_pinned() for each in moments_of(optimizer))
        executor.detach()
    assert all(map(torch.equal, expected, ours))


def test_state_of_a_checkpoint_is_page_locked_by_its_first_step(copies: str, computing: Computing) -> None:
    with computing():
        plain, model = build(), build()
        others = torch.optim.AdamW(plain.parameters())
        train(plain, others)
        state = {key: value.clone() for key, value in plain.state_dict().items()}
        executor = attach(model, 1100 * KIB)
        optimizer = torch.optim.AdamW(model.parameters())
        model.load_state_dict(state)
        optimizer.load_state_dict(others.state_dict())
        assert not any(each.is_pinned() for each in moments_of(optimizer))
        ours = train(model, optimizer)
        assert all(each.is_pinned() for each in moments_of(optimizer))
        executor.detach()
        expected = train(plain, others)
    assert all(map(torch.equal, expected, ours))


def test_state_is_in_ordinary_memory_after_detach_from_a_model_of_the_host(computing: Computing) -> None:
    with computing():
        model = build().cpu()
        plan = plan_of(model, to="host", activations=False, optimizer=OptimizerPlan(host_step="device"))
        executor = Executor(model, plan, QUIET, device=torch.device("cuda", 0))
        executor.attach()
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, 1)
        assert all(each.is_pinned() for each in moments_of(optimizer))
        executor.detach()
        assert not any(each.is_pinned() for each in (*model.parameters(), *moments_of(optimizer)))
        assert executor.placement.pinned.bytes_locked == 0


def test_a_removed_wait_is_found(
    computing: Computing, runtime: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: without the wait for the copies to the host, masters are read too early."""
    runtime.fakecuda_set_copies(b"poisoned")
    with computing():
        plain, model = build(), build()
        expected = train(plain, torch.optim.AdamW(plain.parameters()))
        executor = attach(model, 2**20)
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: None)
        ours = train(model, torch.optim.AdamW(model.parameters()))
        monkeypatch.undo()
        executor.detach()
    assert not all(map(torch.equal, expected, ours))


def test_a_removed_order_of_streams_is_found(
    computing: Computing, runtime: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor may the arithmetic begin before its operands have arrived."""
    runtime.fakecuda_set_copies(b"poisoned")
    with computing():
        plain, model = build(), build()
        expected = train(plain, torch.optim.AdamW(plain.parameters()))
        executor = attach(model, 2**20)
        monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: None)
        ours = train(model, torch.optim.AdamW(model.parameters()))
        monkeypatch.undo()
        executor.detach()
    assert not all(map(torch.equal, expected, ours))
