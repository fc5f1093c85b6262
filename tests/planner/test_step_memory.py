"""The memory over a simulated step, as plans have it for tables and pages."""

from __future__ import annotations

import pytest

import memscale
from memscale import Config, Plan
from memscale.execution_plan import StepMemory
from support.families import FAMILIES

QUIET = Config(enable_logging=False, mode="aggressive")


@pytest.fixture(scope="module")
def plan() -> Plan:
    family = FAMILIES["gpt2"]
    return memscale.plan(family.build(), family.batch(), QUIET, hardware="RTX 3090")


def test_its_highest_moment_is_the_predicted_peak(plan: Plan) -> None:
    for step, peak in (
        (plan.baseline_memory, plan.baseline_peak_bytes),
        (plan.predicted_memory, plan.predicted_peak_bytes),
    ):
        assert step is not None
        totals = [sum(sample) for sample in step.samples]
        assert max(totals) == totals[step.peak]
        # Blocks of the allocator may be larger in one step than in another.
        assert totals[step.peak] == pytest.approx(peak, rel=0.02)


def test_it_says_what_the_memory_is_used_for(plan: Plan) -> None:
    assert plan.baseline_memory is not None
    at_peak = plan.baseline_memory.at_peak
    weights = sum(each.nbytes for each in FAMILIES["gpt2"].build().parameters())
    assert at_peak["weights"] >= weights
    assert at_peak["optimizer state"] >= 2 * weights
    assert sum(at_peak.values()) == sum(plan.baseline_memory.samples[plan.baseline_memory.peak])


def test_activations_grow_in_forward_and_are_gone_after_backward(plan: Plan) -> None:
    step = plan.baseline_memory
    assert isinstance(step, StepMemory)
    begins = {phase.name: phase.begin for phase in step.phases}
    assert list(begins) == ["forward", "loss", "backward", "optimizer step"]
    place = step.categories.index("activations")
    activations = [sample[place] for sample in step.samples]
    assert activations[begins["backward"] - 1] > activations[0]
    assert activations[-1] == 0


def test_it_names_the_largest_tensors_at_the_peak(plan: Plan) -> None:
    step = plan.predicted_memory
    assert step is not None
    sizes = [each.nbytes for each in step.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 0
    assert any("float32" in each.what for each in step.largest)


def test_it_is_part_of_the_json(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
