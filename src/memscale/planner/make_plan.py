"""Make a plan: profile, decide, predict, and decide again until the prediction fits. Nothing here changes the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._torch import sharded_groups
from memscale.config import Config, ConfigFields, OptimizationMode
from memscale.errors import ProfileError, is_out_of_memory
from memscale.execution_plan import ALLOWANCES, DecisionSource, Plan, Tier
from memscale.executor import Executor
from memscale.hardware import Hardware
from memscale.observe.log import open_log
from memscale.optimizer.needs import OptimizerNeeds, StepCosts, needs_of, with_optimizer
from memscale.planner.assembly import plain_point, plan_by_structure, unseen_bytes
from memscale.planner.cache import keep_plan, plan_key, plans_made, values_of
from memscale.planner.cost_model import CostModel
from memscale.planner.decide import capacity_of, decide, room_of
from memscale.planner.estimates import Estimates, batch_size_of, length_of, with_batch_size, with_length
from memscale.planner.predict import (
    PLAIN_NOT_SIMULATED,
    Step,
    measure,
    plain_step_of,
    predict,
    rehearsal,
    with_figures_of,
)
from memscale.planner.settings import Setting, Under, settings_for
from memscale.planner.sharded import (
    PARAMETERS_STAY,
    optimizer_of_shards,
    parameters_stay,
    settings_for_shards,
    with_shards,
)
from memscale.policy.choose import Situation, choose
from memscale.profiler import ModelProfile, Place, Sample, find_blocks, find_head, profile_model
from memscale.profiler.run import profile_static, uses_cache
from memscale.simulator.fake import batch_value_reads
from memscale.units import format_bytes

# Whether each attempt at a plan that fits by simulation refines the frontier. A refined plan uses its limit to the
# last byte, and is the first to be rejected; before the limit is lowered further, the coarse one is tried.
ATTEMPTS = (True, True, False, True, True)
_ONLY_CHECKPOINTING: ConfigFields = {
    "enable_tiling": False,
    "enable_offloading": False,
    "use_mixed_precision": False,
    "use_8bit_optimizer": False,
}
FEWER_TECHNIQUES: tuple[tuple[str, ConfigFields], ...] = (
    ("", {}),
    ("tiling", {"enable_tiling": False}),
    ("offloading", {"enable_offloading": False}),
    ("tiling and offloading", {"enable_tiling": False, "enable_offloading": False}),
    ("any technique but checkpointing", _ONLY_CHECKPOINTING),
    ("any technique", {**_ONLY_CHECKPOINTING, "enable_checkpointing": False}),
)
"""What a plan is made without, one after the other, if a step with the plan before it raises."""
# Of a limit: what a plan must need less than was estimated for a faster one to be looked for.
OVERESTIMATE = 0.01
NEAR_LIMIT = 0.95  # of a limit: where a plan's estimate is lower, the limit did not decide
DEEP_MODEL_BLOCKS = (
    8  # equal blocks that the profile leaves out: so deep a model's plain step is not simulated
)


@dataclass(frozen=True)
class ProfiledModel:
    """What a model needs for a batch: plain, and under each setting that there is to choose from."""

    profile: ModelProfile
    under: Under
    optimizer: OptimizerNeeds | None = None  # what it needs is counted in both; None for AdamW


def make_plan(
    model: nn.Module,
    sample: Sample | None,
    config: Config,
    hardware: Hardware,
    *,
    suggest: bool = True,
    optimizer: Optimizer | OptimizerNeeds | None = None,
) -> Plan:
    """Return the plan for one model, batch, Config and device; the model is not changed.

    Without a sample the plan follows from structure alone, and a note says so. Where no plan fits, with `suggest` a
    note names a smaller batch that would. Without an optimizer the state of AdamW counts.

    Raises:
        ProfileError: the model does not run on the sample.
    """
    config = settings_for_shards(model, config)
    if sample is None:
        plan = plan_by_structure(model, hardware, config)
        return replace(plan, notes=(*plan.notes, *_scripted_note(model)))
    if isinstance(optimizer, Optimizer):
        with rehearsal(model):
            optimizer = needs_of(optimizer, model, Place.of(hardware.device))
    optimizer = optimizer_of_shards(model, optimizer, hardware)
    key = plan_key(model, sample, config, hardware, optimizer, suggest=suggest)
    with_values = (key, values_of(sample))
    if key is not None and (key in plans_made or with_values in plans_made):
        return plans_made[key if key in plans_made else with_values]
    value_reads = batch_value_reads()
    with rehearsal(model, config):
        plan, excess = simulated_plan(model, sample, config, hardware, None, optimizer)
        plan = replace(plan, notes=(*plan.notes, *_scripted_note(model)))
        if config.enable_offloading and parameters_stay(hardware) and not plan.does_nothing:
            plan = replace(plan, notes=(*plan.notes, PARAMETERS_STAY))
        if suggest and not fits(plan, hardware, config) and plan.prediction_source == "simulated":
            advice = _what_would_fit(model, sample, config, hardware, excess, optimizer)
            plan = replace(plan, notes=(*plan.notes, advice))
    if key is not None and plan.prediction_source == "simulated":
        keep_plan(with_values if batch_value_reads() > value_reads else key, plan)
    return plan


def simulated_plan(
    model: nn.Module,
    sample: Sample,
    config: Config,
    hardware: Hardware,
    known: ProfiledModel | None = None,
    optimizer: OptimizerNeeds | None = None,
) -> tuple[Plan, float]:
    """Return a plan with which a step runs, and the simulated peak of the first plan over its estimate.

    A plan with which the simulated step raises would raise in training, and one that the plain model beats in memory
    and time is of no use: it is replaced by one with fewer techniques, and a note says which were left out and why.
    With `config.auto_policy` the learned policy chooses a strategy first: Note [The learned policy].
    To be called in a `rehearsal`; the model is not profiled again where its profile is `known`.
    """
    try:
        profile = known.profile if known is not None else _profile(model, sample, config, hardware, optimizer)
    except torch.OutOfMemoryError:
        note = f"a step of the plain model on {sample.describe()} runs out of memory, so that it was not profiled"
        return plan_by_structure(model, hardware, config, note), 1.0
    if not config.auto_policy:
        return _plan_that_runs(model, sample, config, hardware, profile, known, optimizer)
    decision = choose(situation_of(model, sample, profile, config, hardware))
    source, reason = decision.source, decision.reason
    if source == "ml":
        plan, excess = _plan_that_runs(model, sample, decision.config, hardware, profile, known, optimizer)
        if fits(plan, hardware, config):
            with open_log(config) as log:
                log.info("auto_policy: it chose %s", reason)
            return _decided_by(source, plan), excess
        source, reason = "rule_fallback", f"what it chose ({reason}) does not fit"
    plan, excess = _plan_that_runs(model, sample, config, hardware, profile, known, optimizer)
    who = "the Config decides" if source == "user_config" else "the rules decide"
    plan = replace(plan, notes=(*plan.notes, f"auto_policy: {who}: {reason}"))
    return _decided_by(source, plan), excess


def _decided_by(source: DecisionSource, plan: Plan) -> Plan:
    """Return a plan with what chose its strategy, unless that could not be done and another one was taken."""
    return plan if plan.decision_source == "rule_fallback" else replace(plan, decision_source=source)


def situation_of(
    model: nn.Module, sample: Sample, profile: ModelProfile, config: Config, hardware: Hardware
) -> Situation:
    """Return what the learned policy chooses a strategy for."""
    return Situation(
        profile,
        hardware,
        config,
        room_of(hardware, config),
        plain_point(profile, hardware, config).peak_bytes,
        *_sizes_of(model, sample),
        is_sharded=bool(sharded_groups(model)),
    )


def _sizes_of(model: nn.Module, sample: Sample) -> tuple[int, int, int]:
    """Return the positions of one sequence, those of all, and the outputs of the head whose loss may be tiled."""
    # A tiled loss reads the head's weight after its forward: FSDP2 has freed it by then.
    head = None if sharded_groups(model) else find_head(model)[1]
    return (*sample.positions_and_tokens(), 0 if head is None else head.out_features)


def _plan_that_runs(
    model: nn.Module,
    sample: Sample,
    config: Config,
    hardware: Hardware,
    profile: ModelProfile,
    known: ProfiledModel | None,
    optimizer: OptimizerNeeds | None,
) -> tuple[Plan, float]:
    """Plan, and plan with fewer techniques while a simulated step raises or gains nothing. See `simulated_plan`."""
    reason = ""
    for left_out, changes in FEWER_TECHNIQUES:
        settings = config.replace(**changes)
        needs = known if not changes else None
        try:
            needs = needs or profile_settings(model, sample, settings, hardware, profile, optimizer)
            plan, excess = _plan_that_fits(model, needs, sample, settings, hardware)
        except Exception as error:
            failure = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
            if not reason:
                reason = f"a step with it raised ({failure})"
                with open_log(config) as log:
                    log.warning("A step with the plan raised (%s): planning with fewer techniques.", failure)
            continue
        if not _is_worse_than_plain(plan) or config.force_optimize:
            return (_planned_without(left_out, plan, reason) if changes else plan), excess
        reason = reason or "with it a step would need no less memory than the plain model's, and no less time"
    plan = decide(profile, hardware, settings)  # nothing is attached, so that nothing of it can fail
    return _planned_without(left_out, plan, f"{reason}; its peak is an estimate"), 1.0


def _plan_that_fits(
    model: nn.Module, needs: ProfiledModel, sample: Sample, config: Config, hardware: Hardware
) -> tuple[Plan, float]:
    """Decide, predict, and decide again while the simulation shows that a step needs more than was estimated.

    The difference is then counted as if forward saved it for backward: the optimizer's step is known exactly. Where the
    estimate itself does not fit, the plan is final: it is the smallest, and its notes say so. Returns as
    `simulated_plan`.
    """
    profile, place = needs.profile, Place.of(hardware.device)
    room = room_of(hardware, config)
    limit = usable(room, unseen_bytes(profile, hardware, config))
    simulated: dict[object, Plan] = {}  # plans that do the same are simulated once
    plain = _plain_step(model, needs, sample, config, hardware)
    excess, underestimated, difference = 1.0, 0, 0
    best: Plan | None = None
    for attempt, refine in enumerate(ATTEMPTS):
        if attempt and refine:
            underestimated += difference if best is not None else max(1, difference)
        under = [
            (setting, replace(each, other_saved_bytes=each.other_saved_bytes + underestimated))
            for setting, each in needs.under
        ]
        plan = decide(profile, hardware, config, under=under, margin=room - limit, refine=refine)
        if needs.optimizer is not None:
            plan = replace(plan, notes=(*plan.notes, *needs.optimizer.notes))
        if profile.source != "static":
            return _measured(model, plan, needs, sample, config, hardware), 1.0
        if plan.actions in simulated:
            predicted = with_figures_of(plan, simulated[plan.actions])
        else:
            predicted = predict(model, plan, sample, place, config, plain, needs.optimizer)
            simulated[plan.actions] = predicted
            plain = plain_step_of(predicted)
        needed = needed_bytes(predicted, hardware, config)
        difference = needed - plan.predicted_peak_bytes
        if attempt == 0:
            excess = needed / max(1, plan.predicted_peak_bytes)
        does_fit = fits(predicted, hardware, config)
        if best is not None:  # this is the second plan, made with what the first was overestimated by
            is_faster = predicted.predicted_time_ratio < best.predicted_time_ratio
            predicted = predicted if does_fit and is_faster else best
            break
        if plan.predicted_peak_bytes > limit:
            break
        if does_fit:
            near_limit = plan.predicted_peak_bytes >= NEAR_LIMIT * limit
            if attempt or not near_limit or difference > -OVERESTIMATE * limit:
                break
            best = predicted
    notes = list(predicted.notes)
    if profile.blocks_left_out >= DEEP_MODEL_BLOCKS:
        notes.append(f"{PLAIN_NOT_SIMULATED}: its figures follow from {profile.reason}")
    if plan.predicted_peak_bytes <= limit < needed_bytes(predicted, hardware, config):
        size = format_bytes(needed_bytes(predicted, hardware, config))
        notes.append(f"by simulation the plan needs {size}, more than there is ({format_bytes(room)})")
    return replace(predicted, notes=tuple(notes)), excess


def usable(room: int, unseen: int = 0) -> int:
    """Return the highest simulated peak that fits, with its allowance and what no prediction sees."""
    return max(0, int((room - unseen) / (1 + ALLOWANCES["simulated"])))


def fits(plan: Plan, hardware: Hardware, config: Config) -> bool:
    """Return whether a plan, with its allowance, fits the device and the budget."""
    return needed_bytes(plan, hardware, config) + plan.allowance_bytes <= room_of(hardware, config)


def needed_bytes(plan: Plan, hardware: Hardware, config: Config) -> int:
    """Return what a plan takes of `room_of`: of a budget its peak, of the device what torch must reserve for that."""
    beside_budget = capacity_of(hardware) - room_of(hardware, config)
    return max(plan.predicted_peak_bytes, plan.predicted_capacity_bytes - beside_budget)


def _is_worse_than_plain(plan: Plan) -> bool:
    """Return whether a plan gains nothing: no time, no lower peak and, of equal peaks, not less held for backward."""
    memory = (plan.predicted_peak_bytes, plan.predicted_saved_bytes)
    plain = (plan.baseline_peak_bytes, plan.baseline_saved_bytes)
    return memory >= plain and plan.predicted_time_ratio >= 1 and not plan.does_nothing


def _planned_without(left_out: str, plan: Plan, reason: str) -> Plan:
    """Note in a plan what was left out and why, also on layers that would otherwise blame the Config."""
    note = f"planned without {'any technique' if plan.does_nothing else left_out}: {reason}"
    layers = tuple(
        layer if layer.techniques else replace(layer, rule="left-as-it-is", reason=f"nothing on it ({note})")
        for layer in plan.layers
    )
    return replace(plan, layers=layers, notes=(*plan.notes, note), decision_source="rule_fallback")


def _scripted_note(model: nn.Module) -> tuple[str, ...]:
    """Return a note that names the parts of a model to which no technique can be attached."""
    scripted = [name for name, each in model.named_modules() if isinstance(each, torch.jit.ScriptModule)]
    outermost = [name for name in scripted if not any(name.startswith(f"{other}.") for other in scripted)]
    note = f"scripted modules (torch.jit) take no technique and are left as they are: {', '.join(outermost)}"
    return (note,) if outermost else ()


# Profiles --------------------------------------------------------------------------------------------


def _profile(
    model: nn.Module, sample: Sample, config: Config, hardware: Hardware, optimizer: OptimizerNeeds | None
) -> ModelProfile:
    place = Place.of(hardware.device)
    static, empirical = config.use_static_profiling, config.use_empirical_fallback
    profile = profile_model(model, sample, place, static=static, empirical=empirical)
    return with_shards(with_optimizer(profile, model, optimizer, place), model, hardware)


def profile_settings(
    model: nn.Module,
    sample: Sample,
    config: Config,
    hardware: Hardware,
    profile: ModelProfile | None = None,
    optimizer: OptimizerNeeds | None = None,
) -> ProfiledModel:
    """Profile a model, in a `rehearsal`, under each setting to choose from, and plain unless `profile` is given."""
    profile = profile or _profile(model, sample, config, hardware, optimizer)
    place = Place.of(hardware.device)
    quiet = config.replace(enable_logging=False)
    tier: Tier = "disk" if hardware.device.kind == "cpu" else "host"
    offload_to = tier if config.enable_offloading and not parameters_stay(hardware) else None
    if optimizer is not None and not optimizer.eight_bit:
        config = config.replace(use_8bit_optimizer=False)
    # Where the user has switched everything off, steps are left whole as well.
    is_allowed = config.enable_checkpointing or config.enable_offloading or config.use_8bit_optimizer
    bucketed = is_allowed and (optimizer is None or optimizer.moves) and hardware.device.kind != "cpu"
    under = []
    for setting in settings_for(hardware, config, *_sizes_of(model, sample)):
        needs = profile
        if setting.changes_the_profile and profile.source == "static":
            resident = {block.name: block.resident for block in profile.blocks if block.resident}
            alone = setting.alone(find_blocks(model), offload_to, resident)
            needs = profile_static(
                model,
                sample,
                place,
                prepare=functools.partial(_attach, alone, quiet),
                offloaded=offload_to is not None,
                resident=resident,
            )
            needs = with_shards(with_optimizer(needs, model, optimizer, place), model, hardware)
        # What exceeds page-locked memory is in ordinary memory: such plans are timed as if all of it were.
        has_room = not config.enable_offloading or CostModel(needs, hardware, config).fits_page_locked
        for page_locked in (True,) if has_room else (True, False):
            way = replace(setting, page_locked=page_locked)
            costs = CostModel(needs, hardware, config, Setting(page_locked=page_locked)).steps
            stepped = _ways_to_step(way, costs, config, optimizer) if bucketed else ()
            # Where buckets take time, on small models, whole steps are tried as well.
            whole = () if bucketed and costs.buckets_are_free else (way,)
            under += [(each, needs) for each in (*whole, *stepped)]
    return ProfiledModel(profile, under, optimizer)


def _ways_to_step(
    setting: Setting, costs: StepCosts, config: Config, optimizer: OptimizerNeeds | None
) -> Iterator[Setting]:
    """Yield a setting with each way that there is to step parameters in buckets."""
    in_buckets = replace(setting, bucketed=True)
    yield in_buckets
    # These take memory of the device: they are tried beside steps without.
    moves = config.enable_offloading and not setting.eight_bit
    on_device = moves and (optimizer is None or optimizer.steps_on_device) and costs.device_step_pays
    overlaps = moves and (optimizer is None or optimizer.overlaps) and costs.may_overlap
    if on_device or overlaps:
        yield replace(in_buckets, device_step=on_device, overlapped=overlaps)
    # What is in flight in backward may be what a small peak has no room for.
    is_tight = config.memory_budget is not None or config.mode is OptimizationMode.AGGRESSIVE
    if on_device and overlaps and is_tight:
        yield replace(in_buckets, device_step=True)


def _attach(plan: Plan, config: Config, twin: nn.Module) -> None:
    """Attach a plan that has the same for all blocks to a copy that may lack some of them."""
    there = {name for name, _ in twin.named_modules()}
    layers = tuple(layer for layer in plan.layers if there.issuperset(layer.members))
    Executor(twin, replace(plan, layers=layers), config).attach()


def _plain_step(
    model: nn.Module, needs: ProfiledModel, sample: Sample, config: Config, hardware: Hardware
) -> Step | None:
    """Return the plain step of a deep model, which follows from a few of its blocks; None where it is simulated."""
    profile, place = needs.profile, Place.of(hardware.device)
    if profile.source != "static" or profile.blocks_left_out < DEEP_MODEL_BLOCKS:
        return None
    if uses_cache(model):
        profile = profile_static(model, sample, place, with_cache=True)
        profile = with_optimizer(profile, model, needs.optimizer, place)
    plain = plain_point(profile, hardware, config)
    return Step(plain.peak_bytes, plain.saved_bytes)


def _measured(
    model: nn.Module, plan: Plan, needs: ProfiledModel, sample: Sample, config: Config, hardware: Hardware
) -> Plan:
    """Run a real step with the plan; if it runs out of memory, return the plan with its estimate."""
    plan = replace(plan, notes=(*plan.notes, f"profiled by {needs.profile.reason}"))
    plain = Step(plan.baseline_peak_bytes, plan.baseline_saved_bytes)
    place = Place.of(hardware.device)
    try:
        return measure(model, plan, sample, place, config, plain=plain, optimizer=needs.optimizer)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        note = "a step with the plan ran out of memory when it was measured, its peak is an estimate"
        return replace(plan, notes=(*plan.notes, note))


def _what_would_fit(
    model: nn.Module,
    sample: Sample,
    config: Config,
    hardware: Hardware,
    excess: float,
    optimizer: OptimizerNeeds | None,
) -> str:
    """Return what could be trained instead of a batch that no plan makes fit.

    If this size needs `excess` times as much as was estimated, it is assumed that others do as well.
    """
    room = int(usable(room_of(hardware, config)) / max(1.0, excess))
    without_values = config.replace(use_empirical_fallback=False)  # other sizes have no values to run with
    kinds: tuple[tuple[str, int, Callable[[nn.Module, Sample, int], Sample]], ...] = (
        ("batch", batch_size_of(sample), with_batch_size),
        ("sequence", length_of(sample), with_length),
    )
    for what, size, resized in kinds:
        if size == 1:
            continue
        try:
            known = []
            for each in sorted({size, max(1, size // 2), max(1, size // 4)}):
                other = resized(model, sample, each)
                needs = profile_settings(model, other, without_values, hardware, optimizer=optimizer)
                known.append((each, needs.under))
            most = Estimates(known, hardware, config, room).largest(size - 1)
        except ProfileError:
            continue  # at another size the model does other operations
        if most:
            return f"a {what} of {most} instead of {size} would fit (estimated)"
    return "no smaller batch and no shorter sequence would fit (estimated)"
