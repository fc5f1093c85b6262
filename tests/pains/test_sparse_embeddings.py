"""Embeddings with `sparse=True` train wrapped, with the plain model's numbers, offloaded or not.

`wrap` used to raise "nbytes is not defined for sparse tensors", and torch itself refuses a sparse gradient in the
backward of `weight.to(device)`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.testing import executing
from support.steps import plan_of
from support.wrapping import lossless

ROWS, WIDTH, STEPS = 2000, 32, 3


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        table: dict[str, Any] = {"embedding": nn.Embedding, "bag": nn.EmbeddingBag}
        self.table = table[kind](ROWS, WIDTH, sparse=True)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def optimizers_of(name: str, model: Model) -> list[torch.optim.Optimizer]:
    if name == "SGD":
        return [torch.optim.SGD(model.parameters(), lr=0.1)]
    if name == "Adagrad":
        return [torch.optim.Adagrad(model.parameters(), lr=0.1)]
    dense = [parameter for name, parameter in model.named_parameters() if name != "table.weight"]
    return [torch.optim.SparseAdam([model.table.weight], lr=0.01), torch.optim.AdamW(dense, lr=0.01)]


def train(
    kind: str, optimizer: str, config: Config | None, device: Any
) -> tuple[list[torch.Tensor], Model, bool]:
    """Losses and weights of steps with two batches each, the model, and whether gradients were sparse."""
    torch.manual_seed(0)
    model = Model(kind).to(device)
    ids = torch.randint(ROWS, (2 * STEPS, 16, 8), generator=torch.Generator().manual_seed(1)).to(device)
    if config is not None:
        memscale.wrap(model, config, ids[0])
    optimizers = optimizers_of(optimizer, model)
    found, sparse = [], True
    for number in range(2 * STEPS):
        loss = model(ids[number]).square().mean()
        loss.backward()
        sparse &= model.table.weight.grad.is_sparse
        found.append(loss.detach().cpu())
        if number % 2:
            for each in optimizers:
                each.step()
                each.zero_grad()
    return [*found, *(parameter.detach().cpu().clone() for parameter in model.parameters())], model, sparse


@pytest.mark.matrix(5)
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "SparseAdam"])
@pytest.mark.parametrize("kind", ["embedding", "bag"])
@pytest.mark.parametrize("place", ["cpu", "accelerator", "accelerator, async"])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch.optim.Adagrad's own
def test_offloaded_sparse_embeddings_train_as_the_plain_ones(place: str, kind: str, optimizer: str) -> None:
    with executing() if place != "cpu" else nullcontext() as gpu:
        device = "cpu" if gpu is None else gpu.device
        plain, _, _ = train(kind, optimizer, None, device)
        config = lossless("aggressive", async_offload=place.endswith("async"))
        ours, model, sparse = train(kind, optimizer, config, device)
        entry = next(layer for layer in plan_of(model).layers if layer.name == "table")
        assert "offloading" in entry.techniques, plan_of(model).notes
        assert plan_of(model).prediction_source == "simulated"
        assert sparse
        assert len(ours) == len(plain)
        assert all(map(torch.equal, ours, plain))
        memscale.detach(model)
        assert all(map(torch.equal, (each.detach().cpu() for each in model.parameters()), plain[2 * STEPS :]))


def test_a_sparse_gradient_goes_to_the_host_as_indices_and_values() -> None:
    with executing() as gpu:
        torch.manual_seed(0)
        model = Model("embedding").to(gpu.device)
        ids = torch.randint(ROWS, (16, 8)).to(gpu.device)
        memscale.wrap(model, lossless("aggressive"), ids)
        model(ids).square().mean().backward()  # libraries take their workspaces
        model.zero_grad()
        before = gpu.tracker.live_bytes(gpu.device)
        model(ids).square().mean().backward()
        gradient = model.table.weight.grad
        assert gradient.device.type == "cpu"
        assert gradient._values().nbytes == ids.numel() * WIDTH * 4
        assert gradient._indices().nbytes == ids.numel() * 8
        assert gpu.tracker.live_bytes(gpu.device) == before
