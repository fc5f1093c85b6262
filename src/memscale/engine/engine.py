"""``decide``: a profile, a device and a Config in, a plan out."""

from __future__ import annotations

from memscale.config import Config
from memscale.engine.choices import Candidate, Choice, called_blocks, can_recompute, candidates
from memscale.engine.cost import Clock
from memscale.engine.rules import Point, Verdict, choose, frontier
from memscale.engine.timeline import Estimate, estimate
from memscale.hardware import Hardware
from memscale.plan import Checkpointing, FrontierPoint, LayerPlan, Plan
from memscale.profiler.profile import BlockProfile, ModelProfile
from memscale.units import format_bytes

DIGITS = 6  # ratios and seconds are rounded so that a plan's text does not hang on the last bit


def decide(profile: ModelProfile, hardware: Hardware, config: Config) -> Plan:
    """Choose what each block gets.

    The same profile, hardware and Config give the same plan, byte for byte.
    """
    clock = Clock.of(hardware.device)
    transient = _optimizer_transient(profile, hardware)
    points = [
        Point(candidate, estimate(profile, candidate, clock, transient))
        for candidate in (candidates(profile) if config.enable_checkpointing else _nothing(profile))
    ]
    plain = points[0]
    curve = frontier(points)
    verdict = _verdict(points, hardware, config)
    ratio = verdict.point.estimate.seconds / plain.estimate.seconds if plain.estimate.seconds else 1.0
    return Plan(
        layers=_layers(profile, verdict, clock),
        device=hardware.device.describe(),
        mode=config.mode.value,
        batch=profile.batch,
        baseline_peak_bytes=plain.estimate.peak_bytes,
        predicted_peak_bytes=verdict.point.estimate.peak_bytes,
        predicted_time_ratio=round(ratio, DIGITS),
        baseline_saved_bytes=plain.estimate.saved_bytes,
        predicted_saved_bytes=verdict.point.estimate.saved_bytes,
        decision_source="user_config" if config.explicit_fields & _TECHNIQUE_FIELDS else "rule",
        prediction_source="estimated",
        notes=verdict.notes,
        frontier=tuple(
            FrontierPoint(
                point.candidate.label,
                point.estimate.peak_bytes,
                round(point.estimate.seconds / plain.estimate.seconds, DIGITS) if plain.estimate.seconds else 1.0,
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


def _nothing(profile: ModelProfile) -> tuple[Candidate, ...]:
    return (Candidate("as it is", tuple(Choice() for _ in called_blocks(profile))),)


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
            return Verdict(least, "forced", (*verdict.notes, "force_optimize: applied though it gains little"))
    return verdict


def _optimizer_transient(profile: ModelProfile, hardware: Hardware) -> int:
    """What Adam needs while it steps: one temporary per parameter at a time, or of all at once (foreach)."""
    if hardware.device.kind != "cpu":
        return profile.gradient_bytes
    return 2 * max((block.gradient_bytes for block in profile.blocks), default=0)


def _layers(profile: ModelProfile, verdict: Verdict, clock: Clock) -> tuple[LayerPlan, ...]:
    called = called_blocks(profile)
    choices = {
        block.name: choice for block, choice in zip(called, verdict.point.candidate.choices, strict=True)
    }
    return tuple(
        _layer(block, choices.get(block.name, Choice()), verdict, clock) for block in profile.blocks
    )


def _layer(block: BlockProfile, choice: Choice, verdict: Verdict, clock: Clock) -> LayerPlan:
    if not choice.recompute:
        rule, reason = _why_not(block, verdict)
        return LayerPlan(block.name, block.members, (), rule, reason)
    seconds = clock.recompute(block, choice.kept_flops)
    held = choice.kept_bytes * block.calls
    freed = block.saved_bytes - held + (block.boundary_bytes if choice.chained else 0)
    reason = f"forgets {format_bytes(block.saved_bytes)} after forward and computes it again in backward"
    if choice.keep:
        kept = ", ".join(op.key.removeprefix("aten.") for op in choice.keep)
        reason += f", but keeps {kept} ({format_bytes(held)}), dear to compute and cheap to keep"
    if choice.chained:
        reason += f"; its input ({format_bytes(block.boundary_bytes)}) comes from the block before"
    return LayerPlan(
        name=block.name,
        members=block.members,
        techniques=("checkpointing",),
        rule=verdict.rule,
        reason=reason,
        saved_bytes=freed,
        extra_seconds=round(seconds, 9),
        checkpointing=Checkpointing(tuple(sorted(op.key for op in choice.keep)), choice.chained),
    )


def _why_not(block: BlockProfile, verdict: Verdict) -> tuple[str, str]:
    if block.has_own_checkpointing:
        return "already-checkpointed", "the model checkpoints this block by itself"
    if block.order < 0:
        return "not-called", "forward does not call it"
    if not can_recompute(block):
        return "nothing-to-save", "its forward leaves nothing for backward but its inputs and outputs"
    saved = format_bytes(block.saved_bytes)
    return verdict.rule, f"keeping its {saved} costs less than computing it again would save"


__all__ = ["Estimate", "decide"]
