"""The time of a step, taken apart: the parts are what the estimated step time is the sum of."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, OptimizationMode
from memscale.execution_plan import Plan, StepTime
from memscale.planner.cost_model import PLAIN, SAVED_OFFLOADED, Choice, CostModel
from memscale.planner.decide import cost_models, decide, frontier_points
from memscale.planner.settings import NOTHING, Setting
from memscale.profiler.profile import ModelProfile
from memscale.techniques.cost import FOREACH_ACCESSES, HOOK_SECONDS
from support.profiles import LARGE, MIB, stack

OFFLOADING = Config(enable_logging=False)
DONE = ("recompute", "offloaded", "input_offloaded")
ROUNDING = 1e-12  # of a sum in another order


def heavy(**given: int) -> ModelProfile:
    return stack(8, **{"parameter_bytes": 256 * MIB, "large_saved_bytes": 90 * MIB, **given})


def time_of(
    choice: Choice = PLAIN,
    *,
    states_on_host: int = 0,
    bucketed: bool = False,
    prefetch: int = 0,
    **given: int,
) -> StepTime:
    """Return the time of a step with the same choice for all layers."""
    setting = Setting(bucketed=bucketed)
    model = CostModel(heavy(), LARGE, OFFLOADING.replace(**given), setting, prefetch)
    return model.step_time(model.point((choice,) * len(model.blocks), states_on_host))


@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("prefetch", [False, True])
def test_the_parts_of_every_plan_add_up_to_its_time(prefetch: bool, accumulated: int) -> None:
    config = OFFLOADING.replace(gradient_accumulation_steps=accumulated)
    under = [(NOTHING, heavy()), (Setting(bucketed=True), heavy())]
    points = frontier_points(under, LARGE, config, prefetch=prefetch)
    models = {model.setting: model for model in cost_models(under, LARGE, config, prefetch=prefetch)}
    choices = {each for point in points for each in point.choices}
    assert all(any(map(is_done, choices)) for is_done in (operator.attrgetter(name) for name in DONE))
    assert any(point.states_on_host for point in points)
    for point in points:
        time = models[point.setting].step_time(point)
        assert time.total == pytest.approx(point.seconds, rel=ROUNDING)
        assert min(time.parts) >= -ROUNDING


def test_each_technique_adds_to_the_parts_it_costs() -> None:
    profile, model = heavy(), CostModel(heavy(), LARGE, OFFLOADING)
    rates, layers = model.terms.rates, len(heavy().blocks)
    plain = time_of()
    assert plain == StepTime(compute=plain.compute, device_step=rates.optimizer(profile.gradient_bytes))

    hooks = layers * HOOK_SECONDS
    again = sum(map(rates.forward, profile.blocks))
    checkpointed = time_of(Choice("checkpointing"))
    assert checkpointed.parts == pytest.approx(replace(plain, recomputation=again, overhead=hooks).parts)

    latency = rates.latency * layers  # of one tensor each
    copies = (
        2 * profile.parameter_bytes / rates.h2d_per_second + profile.gradient_bytes / rates.d2h_per_second
    )
    masters = rates.optimizer_offloaded(profile.gradient_bytes, fused=True)
    offloaded = StepTime(plain.compute, 0.0, copies, 0.0, masters, hooks + 3 * latency)
    assert time_of(PLAIN._replace(offloaded=True)).parts == pytest.approx(offloaded.parts, abs=ROUNDING)
    hidden = time_of(PLAIN._replace(offloaded=True), prefetch=1)
    assert 0 < hidden.transfers < copies
    assert hidden.host_step == pytest.approx(masters)

    state = time_of(states_on_host=layers, bucketed=True)
    moments = profile.optimizer_bytes / rates.d2h_per_second
    assert state.transfers == pytest.approx(moments)
    assert state.device_step == plain.device_step

    saved = time_of(SAVED_OFFLOADED)
    nbytes = sum(block.large_saved_bytes + block.boundary_bytes for block in profile.blocks)
    assert saved.transfers == pytest.approx(nbytes / rates.d2h_per_second + nbytes / rates.h2d_per_second)


def test_batches_share_the_optimizers_parts_alone() -> None:
    offloaded = PLAIN._replace(offloaded=True)
    one, many = time_of(offloaded), time_of(offloaded, gradient_accumulation_steps=8)
    assert many.parts == pytest.approx(replace(one, host_step=one.host_step / 8).parts, abs=ROUNDING)


@pytest.mark.parametrize(("momentum", "accesses"), [(0.0, 3), (0.9, 8)])
def test_the_step_of_sgd_is_not_timed_as_adamws(momentum: float, accesses: int) -> None:
    model, batch = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.zeros(2, 64)
    adamw = torch.optim.AdamW(model.parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    time, expected = (
        memscale.plan(model, batch, hardware="RTX 3090", optimizer=each).step_time.device_step
        for each in (sgd, adamw)
    )
    assert time == pytest.approx(expected * accesses / FOREACH_ACCESSES, abs=1e-12)


@pytest.mark.parametrize("mode", tuple(OptimizationMode))
def test_the_ratio_of_a_plan_is_that_of_its_parts(mode: OptimizationMode) -> None:
    plan = decide(heavy(), LARGE, Config(mode=mode, enable_logging=False))
    assert plan.predicted_seconds == plan.step_time.total == sum(plan.step_time.parts)
    assert plan.predicted_time_ratio == round(plan.step_time.total / plan.baseline_seconds, 6)
    assert Plan.from_json(plan.to_json()) == plan


def test_the_explanation_has_a_line_for_it() -> None:
    plan = decide(heavy(), LARGE, Config(mode="aggressive", enable_logging=False))
    text = " ".join(plan.explain().split())  # a narrow terminal breaks the line
    _, _, line = text.partition("A step takes")
    assert "(estimated): compute" in line
    assert "host step" in line
    assert "device step" not in line  # all masters are on the host
