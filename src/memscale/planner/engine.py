"""``decide``: a profile, a device and a Config in, a plan out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from memscale.config import AsyncOffloadConfig, Config
from memscale.execution_plan import FrontierPoint, OptimizerPlan, Plan
from memscale.hardware import Hardware
from memscale.planner.choices import Candidate, by_hand, uniform
from memscale.planner.cost import Clock
from memscale.planner.entries import Entries
from memscale.planner.frontier import Row, Trade, best_trades, fastest_within
from memscale.planner.rows import Choices, Rows, Terms
from memscale.planner.rules import OWN_BYTES, Point, Verdict, choose, frontier
from memscale.planner.settings import NOTHING, Setting
from memscale.profiler.profile import ModelProfile
from memscale.units import format_bytes

__all__ = [
    "decide",
    "has_plan_within",
    "plain_point",
    "plan_of",
    "points",
    "points_by_hand",
    "points_of",
    "room_of",
    "unseen_bytes",
]

MOST_BUCKET_BYTES = 64 * 2**20  # long enough runs to be read fast
LEAST_BUCKET_BYTES = 2**20
ROUGHLY = 40  # partial plans kept where it is enough to know that there is a plan
NEARLY = 0.02  # of a plan's time: what plans may differ by, and be taken as about as fast
ABOVE = 0.004  # the bound of a row, in parts of it: the trades that there are
CLOSE = 0.01  # to it: there trades are looked for first
SURE = 400  # a closer look leaves such a part of a peak free, or every other plan would have to be made anew
DIGITS = 6  # of ratios: a plan's text must not hang on the last bit of a float


def decide(
    profile: ModelProfile,
    hardware: Hardware,
    config: Config,
    *,
    under: Sequence[tuple[Setting, ModelProfile]] = (),
    margin: int = 0,
    closely: bool = True,
    on_likely: Callable[[Plan], None] | None = None,
) -> Plan:
    """Choose what each block gets.

    The same profile, hardware and Config give the same plan, byte for byte.

    Args:
        profile: what the plain model needs.
        hardware: what there is.
        config: what the user wants.
        under: the settings to choose from, and what the model needs under each; nothing if it is not given.
        margin: bytes to leave free of the budget, or of the device.
        closely: where the fastest plan up to a peak is asked for, look at the frontier closer there.
        on_likely: called with what would be chosen of the plans by hand, before the frontier is looked for.
    """
    plan = _decide(profile, hardware, config, under, margin, closely, on_likely)
    if plan.predicted_peak_bytes + margin <= room_of(hardware, config):
        return plan
    for past_host in _tiers(profile, hardware, config)[1:]:
        found = _decide(profile, past_host, config, under, margin, closely, None)
        if found.predicted_peak_bytes < plan.predicted_peak_bytes:
            room = format_bytes(_room_below(hardware, config))
            note = f"parameters, gradients and Adam state go to disk: with {room} of host memory for them nothing fits"
            return replace(found, notes=(*found.notes, note))
    return plan


def _tiers(profile: ModelProfile, hardware: Hardware, config: Config) -> tuple[Hardware, ...]:
    """The device with the tier below it; then with the disk, if host memory is too small for all and that is larger."""
    past_host = replace(hardware, past_host=True)
    everything = profile.parameter_bytes + profile.gradient_bytes + profile.optimizer_bytes
    useful = _room_below(hardware, config) < min(everything, _room_below(past_host, config))
    return (hardware, past_host) if useful and config.enable_offloading else (hardware,)


def _decide(
    profile: ModelProfile,
    hardware: Hardware,
    config: Config,
    under: Sequence[tuple[Setting, ModelProfile]],
    margin: int,
    closely: bool,
    on_likely: Callable[[Plan], None] | None,
) -> Plan:
    settings = under or ((NOTHING, profile),)
    found: list[Point] = []
    for setting, needs in settings:
        found += points_by_hand(needs, hardware, config, setting)
    likely = _verdict(found, hardware, config, margin)
    if on_likely is not None:
        on_likely(plan_of(likely, profile, hardware, config, under=under, found=found))
    best = likely.point.setting  # the frontier is that of the setting that plans by hand are best under
    needs = next(needs for setting, needs in settings if setting is best)
    found += _points_of_frontier(needs, hardware, config, best)
    verdict = _verdict(found, hardware, config, margin)
    if closely:
        verdict = _sharpened(verdict, settings, hardware, config)
    return plan_of(verdict, profile, hardware, config, under=under, found=found)


def _without_calls(profile: ModelProfile) -> tuple[str, ...]:
    """Return, for a step that calls no block, a note that says so and why that may be."""
    if profile.calls_blocks:
        return ()
    return (
        f"forward calls none of the model's {len(profile.blocks)} layers, so that nothing is planned on them: it uses "
        "their weights directly, or was replaced by a function that calls other modules",
    )


def plan_of(
    verdict: Verdict,
    profile: ModelProfile,
    hardware: Hardware,
    config: Config,
    *,
    under: Sequence[tuple[Setting, ModelProfile]] = (),
    found: Sequence[Point] = (),
) -> Plan:
    """A point as a plan.

    Args:
        verdict: the point, and why it was taken.
        profile: what the plain model needs.
        hardware: what there is.
        config: what the user wants.
        under: as for `decide`.
        found: the points that there were to choose from.
    """
    plain = plain_point(profile, hardware)
    chosen, unseen = verdict.point, unseen_bytes(profile, hardware)
    needs = next((needs for setting, needs in under if setting is chosen.setting), profile)
    return Plan(
        layers=Entries(verdict, _rows(needs, hardware, config, chosen.setting, chosen.ahead), config).of(
            needs
        ),
        device=hardware.device.describe(),
        mode=config.mode.value,
        batch=profile.batch,
        baseline_peak_bytes=plain.peak_bytes,
        predicted_peak_bytes=chosen.peak_bytes,
        predicted_time_ratio=_ratio(chosen, plain),
        baseline_seconds=float(f"{plain.seconds:.{DIGITS}g}"),
        baseline_saved_bytes=plain.saved_bytes,
        predicted_saved_bytes=chosen.saved_bytes,
        host_bytes=0 if hardware.offloads_to_disk else chosen.home_bytes,
        disk_bytes=chosen.home_bytes if hardware.offloads_to_disk else 0,
        decision_source="user_config" if config.explicit_fields & _TECHNIQUE_FIELDS else "rule",
        prediction_source="estimated",
        unseen_bytes=unseen,
        notes=(
            *chosen.setting.notes,
            *verdict.notes,
            *_without_calls(profile),
            *_unseen_notes(profile, unseen),
        ),
        frontier=tuple(
            FrontierPoint(point.label, point.peak_bytes, _ratio(point, plain), unseen)
            for point in frontier(found)
        ),
        precision=chosen.setting.precision,
        loss=chosen.setting.loss,
        optimizer=_optimizer(chosen, hardware, verdict.rule, _bucket_bytes(profile)),
        async_offload=chosen.ahead > 0,
    )


def unseen_bytes(profile: ModelProfile, hardware: Hardware) -> int:
    """Return what a step may need that no prediction sees."""
    if not profile.unseen:
        return 0
    plain = plain_point(profile, hardware).peak_bytes
    return sum(each.nbytes + int(each.share * plain) for each in profile.unseen)


def _unseen_notes(profile: ModelProfile, nbytes: int) -> tuple[str, ...]:
    if not profile.unseen:
        return ()
    what = "; ".join(each.what for each in profile.unseen)
    return (f"the allowance is {format_bytes(nbytes)} wider: {what}",)


def _ratio(point: Point, plain: Point) -> float:
    return round(point.seconds / plain.seconds, DIGITS) if plain.seconds else 1.0


def _bucket_bytes(profile: ModelProfile) -> int:
    """What is in memory at once of parameters, gradients and state while they are stepped; a small model's is small."""
    return min(MOST_BUCKET_BYTES, max(LEAST_BUCKET_BYTES, profile.parameter_bytes // 8))


def _optimizer(chosen: Point, hardware: Hardware, rule: str, bucket_bytes: int) -> OptimizerPlan | None:
    on_disk = hardware.offloads_to_disk and chosen.candidate.at_home > 0
    if not on_disk and not chosen.setting.eight_bit:
        return None
    reasons = []
    if on_disk:
        reasons.append(f"stepped {format_bytes(bucket_bytes)} at a time, parameters and gradients too")
    if chosen.setting.eight_bit:
        reasons.append("moments of large parameters take 2.03 bytes a parameter instead of 8")
    return OptimizerPlan(
        state="disk" if on_disk else "device",
        bucket_bytes=bucket_bytes if on_disk else 0,
        eight_bit=chosen.setting.eight_bit,
        rule=rule,
        reason="; ".join(reasons),
    )


_TECHNIQUE_FIELDS = frozenset(
    {
        "enable_checkpointing",
        "enable_offloading",
        "enable_tiling",
        "use_mixed_precision",
        "use_8bit_optimizer",
        "memory_budget",
    }
)


def points(
    profile: ModelProfile, hardware: Hardware, config: Config, setting: Setting = NOTHING
) -> list[Point]:
    """All that there is to choose from: what one would try by hand, nothing at all first, and the frontier.

    The frontier holds the fastest plan for each peak. Of several plans with one peak it does not have the one
    that holds the least, which the plans tried by hand have. And it is that of transfers which wait: plans by hand
    may be better where they do not.
    """
    tried = points_by_hand(profile, hardware, config, setting)
    return tried + _points_of_frontier(profile, hardware, config, setting)


def points_by_hand(
    profile: ModelProfile,
    hardware: Hardware,
    config: Config,
    setting: Setting = NOTHING,
    *,
    steps: int | None = None,
) -> list[Point]:
    """What one would try by hand, nothing at all first; all of it, or in so many steps from one end to the other."""
    home = config.enable_offloading
    candidates = list(uniform(profile, recompute=config.enable_checkpointing, home=home, steps=steps))
    if config.enable_checkpointing:
        candidates += by_hand(profile, home=home, steps=steps)
    found = points_of(candidates, profile, hardware, config, setting)
    return [found[0], *_with_room_below(found[1:], hardware, config)]


def _points_of_frontier(
    profile: ModelProfile, hardware: Hardware, config: Config, setting: Setting
) -> list[Point]:
    rows = _rows(profile, hardware, config, setting, _depths(hardware, config)[0])
    candidates = [Candidate(_choices(trade)) for row in rows.rows() for trade in best_trades(row)]
    return _with_room_below(points_of(candidates, profile, hardware, config, setting), hardware, config)


def _with_room_below(found: Sequence[Point], hardware: Hardware, config: Config) -> list[Point]:
    room = _room_below(hardware, config)
    return [point for point in found if point.below_bytes <= room]


def _sharpened(
    verdict: Verdict, under: Sequence[tuple[Setting, ModelProfile]], hardware: Hardware, config: Config
) -> Verdict:
    """Where the fastest plan up to a peak was asked for: the frontier looked at closer there.

    The whole of it is thinned out, so that there may be a faster plan between two of its points.
    """
    chosen = verdict.point
    if verdict.within is None:
        return verdict
    profile = next(needs for setting, needs in under if setting is chosen.setting)
    ways = [
        (rows, row)
        for depth in _depths(hardware, config)
        for rows in (_rows(profile, hardware, config, chosen.setting, depth),)
        for row in rows.rows()
    ]
    slowest = chosen.seconds * (1 + NEARLY)  # as fast as that there may be a plan that is surer to fit
    for limit in (verdict.within - verdict.within // SURE, verdict.within):
        found = _fastest_of(ways, limit, slowest)
        if found is not None:
            break
    else:
        return verdict
    rows, trade = found
    point = _point(rows, trade, Candidate(_choices(trade)), chosen.setting)
    if trade.seconds >= chosen.seconds or point.below_bytes > _room_below(hardware, config):
        return verdict
    return replace(verdict, point=point)


def _fastest_of(
    ways: Sequence[tuple[Rows, Row[Choices]]], limit: int, slowest: float
) -> tuple[Rows, Trade[Choices]] | None:
    """Return the fastest trade of some rows within a limit, if it is faster than the slowest of interest."""
    best = None
    for rows, row in ways:
        trade = fastest_within(row, limit)
        if trade is not None and trade.seconds < slowest:
            best, slowest = (rows, trade), trade.seconds
    return best


def has_plan_within(
    under: Sequence[tuple[Setting, ModelProfile]], hardware: Hardware, config: Config, peak: int
) -> bool:
    """Whether the frontier has a plan up to a peak."""
    rows = reversed(list(_every_row(under, hardware, config)))  # at home is what needs the least
    return any(fastest_within(row, peak, ROUGHLY) is not None for row in rows)


def _every_row(
    under: Sequence[tuple[Setting, ModelProfile]], hardware: Hardware, config: Config
) -> Iterator[Row[Choices]]:
    for there in reversed(_tiers(under[0][1], hardware, config)):
        for depth in reversed(_depths(there, config)):
            for setting, needs in under:
                yield from _rows(needs, there, config, setting, depth).rows()


def points_of(
    candidates: Sequence[Candidate],
    profile: ModelProfile,
    hardware: Hardware,
    config: Config,
    setting: Setting = NOTHING,
) -> list[Point]:
    """What candidates cost, in their order; then those with parameters at home once more, fetched ahead."""
    found: list[Point] = []
    for number, depth in enumerate(_depths(hardware, config)):
        # What is best without fetching ahead is good with it.
        those = [each for each in candidates if number == 0 or each.at_home]
        rows = _rows(profile, hardware, config, setting, depth)
        found += [_point(rows, rows.trade(candidate), candidate, setting) for candidate in those]
    return found


def plain_point(profile: ModelProfile, hardware: Hardware) -> Point:
    """The model as it is."""
    rows = Rows(profile, Terms(Clock.of(hardware), hardware.device.kind))
    candidate = next(uniform(profile, recompute=False, home=False))
    return _point(rows, rows.trade(candidate), candidate, NOTHING)


def _depths(hardware: Hardware, config: Config) -> tuple[int, ...]:
    """How many layers ahead parameters may be fetched."""
    depth = (config.async_config or AsyncOffloadConfig()).prefetch_depth
    if hardware.device.kind == "cpu" or not config.enable_offloading:
        return (0,)  # the system reads pages ahead by itself
    if "async_offload" in config.explicit_fields:
        return (depth,) if config.async_offload else (0,)
    return (0, depth)


def _rows(profile: ModelProfile, hardware: Hardware, config: Config, setting: Setting, ahead: int) -> Rows:
    return Rows(
        profile,
        Terms(
            clock=Clock.of(hardware, setting.precision),
            kind=hardware.device.kind,
            recompute=config.enable_checkpointing,
            home=config.enable_offloading,
            home_bytes=_room_below(hardware, config),
            ahead=ahead,
            working_share=setting.working_share,
            state_share=setting.state_share,
            bucket_bytes=_bucket_bytes(profile),
        ),
    )


def _choices(trade: Trade[Choices]) -> Choices:
    return tuple(choice for option in trade.options for choice in option.what)


def _point(rows: Rows, trade: Trade[Choices], candidate: Candidate, setting: Setting) -> Point:
    return Point(
        candidate,
        trade.peak,
        rows.other_saved_bytes + trade.held,
        trade.seconds,
        rows.home_bytes(candidate.choices),
        rows.below_bytes(candidate.choices),
        setting,
        rows.terms.ahead if candidate.at_home else 0,
    )


def _room_below(hardware: Hardware, config: Config) -> int:
    """What may live on the tier below: the user's cap, else what is there.

    Of host memory that is its size, not what happens to be free; a disk may be full of other things.
    """
    if hardware.offloads_to_disk:
        cap, there = config.max_disk_offload_bytes, hardware.disk.free_bytes if hardware.disk.writable else 0
    else:
        cap, there = config.max_cpu_offload_bytes, hardware.host.total_ram_bytes
    return there if cap is None else cap


def room_of(hardware: Hardware, config: Config) -> int:
    """What a plan and its allowance may take together: what the device has, or the budget if that is less."""
    capacity, budget = _capacity_and_budget(hardware, config)
    return capacity if budget is None else min(capacity, budget)


def _capacity_and_budget(hardware: Hardware, config: Config) -> tuple[int, int | None]:
    capacity = hardware.device.total_bytes
    if config.memory_budget == "auto":
        return capacity, int(capacity * config.target_gpu_utilization)
    return capacity, config.memory_budget_bytes


def _verdict(points: list[Point], hardware: Hardware, config: Config, margin: int) -> Verdict:
    capacity, budget = _capacity_and_budget(hardware, config)
    own = OWN_BYTES if hardware.device.kind == "cpu" else 0
    verdict = choose(points, config.mode, budget, capacity, own, margin)
    if config.force_optimize and not any(
        choice.recompute or choice.home for choice in verdict.point.candidate.choices
    ):
        forced = [p for p in points if any(choice.recompute for choice in p.candidate.choices)]
        if forced:
            least = min(forced, key=lambda point: (point.peak_bytes, point.seconds))
            return Verdict(
                least, "forced", (*verdict.notes, "force_optimize: applied though it gains little")
            )
    return verdict
