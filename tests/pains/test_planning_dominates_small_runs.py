"""Planning is done once for equal models, seldom in a run, and its time is in the report."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.planner import make_plan as planning
from memscale.planner import replan as replanning
from memscale.profiler.sample import MOST_PLANS
from support.wrapping import QUIET, Layer

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


@pytest.fixture
def rehearsals(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were really planned for."""
    seen: list[nn.Module] = []
    simulated = planning.simulated_plan

    def counted(model: nn.Module, *args: Any) -> Any:
        seen.append(model)
        return simulated(model, *args)

    monkeypatch.setattr(planning, "simulated_plan", counted)
    return seen


def test_an_equal_model_has_the_plan_of_the_first(rehearsals: list[nn.Module]) -> None:
    first, second = Net(), Net()
    for model in (first, second):
        memscale.wrap(model, QUIET, X)
        model(X).sum().backward()
    assert rehearsals == [first]
    assert second._memscale_executor.plan == first._memscale_executor.plan
    memscale.plan(second, torch.zeros(4, 6, 8), QUIET)  # the values of activations decide nothing
    assert rehearsals == [first]


CHANGES: dict[str, Callable[[Net], object]] = {
    "dropout": lambda net: setattr(net.layers[1].dropout, "p", 0.1),
    "evaluation": lambda net: net.layers[1].eval(),
    "an attribute": lambda net: setattr(net, "power", 2),
    "a frozen parameter": lambda net: net.layers[0].up.weight.requires_grad_(False),
    "a tied parameter": lambda net: setattr(net.layers[0].up, "weight", net.layers[1].up.weight),
    "another type": lambda net: net.double(),
    "a layer more": lambda net: net.layers.append(Layer()),
    "another class": lambda net: net.layers.__setitem__(0, nn.Linear(8, 8)),
    "a forward of its own": lambda net: setattr(net.layers[0], "forward", lambda x: x),
    "a hook": lambda net: net.register_forward_hook(lambda *args: None),
    "an unknown object": lambda net: setattr(net, "draw", random.Random(3)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_model_that_differs_is_planned_for_anew(
    change: Callable[[Net], object], rehearsals: list[nn.Module]
) -> None:
    memscale.plan(Net(), X, QUIET)
    other = Net()
    change(other)
    batch = X.double() if next(other.parameters()).dtype is torch.float64 else X
    memscale.plan(other, batch, QUIET)
    assert len(rehearsals) == 2


@pytest.mark.parametrize(
    ("batch", "config", "hardware"),
    [
        (torch.ones(4, 7, 8), QUIET, None),
        (X.clone().requires_grad_(), QUIET, None),
        (X, QUIET.replace(mode="aggressive"), None),
        (X, QUIET.replace(memory_budget="1GB"), None),
        (X, QUIET, "RTX 3090"),
    ],
)
def test_another_batch_or_setting_or_device_is_planned_for_anew(
    batch: torch.Tensor, config: Config, hardware: str | None, rehearsals: list[nn.Module]
) -> None:
    memscale.plan(Net(), X, QUIET)
    memscale.plan(Net(), batch, config, hardware=hardware)
    assert len(rehearsals) == 2


def test_values_of_the_batch_count_where_forward_asks_for_them(rehearsals: list[nn.Module]) -> None:
    ones, zeros = torch.ones(4, 6, dtype=torch.long), torch.zeros(4, 6, dtype=torch.long)
    for mask in (ones, zeros, ones, zeros):
        memscale.plan(Net(), (X, mask), QUIET)
    assert len(rehearsals) == 2
    embedding = nn.Sequential(nn.Embedding(8, 8), Layer())
    for ids in (ones, zeros):
        memscale.plan(embedding, ids, QUIET)
    assert len(rehearsals) == 3


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
