"""No mode takes a plan that the plain model beats in both memory and time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, Plan
from memscale.planner import make_plan as planning
from support.families import FAMILIES
from support.wrapping import Stack

QUIET = {"enable_logging": False}
FEW = ("cnn", "kwargs_only", "shared_block", "lstm", "transformer_encoder")


def does_something(plan: Plan) -> bool:
    whole = (plan.precision, plan.loss, plan.optimizer)
    return any(layer.techniques for layer in plan.layers) or any(each is not None for each in whole)


@pytest.mark.matrix(7)
@pytest.mark.parametrize("mode", ["conservative", "balanced", "aggressive"])
@pytest.mark.parametrize("hardware", ["RTX 3090", None])
@pytest.mark.parametrize("name", FEW)
def test_a_plan_gains_memory_or_time(name: str, mode: str, hardware: str | None) -> None:
    family = FAMILIES[name]
    plan = memscale.plan(family.build(), family.batch(), Config(mode=mode, **QUIET), hardware=hardware)
    if does_something(plan):
        memory = (plan.predicted_peak_bytes, plan.predicted_saved_bytes)
        gains_memory = memory < (plan.baseline_peak_bytes, plan.baseline_saved_bytes)
        assert gains_memory or plan.predicted_time_ratio < 1, plan


@pytest.fixture
def every_plan_is_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """By simulation every plan that does something needs a byte more than the plain model."""
    predict = planning.predict

    def pessimistic(model: nn.Module, plan: Plan, *args: Any) -> Plan:
        found = predict(model, plan, *args)
        more = found.baseline_peak_bytes + does_something(plan)
        return replace(found, predicted_peak_bytes=more, predicted_time_ratio=1.0 + does_something(plan))

    monkeypatch.setattr(planning, "predict", pessimistic)


@pytest.mark.usefixtures("every_plan_is_worse")
def test_nothing_is_attached_where_nothing_is_gained_and_the_plan_says_so() -> None:
    batch = torch.ones(4, 6, 8)
    model = memscale.wrap(Stack(), Config(mode="aggressive", **QUIET), batch)
    plan = model._memscale_executor.plan
    assert not does_something(plan)
    assert plan.predicted_peak_bytes == plan.baseline_peak_bytes
    assert plan.predicted_time_ratio == 1
    assert plan.notes[-1].startswith(
        "planned without any technique: with it a step would need no less memory"
    )
    assert "enable_checkpointing" not in plan.explain()
    assert all("forward" not in vars(module) for module in model.layers.modules())
    forced = memscale.plan(Stack(), batch, Config(mode="aggressive", force_optimize=True, **QUIET))
    assert does_something(forced)


def test_a_bucket_of_the_optimizer_is_not_larger_than_all_that_is_on_disk() -> None:
    """A tiny model was predicted to need a whole bucket of a mebibyte."""
    family = FAMILIES["transformer_encoder"]
    plan = memscale.plan(family.build(), family.batch(), Config(mode="aggressive", **QUIET))
    assert plan.optimizer is not None
    assert plan.optimizer.state == "disk"
    assert plan.predicted_peak_bytes < plan.baseline_peak_bytes < plan.optimizer.bucket_bytes
