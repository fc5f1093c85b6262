"""A plan with which a step raises before training is never attached: one with fewer techniques takes its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memscale
from memscale import Config, Plan
from memscale.testing import executing
from support.wrapping import Layer, lossless

AGGRESSIVE = lossless("aggressive")


class TiedByHand(nn.Module):
    """Reads its embedding's weight again in the head, as torchtune's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(500, 32)
        self.layers = nn.ModuleList([Layer(32) for _ in range(3)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(x, self.tok.weight)


class OwnWeight(Layer):
    """Refuses to compute with anything but its own parameter, as an offloaded layer has to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not all(isinstance(each.weight, nn.Parameter) for each in (self.up, self.down)):
            raise TypeError("the weights of this layer must be parameters")
        return super().forward(x)


class OwnForward(Layer):
    """Refuses to run with a forward that is not its class's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "forward" in vars(self):
            raise TypeError("somebody has replaced the forward of this layer")
        return super().forward(x)


def stack(kind: type[Layer]) -> nn.Module:
    return nn.Sequential(nn.Sequential(*[kind(32) for _ in range(4)]), nn.Linear(32, 4))


def techniques(plan: Plan) -> set[str]:
    return {name for layer in plan.layers for name in layer.techniques}


def batch(device: Any = "cpu") -> torch.Tensor:
    return torch.ones(8, 64, 32, device=device)


def test_a_layer_that_cannot_be_offloaded_is_planned_without_offloading() -> None:
    plain = memscale.plan(stack(Layer), batch(), AGGRESSIVE, hardware="RTX 3090")
    assert techniques(plain) == {"offloading", "checkpointing"}

    plan = memscale.plan(stack(OwnWeight), batch(), AGGRESSIVE, hardware="RTX 3090")

    assert techniques(plan) == {"checkpointing"}
    assert plan.prediction_source == "simulated"
    assert plan.decision_source == "rule_fallback"
    (note,) = plan.notes
    assert note.startswith("planned without offloading")
    assert "TypeError: the weights of this layer must be parameters" in note


def test_a_model_that_no_technique_works_on_gets_none_and_is_told_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = stack(OwnForward)
    caplog.set_level("WARNING", "memscale")
    memscale.wrap(model, AGGRESSIVE.replace(enable_logging=True), batch())

    plan = model._memscale_executor.plan
    assert techniques(plan) == set()
    assert plan.optimizer is None
    assert plan.predicted_peak_bytes == plan.baseline_peak_bytes
    assert plan.notes[-1].startswith("planned without any technique")
    raised, idle = (record.getMessage() for record in caplog.records)
    assert "A step with the plan raised (TypeError: somebody has replaced" in raised
    assert "The plan does nothing" in idle
    assert "somebody has replaced" in idle
    model(batch()).sum().backward()


@pytest.mark.parametrize("config", [AGGRESSIVE, Config(mode="aggressive", enable_logging=False)])
def test_a_head_that_reads_an_offloaded_embedding_trains(config: Config) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 500, (4, 16))
    with executing("1GiB") as gpu:
        model = memscale.wrap(TiedByHand().to(gpu.device), config, ids)
        assert techniques(model._memscale_executor.plan)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            functional.cross_entropy(
                model(ids.to(gpu.device)).flatten(0, 1), ids.flatten().to(gpu.device)
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
