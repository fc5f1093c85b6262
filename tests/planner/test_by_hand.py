"""Points of the frontier become plans; the engine is never worse than what one would try by hand."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter

import pytest

from memscale.planner.cost_model import CostModel
from memscale.planner.engine import decide, points_by_hand, points_of
from memscale.planner.make_plan import usable
from memscale.planner.options import called_blocks, checkpointing_candidates, uniform_candidates
from memscale.profiler import ModelProfile
from support.profiles import LARGE, MIB, all_points_of, block, config_of, profile_of, stack

WITH_HOMES = config_of(enable_offloading=True)


@pytest.mark.parametrize("offloading", [False, True])
def test_a_point_is_had_by_asking_for_its_memory(offloading: bool) -> None:
    profile, config = stack(6), config_of(enable_offloading=offloading)
    frontier = decide(profile, LARGE, config).frontier
    assert len(frontier) > 3
    for point in frontier:
        budget = config.replace(memory_budget=point.budget_bytes)
        plan = decide(profile, LARGE, budget, margin=point.budget_bytes - usable(point.budget_bytes))
        assert (plan.predicted_peak_bytes, plan.predicted_time_ratio) == (point.peak_bytes, point.time_ratio)


def test_by_hand_is_full_checkpointing_with_ever_more_layers_at_home() -> None:
    profile = profile_of(block("embedding", role="embedding", container=""), *stack(3).blocks)
    found = list(checkpointing_candidates(profile, offload=True))
    assert all(each.is_full_checkpointing for each in found)
    assert [each.offloaded for each in found] == [0, 1, 2, 3, 4]
    layers = [
        [
            choice.offloaded
            for choice, each in zip(found[2].choices, called_blocks(profile), strict=True)
            if each.role == role
        ]
        for role in ("embedding", "repeated")
    ]
    assert layers == [[False], [False, True, True]]
    assert len(list(checkpointing_candidates(profile, offload=False))) == 1
    assert not list(checkpointing_candidates(stack(3, has_own_checkpointing=True), offload=True))


def test_in_steps_from_one_end_to_the_other() -> None:
    profile = stack(12)
    assert [each.offloaded for each in checkpointing_candidates(profile, offload=True, steps=3)] == [
        0,
        4,
        8,
        12,
        12,
    ]
    assert [each.offloaded for each in checkpointing_candidates(stack(2), offload=True, steps=3)] == [
        0,
        1,
        2,
        2,
    ]
    every = points_by_hand(profile, LARGE, WITH_HOMES)
    few = points_by_hand(profile, LARGE, WITH_HOMES, steps=1)
    assert len(few) < len(every)
    ends = [min(point.peak_bytes for point in found) for found in (few, every)]
    assert ends[0] == ends[1]
    assert min(point.seconds for point in few) == min(point.seconds for point in every)


def longest_segments(profile: ModelProfile) -> tuple[int, int]:
    """Of the plans by hand, and of the options that the frontier is found on."""
    blocks = called_blocks(profile)
    by_hand = [
        max((len(list(group)) for chained, group in groupby(each.choices, attrgetter("chained")) if chained))
        for each in uniform_candidates(profile, recompute=True, offload=False)
        if any(choice.chained for choice in each.choices)
    ]
    model = CostModel(profile, LARGE, config_of())
    spans = [option.span for row in model.rows() for here in row.options for option in here]
    assert len(blocks) == 24
    return 1 + max(by_hand), max(spans)


def test_segments_that_bring_back_too_much_are_not_looked_at() -> None:
    """24 blocks: of what they save the best segments are of sqrt(24 * input / saved) blocks."""
    heavy = stack(24, saved_bytes=96 * MIB, boundary_bytes=MIB, output_bytes=MIB, ops=())
    light = stack(24, saved_bytes=MIB, boundary_bytes=MIB, output_bytes=MIB, ops=())
    assert longest_segments(heavy) == (4, 4)
    assert longest_segments(light) == (16, 8)


def test_the_engine_has_what_one_would_try_by_hand() -> None:
    profile = stack(4)
    hand = points_of(list(checkpointing_candidates(profile, offload=True)), profile, LARGE, WITH_HOMES)
    ours = {(point.peak_bytes, point.seconds) for point in all_points_of(profile, LARGE, WITH_HOMES)}
    assert {(point.peak_bytes, point.seconds) for point in hand} <= ours


def test_only_what_is_at_home_is_fetched_ahead() -> None:
    """A large embedding that stays on the device is never on its way to it."""
    large = block("embedding", role="embedding", container="", order=0, parameter_bytes=512 * MIB)
    layers = [block(f"layers.{index}", order=index + 1) for index in range(4)]
    profile = profile_of(large, *layers)
    one_layer = list(checkpointing_candidates(profile, offload=True))[1]
    waiting, ahead = points_of([one_layer], profile, LARGE, WITH_HOMES)
    assert (waiting.prefetch, ahead.prefetch > 0) == (0, True)
    assert ahead.peak_bytes - waiting.peak_bytes <= ahead.prefetch * layers[0].used_bytes
