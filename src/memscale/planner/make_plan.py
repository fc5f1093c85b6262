"""The corridor up to the plan: hardware, profile, decision, prediction. Nothing here touches the user's model."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memscale._torch import DDP_STATIC_GRAPH_REDUCED, FAKE_TENSOR_LOGGER, disable_current_modes
from memscale._util.rng import RngState
from memscale.config import Config, ConfigFields
from memscale.errors import ProfileError, is_out_of_memory
from memscale.execution_plan import ALLOWANCES, Plan, Tier
from memscale.executor import Executor
from memscale.hardware import Hardware
from memscale.observe.log import speaking
from memscale.optimizer.needs import OptimizerNeeds, needs_of, with_optimizer
from memscale.planner import decide, plain_point, room_of, unseen_bytes
from memscale.planner.cache import PlanCache, plan_key
from memscale.planner.fitting import Estimates, Under
from memscale.planner.predict import Step, measure, predict, with_figures_of
from memscale.planner.settings import Batch, settings_for
from memscale.planner.sizes import batch_size_of, length_of, with_batch_size, with_length
from memscale.planner.structure import decide_by_structure
from memscale.profiler import ModelProfile, Place, Sample, find_blocks, find_head, profile_model
from memscale.profiler.run import profile_static, uses_cache
from memscale.simulator.fake import batch_value_reads
from memscale.units import format_bytes

# At a plan that fits, if the simulation finds that the engine's does not: with a closer look, or without.
ATTEMPTS = (True, False, True, True)
_ONLY_CHECKPOINTING: ConfigFields = {
    "enable_tiling": False,
    "enable_offloading": False,
    "use_mixed_precision": False,
    "use_8bit_optimizer": False,
}
# What a plan is made without, one after the other, if a step with the plan before it raises.
FEWER_TECHNIQUES: tuple[tuple[str, ConfigFields], ...] = (
    ("", {}),
    ("tiling", {"enable_tiling": False}),
    ("offloading", {"enable_offloading": False}),
    ("tiling and offloading", {"enable_tiling": False, "enable_offloading": False}),
    ("any technique but checkpointing", _ONLY_CHECKPOINTING),
    ("any technique", {**_ONLY_CHECKPOINTING, "enable_checkpointing": False}),
)
plans_made = PlanCache()
DEEP = 8  # equal blocks beyond the two that the profile runs, from which on a plain step is not simulated


def make_plan(
    model: nn.Module,
    sample: Sample | None,
    config: Config,
    hardware: Hardware,
    *,
    suggest: bool = True,
    known: Profiled | None = None,
    on_likely: Callable[[Plan], None] | None = None,
    optimizer: Optimizer | OptimizerNeeds | None = None,
) -> Plan:
    """The plan for one model, batch, Config and device.

    Without a sample the plan follows from structure alone, and says so. Of a batch that no plan makes fit, it says what
    would fit, unless it is not to suggest anything. The model is not profiled where its profile is `known`.

    `on_likely` is called early, with a plan that is likely to have much in common with the one that is returned; not
    where the model itself is run, nor where an equal model was planned for before (Note [Equal models]).

    The plan reckons with the state of the `optimizer`; with AdamW's if it is not given, or if there is no sample.

    Raises:
        ProfileError: the model does not run on the sample.
    """
    if sample is None:
        plan = decide_by_structure(model, find_blocks(model), hardware, config)
        return replace(plan, notes=(*plan.notes, *_left_out(model)))
    if isinstance(optimizer, Optimizer):
        with rehearsal(model):
            optimizer = needs_of(optimizer, model, Place.of(hardware.device))
    key = plan_key(model, sample, config, hardware, optimizer)
    found = None if key is None else plans_made.find((key, suggest), sample)
    if found is not None:
        return found
    value_reads = batch_value_reads()
    with rehearsal(model):
        plan, excess = rehearsed(model, sample, config, hardware, known, on_likely, optimizer)
        plan = replace(plan, notes=(*plan.notes, *_left_out(model)))
        if suggest and not fits(plan, hardware, config) and plan.prediction_source == "simulated":
            advice = _what_would_fit(model, sample, config, hardware, excess, optimizer)
            plan = replace(plan, notes=(*plan.notes, *advice))
    if key is not None and plan.prediction_source == "simulated":
        plans_made.add((key, suggest), sample, plan, by_values=batch_value_reads() > value_reads)
    return plan


def _left_out(model: nn.Module) -> tuple[str, ...]:
    """Return a note that names the parts of a model that no technique can go on."""
    scripted = [name for name, each in model.named_modules() if isinstance(each, torch.jit.ScriptModule)]
    outermost = [name for name in scripted if not any(name.startswith(f"{other}.") for other in scripted)]
    if not outermost:
        return ()
    return (
        f"scripted modules (torch.jit) take no technique and are left as they are: {', '.join(outermost)}",
    )


@contextlib.contextmanager
def rehearsal(model: nn.Module) -> Iterator[None]:
    """Around looks at a model: they leave no trace on it, and nobody hears of them."""
    random = RngState(sorted({parameter.device.type for parameter in model.parameters()}))
    # A forward that its user has put on a module may refer to the model itself, and not to its copy.
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    # Whoever listens to the training loop (a FLOP counter, a profiler) must not hear the rehearsal.
    with (
        disable_current_modes(),
        _quiet_fake_tensors(),
        _without_other_processes(model),
        _without_garbage_collection(),
        _without_compiler(),
    ):
        try:
            yield
        finally:
            random.restore()
            for parameter, gradient in gradients:
                if parameter.grad is not gradient:
                    parameter.grad = gradient


@dataclass(frozen=True)
class Profiled:
    """What a model needs for a batch: plain, and under each setting that the engine may choose from.

    Attributes:
        profile: plain.
        under: under each setting.
        optimizer: what the optimizer needs that both reckon with; None for AdamW.
    """

    profile: ModelProfile
    under: Under
    optimizer: OptimizerNeeds | None = None


@dataclass(frozen=True)
class Look:
    """What the engine makes of a profile, before it is simulated."""

    needs: Profiled
    plan: Plan

    @property
    def profile(self) -> ModelProfile:
        return self.needs.profile

    @property
    def under(self) -> Under:
        return self.needs.under

    @property
    def optimizer(self) -> OptimizerNeeds | None:
        return self.needs.optimizer


def profiled(
    model: nn.Module,
    sample: Sample,
    config: Config,
    hardware: Hardware,
    profile: ModelProfile | None = None,
    optimizer: OptimizerNeeds | None = None,
) -> Profiled:
    """Profile a model, unless its plain profile is there already; to be called in a `rehearsal`."""
    profile = profile or _plain_profile(model, sample, config, hardware, optimizer)
    under = _under_settings(model, profile, sample, config, hardware, optimizer)
    return Profiled(profile, under, optimizer)


def _plain_profile(
    model: nn.Module, sample: Sample, config: Config, hardware: Hardware, optimizer: OptimizerNeeds | None
) -> ModelProfile:
    place = Place.of(hardware.device)
    profile = profile_model(
        model,
        sample,
        place,
        static=config.use_static_profiling,
        empirical=config.use_empirical_fallback,
    )
    return with_optimizer(profile, model, optimizer, place)


def look_at(
    model: nn.Module,
    sample: Sample,
    config: Config,
    hardware: Hardware,
    known: Profiled | None = None,
    on_likely: Callable[[Plan], None] | None = None,
    optimizer: OptimizerNeeds | None = None,
) -> Look:
    """Profile a model and decide; to be called in a `rehearsal`."""
    needs = known or profiled(model, sample, config, hardware, optimizer=optimizer)
    profile, under = needs.profile, needs.under
    room = room_of(hardware, config)
    margin = room - usable(room, unseen_bytes(profile, hardware))
    early = on_likely if profile.source == "static" else None
    plan = decide(profile, hardware, config, under=under, margin=margin, on_likely=early)
    if needs.optimizer is not None:
        plan = replace(plan, notes=(*plan.notes, *needs.optimizer.notes))
    return Look(needs, plan)


def usable(room: int, unseen: int = 0) -> int:
    """Return the highest simulated peak that fits, with its allowance and what no prediction sees."""
    return max(0, int((room - unseen) / (1 + ALLOWANCES["simulated"])))


def fits(plan: Plan, hardware: Hardware, config: Config) -> bool:
    """Whether a plan, with its allowance, has room on the device and in the budget."""
    return plan.predicted_peak_bytes + plan.allowance_bytes <= room_of(hardware, config)


@contextlib.contextmanager
def _without_other_processes(model: nn.Module) -> Iterator[None]:
    """A model that trains in several processes speaks to none of them: they may not rehearse anything now."""
    flags = {
        "require_backward_grad_sync": False,
        "require_forward_param_sync": False,
        DDP_STATIC_GRAPH_REDUCED: True,  # else backward begins the first reduction of a static graph
    }
    parallel = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    before = [(each, name, getattr(each, name)) for each in parallel for name in flags if hasattr(each, name)]
    try:
        for each, name, _ in before:
            setattr(each, name, flags[name])
        yield
    finally:
        for each, name, value in before:
            setattr(each, name, value)


def _without_compiler() -> contextlib.AbstractContextManager[object]:
    """Compiled parts run as they are written: to compile them for fake tensors takes long, and tells nothing."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to import it takes a second
        return contextlib.nullcontext()
    return cast(contextlib.AbstractContextManager[object], torch.compiler.set_stance("force_eager"))


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Of tensors in reference cycles nobody knows when a training loop will be rid of them: here they stay, so that
    a prediction does not depend on when the collector runs. (And it would take a sixth of the time of a plan.)"""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextlib.contextmanager
def _quiet_fake_tensors() -> Iterator[None]:
    """torch logs a traceback for each operation that fails on fake tensors; here the error itself says it."""
    log = logging.getLogger(FAKE_TENSOR_LOGGER)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def rehearsed(
    model: nn.Module,
    sample: Sample,
    config: Config,
    hardware: Hardware,
    known: Profiled | None = None,
    on_likely: Callable[[Plan], None] | None = None,
    optimizer: OptimizerNeeds | None = None,
) -> tuple[Plan, float]:
    """Return the plan, and the simulated peak of the engine's first choice over the engine's own count.

    One step is simulated with the plan, or run where the model cannot be simulated. A plan with which that raises
    would raise in training, and one that the plain model beats in memory and time is of no use: it is replaced by one
    with fewer techniques (`FEWER_TECHNIQUES`), and a note says which were left out and why.

    To be called in a `rehearsal`; otherwise as `make_plan`.
    """
    try:
        profile = (
            known.profile if known is not None else _plain_profile(model, sample, config, hardware, optimizer)
        )
    except torch.OutOfMemoryError:
        note = f"a step of the plain model on {sample.describe()} runs out of memory, so that it was not profiled"
        return decide_by_structure(model, find_blocks(model), hardware, config, notes=(note,)), 1.0
    reason = ""
    for left_out, changes in FEWER_TECHNIQUES:
        settings = config.replace(**changes)
        needs = known if not changes else None
        try:
            needs = needs or profiled(model, sample, settings, hardware, profile, optimizer)
            look = look_at(model, sample, settings, hardware, needs, None if changes else on_likely)
            plan, excess = _rehearse(model, look, sample, settings, hardware)
        except Exception as error:
            failure = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
            if not reason:
                reason = f"a step with it raised ({failure})"
                with speaking(config) as log:
                    log.warning("A step with the plan raised (%s): planning with fewer techniques.", failure)
            continue
        if not (_is_worse_than_plain(plan) and not config.force_optimize):
            return (_planned_without(left_out, plan, reason) if changes else plan), excess
        reason = reason or "with it a step would need no less memory than the plain model's, and no less time"
    plan = decide(profile, hardware, settings)  # nothing is attached, so that nothing of it can fail
    return _planned_without(left_out, plan, f"{reason}; its peak is an estimate"), 1.0


def _does_nothing(plan: Plan) -> bool:
    whole = (plan.precision, plan.loss, plan.optimizer)
    return not any(layer.techniques for layer in plan.layers) and all(each is None for each in whole)


def _is_worse_than_plain(plan: Plan) -> bool:
    """Whether a plan gains nothing: no time, no lower peak and, of equal peaks, not less held for backward."""
    memory = (plan.predicted_peak_bytes, plan.predicted_saved_bytes)
    plain = (plan.baseline_peak_bytes, plan.baseline_saved_bytes)
    return memory >= plain and plan.predicted_time_ratio >= 1 and not _does_nothing(plan)


def _planned_without(left_out: str, plan: Plan, reason: str) -> Plan:
    """Say of a plan what was left out and why; where that is all, its layers must not blame the Config."""
    note = f"planned without {'any technique' if _does_nothing(plan) else left_out}: {reason}"
    layers = tuple(
        layer if layer.techniques else replace(layer, rule="left-as-it-is", reason=f"nothing on it ({note})")
        for layer in plan.layers
    )
    return replace(plan, layers=layers, notes=(*plan.notes, note), decision_source="rule_fallback")


def _rehearse(
    model: nn.Module, look: Look, sample: Sample, config: Config, hardware: Hardware
) -> tuple[Plan, float]:
    """Simulate or measure a step with the engine's plan; raise what that raises."""
    profile, plan = look.profile, look.plan
    if profile.source != "static":
        return _measured(model, plan, look, sample, config, hardware), 1.0
    plain = _plain_step(model, look, sample, hardware)
    predicted = predict(model, plan, sample, Place.of(hardware.device), config, plain, look.optimizer)
    excess = predicted.predicted_peak_bytes / max(1, plan.predicted_peak_bytes)
    return _within(model, look, predicted, sample, config, hardware), excess


