"""Checkpointing on a device: the numbers of the CPU, random numbers of its own, and less memory there."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from memscale.testing import executing
from support.checkpointed import DEAR, assert_same, train, wrapped
from support.families import FAMILIES, Family

# Families whose attention is the same kernel on both devices, or that have none.
NAMES = ("gpt2", "t5", "resnet", "cnn", "kwargs_only", "shared_block")
ON_DEVICE = ("aten._scaled_dot_product_efficient_attention.default",)
SETTINGS = {"whole": {}, "chained": {"chained": True}, "keeping": {"keep": (*DEAR, *ON_DEVICE)}}


@pytest.fixture(params=NAMES, scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    found = FAMILIES[request.param]
    if found.transformers:
        pytest.importorskip("transformers")
    return found


@functools.lru_cache(maxsize=1)
def on_cpu(family: Family) -> list[tuple[str, torch.Tensor]]:
    return _without_random_state(train(family, steps=2))


@pytest.mark.matrix(5)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_training_on_the_device_is_that_of_the_cpu(family: Family, settings: dict[str, Any]) -> None:
    with executing("1GiB") as gpu:
        ours = train(family, functools.partial(wrapped, **settings), device=gpu.device, steps=2)
    # The device has a generator of its own, and the CPU's has not moved.
    assert_same(_without_random_state(ours), on_cpu(family))


def test_the_device_holds_less_after_forward_and_at_its_peak(family: Family) -> None:
    plain = _memory(family)
    alone = _memory(family, chained=False)
    chained = _memory(family, chained=True)

    assert alone["after forward"] < plain["after forward"]
    assert alone["peak"] < plain["peak"]
    if family.name == "shared_block":
        assert chained == alone
    else:
        assert chained["after forward"] < alone["after forward"]


def _memory(family: Family, **settings: Any) -> dict[str, int]:
    with executing("1GiB") as gpu:
        model: nn.Module = family.build().to(gpu.device)
        if settings:
            wrapped(model, **settings)
        batch = family.batch(gpu.device, batch_size=32)
        family.loss(model, batch).backward()
        model.zero_grad()
        gpu.tracker.reset_peak()
        loss = family.loss(model, batch)
        after_forward = gpu.tracker.live_bytes(gpu.device)
        loss.backward()
        return {"after forward": after_forward, "peak": gpu.peak_bytes}


def _without_random_state(seen: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in seen if not name.startswith("random state")]
