"""From a chosen point to a `Plan`: one entry per block with the rule that decided and the reason in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from memscale.checkpointing.technique import can_recompute
from memscale.config import Config, OptimizationMode
from memscale.execution_plan import (
    WITHIN_BUDGET,
    Checkpointing,
    FrontierPoint,
    LayerPlan,
    Offloading,
    OptimizerPlan,
    Plan,
    StepTime,
    Tier,
    Tiling,
)
from memscale.hardware import Hardware
from memscale.planner.cost_model import PLAIN, Choice, CostModel, Point, all_bytes, spans
from memscale.planner.settings import Under
from memscale.profiler import find_blocks
from memscale.profiler.profile import BlockProfile, ModelProfile
from memscale.techniques.cost import ReachedRates
from memscale.units import format_bytes

SECONDS_DIGITS = 9  # decimals of seconds in a plan: its text must not depend on the last bit of a float
STEP_DIGITS = 12  # decimals of the seconds of a step, which may be few
RATIO_DIGITS = 6  # decimals of ratios
NOT_CALLED = "not-called"  # the rule of a block that forward does not call
BY_STRUCTURE = "by-structure"
NO_BATCH = "planned without a batch: activations are not counted, the first training batch makes it anew"

# Config fields that decide about techniques: a plan made with one of them set is the user's decision.
_TECHNIQUE_FIELDS = {"enable_checkpointing", "enable_offloading", "enable_tiling", "memory_budget"}
_TECHNIQUE_FIELDS |= {"use_mixed_precision", "use_8bit_optimizer"}

WHY_KEPT = {
    "small-model": "the model needs little of the device as it is",
    "least-peak": "dropping it would not lower the peak",
    "least-peak-within-1.15x": "computing it again would not lower the peak, or take too long",
    "least-peak-within-1.5x": "computing it again would not lower the peak, or take too long",
    "least-peak-within-2x": "computing it again would not lower the peak, or take too long",
    "fastest-at-24%": "24% of the plain peak, the aim of this mode, is reached without recomputing it",
    "fastest-within-utilization": "target_gpu_utilization leaves room for it",
    "fastest-that-fits": "the device has room for it",
    WITHIN_BUDGET: "the budget has room for it",
    "smallest-plan": "dropping it would not lower the peak",
    "forced": "dropping it would not lower the peak",
    "by-hand": "nobody asked for it",
}
"""For each rule, why a block that could be recomputed is not."""


@dataclass(frozen=True)
class Verdict:
    """The point taken, the rule that took it, and what the user should know."""

    point: Point
    rule: str
    notes: tuple[str, ...] = ()
    within: int | None = None  # where the rule takes the fastest plan up to a peak, that peak
    at_most: float | None = None  # where it takes the least peak up to a step time, that time


def pareto_frontier(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points that no other beats in both peak and time, fastest first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (each.seconds, each.peak_bytes)):
        if not best or point.peak_bytes < best[-1].peak_bytes:
            best.append(point)
    return tuple(best)


def plain_point(profile: ModelProfile, hardware: Hardware, config: Config) -> Point:
    """Return what the model costs as it is."""
    model = CostModel(profile, hardware, config)
    return model.point((PLAIN,) * len(model.blocks))


def plain_time(profile: ModelProfile, hardware: Hardware, config: Config) -> StepTime:
    return _rounded(
        ReachedRates.for_profile(hardware, profile).step(profile, config.gradient_accumulation_steps)
    )


def _rounded(time: StepTime) -> StepTime:
    return StepTime(*(round(part, STEP_DIGITS) + 0.0 for part in time.parts))


def plan_of(
    verdict: Verdict,
    profile: ModelProfile,
    hardware: Hardware,
    config: Config,
    *,
    under: Under = (),
    points: Sequence[Point] = (),
) -> Plan:
    """Return the plan of the point taken, of `points` under the settings `under`; `profile` is the plain model's."""
    plain = plain_point(profile, hardware, config)
    chosen, unseen = verdict.point, unseen_bytes(profile, hardware, config)
    same = (needs for setting, needs in under if setting.whole_steps == chosen.setting.whole_steps)
    needs = next(same, profile)
    model = CostModel(needs, hardware, config, chosen.setting, chosen.prefetch)
    plain_step, time = plain_time(profile, hardware, config), model.step_time(chosen)
    again = max(0.0, time.compute - plain_step.compute)  # what tiles compute once more
    time = _rounded(time + StepTime(compute=-again, recomputation=again))
    baseline = plain_step.total
    return Plan(
        layers=_LayerPlans(verdict, model, config).of(needs),
        device=hardware.describe(),
        mode=config.mode.value,
        batch=profile.batch,
        baseline_peak_bytes=plain.peak_bytes,
        predicted_peak_bytes=chosen.peak_bytes,
        predicted_time_ratio=_ratio(time.total, baseline),
        baseline_seconds=baseline,
        step_time=time,
        baseline_saved_bytes=plain.saved_bytes,
        predicted_saved_bytes=chosen.saved_bytes,
        host_bytes=0 if hardware.offloads_to_disk else chosen.offload_peak_bytes,
        disk_bytes=chosen.offloaded_bytes if hardware.offloads_to_disk else 0,
        decision_source="user_config" if config.explicit_fields & _TECHNIQUE_FIELDS else "rule",
        prediction_source="estimated",
        unseen_bytes=unseen,
        notes=(*chosen.setting.notes, *verdict.notes, *_profile_notes(profile, unseen)),
        frontier=tuple(
            FrontierPoint(_describe(point), point.peak_bytes, _ratio(point.seconds, baseline), unseen)
            for point in pareto_frontier(points)
        ),
        precision=chosen.setting.precision,
        loss=chosen.setting.loss,
        optimizer=_optimizer(chosen, hardware, verdict.rule, model),
        async_offload=chosen.prefetch > 0,
    )


