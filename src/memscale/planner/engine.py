"""The decision engine: from a profile, a device and a Config to a plan, the same every time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memscale.config import AsyncOffloadConfig, Config
from memscale.execution_plan import Plan
from memscale.hardware import Hardware
from memscale.planner.assembly import plan_of, point_of
from memscale.planner.cost_model import CostModel, room_below
from memscale.planner.frontier import Option, best_trades, fastest_within
from memscale.planner.options import (
    Candidate,
    Choices,
    checkpointing_candidates,
    uniform_candidates,
)
from memscale.planner.rules import OWN_BYTES, Point, Verdict, choose
from memscale.planner.settings import NOTHING, Setting
from memscale.profiler.profile import ModelProfile
from memscale.units import format_bytes

__all__ = ["Under", "decide", "frontier_points", "has_plan_within", "points_by_hand", "points_of", "room_of"]

FEASIBILITY_WIDTH = 40  # partial plans kept at a position where it is enough to know that there is a plan
EQUAL_TIME = 0.02  # of a plan's time: what another may take more if it is surer to fit
REFINE_HEADROOM = (
    1 / 400
)  # of a limit, left free at first, or the simulation would reject every other refined plan

Under = Sequence[tuple[Setting, ModelProfile]]
"""The settings to choose from, each with what the model needs under it."""


def decide(
    profile: ModelProfile,
    hardware: Hardware,
    config: Config,
    *,
    under: Under = (),
    margin: int = 0,
    refine: bool = True,
) -> Plan:
    """Choose what each block gets.

    The same profile, hardware and Config give the same plan, byte for byte.

    Args:
        profile: what the plain model needs.
        hardware: what there is.
        config: what the user wants.
        under: the settings to choose from; none if it is empty.
        margin: bytes to leave free of the budget, or of the device.
        refine: where the fastest plan up to a peak is asked for, search the frontier more closely there.
    """
    first, *others = _tiers(profile, hardware, config)
    plan = _decide(profile, first, config, under, margin, refine)
    if plan.predicted_peak_bytes + margin <= room_of(hardware, config):
        return plan
    for past_host in others:
        found = _decide(profile, past_host, config, under, margin, refine)
        if found.predicted_peak_bytes < plan.predicted_peak_bytes:
            room = format_bytes(room_below(hardware, config))
            note = f"parameters, gradients and Adam state go to disk: with {room} of host memory for them nothing fits"
            return replace(found, notes=(*found.notes, note))
    return plan


def _tiers(profile: ModelProfile, hardware: Hardware, config: Config) -> tuple[Hardware, ...]:
    """Return the hardware as it is; then offloading to disk, if host memory is too small for all and disk larger."""
    past_host = replace(hardware, past_host=True)
    everything = profile.parameter_bytes + profile.gradient_bytes + profile.optimizer_bytes
    useful = room_below(hardware, config) < min(everything, room_below(past_host, config))
    return (hardware, past_host) if useful and config.enable_offloading else (hardware,)


def _decide(
    profile: ModelProfile, hardware: Hardware, config: Config, under: Under, margin: int, refine: bool
) -> Plan:
    under = under or ((NOTHING, profile),)
    found = [point for setting, needs in under for point in points_by_hand(needs, hardware, config, setting)]
    # The frontier is computed for the setting under which plans by hand are best.
    best = _choose(found, hardware, config, margin).point.setting
    needs = next(needs for setting, needs in under if setting is best)
    found += frontier_points(needs, hardware, config, best)
    verdict = _choose(found, hardware, config, margin)
    if refine and verdict.within is not None:
        needs = next(needs for setting, needs in under if setting is verdict.point.setting)
        verdict = _refined(verdict, verdict.within, needs, hardware, config)
    return plan_of(verdict, profile, hardware, config, under=under, points=found)


def _choose(points: list[Point], hardware: Hardware, config: Config, margin: int) -> Verdict:
    capacity, budget = _capacity_and_budget(hardware, config)
    own = OWN_BYTES if hardware.device.kind == "cpu" else 0
    verdict = choose(points, config.mode, budget, capacity, own, margin)
    if config.force_optimize and not any(
        choice.technique or choice.offloaded for choice in verdict.point.candidate.choices
    ):
        forced = [p for p in points if any(choice.recompute for choice in p.candidate.choices)]
        if forced:
            least = min(forced, key=lambda point: (point.peak_bytes, point.seconds))
            note = "force_optimize: applied though it gains little"
            return Verdict(least, "forced", (*verdict.notes, note))
    return verdict


def _refined(
    verdict: Verdict, limit: int, profile: ModelProfile, hardware: Hardware, config: Config
) -> Verdict:
    """Return a faster plan up to a limit if there is one between two points of the thinned frontier."""
    chosen = verdict.point
    models = [
        CostModel(profile, hardware, config, chosen.setting, depth)
        for depth in _prefetch_depths(hardware, config)
    ]
    slowest = chosen.seconds * (1 + EQUAL_TIME)
    for within in (limit - int(limit * REFINE_HEADROOM), limit):
        best = None
        for model in models:
            for row in model.rows():
                trade = fastest_within(row, within)
                if trade is not None and trade.seconds < slowest:
                    best, slowest = point_of(model, Candidate(_choices(trade.options))), trade.seconds
        if best is not None:
            is_better = best.seconds < chosen.seconds
            has_room = best.peak_below_bytes <= room_below(hardware, config)
            return replace(verdict, point=best) if is_better and has_room else verdict
    return verdict


def points_by_hand(
    profile: ModelProfile,
    hardware: Hardware,
    config: Config,
    setting: Setting = NOTHING,
    *,
    steps: int | None = None,
) -> list[Point]:
    """Return what one would try by hand, the plain model first; all of it, or in so many steps."""
    offload = config.enable_offloading
    candidates = list(
        uniform_candidates(profile, recompute=config.enable_checkpointing, offload=offload, steps=steps)
    )
    if config.enable_checkpointing:
        candidates += checkpointing_candidates(profile, offload=offload, steps=steps)
    found = points_of(candidates, profile, hardware, config, setting)
    return [found[0], *_with_room_below(found[1:], hardware, config)]


def frontier_points(
    profile: ModelProfile, hardware: Hardware, config: Config, setting: Setting
) -> list[Point]:
    """Return the frontier: the fastest plan for each peak.

    It is computed without prefetching. And of several plans with one peak it has the fastest, not the one that holds
    the least for backward: plans by hand may be better in these respects.
    """
    model = CostModel(profile, hardware, config, setting, _prefetch_depths(hardware, config)[0])
    candidates = [Candidate(_choices(trade.options)) for row in model.rows() for trade in best_trades(row)]
    return _with_room_below(points_of(candidates, profile, hardware, config, setting), hardware, config)


def _with_room_below(found: Sequence[Point], hardware: Hardware, config: Config) -> list[Point]:
    room = room_below(hardware, config)
    return [point for point in found if point.peak_below_bytes <= room]


def points_of(
    candidates: Sequence[Candidate],
    profile: ModelProfile,
    hardware: Hardware,
    config: Config,
    setting: Setting = NOTHING,
) -> list[Point]:
    """Return what candidates cost, in their order; then those with offloaded parameters once more, prefetched."""
    found: list[Point] = []
    for number, depth in enumerate(_prefetch_depths(hardware, config)):
        model = CostModel(profile, hardware, config, setting, depth)
        found += [point_of(model, each) for each in candidates if number == 0 or each.offloaded]
    return found


def _choices(options: Sequence[Option[Choices]]) -> Choices:
    return tuple(choice for option in options for choice in option.what)


def _prefetch_depths(hardware: Hardware, config: Config) -> tuple[int, ...]:
    """Return how many layers ahead parameters may be fetched."""
    depth = (config.async_config or AsyncOffloadConfig()).prefetch_depth
    if hardware.device.kind == "cpu" or not config.enable_offloading:
        return (0,)  # the system reads pages ahead by itself
    if "async_offload" in config.explicit_fields:
        return (depth,) if config.async_offload else (0,)
    return (0, depth)


def has_plan_within(under: Under, hardware: Hardware, config: Config, peak: int) -> bool:
    """Return whether there is a plan up to a peak."""
    models = reversed(list(_models(under, hardware, config)))
    rows = (row for model in models for row in reversed(list(model.rows())))  # offloaded ones need the least
    return any(fastest_within(row, peak, FEASIBILITY_WIDTH) is not None for row in rows)


def _models(under: Under, hardware: Hardware, config: Config) -> Iterator[CostModel]:
    for tier in reversed(_tiers(under[0][1], hardware, config)):
        for depth in reversed(_prefetch_depths(tier, config)):
            for setting, needs in under:
                yield CostModel(needs, tier, config, setting, depth)


def room_of(hardware: Hardware, config: Config) -> int:
    """Return what a plan and its allowance may take: what the device has, or the budget if that is less."""
    capacity, budget = _capacity_and_budget(hardware, config)
    return capacity if budget is None else min(capacity, budget)


def _capacity_and_budget(hardware: Hardware, config: Config) -> tuple[int, int | None]:
    capacity = hardware.device.total_bytes
    if config.memory_budget == "auto":
        return capacity, int(capacity * config.target_gpu_utilization)
    return capacity, config.memory_budget_bytes
