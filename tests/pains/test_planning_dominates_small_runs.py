"""Planning is done seldom in a run, and its time is in the report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.planner import replan as replanning
from memscale.profiler.sample import MOST_PLANS
from support.wrapping import Layer

X = torch.ones(4, 6, 8)


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.power = 1

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None and bool(mask.all()):
            x = x.exp()
        for layer in self.layers:
            x = layer(x) ** self.power
        return x


def test_the_number_of_plans_in_a_run_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: list[int] = []
    make_plan = replanning.make_plan

    def counted(model: nn.Module, sample: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(sample.args[0].shape[0])
        return make_plan(model, sample, *args, **kwargs)

    monkeypatch.setattr(replanning, "make_plan", counted)
    model = memscale.wrap(Net(), Config(), X)
    caplog.set_level("WARNING", "memscale")
    caplog.clear()
    for samples in (4, 2, 5, 9, 17, 33, 65, 129, 130):
        model(torch.ones(samples, 6, 8)).sum().backward()
    assert sizes == [8, 16, 32, 64]
    assert len(sizes) == MOST_PLANS - 1  # and the one that wrap made
    assert [f"{MOST_PLANS} plans were made in this run" in r.getMessage() for r in caplog.records] == [True]
    report = model._memscale_executor.report()
    assert report.plans == MOST_PLANS
    assert report.planning_seconds > 0
    assert f"time to make {MOST_PLANS} plans" in report.explain()
    assert report.scalars()["plans"] == MOST_PLANS