def _under_settings(
    model: nn.Module,
    profile: ModelProfile,
    sample: Sample,
    config: Config,
    hardware: Hardware,
    optimizer: OptimizerNeeds | None,
) -> Under:
    """The settings that the engine may choose from, each with what the model needs under it."""
    head = find_head(model)[1]
    batch = Batch(*sample.positions_and_tokens(), 0 if head is None else head.out_features)
    quiet = config.replace(enable_logging=False)
    tier: Tier = "disk" if hardware.device.kind == "cpu" else "host"
    home = tier if config.enable_offloading else None
    found = []
    if optimizer is not None and not optimizer.eight_bit:
        config = config.replace(use_8bit_optimizer=False)
    for setting in settings_for(hardware, config, batch):
        needs = profile
        if setting.changes_the_profile and profile.source == "static":
            resident = {block.name: block.resident for block in profile.blocks if block.resident}
            alone = setting.alone(find_blocks(model), home, resident)
            needs = profile_static(
                model,
                sample,
                Place.of(hardware.device),
                prepare=functools.partial(_attached, alone, quiet),
                at_home=home is not None,
                resident=resident,
            )
            needs = with_optimizer(needs, model, optimizer, Place.of(hardware.device))
        found.append((setting, needs))
    return found


def _attached(plan: Plan, config: Config, twin: nn.Module) -> None:
    """Put a plan that has the same for all blocks on a twin that may lack some of them."""
    there = {name for name, _ in twin.named_modules()}
    layers = tuple(layer for layer in plan.layers if there.issuperset(layer.members))
    Executor(twin, replace(plan, layers=layers), config).attach()


