"""``max_disk_offload_gb`` is a limit that the plan keeps, optimizer state included; training does not run into it."""

from __future__ import annotations

import pytest
import torch
from torch import optim

import memscale
from memscale.executor import executor_of
from support.wrapping import Stack

KINDS = {
    "adamw": lambda p: optim.AdamW(p),
    "amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        ("adamw", 0.5),
        ("adamw", 1.5),
        ("adamw", 3.0),
        ("adamw", 4.5),
        ("amsgrad", 2.0),
        ("amsgrad", 4.5),
        ("momentum", 2.0),
    ],
)
def test_training_under_a_cap_does_not_run_into_it(kind, times):
    torch.manual_seed(0)
    model = Stack(6, 128).train()
    size = sum(parameter.nbytes for parameter in model.parameters())
    cap = int(times * size)
    optimizer = KINDS[kind](model.parameters())
    config = memscale.Config(
        memory_budget=size, max_disk_offload_gb=cap / 10**9, enable_logging=False, enable_tiling=False
    )
    batch = torch.randn(64, 128)
    memscale.wrap(model, config, batch, optimizer=optimizer)
    store = executor_of(model).placement.store
    for _ in range(3):
        loss = model(batch).square().mean()
        assert store.bytes_used <= cap
        loss.backward()
        assert store.bytes_used <= cap
        optimizer.step()
        assert store.bytes_used <= cap
        if times > 1:  # room for a layer
            assert store.bytes_used > 0
        optimizer.zero_grad()
    memscale.detach(model)
