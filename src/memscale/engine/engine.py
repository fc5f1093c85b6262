"""``decide``: a profile, a device and a Config in, a plan out."""

from __future__ import annotations

from memscale.config import Config
from memscale.engine.choices import Candidate, uniform
from memscale.engine.cost import Clock
from memscale.engine.entries import Entries
from memscale.engine.frontier import Trade, best_trades
from memscale.engine.rows import Choices, Rows, Terms
from memscale.engine.rules import OWN_BYTES, Point, Verdict, choose, frontier
from memscale.execution_plan import FrontierPoint, Plan
from memscale.hardware import Hardware
from memscale.profiler.profile import ModelProfile

__all__ = ["decide", "points", "room_of"]

DIGITS = 6  # of ratios: a plan's text must not hang on the last bit of a float


def decide(profile: ModelProfile, hardware: Hardware, config: Config, *, margin: int = 0) -> Plan:
    """Choose what each block gets.

    The same profile, hardware and Config give the same plan, byte for byte.

    Args:
        profile: what the model needs.
        hardware: what there is.
        config: what the user wants.
        margin: bytes to leave free of the budget, or of the device.
    """
    clock = Clock.of(hardware.device)
    found = points(profile, hardware, config)
    plain = found[0]
    verdict = _verdict(found, hardware, config, margin)
    ratio = verdict.point.seconds / plain.seconds if plain.seconds else 1.0
    return Plan(
        layers=Entries(verdict, clock, config).of(profile),
        device=hardware.device.describe(),
        mode=config.mode.value,
        batch=profile.batch,
        baseline_peak_bytes=plain.peak_bytes,
        predicted_peak_bytes=verdict.point.peak_bytes,
        predicted_time_ratio=round(ratio, DIGITS),
        baseline_saved_bytes=plain.saved_bytes,
        predicted_saved_bytes=verdict.point.saved_bytes,
        host_bytes=verdict.point.home_bytes,
        decision_source="user_config" if config.explicit_fields & _TECHNIQUE_FIELDS else "rule",
        prediction_source="estimated",
        notes=verdict.notes,
        frontier=tuple(
            FrontierPoint(
                point.candidate.label,
                point.peak_bytes,
                round(point.seconds / plain.seconds, DIGITS) if plain.seconds else 1.0,
            )
            for point in frontier(found)
        ),
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


def points(profile: ModelProfile, hardware: Hardware, config: Config) -> list[Point]:
    """All that there is to choose from, the plain model first: the frontier, and what one would try by hand.

    The frontier holds the fastest plan for each peak. Of several plans with one peak it does not have the one
    that holds the least, which the plans tried by hand have.
    """
    home = config.enable_offloading and hardware.device.kind != "cpu"
    room = _host_room(hardware, config)
    terms = Terms(Clock.of(hardware.device), hardware.device.kind, config.enable_checkpointing, home, room)
    rows = Rows(profile, terms)
    found = [
        _point(rows, rows.trade(candidate), candidate)
        for candidate in uniform(profile, recompute=terms.recompute, home=terms.home)
    ]
    for row in rows.rows():
        for trade in best_trades(row):
            found.append(_point(rows, trade, Candidate(_choices(trade))))
    return [found[0], *(point for point in found[1:] if point.home_bytes <= room)]


def _choices(trade: Trade[Choices]) -> Choices:
    return tuple(choice for option in trade.options for choice in option.what)


def _point(rows: Rows, trade: Trade[Choices], candidate: Candidate) -> Point:
    return Point(
        candidate,
        trade.peak,
        rows.other_saved_bytes + trade.held,
        trade.seconds,
        rows.home_bytes(candidate.choices),
    )


def _host_room(hardware: Hardware, config: Config) -> int:
    """Host memory that may be used: the user's cap, else what the host has (its size, not what is free now)."""
    if config.max_cpu_offload_bytes is not None:
        return config.max_cpu_offload_bytes
    return hardware.host.total_ram_bytes


def room_of(hardware: Hardware, config: Config) -> tuple[int, int | None]:
    """What the device has, and the budget if there is one."""
    capacity = hardware.device.total_bytes
    if config.memory_budget == "auto":
        return capacity, int(capacity * config.target_gpu_utilization)
    return capacity, config.memory_budget_bytes


def _verdict(points: list[Point], hardware: Hardware, config: Config, margin: int) -> Verdict:
    capacity, budget = room_of(hardware, config)
    capacity -= margin
    if budget is not None:
        budget -= margin
    own = OWN_BYTES if hardware.device.kind == "cpu" else 0
    verdict = choose(points, config.mode, budget, capacity, own)
    if config.force_optimize and not any(choice.recompute for choice in verdict.point.candidate.choices):
        forced = [p for p in points if any(choice.recompute for choice in p.candidate.choices)]
        if forced:
            least = min(forced, key=lambda point: (point.peak_bytes, point.seconds))
            return Verdict(
                least, "forced", (*verdict.notes, "force_optimize: applied though it gains little")
            )
    return verdict
