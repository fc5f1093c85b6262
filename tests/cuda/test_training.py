"""Wrapped models on CUDA train as plain ones do, to the bit, however late asynchronous copies are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from support.families import FAMILIES, Family

STEPS = 3
EXACT = Config(
    force_optimize=True,
    enable_logging=False,
    use_mixed_precision=False,
    use_8bit_optimizer=False,
    enable_tiling=False,
    fused_host_step=False,
)
Computing = Callable[[], AbstractContextManager[None]]


def on_device(batch: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda each: each.cuda(), batch)


def train(model: nn.Module, family: Family, **optimizer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    stepping = torch.optim.AdamW(model.parameters(), lr=1e-3, **optimizer)
    losses = []
    for _ in range(STEPS):
        loss = family.loss(model, on_device(family.batch()))
        loss.backward()
        stepping.step()
        stepping.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("mode", ["conservative", "balanced", "aggressive"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "vit"])
def test_a_wrapped_model_trains_as_a_plain_one(
    name: str, mode: str, is_async: bool, copies: str, computing: Computing
) -> None:
    family = FAMILIES[name]
    with computing():
        expected = train(family.build().cuda(), family)
        model = family.build().cuda()
        memscale.wrap(model, EXACT.replace(mode=mode, async_offload=is_async), on_device(family.batch()))
        plan = model._memscale_executor.plan
        assert any(layer.techniques for layer in plan.layers)
        losses, weights = train(model, family)
        memscale.detach(model)
    assert losses == expected[0]
    assert all(torch.equal(weights[name], value) for name, value in expected[1].items())


def test_a_removed_wait_is_found(
    computing: Computing, runtime: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: without the waits for gradients on their way to the host the numbers are others."""
    family = FAMILIES["gpt2"]
    runtime.fakecuda_set_copies(b"poisoned")
    with computing():
        expected = train(family.build().cuda(), family)
        model = family.build().cuda()
        memscale.wrap(model, EXACT.replace(mode="aggressive", async_offload=True), on_device(family.batch()))
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: None)
        losses, weights = train(model, family)
        monkeypatch.undo()
        memscale.detach(model)
    same = losses == expected[0] and all(
        torch.equal(weights[key], value) for key, value in expected[1].items()
    )
    assert not same
