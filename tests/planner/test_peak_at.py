"""A plan says where in the step its peak is, as the memory of two training steps shows it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, Plan
from memscale._util.terminal import Terminal
from memscale.executor import Executor
from memscale.simulator import simulate
from support.wrapping import Layer

GPU = "RTX 3090"
PLAIN = Config(
    enable_logging=False,
    enable_checkpointing=False,
    enable_offloading=False,
    enable_tiling=False,
    use_8bit_optimizer=False,
    use_mixed_precision=False,
)


class Spacious(nn.Module):
    """A layer that needs much memory in its forward, and saves nothing of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.repeat(1, 400)
        return x


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def small() -> list[nn.Module]:
    return [Layer(64) for _ in range(4)]


CASES = {
    "optimizer step": (lambda: Stack(*(Layer(512) for _ in range(4))), 1),
    "forward of layers.4": (lambda: Stack(*small(), Spacious()), 1024),
    "backward of layers.3": (lambda: Stack(*small()), 4096),
}


def phase_of(plan: Plan, build, rows: int) -> str:
    """Return the phase in which the tracker of a training loop with the plan saw the peak."""
    with simulate(GPU) as simulation:
        model = build().train().to(simulation.device)
        Executor(model, plan, PLAIN, device=simulation.device).attach()
        x = torch.zeros(rows, next(model.parameters()).shape[1], device=simulation.device)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            simulation.tracker.reset_peak()
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        return str(simulation.tracker.at_peak(simulation.device).phase)


@pytest.mark.parametrize("where", CASES)
def test_the_peak_is_where_training_has_it(where: str) -> None:
    build, rows = CASES[where]
    model = build().train()
    x = torch.zeros(rows, next(model.parameters()).shape[1])
    plan = memscale.plan(model, x, PLAIN, GPU)
    assert plan.peak_at == where
    assert plan.peak_at.startswith(phase_of(plan, build, rows))
    assert f"(in {where})" in str(plan)
    assert f"(in {where})" in " ".join(plan.explain(terminal=Terminal(200)).replace("│", " ").split())
    assert Plan.from_json(plan.to_json()).peak_at == where


def test_a_loss_outside_of_the_model_and_a_plan_that_is_only_estimated() -> None:
    model = nn.Sequential(*small(), nn.Linear(64, 20_000)).train()
    plan = memscale.plan(model, torch.zeros(256, 64), PLAIN, GPU)
    assert plan.peak_at == "backward", "of the loss, which belongs to no module"
    assert memscale.plan(model, None, PLAIN, GPU).peak_at == ""
