"""With gradient accumulation each batch has its share of the time of the optimizer's step, and gradients stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memscale
from memscale import Config
from memscale.execution_plan import Plan
from memscale.executor import Executor
from memscale.hardware import virtual_hardware
from memscale.planner.cache import plan_key
from memscale.planner.cost_model import PLAIN, CostModel
from memscale.planner.decide import decide
from memscale.planner.make_plan import profile_settings
from memscale.planner.predict import rehearsal
from memscale.planner.settings import Setting
from memscale.profiler import Sample
from memscale.profiler.profile import ModelProfile
from memscale.simulator import simulate
from support.profiles import LARGE, MIB, stack

OFFLOADING = Config(enable_logging=False)
STEPS = 8
TOKENS = torch.zeros(4, 256, dtype=torch.long)


def heavy() -> ModelProfile:
    """Layers whose parameters need far more memory and time than what they compute."""
    return stack(8, parameter_bytes=256 * MIB)


def seconds(
    accumulated: int, *, offloaded: bool = False, states_on_host: int = 0, bucketed: bool = False
) -> float:
    config = OFFLOADING.replace(gradient_accumulation_steps=accumulated)
    model = CostModel(heavy(), LARGE, config, Setting(bucketed=bucketed))
    choices = (PLAIN._replace(offloaded=offloaded),) * len(model.blocks)
    return model.point(choices, states_on_host).seconds


def of_the_step(**placement: bool | int) -> float:
    """Return what of a step's time is shared by the batches."""
    return (seconds(1, **placement) - seconds(STEPS, **placement)) / (1 - 1 / STEPS)


def test_only_the_time_of_the_optimizer_is_shared() -> None:
    profile = heavy()
    rates = CostModel(profile, LARGE, OFFLOADING).terms.rates
    on_device = rates.optimizer(profile.gradient_bytes)
    assert of_the_step() == pytest.approx(on_device)
    on_host = rates.optimizer_offloaded(profile.gradient_bytes, fused=True)
    assert of_the_step(offloaded=True) == pytest.approx(on_host)
    moved = of_the_step(states_on_host=8, bucketed=True) - of_the_step(bucketed=True)
    transfers = profile.optimizer_bytes / rates.d2h_per_second
    latency = 2 * rates.latency * sum(each.parameter_count for each in profile.blocks)
    assert moved == pytest.approx(transfers + latency)
    assert seconds(1, states_on_host=8, bucketed=True) - seconds(1, bucketed=True) == pytest.approx(moved)


def plans(**given: object) -> tuple[Plan, Plan]:
    """Return the plans without accumulation, and with it."""
    config = OFFLOADING.replace(**given)
    first, second = (
        decide(heavy(), LARGE, config.replace(gradient_accumulation_steps=steps)) for steps in (1, STEPS)
    )
    return first, second


def test_balanced_offloads_more_within_the_same_time() -> None:
    one, many = plans()
    assert many.predicted_time_ratio <= 2.0
    assert many.host_bytes > one.host_bytes
    assert many.predicted_peak_bytes < one.predicted_peak_bytes


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.8])
def test_a_plan_for_the_same_budget_slows_training_less(share: float) -> None:
    plain = decide(heavy(), LARGE, OFFLOADING).baseline_peak_bytes
    one, many = plans(memory_budget=int(share * plain))
    assert one.host_bytes > 0
    assert many.predicted_time_ratio < one.predicted_time_ratio
    assert many.predicted_seconds < one.predicted_seconds


def test_plans_are_kept_apart_by_it() -> None:
    model, sample, hardware = nn.Linear(4, 4), Sample((torch.ones(2, 4),), {}), virtual_hardware("RTX 3090")
    keys = [
        plan_key(
            model, sample, Config(gradient_accumulation_steps=steps), hardware, optimizer=None, suggest=True
        )
        for steps in (1, STEPS, STEPS)
    ]
    assert keys[0] != keys[1] == keys[2]


def test_a_plan_of_a_model_is_made_for_it() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))
    config = Config(memory_budget="80MB", enable_logging=False)
    one, many = (
        memscale.plan(
            model,
            torch.ones(8, 2048),
            config.replace(gradient_accumulation_steps=steps),
            hardware="RTX 3090",
        )
        for steps in (1, STEPS)
    )
    assert one.host_bytes > 0
    assert many.baseline_seconds < one.baseline_seconds
    assert many.predicted_seconds < one.predicted_seconds


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=512, n_head=8, vocab_size=8192)).train()


def trained(plan: Plan | None) -> int:
    """Return the peak of two steps of two batches each, with a plan or without."""
    with simulate("2GiB") as simulation:
        model = gpt2()
        if plan is None:
            model.to(simulation.device)
        else:
            Executor(model, plan, OFFLOADING, device=simulation.device).attach()
        tokens = TOKENS.to(simulation.device)
        simulation.tracker.reset_peak()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            for _ in range(2):
                model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return simulation.peak_bytes


@pytest.mark.parametrize("offloading", [False, True])
@pytest.mark.matrix(2)
def test_gradients_of_the_batches_before_are_in_the_predicted_peak(offloading: bool) -> None:
    """Forward and backward of all batches but the first find them on the device."""
    config = OFFLOADING.replace(enable_offloading=offloading, gradient_accumulation_steps=2)
    sample, hardware = Sample((), {"input_ids": TOKENS, "labels": TOKENS}), virtual_hardware("2GiB")
    with torch.device("meta"):
        model = gpt2()
    plan = memscale.plan(model, sample.kwargs, config, hardware=hardware)
    assert any(layer.techniques for layer in plan.layers)
    if not offloading:
        assert plan.baseline_peak_bytes == trained(None)
    peak = trained(plan)
    assert peak <= plan.predicted_peak_bytes + plan.allowance_bytes
    assert plan.predicted_peak_bytes == pytest.approx(peak, rel=0.01)
    with rehearsal(model):
        known = profile_settings(model, sample, config, hardware)
    estimated = decide(known.profile, hardware, config, under=known.under)
    assert estimated.actions == plan.actions
    assert estimated.baseline_peak_bytes == pytest.approx(plan.baseline_peak_bytes, rel=0.05)
    assert estimated.predicted_peak_bytes == pytest.approx(peak, rel=0.05)
