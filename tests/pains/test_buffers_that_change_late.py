"""A large buffer that a layer changes for the first time in a later step, such as an average after a warm-up."""

from __future__ import annotations

import torch
from torch import nn

import memscale
from support.steps import counted_regions
from support.wrapping import lossless

SIZE = 32 * 1024  # 128 KiB
WARM_UP = 2


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("average", torch.ones(SIZE))
        self.updates = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) * self.average[:16].clone())
        if self.updates:
            with torch.no_grad():
                self.average.lerp_(y.mean().expand(SIZE), 0.5)
        return x + torch.tanh(y)


def train(model: nn.Sequential) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2 * WARM_UP):
        for layer in model[:3]:
            layer.updates = step >= WARM_UP
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 64).reshape(4, 16)).square().mean().backward()
        optimizer.step()
    return [each.clone() for each in model.state_dict().values()]


def test_training_goes_on_with_the_numbers_of_the_plain_model() -> None:
    seen = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Averaging() for _ in range(3)), nn.Linear(16, 1))
        if wrapped:
            memscale.wrap(
                model, lossless("aggressive", enable_offloading=False, force_optimize=True), torch.ones(4, 16)
            )
        with counted_regions() as regions:
            seen.append(train(model))
        assert (regions[0] > 0) == wrapped
    assert all(torch.equal(ours, plain) for plain, ours in zip(*seen, strict=True))
