"""Points of the frontier: what is considered, and how to get one as a plan."""

from __future__ import annotations

import pytest

from memscale.planner.cost_model import CostModel, full_checkpointing
from memscale.planner.decide import decide
from memscale.planner.make_plan import usable
from memscale.profiler import ModelProfile
from support.profiles import LARGE, MIB, block, config_of, profile_of, stack

OFFLOADING = config_of(enable_offloading=True)


@pytest.mark.parametrize("offloading", [False, True])
def test_a_point_is_had_by_asking_for_its_memory(offloading: bool) -> None:
    profile, config = stack(6), config_of(enable_offloading=offloading)
    frontier = decide(profile, LARGE, config).frontier
    assert len(frontier) > 3
    for point in frontier:
        budget = config.replace(memory_budget=point.budget_bytes)
        plan = decide(profile, LARGE, budget, margin=point.budget_bytes - usable(point.budget_bytes))
        assert (plan.predicted_peak_bytes, plan.predicted_time_ratio) == (point.peak_bytes, point.time_ratio)


def longest_segment(profile: ModelProfile) -> int:
    model = CostModel(profile, LARGE, config_of())
    return max(option.span for row in model.rows() for here in row.options for option in here)


def test_segments_that_bring_back_too_much_are_not_considered() -> None:
    """24 blocks: of what they save the best segments are of sqrt(24 * input / saved) blocks."""
    heavy = stack(24, saved_bytes=96 * MIB, boundary_bytes=MIB, output_bytes=MIB, ops=())
    light = stack(24, saved_bytes=MIB, boundary_bytes=MIB, output_bytes=MIB, ops=())
    assert (longest_segment(heavy), longest_segment(light)) == (4, 8)


def test_only_what_is_offloaded_is_prefetched() -> None:
    """A large embedding that stays on the device is never copied to it."""
    large = block("embedding", role="embedding", container="", order=0, parameter_bytes=512 * MIB)
    layers = [block(f"layers.{index}", order=index + 1) for index in range(4)]
    profile = profile_of(large, *layers)
    waiting, prefetching = (CostModel(profile, LARGE, OFFLOADING, prefetch=depth) for depth in (0, 1))
    full = full_checkpointing(waiting.blocks)
    choices = (*full[:-1], full[-1]._replace(offloaded=True))
    without, ahead = waiting.point(choices), prefetching.point(choices)
    assert (without.prefetch, ahead.prefetch > 0) == (0, True)
    assert ahead.peak_bytes - without.peak_bytes <= ahead.prefetch * layers[0].used_bytes
