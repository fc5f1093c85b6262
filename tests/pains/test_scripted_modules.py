"""Scripted modules (`torch.jit`) take neither hooks nor another forward: they are left alone, the rest is planned."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import memscale
from memscale.errors import WrapError
from support.steps import AGGRESSIVE, assert_has_techniques, counted_regions


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4)))


def train(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(64, 32)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("scripted", [(1,), (0, 1, 2, 3)], ids=["one layer", "all layers"])
def test_scripted_layers_are_left_as_they_are(
    scripted: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = build(), build()
    for index in scripted:
        model[index] = torch.jit.script(model[index])
    with caplog.at_level(logging.INFO, "memscale"):
        memscale.wrap(model, AGGRESSIVE.replace(enable_logging=True), torch.ones(64, 32))
    names = ", ".join(map(str, scripted))
    assert any(
        f"scripted modules (torch.jit) take no technique and are left as they are: {names}" in text
        for text in caplog.messages
    )
    with counted_regions() as regions:
        assert all(map(torch.equal, train(model), train(plain)))
    if len(scripted) < 4:
        assert_has_techniques(model, "checkpointing")
        assert regions[0] > 0
    memscale.detach(model)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_scripted_model_is_refused() -> None:
    model = torch.jit.script(build())
    for entry in (memscale.wrap, lambda model: memscale.plan(model, torch.ones(64, 32))):
        with pytest.raises(WrapError, match=r"Sequential is a scripted module.*Train the Python module"):
            entry(model)
