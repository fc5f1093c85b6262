"""``wrap(optimizer=...)``: the plan reckons with the state of that optimizer, and not with AdamW's."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import memscale
from memscale import Config
from memscale.errors import WrapError
from memscale.execution_plan import ALLOWANCES
from memscale.executor import executor_of
from memscale.testing import executing

QUIET = Config(enable_logging=False)
KINDS = {
    "sgd": lambda p: optim.SGD(p, lr=0.01),
    "momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9),
    "adamw": lambda p: optim.AdamW(p),
    "amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "adagrad": lambda p: optim.Adagrad(p),
}
TIMES = {"sgd": 0, "momentum": 1, "adamw": 2, "amsgrad": 3, "adagrad": 1}


class Lion(optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(average.lerp_(p.grad, 0.1).sign(), alpha=group["lr"])


def build(layers=4, width=256):
    torch.manual_seed(0)
    layer = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(layers)
    ]
    return nn.Sequential(*layer, nn.Linear(width, 8))


def parameter_bytes(model):
    return sum(each.nbytes for each in model.parameters())


def plan(model, optimizer, config=QUIET, hardware="RTX 3090"):
    return memscale.plan(model, torch.ones(4, 256), config, hardware, optimizer=optimizer)


@pytest.mark.slow
def test_state_is_planned_for_by_kind_and_settings():
    model = build()
    size = parameter_bytes(model)
    needs = Config(enable_logging=False, memory_budget=8_000_000, enable_checkpointing=False)
    peaks, at_home = {}, {}
    for name, make in KINDS.items():
        optimizer = make(model.parameters())
        peaks[name] = plan(model, optimizer).baseline_peak_bytes
        at_home[name] = plan(model, optimizer, needs).host_bytes
        assert not optimizer.state or name == "adagrad"
    assert plan(model, None).baseline_peak_bytes == peaks["adamw"]
    assert plan(model, None, needs).host_bytes == at_home["adamw"] > 0
    # State is there all the time; SGD's step makes nothing in between.
    assert peaks["amsgrad"] - peaks["adamw"] == pytest.approx(size, rel=0.01)
    assert peaks["sgd"] < peaks["momentum"] < peaks["adamw"] < peaks["amsgrad"]
    for name, times in TIMES.items():
        assert at_home[name] / at_home["adamw"] == pytest.approx((2 + times) / 4, rel=0.01)


def test_only_the_parameters_that_it_steps_have_state():
    model = build()
    half = plan(model, optim.AdamW(model[:2].parameters())).baseline_peak_bytes
    assert half < plan(model, optim.AdamW(model.parameters())).baseline_peak_bytes


def test_state_that_is_there_counts():
    """Of a hand-written optimizer it is not known before the first step, and then is."""
    model = build()
    optimizer = Lion(model.parameters())
    before = plan(model, optimizer)
    assert any("Lion" in note and "AdamW" in note for note in before.notes)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    after = plan(model, optimizer)
    assert not any("Lion" in note for note in after.notes)
    assert before.baseline_peak_bytes - after.baseline_peak_bytes == pytest.approx(
        parameter_bytes(model), rel=0.01
    )


@pytest.mark.parametrize("mode", ["plain", "aggressive"])
@pytest.mark.parametrize("name", KINDS)
def test_the_predicted_peak_is_the_observed_one(name, mode):
    with executing("1GiB") as gpu:
        model = build().to(gpu.device).train()
        optimizer = KINDS[name](model.parameters())
        batch = torch.randn(4, 256).to(gpu.device)
        off = (
            {"enable_checkpointing": False, "enable_offloading": False} if mode == "plain" else {"mode": mode}
        )
        config = Config(
            enable_logging=False,
            enable_tiling=False,
            use_8bit_optimizer=False,
            use_mixed_precision=False,
            **off,
        )
        memscale.wrap(model, config, batch, optimizer=optimizer)
        planned = executor_of(model).plan
        for _ in range(3):
            gpu.tracker.reset_peak()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert gpu.peak_bytes == pytest.approx(planned.predicted_peak_bytes, rel=ALLOWANCES["simulated"])
        memscale.detach(model)


def test_a_plan_that_is_made_anew_reckons_with_it():
    model = build()
    with memscale.optimize(
        model, optim.SGD(model.parameters(), lr=0.1), QUIET, torch.ones(2, 256)
    ) as executor:
        first = executor.plan
        model(torch.ones(64, 256)).sum().backward()
        again = executor.plan
        assert again.batch != first.batch
        assert (
            again.baseline_peak_bytes < memscale.plan(model, torch.ones(64, 256), QUIET).baseline_peak_bytes
        )


def test_an_optimizer_of_another_model_is_refused():
    model = build()
    with pytest.raises(WrapError, match="none of the model's parameters"):
        memscale.wrap(model, QUIET, torch.ones(2, 256), optimizer=optim.SGD(build().parameters(), lr=0.1))
    assert executor_of(model) is None
