"""Decide: from a profile, a device and a Config to a plan, the same every time.

| asked for | the point of the frontier that is taken |
|---|---|
| CONSERVATIVE | the least peak whose step time is within 1.15 × of the fastest plan that fits |
| BALANCED | the model fits as it is: the fastest plan at 24% of the plain peak or less, or the least peak at twice \
the plain step time where that is too slow (1.5 times it where optimizer steps overlap with backward); it does not \
fit: the fastest plan within `target_gpu_utilization` |
| AGGRESSIVE | the least peak; within 2% of it the fastest plan; of equal peaks the one that holds the least |
| a memory budget | the fastest plan that fits it |
| any mode but AGGRESSIVE, and the plain step needs less than 10% of the device | nothing is done |

A point that does not fit the device is replaced by the fastest one that does; if none fits, by the smallest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memscale.config import AsyncOffloadConfig, Config, OptimizationMode
from memscale.execution_plan import LEFT_AS_IT_IS, WITHIN_BUDGET, Plan
from memscale.hardware import Hardware
from memscale.planner.assembly import Verdict, pareto_frontier, plain_point, plan_of
from memscale.planner.cost_model import PLAIN, Choices, CostModel, Point, full_checkpointing, offload_room
from memscale.planner.frontier import Trade, best_trades, fastest_within
from memscale.planner.settings import NOTHING, Under
from memscale.profiler.profile import ModelProfile
from memscale.units import format_bytes

CONSERVATIVE_TIME = 1.15  # times the fastest plan that fits
BALANCED_SHARE = 0.24  # of the plain peak
BALANCED_TIME = 2.0  # times the plain step
OVERLAPPED_TIME = 1.5  # the same where steps are known to overlap with backward
# Of the least peak, or of what it saves if that is less: what a faster plan may need more.
AGGRESSIVE_SHARE = 0.02
UNTOUCHED_SHARE = 0.1  # of the device: a model whose plain step needs less is left as it is
STATE_PARTS = 8  # the numbers of blocks, evenly spaced, whose optimizer state is tried on the host
# Of the time of a plan that prefetches: what one that waits must take to be preferred.
WORTH_WAITING = 0.99


def decide(
    profile: ModelProfile,
    hardware: Hardware,
    config: Config,
    *,
    under: Under = (),
    margin: int = 0,
    refine: bool = True,
) -> Plan:
    """Choose what each block gets; the same profile, hardware and Config give the same plan, byte for byte.

    Args:
        profile: what the plain model needs.
        hardware: what there is.
        config: what the user wants.
        under: the settings to choose from; none if it is empty.
        margin: bytes to leave free of the budget, or of the device.
        refine: where the fastest plan up to a peak is asked for, search the frontier more closely there.
    """
    under = under or ((NOTHING, profile),)
    ways = [(hardware, True), (hardware, False)] if _prefetch_depth(hardware, config) else [(hardware, False)]
    if "async_offload" in config.explicit_fields:
        ways = ways[:1]
    elif config.mode is OptimizationMode.AGGRESSIVE:
        ways = ways[-1:]  # what is prefetched takes memory
    if _is_short_of_host_memory(profile, hardware, config):
        ways.append((replace(hardware, past_host=True), False))
    plans = []
    for tiers, prefetch in ways:
        plain = plain_point(profile, tiers, config)
        points = frontier_points(under, tiers, config, prefetch=prefetch)
        verdict = choose_point(points, plain, tiers, config, margin)
        may_wait = prefetch and (tiers, False) in ways
        if may_wait and _waiting_may_be_faster(verdict, points, under, tiers, config):
            others = frontier_points(under, tiers, config, prefetch=False)
            waiting = choose_point(others, plain, tiers, config, margin)
            if waiting.rule == verdict.rule and waiting.point.seconds < WORTH_WAITING * verdict.point.seconds:
                verdict, points, prefetch = waiting, [*points, *others], False
        if refine:
            verdict = _refined(verdict, under, tiers, config, prefetch)
        plan = plan_of(verdict, profile, tiers, config, under=under, points=points)
        if tiers.past_host:
            room = format_bytes(offload_room(hardware, config))
            note = f"parameters, gradients and Adam state go to disk: with {room} of host memory for them nothing fits"
            plan = replace(plan, notes=(*plan.notes, note))
        plans.append(plan)
        if plan.predicted_peak_bytes + margin <= room_of(hardware, config):
            return plan
    plans.reverse()  # of equal ones that without prefetching
    return min(plans, key=lambda each: each.predicted_peak_bytes)


def _waiting_may_be_faster(
    verdict: Verdict, points: Sequence[Point], under: Under, hardware: Hardware, config: Config
) -> bool:
    """Return whether the memory that prefetching takes could buy a plan up to the rule's limit that is faster.

    At best one that waits takes no longer than the one that prefetches and needs as much more.
    """
    chosen = verdict.point
    if verdict.within is None or not chosen.prefetch:
        return False
    same = [(setting, needs) for setting, needs in under if setting is chosen.setting]
    (waiting,) = cost_models(same, hardware, config, prefetch=False)
    taken = chosen.peak_bytes - waiting.point(chosen.choices, chosen.states_on_host).peak_bytes
    return _fastest(pareto_frontier(points), verdict.within + taken).seconds < WORTH_WAITING * chosen.seconds


def _is_short_of_host_memory(profile: ModelProfile, hardware: Hardware, config: Config) -> bool:
    """Return whether host memory is too small for all parameters and their state, and the disk is larger."""
    everything = profile.parameter_bytes + profile.gradient_bytes + profile.optimizer_bytes
    on_disk = offload_room(replace(hardware, past_host=True), config)
    return config.enable_offloading and offload_room(hardware, config) < min(everything, on_disk)


def _prefetch_depth(hardware: Hardware, config: Config) -> int:
    """Return how many layers ahead parameters may be fetched; 0 if transfers wait."""
    if hardware.offloads_to_disk or not config.enable_offloading:
        return 0  # the system reads pages ahead by itself
    if "async_offload" in config.explicit_fields and not config.async_offload:
        return 0
    return (config.async_config or AsyncOffloadConfig()).prefetch_depth


def cost_models(
    under: Under, hardware: Hardware, config: Config, *, prefetch: bool = True
) -> Iterator[CostModel]:
    """Yield the cost model of each setting, with prefetching where that is possible and wanted."""
    depth = _prefetch_depth(hardware, config) if prefetch else 0
    for setting, needs in under:
        if not hardware.offloads_to_disk or (setting.page_locked and not setting.device_step):
            yield CostModel(needs, hardware, config, setting, depth)


def frontier_points(
    under: Under, hardware: Hardware, config: Config, *, prefetch: bool = True, most: int | None = None
) -> list[Point]:
    """Return the plain model, and the frontier of each setting: the fastest plan for each peak.

    Optimizer state on the host lowers the whole of a step for the same time a byte, whatever else is done: so each
    plan is taken with the state of none of its blocks there, of all, and of some numbers in between.

    Of each position `most` partial plans are kept; by default as many as the depth of the model allows.
    """
    found = untouched_points(under, hardware, config)
    for model in cost_models(under, hardware, config, prefetch=prefetch):
        plans = [(PLAIN,) * len(model.blocks)]
        if config.enable_checkpointing:  # at the same peak it may hold less
            plans += [full_checkpointing(model.blocks, odd=odd) for odd in (False, True)]
        plans += [_choices(trade) for row in model.rows() for trade in best_trades(row, most)]
        _, *numbers = model.numbers_of_states_on_host(STATE_PARTS)
        here = [model.point(choices) for choices in plans]
        # What is beaten with all state on the device is so with as much of it on the host.
        points = here + [model.point(each.choices, n) for each in pareto_frontier(here) for n in numbers]
        points = [
            point
            if point.offload_peak_bytes <= model.room
            else model.without_transfers(point, point.offload_peak_bytes - model.room)
            for point in points
        ]
        found += [point for point in points if point.offload_peak_bytes <= model.room]
    return found


def untouched_points(under: Under, hardware: Hardware, config: Config) -> list[Point]:
    """Return the plans that do nothing but what each setting asks for, with whole steps."""
    whole = [(setting.whole_steps, needs) for setting, needs in under]
    return [
        model.point((PLAIN,) * len(model.blocks))
        for model in cost_models(whole, hardware, config, prefetch=False)
    ]


def _choices(trade: Trade[Choices]) -> Choices:
    return tuple(choice for option in trade.options for choice in option.what)


def choose_point(
    points: Sequence[Point], plain: Point, hardware: Hardware, config: Config, margin: int
) -> Verdict:
    """Choose a point, with `margin` bytes left free; the first one does nothing to any block."""
    needed = plain.peak_bytes
    is_small = needed < UNTOUCHED_SHARE * hardware.device.total_bytes
    is_pressed = config.mode is OptimizationMode.AGGRESSIVE or config.memory_budget is not None
    if is_small and not is_pressed and not config.force_optimize:
        note = (
            f"a plain step needs {format_bytes(needed)}, less than {UNTOUCHED_SHARE:.0%} of "
            f"{hardware.device.describe()}: {LEFT_AS_IT_IS} (force_optimize=True changes that)"
        )
        return Verdict(points[0], "small-model", (note,))
    verdict = _by_rule(points, plain, hardware, config, margin)
    chosen = verdict.point
    does_something = chosen.states_on_host or any(each.technique or each.offloaded for each in chosen.choices)
    if config.force_optimize and not does_something:
        forced = [p for p in points if any(choice.recompute for choice in p.choices)]
        if forced:
            least = min(forced, key=lambda point: (point.peak_bytes, point.seconds))
            note = "force_optimize: applied though it gains little"
            return Verdict(least, "forced", (*verdict.notes, note))
    return verdict


def _by_rule(
    points: Sequence[Point], plain: Point, hardware: Hardware, config: Config, margin: int
) -> Verdict:
    capacity, budget = _capacity_and_budget(hardware, config)
    room = capacity - margin
    curve = pareto_frontier(points)
    fitting = [point for point in curve if point.peak_bytes <= room]
    # Of equal peaks the one that holds the least for backward.
    smallest = min(points, key=lambda point: (point.peak_bytes, point.saved_bytes, point.seconds))
    if not fitting:
        note = f"nothing fits: {_shortage(smallest, margin, capacity)} than the device has ({format_bytes(capacity)})"
        return Verdict(smallest, "smallest-plan", (note,))
    if budget is not None:
        most = min(budget, capacity) - margin
        within = [point for point in fitting if point.peak_bytes <= most]
        if within:
            return Verdict(within[0], WITHIN_BUDGET, within=most)
        note = f"no plan fits the budget of {format_bytes(budget)}: {_shortage(smallest, margin, budget)}"
        return Verdict(smallest, "smallest-plan", (note,))
    if config.mode is OptimizationMode.AGGRESSIVE:
        least = smallest.peak_bytes
        saved = plain.peak_bytes - least
        most = min(room, least + int(AGGRESSIVE_SHARE * max(0, min(least, saved))))
        chosen = _fastest(fitting, most)
        return Verdict(smallest if chosen.peak_bytes == least else chosen, "least-peak")
    if config.mode is OptimizationMode.CONSERVATIVE:
        limit = CONSERVATIVE_TIME * fitting[0].seconds
        return Verdict(_slowest(fitting, limit), "least-peak-within-1.15x", at_most=limit)
    if plain.peak_bytes > room:
        most = int(config.target_gpu_utilization * capacity) - margin
        if smallest.peak_bytes <= most:
            return Verdict(_fastest(fitting, most), "fastest-within-utilization", within=most)
        return Verdict(fitting[0], "fastest-that-fits", within=room)
    times = OVERLAPPED_TIME if any(point.setting.overlapped for point in points) else BALANCED_TIME
    most, limit = int(BALANCED_SHARE * plain.peak_bytes), times * plain.seconds
    if smallest.peak_bytes <= most and _fastest(fitting, most).seconds <= limit:
        return Verdict(_fastest(fitting, most), "fastest-at-24%", within=most)
    return Verdict(_slowest(fitting, limit), f"least-peak-within-{times:g}x", at_most=limit)


def _shortage(smallest: Point, margin: int, room: int) -> str:
    needs, allowance = smallest.peak_bytes + margin, " with its allowance" if margin else ""
    return f"the smallest plan needs {format_bytes(needs)}{allowance}, {format_bytes(needs - room)} more"


def _fastest(curve: Sequence[Point], most: int) -> Point:
    """Return the fastest point of a Pareto frontier that needs no more than so many bytes."""
    return next(point for point in curve if point.peak_bytes <= most)


def _slowest(curve: Sequence[Point], limit: float) -> Point:
    """Return the smallest point of a Pareto frontier that takes no more than so many seconds; else the fastest."""
    return next((point for point in reversed(curve) if point.seconds <= limit), curve[0])


def _refined(verdict: Verdict, under: Under, hardware: Hardware, config: Config, prefetch: bool) -> Verdict:
    """Return a better plan up to the rule's limit if there is one between two points of the thinned frontier."""
    best, limit = verdict.point, verdict.within
    same = [(setting, needs) for setting, needs in under if setting is best.setting]
    for model in cost_models(same, hardware, config, prefetch=prefetch):
        if limit is not None:
            for row in model.rows(model.blocks_with_state_on_host(best.choices, best.states_on_host)):
                trade = fastest_within(row, limit)
                point = best if trade is None else model.point(_choices(trade), best.states_on_host)
                is_allowed = point.offload_peak_bytes <= model.room and point.peak_bytes <= limit
                best = point if is_allowed and point.seconds < best.seconds else best
            while best.states_on_host:  # no more state on the host than must be
                point = model.point(best.choices, best.states_on_host - 1)
                if point.peak_bytes > limit:
                    break
                best = point
        elif verdict.at_most is not None:
            for number in range(best.states_on_host, model.numbers_of_states_on_host(1)[-1] + 1):
                point = model.point(best.choices, number)
                if point.seconds > verdict.at_most or point.offload_peak_bytes > model.room:
                    break
                best = min(best, point, key=lambda each: each.peak_bytes)
    return replace(verdict, point=best)


def room_of(hardware: Hardware, config: Config) -> int:
    """Return what a plan and its allowance may take: what the device has, or the budget if that is less."""
    capacity, budget = _capacity_and_budget(hardware, config)
    return capacity if budget is None else min(capacity, budget)


def capacity_of(hardware: Hardware) -> int:
    """Return what torch's allocator can reserve of the device: without CUDA's context and other processes."""
    device = hardware.device
    return device.total_bytes if device.capacity_bytes is None else device.capacity_bytes


def _capacity_and_budget(hardware: Hardware, config: Config) -> tuple[int, int | None]:
    """Return what a step may take of the device, without CUDA's context and other processes; and the budget."""
    capacity = capacity_of(hardware)
    if config.memory_budget == "auto":
        return capacity, int(capacity * config.target_gpu_utilization)
    return capacity, config.memory_budget_bytes
