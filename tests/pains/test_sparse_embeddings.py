"""`nn.Embedding(sparse=True)` is planned for and trains: "nbytes is not defined for sparse tensors" is not said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale
from memscale.profiler import Place, Sample, profile_model
from memscale.simulator import executing
from wrapping import Layer, lossless

WORDS, WIDTH = 5000, 16


class Net(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def trained(device: torch.device | str, mode: str | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, ids = Net().to(device), torch.randint(0, WORDS, (4, 8)).to(device)
    if mode is not None:
        memscale.wrap(model, lossless(mode), ids)
        plan = model._memscale_executor.plan
        assert plan.prediction_source == "simulated"
        assert mode != "aggressive" or any(layer.techniques for layer in plan.layers)
    sparse = torch.optim.SparseAdam(model.embedding.parameters())
    dense = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    torch.manual_seed(1)
    for _ in range(2):
        model(ids).square().mean().backward()
        assert model.embedding.weight.grad.is_sparse
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("mode", ["balanced", "aggressive"])
@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_training_is_that_of_the_plain_model(mode: str, where: str) -> None:
    with executing("1GiB") as gpu:
        device = gpu.device if where == "gpu" else "cpu"
        ours, plain = trained(device, mode), trained(device, None)
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


def test_a_sparse_gradient_counts_as_its_indices_and_values() -> None:
    sample = Sample((torch.zeros(4, 8, dtype=torch.long),), {})
    sparse, dense = (
        profile_model(Net(kind), sample, Place("cpu"), empirical=False).block("embedding")
        for kind in (True, False)
    )
    less = 4 * WORDS * WIDTH - (4 * 32 * WIDTH + 8 * 32)  # a dense gradient; 32 rows and their numbers
    assert dense.backward_traffic - sparse.backward_traffic >= less