def _plain_step(model: nn.Module, look: Look, sample: Sample, hardware: Hardware) -> Step | None:
    """What the plain step of a deep model needs follows from a few of its blocks; others are simulated (None)."""
    profile, place = look.profile, Place.of(hardware.device)
    if profile.blocks_left_out < DEEP:
        return None
    if uses_cache(model):
        profile = profile_static(model, sample, place, with_cache=True)
        profile = with_optimizer(profile, model, look.optimizer, place)
    plain = plain_point(profile, hardware)
    return Step(plain.peak_bytes, plain.saved_bytes)


def _within(
    model: nn.Module, look: Look, predicted: Plan, sample: Sample, config: Config, hardware: Hardware
) -> Plan:
    """The plan, made anew if the simulation shows that it needs more than the engine reckoned.

    What was needed more is reckoned with, as if forward left it for backward: the optimizer's step is known exactly. If
    that does not do, the plan that the engine has without a closer look is next, and then still more is reckoned with.
    Of a plan that the engine knows not to fit the user has been told already.
    """
    profile, plan = look.profile, look.plan
    room = room_of(hardware, config)
    most = usable(room, unseen_bytes(profile, hardware))
    plain = Step(predicted.baseline_peak_bytes, predicted.baseline_saved_bytes)
    simulated = {plan.actions: predicted}
    more = 0
    for closely in ATTEMPTS:
        if plan.predicted_peak_bytes > most or fits(predicted, hardware, config):
            break
        if closely:
            more += max(1, predicted.predicted_peak_bytes - plan.predicted_peak_bytes)
        under = [
            (setting, replace(needs, other_saved_bytes=needs.other_saved_bytes + more))
            for setting, needs in look.under
        ]
        plan = decide(profile, hardware, config, under=under, margin=room - most, closely=closely)
        same = simulated.get(plan.actions)
        if same is None:
            predicted = predict(model, plan, sample, Place.of(hardware.device), config, plain, look.optimizer)
            simulated[plan.actions] = predicted
        else:
            predicted = with_figures_of(plan, same)
    notes = list(predicted.notes)
    if profile.blocks_left_out >= DEEP:
        notes.append(f"the plain step was not simulated: its figures follow from {profile.reason}")
    if plan.predicted_peak_bytes <= most < predicted.predicted_peak_bytes:
        needs = format_bytes(predicted.predicted_peak_bytes)
        notes.append(f"by simulation the plan needs {needs}, more than there is ({format_bytes(room)})")
    return replace(predicted, notes=tuple(notes))


