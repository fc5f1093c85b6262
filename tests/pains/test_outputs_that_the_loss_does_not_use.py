"""A model with an output that the loss does not use: what only that output needs has no gradient, rather than zeros.

With a gradient of zeros, an optimizer with weight decay or momentum changes weights that it leaves alone otherwise.
"""

from __future__ import annotations

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
