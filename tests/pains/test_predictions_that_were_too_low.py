"""What a simulation cannot see is allowed for, and the plan says so."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import memscale
from memscale import Plan
from memscale.profiler.profile import BRANCH_SHARE, CONVOLUTION_WORKSPACES, RECURRENT_SHARE
from support.wrapping import Layer, lossless

CONSERVATIVE = lossless("conservative")


class Net(nn.Module):
    """Three layers, and a question that forward asks first."""

    def __init__(self, question: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(32) for _ in range(3)])
        self.question = question

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.question == "branch" and x.mean() > 0:
            x = x.exp().sqrt().tanh()
        if self.question == "any" and (x > 0).any():
            x = x.exp().sqrt().tanh()
        if self.question == "draw" and torch.rand(1) > 0.5:
            x = x.exp().sqrt().tanh()
        if self.question == "item":
            x = x * x.max().item()
        if self.question == "finite" and (torch.isnan(x).any() or not torch.isfinite(x).all()):
            raise ValueError("bad values")
        if self.question == "mask" and mask is not None and not mask.all():
            x = x * mask
        for layer in self.layers:
            x = layer(x)
        return x


def planned(model: nn.Module, *args: torch.Tensor, hardware: str | None = None) -> Plan:
    return memscale.plan(model, args, CONSERVATIVE, hardware=hardware)


X = torch.ones(4, 16, 32)


@pytest.mark.parametrize("question", ["branch", "any", "draw", "item"])
@pytest.mark.parametrize("hardware", ["RTX 3090", None])
def test_values_that_were_guessed_widen_the_allowance(question: str, hardware: str | None) -> None:
    plan = planned(Net(question), X, hardware=hardware)
    assert plan.prediction_source == "simulated"
    assert plan.unseen_bytes == pytest.approx(BRANCH_SHARE * plan.baseline_peak_bytes, rel=0.02)
    assert plan.allowance_bytes == math.ceil(0.01 * plan.predicted_peak_bytes) + plan.unseen_bytes
    assert any("which were guessed" in note for note in plan.notes)


@pytest.mark.parametrize("question", ["", "finite", "mask"])
def test_checks_and_values_of_the_batch_are_not_guesses(question: str) -> None:
    plan = planned(Net(question), X, torch.ones(4, 16, 1, dtype=torch.long))
    assert plan.unseen_bytes == 0
    assert plan.notes == ()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_on_a_gpu_widen_the_allowance(kind: type[nn.RNNBase]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(32, 32, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]

    on_gpu = planned(Recurrent(), X, hardware="RTX 3090")
    assert on_gpu.unseen_bytes == pytest.approx(RECURRENT_SHARE * on_gpu.baseline_peak_bytes, rel=0.02)
    assert "recurrent layers" in on_gpu.notes[-1]
    assert planned(Recurrent(), X).unseen_bytes == 0


def test_convolutions_on_a_gpu_widen_the_allowance_by_what_the_largest_reads_and_writes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    x = torch.ones(2, 3, 64, 64)
    largest = 4 * (2 * 8 * 64 * 64 + 2 * 4 * 64 * 64 + 4 * 8 * 9 + 4)
    on_gpu = planned(model, x, hardware="RTX 3090")
    assert on_gpu.unseen_bytes == CONVOLUTION_WORKSPACES * largest
    assert "cuDNN's convolutions" in on_gpu.notes[-1]
    assert planned(model, x).unseen_bytes == 0


def test_a_budget_has_room_for_the_wider_allowance() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU()) for _ in range(6)])
    x = torch.ones(4, 8, 128, 128)
    plain = memscale.plan(model, x, CONSERVATIVE, hardware="RTX 3090")
    point = plain.frontier[len(plain.frontier) // 2]
    assert point.unseen_bytes == plain.unseen_bytes > 0
    budget = CONSERVATIVE.replace(memory_budget=point.budget_bytes)
    plan = memscale.plan(model, x, budget, hardware="RTX 3090")
    assert plan.predicted_peak_bytes + plan.allowance_bytes <= point.budget_bytes
    assert plan.allowance_bytes > plan.unseen_bytes


def test_a_model_without_gradients_is_planned() -> None:
    """As one that is wrapped before its adapters are added: its step ends with forward."""
    plan = planned(Net("").requires_grad_(False), X)
    assert plan.prediction_source == "simulated"
    assert not any("raised" in note for note in plan.notes)