def _what_would_fit(
    model: nn.Module,
    sample: Sample,
    config: Config,
    hardware: Hardware,
    excess: float,
    optimizer: OptimizerNeeds | None,
) -> tuple[str, ...]:
    """In words, what could be trained instead of a batch that no plan makes fit.

    Other sizes will need more than the engine reckons as well, if this one does: `excess` times as much.
    """
    room = int(usable(room_of(hardware, config)) / max(1.0, excess))
    # Batches of other sizes have no values to run with.
    without_values = config.replace(use_empirical_fallback=False)
    for what, size, resized in (
        ("batch", batch_size_of(sample), with_batch_size),
        ("sequence", length_of(sample), with_length),
    ):
        if size > 1:
            sizes = sorted({size, max(1, size // 2), max(1, size // 4)})
            try:
                known = []
                for each in sizes:
                    other = resized(model, sample, each)
                    needs = profiled(model, other, without_values, hardware, optimizer=optimizer)
                    known.append((each, needs.under))
                most = Estimates(known, hardware, config, room).largest(size - 1)
            except ProfileError:
                continue  # of another size it is another model
            if most:
                return (f"a {what} of {most} instead of {size} would fit (estimated)",)
    return ("no smaller batch and no shorter sequence would fit (estimated)",)


def _measured(
    model: nn.Module, plan: Plan, look: Look, sample: Sample, config: Config, hardware: Hardware
) -> Plan:
    """Run a step with the plan; one that there is no room for now leaves the engine's estimate."""
    plan = replace(plan, notes=(*plan.notes, *_way(look.profile)))
    plain = Step(plan.baseline_peak_bytes, plan.baseline_saved_bytes)
    place = Place.of(hardware.device)
    try:
        return measure(model, plan, sample, place, config, plain=plain, optimizer=look.optimizer)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        note = "a step with the plan ran out of memory when it was measured, its peak is an estimate"
        return replace(plan, notes=(*plan.notes, note))


def _way(profile: ModelProfile) -> tuple[str, ...]:
    return () if profile.source == "static" else (f"profiled by {profile.reason}",)
