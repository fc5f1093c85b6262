"""Decide: from a profile, a device and a Config to a plan, the same every time.

| asked for | the point of the frontier that is taken |
|---|---|
| CONSERVATIVE | the least peak whose step time is within 1.15 × of the fastest plan that fits; where full \
checkpointing (every repeated block recomputed whole) would need less, the fastest plan at its peak or below; on a \
CPU below it by MemScale's own size, which is in the same memory |
| BALANCED | the least product of peak and step time |
| AGGRESSIVE | the least peak; of equal ones the one that holds the least between forward and backward |
| a memory budget | the fastest plan that fits it |

A point that does not fit the device is replaced by the fastest one that does; if none fits, by the smallest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memscale.config import AsyncOffloadConfig, Config, OptimizationMode
from memscale.execution_plan import Plan
from memscale.hardware import Hardware
from memscale.planner.assembly import Verdict, pareto_frontier, plan_of
from memscale.planner.cost_model import PLAIN, Choices, CostModel, Point, full_checkpointing, room_below
from memscale.planner.frontier import best_trades, fastest_within
from memscale.planner.settings import NOTHING, Under
from memscale.profiler.profile import ModelProfile
from memscale.units import format_bytes

__all__ = ["cost_models", "decide", "frontier_points", "room_of"]

CONSERVATIVE_TIME = 1.15  # times the fastest plan that fits
OWN_BYTES = 12 * 2**20  # what importing and running the planner adds to a process, measured with torch 2.13
EQUAL_TIME = 0.02  # of a plan's time: what another may take more if it is surer to fit
# Of a limit, left free at first, or the simulation would reject every other refined plan.
REFINE_HEADROOM = 1 / 400


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
    under = under or ((NOTHING, profile),)
    plan = _decide(profile, hardware, config, under, margin, refine)
    past_host = replace(hardware, past_host=True)
    if plan.predicted_peak_bytes + margin <= room_of(hardware, config) or not _is_short_of_host_memory(
        profile, hardware, config
    ):
        return plan
    found = _decide(profile, past_host, config, under, margin, refine)
    if found.predicted_peak_bytes >= plan.predicted_peak_bytes:
        return plan
    room = format_bytes(room_below(hardware, config))
    note = (
        f"parameters, gradients and Adam state go to disk: with {room} of host memory for them nothing fits"
    )
    return replace(found, notes=(*found.notes, note))


def _is_short_of_host_memory(profile: ModelProfile, hardware: Hardware, config: Config) -> bool:
    """Return whether host memory is too small for all parameters and their state, and the disk is larger."""
    everything = profile.parameter_bytes + profile.gradient_bytes + profile.optimizer_bytes
    on_disk = room_below(replace(hardware, past_host=True), config)
    return config.enable_offloading and room_below(hardware, config) < min(everything, on_disk)


def _decide(
    profile: ModelProfile, hardware: Hardware, config: Config, under: Under, margin: int, refine: bool
) -> Plan:
    points = frontier_points(under, hardware, config)
    verdict = _choose(points, hardware, config, margin)
    if refine and verdict.within is not None:
        verdict = _refined(verdict, verdict.within, under, hardware, config)
    return plan_of(verdict, profile, hardware, config, under=under, points=points)


def cost_models(under: Under, hardware: Hardware, config: Config) -> Iterator[CostModel]:
    """Yield the cost model of each setting, without prefetching and with it."""
    depth = (config.async_config or AsyncOffloadConfig()).prefetch_depth
    depths: tuple[int, ...] = (0, depth)
    if hardware.device.kind == "cpu" or not config.enable_offloading:
        depths = (0,)  # the system reads pages ahead by itself
    elif "async_offload" in config.explicit_fields:
        depths = (depth,) if config.async_offload else (0,)
    for setting, needs in under:
        for each in depths:
            yield CostModel(needs, hardware, config, setting, each)


def frontier_points(
    under: Under, hardware: Hardware, config: Config, *, most: int | None = None
) -> list[Point]:
    """Return the plain model, full checkpointing, and the frontier: the fastest plan for each peak.

    The frontier of each setting is searched once, and each of its plans costed with and without prefetching.

    Args:
        under: the settings to choose from.
        hardware: what there is.
        config: what the user wants.
        most: partial plans kept at a position of the frontier; by default as many as its depth allows.
    """
    found: list[Point] = []
    searched: dict[int, list[Choices]] = {}
    for model in cost_models(under, hardware, config):
        plain = (PLAIN,) * len(model.blocks)
        if id(model.setting) not in searched:
            trades = [trade for row in model.rows() for trade in best_trades(row, most)]
            searched[id(model.setting)] = [
                tuple(choice for option in trade.options for choice in option.what) for trade in trades
            ]
            found.append(model.point(plain))
            if config.enable_checkpointing:
                found.append(model.point(full_checkpointing(model.blocks)))
        found += [model.point(choices) for choices in searched[id(model.setting)]]
    room = room_below(hardware, config)
    return [point for point in found if point.peak_below_bytes <= room]


def _choose(points: Sequence[Point], hardware: Hardware, config: Config, margin: int) -> Verdict:
    """Choose a point, with `margin` bytes left free."""
    verdict = _by_rule(points, hardware, config, margin)
    if config.force_optimize and not any(each.technique or each.offloaded for each in verdict.point.choices):
        forced = [p for p in points if any(choice.recompute for choice in p.choices)]
        if forced:
            least = min(forced, key=lambda point: (point.peak_bytes, point.seconds))
            note = "force_optimize: applied though it gains little"
            return Verdict(least, "forced", (*verdict.notes, note))
    return verdict


def _by_rule(points: Sequence[Point], hardware: Hardware, config: Config, margin: int) -> Verdict:
    capacity, budget = _capacity_and_budget(hardware, config)
    room = capacity - margin
    curve = pareto_frontier(points)
    fitting = [point for point in curve if point.peak_bytes <= room]
    smallest = min(points, key=_size)
    if not fitting:
        note = f"nothing fits: {_shortage(smallest, room)} than the device has ({format_bytes(capacity)})"
        return Verdict(smallest, "smallest-plan", (note,))
    if budget is not None:
        most = min(budget, capacity) - margin
        within = [point for point in fitting if point.peak_bytes <= most]
        if within:
            return Verdict(within[0], "budget-fastest", within=most)
        note = f"no plan fits the budget of {format_bytes(budget)}: {_shortage(smallest, budget - margin)}"
        return Verdict(smallest, "smallest-plan", (note,))
    own_bytes = OWN_BYTES if hardware.device.kind == "cpu" else 0
    verdict = _by_mode(points, curve, fitting, config.mode, own_bytes)
    wanted = verdict.point
    if wanted.peak_bytes <= room:
        return verdict
    note = (
        f"the {config.mode.value} point needs {format_bytes(wanted.peak_bytes)} and does not fit "
        f"{format_bytes(capacity)}: the fastest plan that fits was taken"
    )
    return Verdict(fitting[0], "fastest-that-fits", (note,), within=room)


def _shortage(smallest: Point, room: int) -> str:
    needs = smallest.peak_bytes
    return f"the smallest plan needs {format_bytes(needs)}, {format_bytes(needs - room)} more"


def _size(point: Point) -> tuple[int, int, float]:
    return point.peak_bytes, point.saved_bytes, point.seconds


def _by_mode(
    points: Sequence[Point],
    curve: Sequence[Point],
    fitting: Sequence[Point],
    mode: OptimizationMode,
    own_bytes: int,
) -> Verdict:
    if mode is OptimizationMode.AGGRESSIVE:
        return Verdict(min(points, key=_size), "least-peak")
    if mode is OptimizationMode.BALANCED:
        product = min(curve, key=lambda point: point.peak_bytes * point.seconds)
        return Verdict(product, "least-peak-times-time")
    limit = CONSERVATIVE_TIME * fitting[0].seconds
    within = [point for point in fitting if point.seconds <= limit]
    wanted = min(within, key=lambda point: point.peak_bytes)
    full = next((each for each in points if any(choice.recompute for choice in each.choices)), None)
    if full is not None and wanted.peak_bytes > full.peak_bytes - own_bytes:
        for most in (full.peak_bytes - own_bytes, full.peak_bytes):
            below = [point for point in curve if point.peak_bytes <= most]
            if below:
                return Verdict(below[0], "fastest-at-full-checkpointing", within=most)
    return Verdict(wanted, "least-peak-within-1.15x")


def _refined(verdict: Verdict, limit: int, under: Under, hardware: Hardware, config: Config) -> Verdict:
    """Return a faster plan up to a limit if there is one between two points of the thinned frontier."""
    chosen = verdict.point
    same = [(setting, needs) for setting, needs in under if setting is chosen.setting]
    models = list(cost_models(same, hardware, config))
    slowest = chosen.seconds * (1 + EQUAL_TIME)
    for within in (limit - int(limit * REFINE_HEADROOM), limit):
        best = None
        for model in models:
            for row in model.rows():
                trade = fastest_within(row, within)
                if trade is not None and trade.seconds < slowest:
                    slowest = trade.seconds
                    best = model.point(tuple(choice for option in trade.options for choice in option.what))
        if best is not None:
            is_better = best.seconds < chosen.seconds
            has_room = best.peak_below_bytes <= room_below(hardware, config)
            return replace(verdict, point=best) if is_better and has_room else verdict
    return verdict


def room_of(hardware: Hardware, config: Config) -> int:
    """Return what a plan and its allowance may take: what the device has, or the budget if that is less."""
    capacity, budget = _capacity_and_budget(hardware, config)
    return capacity if budget is None else min(capacity, budget)


def _capacity_and_budget(hardware: Hardware, config: Config) -> tuple[int, int | None]:
    capacity = hardware.device.total_bytes
    if config.memory_budget == "auto":
        return capacity, int(capacity * config.target_gpu_utilization)
    return capacity, config.memory_budget_bytes