def unseen_bytes(profile: ModelProfile, hardware: Hardware, config: Config) -> int:
    """Return what a step may need that no prediction sees."""
    if not profile.unseen:
        return 0
    plain = plain_point(profile, hardware, config).peak_bytes
    return sum(each.nbytes + int(each.share * plain) for each in profile.unseen)


def _profile_notes(profile: ModelProfile, unseen: int) -> tuple[str, ...]:
    notes = []
    if not profile.calls_blocks:
        notes.append(
            f"forward calls none of the model's {len(profile.blocks)} layers, so that nothing is planned on them: it "
            "uses their weights directly, or was replaced by a function that calls other modules"
        )
    if profile.unseen:
        what = "; ".join(each.what for each in profile.unseen)
        notes.append(f"the allowance is {format_bytes(unseen)} wider: {what}")
    return tuple(notes)


def _describe(point: Point) -> str:
    """Return what a point does, in words."""
    choices, setting = point.choices, point.setting
    parts = []
    recomputed = [choice for choice in choices if choice.recompute]
    if recomputed:
        parts.append(f"{len(recomputed)} blocks recomputed")
        lengths = {stop - start for start, stop in spans(choices) if choices[start].recompute}
        if lengths != {1}:
            parts.append(f"in segments of {_range(lengths)}")
        kept = {choice.variant for choice in recomputed}
        if kept != {0}:
            parts.append(f"keeping {_range(kept)} products each")
    saved = sum(choice.saved_offloaded for choice in choices)
    if saved:
        parts.append(f"activations of {saved} blocks offloaded")
    techniques = (each.technique for each in choices if not each.recompute and not each.saved_offloaded)
    parts += [f"{name} on {count} blocks" for name, count in sorted(Counter(techniques).items()) if name]
    inputs = sum(choice.input_offloaded and choice.recompute and not choice.chained for choice in choices)
    if inputs:
        parts.append(f"inputs of {inputs} offloaded")
    offloaded = sum(choice.offloaded for choice in choices)
    if offloaded:
        which = "" if offloaded == len(choices) else f" of {offloaded} blocks"
        parts.append(f"parameters{which} offloaded{', prefetched' if point.prefetch else ''}")
    whole = {
        "loss in tiles": setting.loss is not None,
        "MLPs in tiles": setting.mlp_rows is not None,
        "" if setting.precision is None else setting.precision.dtype: setting.precision is not None,
        "8-bit optimizer": setting.eight_bit,
        f"optimizer state of {point.states_on_host} blocks on the host": point.states_on_host > 0,
        "stepped on the device": setting.device_step and offloaded > 0,
        "stepped in backward": setting.overlapped and (point.states_on_host > 0 or offloaded > 0),
    }
    parts += [what for what, is_done in whole.items() if is_done]
    return ", ".join(parts) or ("stepped in buckets" if setting.bucketed else "as it is")


