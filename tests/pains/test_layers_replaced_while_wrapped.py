"""A layer that is replaced while the model is wrapped, as for fine-tuning: its parameters are in no plan yet."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import memscale
from memscale.testing import executing
from support.wrapping import lossless


class Gated(nn.Module):
    """Has a shape that depends on data: it runs on fake tensors only if `gated` is False."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.gated = gated
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.gated:
            chosen = (x[:, 0] > -2).nonzero().squeeze(-1)
            x = x[chosen]
        return self.head(x)


def offloaded(device: torch.device, gated: bool = False) -> nn.Module:
    """A wrapped model with all layers on the host, whose head is another one since."""
    torch.manual_seed(0)
    model, batch = Gated(gated).to(device), torch.randn(4, 64).to(device)
    config = lossless("aggressive", force_optimize=True)
    smallest = min(point.budget_bytes for point in memscale.plan(model, batch, config).frontier)
    memscale.wrap(model, config.replace(memory_budget=smallest, enable_logging=gated), batch)
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    model.head = nn.Linear(64, 4).to(device)
    return model


def test_the_model_is_copied_with_it() -> None:
    with executing("1GiB", seed=0) as gpu:
        model, batch = offloaded(gpu.device), torch.randn(4, 64).to(gpu.device)
        other = copy.deepcopy(model)
        assert torch.equal(other(batch).cpu(), model(batch).cpu())
        memscale.detach(other)
        assert {each.device for each in other.parameters()} == {gpu.device}


def test_the_model_moves_with_it() -> None:
    with executing("1GiB", seed=0) as gpu:
        model = offloaded(gpu.device).to("cpu")
        assert {each.device.type for each in model.parameters()} == {"cpu"}
        model(torch.randn(4, 64)).sum().backward()
        memscale.detach(model)
        assert {each.device.type for each in model.parameters()} == {"cpu"}


def test_a_larger_batch_that_cannot_be_profiled_leaves_the_plan_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The failed run's graph, in the frames of its error, kept the new parameters from being moved to the host."""
    with executing("1GiB", seed=0) as gpu, caplog.at_level(logging.WARNING, "memscale"):
        model = offloaded(gpu.device, gated=True)
        plan, batch = model._memscale_executor.plan, torch.randn(16, 64).to(gpu.device)
        loss = model(batch).square().sum()
        assert "Pass the largest batch as sample_input to plan once" in caplog.text
        assert model._memscale_executor.plan is plan
        assert {each.device.type for each in model.parameters()} == {"cpu"}  # the new head, too
        loss.backward()
        ours = [each.grad.cpu() for each in model.parameters()]
        memscale.detach(model)
        model.zero_grad()
        model(batch).square().sum().backward()
        assert all(
            torch.equal(one, each.grad.cpu()) for one, each in zip(ours, model.parameters(), strict=True)
        )
