"""A user's `GradScaler` with masters and gradients on the host: to the bit as a plain run, however late copies are."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import memscale.optimizer.placement
from memscale import Config
from memscale.executor import Executor
from support.offloaded import plan_of

WIDTH = 64
OVERFLOWS = 1  # the step whose gradients are infinite
Computing = Callable[[], AbstractContextManager[None]]
Numbers = tuple[list[float], list[torch.Tensor]]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).cuda()


def train(model: nn.Module, *, clips: bool, **settings: Any) -> Numbers:
    """Return the scales after each of four steps, and the parameters after the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(4):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(x).square().mean()
        scaler.scale(loss * math.inf if step == OVERFLOWS else loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, [each.detach().cpu().clone() for each in model.parameters()]


def run(is_async: bool, **settings: Any) -> bool:
    """Train plainly and with masters on the host; return whether all numbers are equal."""
    plain, model = build(), build()
    expected = train(plain, **settings)
    config = Config(enable_logging=False, async_offload=is_async, fused_host_step=False)
    executor = Executor(model, plan_of(model, to="host", activations=False), config)
    executor.attach()
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    ours = train(model, **settings)
    executor.detach()
    assert expected[0] == [2.0**10, 2.0**9, 2.0**9, 2.0**10]
    return ours[0] == expected[0] and all(map(torch.equal, ours[1], expected[1]))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("clips", [False, True], ids=["", "clips"])
@pytest.mark.parametrize("fused", [None, True], ids=["", "fused"])
def test_trains_as_a_plain_model(
    fused: bool | None, clips: bool, is_async: bool, copies: str, computing: Computing
) -> None:
    with computing():
        assert run(is_async, fused=fused, clips=clips)


@pytest.mark.parametrize(
    ("remedy", "instead", "fused"),
    [
        ("wait_for_copy", lambda get, owners, source, device: get(source, device), None),
        ("_SCALING", (), True),
    ],
)
def test_without_the_remedy_the_numbers_are_others(
    remedy: str,
    instead: Any,
    fused: bool | None,
    runtime: ctypes.CDLL,
    computing: Computing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above can fail: torch does not wait for these copies."""
    monkeypatch.setattr(memscale.optimizer.placement, remedy, instead)
    runtime.fakecuda_set_copies(b"poisoned")
    with computing():
        assert not run(True, fused=fused, clips=False)


def test_torch_is_as_it_was_after_detach(computing: Computing) -> None:
    replicator = torch.amp.grad_scaler._MultiDeviceReplicator
    before = replicator.get
    model = build()
    executor = Executor(model, plan_of(model, to="host", activations=False), Config(enable_logging=False))
    executor.attach()
    assert replicator.get is not before
    executor.detach()
    assert replicator.get is before