def _range(numbers: set[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


def _ratio(seconds: float, plain: float) -> float:
    return round(seconds / plain, RATIO_DIGITS) if plain else 1.0


def _optimizer(chosen: Point, hardware: Hardware, rule: str, model: CostModel) -> OptimizerPlan | None:
    setting, bucket = chosen.setting, model.bucket_bytes
    on_disk = hardware.offloads_to_disk and any(choice.offloaded for choice in chosen.choices)
    if not (on_disk or setting.eight_bit or setting.bucketed):
        return None
    with_state_on_host = model.blocks_with_state_on_host(chosen.choices, chosen.states_on_host)
    device_step = model.terms.step_bucket > 0 and any(choice.offloaded for choice in chosen.choices)
    on_host = [model.blocks[index] for index in with_state_on_host if model.blocks[index].optimizer_bytes]
    reasons = []
    if on_disk:
        reasons.append(f"stepped {format_bytes(bucket)} at a time, parameters and gradients too")
    elif setting.bucketed:
        reasons.append(
            f"stepped {format_bytes(bucket)} at a time, without temporaries of all parameters at once"
        )
    if on_host:
        size = format_bytes(sum(block.optimizer_bytes for block in on_host))
        reasons.append(
            f"{size} of state, of {len(on_host)} layers on the device, are on the host between steps"
        )
    if device_step:
        reasons.append(
            "parameters on the host are copied to the device for it, with gradients and state: that is faster than on "
            "the CPU"
        )
    overlapped = setting.overlapped and (bool(on_host) or device_step)
    if overlapped:
        reasons.append("stepped while backward goes on, committed by step()")
    if setting.eight_bit:
        reasons.append("moments of large parameters take 2.03 bytes a parameter instead of 8")
    return OptimizerPlan(
        state="disk" if on_disk else "host" if on_host else "device",
        layers=tuple(block.name for block in on_host),
        bucket_bytes=bucket if on_disk or setting.bucketed else 0,
        eight_bit=setting.eight_bit,
        host_step="device" if device_step else "cpu",
        overlapped=overlapped,
        rule=rule,
        reason="; ".join(reasons),
    )


@dataclass(frozen=True)
class _LayerPlans:
    """Writes the entries of one plan."""

    verdict: Verdict
    model: CostModel
    config: Config

    def of(self, profile: ModelProfile) -> tuple[LayerPlan, ...]:
        """Return one entry per block, in model order."""
        choices = enumerate(zip(self.model.blocks, self.verdict.point.choices, strict=True))
        entries = {block.name: self._entry(index, choice) for index, (block, choice) in choices}
        return tuple(
            entries.get(each.name) or _with_residents(self._kept(each), each) for each in profile.blocks
        )

    def _entry(self, index: int, choice: Choice) -> LayerPlan:
        block = self.model.blocks[index]
        layer = self._activations(index, choice)
        rows = self.verdict.point.setting.mlp_rows
        if rows is not None and block.role == "repeated":
            layer = replace(layer, techniques=(*layer.techniques, "tiling"), tiling=Tiling(rows))
        option = self.model.parameter_option(index, choice)
        if option is None and not choice.input_offloaded:
            return _with_residents(layer, block)
        tier: Tier = "disk" if self.model.terms.rates.tier_is_disk else "host"
        nbytes, seconds, reason = 0, 0.0, ""
        if option is not None:
            nbytes, seconds = all_bytes(block), option.seconds
            reason = f"{format_bytes(nbytes)} of parameters, gradients and Adam state live on the {tier}"
            if block.resident:
                reason += f"; {_why_resident(block)}"
        size = self.model.offloaded_activation_bytes(index, choice)
        if size:
            nbytes += size
            what = "its input"
            if choice.saved_offloaded:
                what = "what it saves for backward"
            else:
                seconds += self.model.input_time(index).total
            reason += f"{', and so does' if reason else f'on the {tier} is'} {what} ({format_bytes(size)})"
        reasons = [each for each in (reason, layer.reason if layer.techniques else "") if each]
        return replace(
            layer,
            techniques=("offloading", *layer.techniques),
            rule=self.verdict.rule,
            reason="; ".join(reasons),
            saved_bytes=layer.saved_bytes + nbytes,
            extra_seconds=round(layer.extra_seconds + seconds, SECONDS_DIGITS),
            offloading=Offloading(
                "device" if option is None else tier, choice.input_offloaded, block.resident
            ),
        )

    def _activations(self, index: int, choice: Choice) -> LayerPlan:
        """Return the entry of a block as far as its activations are concerned."""
        block = self.model.blocks[index]
        option = self.model.activation_option(index, choice)
        if option is None:
            return self._kept(block)
        if choice.saved_offloaded:  # `_entry` says the rest
            seconds = round(option.seconds, SECONDS_DIGITS)
            return LayerPlan(block.name, block.members, (), self.verdict.rule, "", extra_seconds=seconds)
        freed, reason, settings = block.saved_bytes - option.held_bytes, option.reason, option.settings
        if choice.chained:
            freed += block.boundary_bytes
            reason += f"; input ({format_bytes(block.boundary_bytes)}) from the block before"
            settings = None if settings is None else replace(settings, chained=True)
        kept_flops = sum(op.flops for op in option.keep)
        once = max(0, block.forward_flops // max(1, block.calls) - kept_flops)
        return LayerPlan(
            name=block.name,
            members=block.members,
            techniques=(option.technique,),
            rule=self.verdict.rule,
            reason=reason,
            saved_bytes=freed,
            extra_seconds=round(option.seconds, SECONDS_DIGITS),
            checkpointing=settings,
            recompute_flops=once if option.reruns_forward else 0,
        )

    def _kept(self, block: BlockProfile) -> LayerPlan:
        keeps = f"keeps {format_bytes(block.saved_bytes)}"
        if block.has_own_checkpointing:
            rule, reason = "already-checkpointed", "the model checkpoints this block by itself"
        elif block.order < 0:
            rule, reason = NOT_CALLED, "forward does not call it"
        elif block.changes_input:
            rule = "changes-its-input"
            reason = "its forward writes into its input, so that it can't be run again from it"
        elif block.gathers_inside:
            rule, reason = (
                "gathers-its-parts",
                "FSDP2 gathers its parts one by one: fully_shard the whole layer instead",
            )
        elif not can_recompute(block):
            rule, reason = "nothing-to-save", "holds only its inputs and outputs"
        elif not self.config.enable_checkpointing:
            rule, reason = "checkpointing-off", f"{keeps}, as enable_checkpointing is off"
        else:
            rule, reason = self.verdict.rule, f"{keeps}: {WHY_KEPT[self.verdict.rule]}"
        return LayerPlan(block.name, block.members, (), rule, reason)


def _with_residents(layer: LayerPlan, block: BlockProfile) -> LayerPlan:
    return replace(layer, reason=f"{layer.reason}; {_why_resident(block)}") if block.resident else layer


def _why_resident(block: BlockProfile) -> str:
    what = block.resident[0] if len(block.resident) == 1 else f"{len(block.resident)} parameters"
    verb = "stays" if len(block.resident) == 1 else "stay"
    readers = "another module, a hook or a checkpoint in it"
    return f"{what} {verb} on the device: read while its forward does not run, by {readers}"


def plan_by_structure(model: nn.Module, hardware: Hardware, config: Config, note: str = NO_BATCH) -> Plan:
    """Return a first plan for a model that has not seen a batch: recompute every repeated block.

    That is right for most models, and the first training batch makes the plan anew.
    """
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    recompute = config.enable_checkpointing and config.mode is not OptimizationMode.CONSERVATIVE
    peak = parameters + 3 * trained  # weights, gradients, Adam's moments; activations are not known
    layers = [
        LayerPlan(block.name, block.members, (), BY_STRUCTURE, "left as it is until the first batch")
        if not recompute or block.role != "repeated"
        else LayerPlan(
            block.name,
            block.members,
            ("checkpointing",),
            BY_STRUCTURE,
            "a repeated block; what it needs will be known from the first batch",
            checkpointing=Checkpointing(),
        )
        for block in find_blocks(model)
    ]
    return Plan(
        layers=tuple(layers),
        device=hardware.describe(),
        mode=config.mode.value,
        batch="not seen yet",
        baseline_peak_bytes=peak,
        predicted_peak_bytes=peak,
        decision_source="rule_fallback" if config.auto_policy else "rule",  # the policy knows batches only
        prediction_source="estimated",
        notes=(note,),
    )
