"""``decide``: a profile, a device and a Config in, a plan out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memscale.config import Config
from memscale.engine.choices import Candidate, Choice, called_blocks, can_recompute, candidates
from memscale.engine.cost import Clock
from memscale.engine.rules import Point, Verdict, choose, frontier
from memscale.engine.timeline import Estimate, estimate, optimizer_transient
from memscale.execution_plan import Checkpointing, FrontierPoint, LayerPlan, Plan
from memscale.hardware import Hardware
from memscale.profiler.profile import BlockProfile, ModelProfile
from memscale.units import format_bytes

DIGITS = 6  # ratios and seconds are rounded so that a plan's text does not hang on the last bit


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
        layers=_layers(profile, verdict, clock),
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


def _layers(profile: ModelProfile, verdict: Verdict, clock: Clock) -> tuple[LayerPlan, ...]:
    called = called_blocks(profile)
    choices = {
        block.name: choice for block, choice in zip(called, verdict.point.candidate.choices, strict=True)
    }
    return tuple(_layer(block, choices.get(block.name, Choice()), verdict, clock) for block in profile.blocks)


def _layer(block: BlockProfile, choice: Choice, verdict: Verdict, clock: Clock) -> LayerPlan:
    layer = _recomputed(block, choice, verdict, clock)
    if not verdict.point.candidate.offloaded or not block.used_bytes or block.order < 0:
        return layer
    home = block.parameter_bytes + block.gradient_bytes + block.optimizer_bytes
    reason = f"{format_bytes(home)} of parameters, gradients and Adam state live on the host"
    return replace(
        layer,
        techniques=("offloading", *layer.techniques),
        rule=verdict.rule,
        reason=f"{reason}; {layer.reason}" if layer.techniques else reason,
        saved_bytes=layer.saved_bytes + home,
        extra_seconds=round(
            layer.extra_seconds + (2 * block.used_bytes + block.gradient_bytes) / clock.link_per_second, 9
        ),
    )


def _recomputed(block: BlockProfile, choice: Choice, verdict: Verdict, clock: Clock) -> LayerPlan:
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
