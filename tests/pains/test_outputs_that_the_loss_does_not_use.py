"""A model with an output that the loss does not use: what only that output needs has no gradient, rather than zeros.

With a gradient of zeros, an optimizer with weight decay or momentum changes weights that it leaves alone otherwise.
Nor does backward run there: a user's own `torch.autograd.Function` is not called, and what can't be differentiated
does no harm.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.testing import executing
from support.wrapping import lossless

OFFLOADING = lossless("aggressive", enable_checkpointing=False, async_offload=True)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.used = nn.Linear(64, 4)
        self.unused = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.used(x), self.unused(x)


def train(config: Config | None) -> list[torch.Tensor | None]:
    with executing("1GiB", seed=0) as gpu:
        torch.manual_seed(0)
        model, batch = TwoHeads().to(gpu.device), torch.randn(8, 64).to(gpu.device)
        if config is not None:
            smallest = min(point.budget_bytes for point in memscale.plan(model, batch, config).frontier)
            memscale.wrap(model, config.replace(memory_budget=smallest), batch)
            offloaded = {layer.name for layer in model._memscale_executor.plan.layers if layer.offloading}
            assert "unused" in offloaded
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(batch)[0].square().mean().backward()
            optimizer.step()
        gradients = [each.grad for each in model.parameters()]
        seen = [None if each is None else each.cpu() for each in gradients]
        return [*seen, *(each.detach().cpu() for each in model.parameters())]


def test_an_offloaded_layer_beside_the_loss_has_no_gradient_and_keeps_its_weights() -> None:
    plain, ours = train(None), train(OFFLOADING)
    assert plain.count(None) == 2
    for one, other in zip(ours, plain, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


class Doubled(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        Doubled.calls += 1
        return None, gradient.sum((0, 1)) * 2


class OwnFunctionBeside(nn.Module):
    """Returns beside its logits what a function of the user's makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"logits": x, "beside": Doubled.apply(x.detach(), self.weight)}  # type: ignore[no-untyped-call]


class ChangedBeside(nn.Module):
    """Returns beside its logits the means of activations that were changed in place after it had taken them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        beside = []
        for layer in self.layers:
            x = layer(x)
            beside.append(x.square().mean())
            x.mul_(0.5)
        return {"logits": x, "beside": torch.stack(beside).sum()}


@pytest.mark.parametrize("static", [True, False], ids=["on fake tensors", "by a real run"])
@pytest.mark.parametrize("kind", [OwnFunctionBeside, ChangedBeside])
def test_nothing_behind_an_unused_output_runs_in_backward(kind: type[nn.Module], static: bool) -> None:
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model, batch = kind(), torch.randn(4, 3, 8)
        if wrapped:
            memscale.wrap(model, lossless("balanced", use_static_profiling=static), batch)
        Doubled.calls = 0
        model(batch)["logits"].square().mean().backward()
        found.append([each.grad for each in model.parameters()])
    assert Doubled.calls == 0
    for plain, ours in zip(*found, strict=True):
        assert (plain is None) == (ours is None)
        assert plain is None or torch.equal(plain, ours)


def test_a_loss_that_needs_what_was_changed_is_refused_as_ever() -> None:
    model, batch = ChangedBeside(), torch.randn(4, 3, 8)
    memscale.wrap(model, lossless("balanced"), batch)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(batch)["beside"].backward()
