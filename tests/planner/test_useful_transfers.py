"""Activations are offloaded only where the peak would else be higher, or exceed what was asked for."""

from __future__ import annotations

import pytest

from memscale import Config, OptimizationMode
from memscale.planner import decide as deciding
from memscale.planner.assembly import Verdict
from memscale.planner.cost_model import CostModel, spans
from memscale.profiler.profile import ModelProfile
from support.profiles import LARGE, MIB, config_of, profile_of, stack

LAYERS = stack(12, large_saved_bytes=100 * MIB, large_saved_count=8)
PROFILES = {
    "equal layers": LAYERS,
    "a large loss": profile_of(*LAYERS.blocks, tail_peak_bytes=2000 * MIB),
    "large parameters": stack(
        12, parameter_bytes=500 * MIB, large_saved_bytes=100 * MIB, large_saved_count=8
    ),
}
SHARES = [None, 0.8, 0.6, 0.4, 0.2]


def chosen(
    profile: ModelProfile, config: Config, monkeypatch: pytest.MonkeyPatch
) -> tuple[CostModel, Verdict]:
    """Return the point that is decided on, and the cost model that it is of."""
    seen: list[Verdict] = []
    plan_of = deciding.plan_of
    with monkeypatch.context() as patches:
        patches.setattr(
            deciding,
            "plan_of",
            lambda verdict, *args, **given: seen.append(verdict) or plan_of(verdict, *args, **given),
        )
        deciding.decide(profile, LARGE, config)
    point = seen[-1].point
    return CostModel(profile, LARGE, config, point.setting, point.prefetch), seen[-1]


@pytest.mark.parametrize("share", SHARES, ids=str)
@pytest.mark.parametrize("name", PROFILES)
def test_without_any_of_them_the_peak_is_higher(name: str, share: float | None, monkeypatch) -> None:
    profile = PROFILES[name]
    config = config_of(OptimizationMode.AGGRESSIVE, enable_offloading=True)
    if share is not None:
        plain = deciding.plain_point(profile, LARGE, Config()).peak_bytes
        config = config_of(enable_offloading=True, memory_budget=int(share * plain))
    model, verdict = chosen(profile, config, monkeypatch)
    point = verdict.point
    limit = max(point.peak_bytes, verdict.within or 0)
    offloaded = [each for each in spans(point.choices) if point.choices[each[0]].input_offloaded]
    assert offloaded or name != "equal layers"
    for start, stop in offloaded:
        here = tuple(each.with_activations_here for each in point.choices[start:stop])
        choices = (*point.choices[:start], *here, *point.choices[stop:])
        assert model.point(choices, point.states_on_host).peak_bytes > limit
