"""Parameters at home: on a device that is too small for the plain model the wrapped one trains, with equal numbers."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, Family
from torch import nn
from torch.utils._pytree import tree_map

import memscale
from memscale import Config
from memscale.simulator import ExecutingDevice, executing

STEPS = 3
QUIET = Config(mode="aggressive", enable_logging=False)  # tiny models gain too little for BALANCED
NAMES = ["gpt2", "bert", "llama", "t5", "vit", "tied", "lora", "frozen_embeddings", "resnet"]


def sample_of(family: Family, device: torch.device | str = "cpu") -> object:
    batch = family.batch(device=device)
    return batch if isinstance(batch, dict) else batch[:1]


def train(family: Family, model: nn.Module, device: torch.device | str) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and the parameters' last gradients on the CPU."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = tree_map(lambda leaf: leaf.to(device), family.batch())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = family.loss(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    gradients = [p.grad.detach().cpu() for p in model.parameters() if p.grad is not None]
    return losses, gradients


def plain_peak(family: Family) -> int:
    with executing() as gpu:
        train(family, family.build().to(gpu.device), gpu.device)
    return gpu.peak_bytes


def wrapped_run(family: Family, capacity: int) -> tuple[ExecutingDevice, list[float], list[torch.Tensor], memscale.Plan]:
    with executing(capacity) as gpu:
        model = family.build().to(gpu.device)
        memscale.wrap(model, QUIET, sample_of(family, gpu.device))
        plan = model._memscale_executor.plan
        homes = [p.device.type for layer in plan.layers if "offloading" in layer.techniques
                 for member in layer.members for p in model.get_submodule(member).parameters()]
        assert homes, "nothing was offloaded"
        assert set(homes) == {"cpu"}
        gpu.tracker.reset_peak()
        losses, gradients = train(family, model, gpu.device)
        memscale.detach(model)
        assert {p.device.type for p in model.parameters()} == {gpu.device.type}
    return gpu, losses, gradients, plan


@pytest.mark.parametrize("name", NAMES)
def test_offloaded_model_trains_like_the_plain_one(name: str) -> None:
    family = FAMILIES[name]
    expected_losses, expected_gradients = train(family, family.build(), "cpu")
    gpu, losses, gradients, plan = wrapped_run(family, 1 << 34)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for expected, got in zip(expected_gradients, gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert gpu.peak_bytes < plain_peak(family)
