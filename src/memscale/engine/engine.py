"""``decide``: a profile, a device and a Config in, a plan out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memscale.config import Config
from memscale.engine.choices import Candidate, Choice, called_blocks, candidates
from memscale.engine.cost import Clock
from memscale.engine.entries import Entries
from memscale.engine.rules import Point, Verdict, choose, frontier
from memscale.engine.timeline import Estimate, estimate, optimizer_transient
from memscale.execution_plan import FrontierPoint, Plan
from memscale.hardware import Hardware
from memscale.profiler.profile import ModelProfile

DIGITS = 6  # of ratios: a plan's text must not hang on the last bit of a float


def decide(profile: ModelProfile, hardware: Hardware, config: Config) -> Plan:
    """Choose what each block gets.

    The same profile, hardware and Config give the same plan, byte for byte.
    """
    clock = Clock.of(hardware.device)
    transient = optimizer_transient(profile, hardware.device.kind)
    points = [
        Point(candidate, estimate(profile, candidate, clock, transient))
        for candidate in _candidates(profile, hardware, config)
    ]
    points = [points[0], *(p for p in points[1:] if p.estimate.host_bytes <= _host_room(hardware, config))]
    plain = points[0]
    curve = frontier(points)
    verdict = _verdict(points, hardware, config)
    ratio = verdict.point.estimate.seconds / plain.estimate.seconds if plain.estimate.seconds else 1.0
    return Plan(
        layers=Entries(verdict, clock, config).of(profile),
        device=hardware.device.describe(),
        mode=config.mode.value,
        batch=profile.batch,
        baseline_peak_bytes=plain.estimate.peak_bytes,
        predicted_peak_bytes=verdict.point.estimate.peak_bytes,
        predicted_time_ratio=round(ratio, DIGITS),
        baseline_saved_bytes=plain.estimate.saved_bytes,
        predicted_saved_bytes=verdict.point.estimate.saved_bytes,
        host_bytes=verdict.point.estimate.host_bytes,
        decision_source="user_config" if config.explicit_fields & _TECHNIQUE_FIELDS else "rule",
        prediction_source="estimated",
        notes=verdict.notes,
        frontier=tuple(
            FrontierPoint(
                point.candidate.label,
                point.estimate.peak_bytes,
                round(point.estimate.seconds / plain.estimate.seconds, DIGITS)
                if plain.estimate.seconds
                else 1.0,
            )
            for point in curve
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


def _candidates(profile: ModelProfile, hardware: Hardware, config: Config) -> Iterator[Candidate]:
    """The choices that the Config allows; the plain model first."""
    nothing = Candidate("as it is", tuple(Choice() for _ in called_blocks(profile)))
    allowed = list(candidates(profile)) if config.enable_checkpointing else [nothing]
    yield from allowed
    if config.enable_offloading and hardware.device.kind != "cpu":
        for candidate in allowed:
            label = (
                "parameters at home" if candidate is allowed[0] else f"{candidate.label}, parameters at home"
            )
            yield replace(candidate, label=label, offloaded=True, is_full_checkpointing=False)


def _host_room(hardware: Hardware, config: Config) -> int:
    """Host memory that may be used: the user's cap, else what the host has (its size, not what is free now)."""
    if config.max_cpu_offload_bytes is not None:
        return config.max_cpu_offload_bytes
    return hardware.host.total_ram_bytes


def _verdict(points: list[Point], hardware: Hardware, config: Config) -> Verdict:
    capacity = hardware.device.total_bytes
    budget = config.memory_budget_bytes
    if config.memory_budget == "auto":
        budget = int(capacity * config.target_gpu_utilization)
    verdict = choose(points, config.mode, budget, capacity)
    if config.force_optimize and not any(choice.recompute for choice in verdict.point.candidate.choices):
        forced = [p for p in points if any(choice.recompute for choice in p.candidate.choices)]
        if forced:
            least = min(forced, key=lambda point: (point.estimate.peak_bytes, point.estimate.seconds))
            return Verdict(
                least, "forced", (*verdict.notes, "force_optimize: applied though it gains little")
            )
    return verdict


__all__ = ["Estimate", "decide"]
