"""A loop that leaves gradients alone gets, once, a plan whose optimizer steps overlap with backward."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memscale
from memscale import Config
from memscale.executor import executor_of
from memscale.optimizer import needs
from memscale.techniques import cost
from memscale.testing import executing

STEPS = 6
BUDGET = "50MiB"


@pytest.fixture(autouse=True)
def launches_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model this small buckets would cost more than they gain."""
    monkeypatch.setattr(needs, "BUCKET_SECONDS", 0.0)
    monkeypatch.setattr(cost, "BUCKET_SECONDS", 0.0)
    monkeypatch.setattr(cost, "LINK_LATENCY", 0.0)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=512, n_positions=64)
    ).train()


def train(model: nn.Module, device: torch.device, *, clip: bool) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, losses = torch.Generator().manual_seed(0), []
    torch.manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, 512, (4, 64), generator=generator).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.slow
def test_the_loop_decides_whether_steps_overlap(clip: bool, caplog: pytest.LogCaptureFixture) -> None:
    with executing("2GiB") as gpu:
        plain = gpt2().to(gpu.device)
        expected = train(plain, gpu.device, clip=clip)
        model = memscale.wrap(gpt2().to(gpu.device), Config(memory_budget=BUDGET, fused_host_step=False))
        with caplog.at_level(logging.INFO, logger="memscale"):
            losses = train(model, gpu.device, clip=clip)
        executor = executor_of(model)
        assert executor.plan.optimizer is not None
        assert executor.plan.optimizer.overlapped is not clip
        overlap = executor.placement.states.overlap
        assert (overlap.meter.steps_committed > 0) is not clip
        assert overlap.meter.steps_dropped == 0
        said = [each for each in caplog.messages if each.startswith("nothing changes gradients")]
        assert len(said) == (0 if clip else 1)
        assert all("(estimated)" in each and "of host memory" in each for each in said)
        assert gpu.peak_bytes > 0
        memscale.detach(model)
        assert losses == expected
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.slow
def test_switched_off() -> None:
    with executing("2GiB") as gpu:
        config = Config(memory_budget=BUDGET, overlap_optimizer=False, enable_logging=False)
        model = memscale.wrap(gpt2().to(gpu.device), config)
        train(model, gpu.device, clip=False)
        overlap = executor_of(model).placement.states.overlap
        assert (overlap.meter.steps_committed, overlap.obstacle, overlap.is_allowed) == (0, None, False)
        memscale.detach(model)
