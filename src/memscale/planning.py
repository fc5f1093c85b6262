"""The corridor up to the plan: hardware, profile, decision, prediction. Nothing here touches the user's model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from memscale.config import Config
from memscale.engine import decide
from memscale.engine.structure import decide_by_structure
from memscale.engine.timeline import optimizer_transient
from memscale.execution_plan import Plan
from memscale.hardware import Hardware
from memscale.prediction import Step, measure, predict
from memscale.profiler import ModelProfile, Place, Sample, find_blocks, profile_model
from memscale.profiler.cache import uses_cache
from memscale.profiler.static import profile_static
from memscale.recompute.rng import RngState

DEEP = 24  # equal blocks beyond the two that the profile runs, from which on a plain step is not simulated


def make_plan(model: nn.Module, sample: Sample | None, config: Config, hardware: Hardware) -> Plan:
    """The plan for one model, batch, Config and device.

    Without a sample the plan follows from structure alone, and says so.

    Raises:
        ProfileError: the model does not run on the sample.
    """
    if sample is None:
        return decide_by_structure(model, find_blocks(model), hardware, config)
    random = RngState(sorted({parameter.device.type for parameter in model.parameters()}))
    # Whoever listens to the training loop (a FLOP counter, a profiler) must not hear the rehearsal.
    with _disable_current_modes(), _quiet_fake_tensors():
        try:
            return _rehearsed(model, sample, config, hardware)
        finally:
            random.restore()


@contextlib.contextmanager
def _quiet_fake_tensors() -> Iterator[None]:
    """torch logs a traceback for each operation that fails on fake tensors; here the error itself says it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _rehearsed(model: nn.Module, sample: Sample, config: Config, hardware: Hardware) -> Plan:
    place = Place.of(hardware.device)
    try:
        profile = profile_model(
            model,
            sample,
            place,
            static=config.use_static_profiling,
            empirical=config.use_empirical_fallback,
        )
    except torch.OutOfMemoryError:
        note = f"a step of the plain model on {sample.describe()} runs out of memory, so that it was not profiled"
        return decide_by_structure(model, find_blocks(model), hardware, config, notes=(note,))
    plan = decide(profile, hardware, config)
    try:
        if profile.source == "static" and profile.blocks_left_out >= DEEP:
            return _predicted_in_part(model, plan, profile, sample, config, hardware)
        if profile.source == "static":
            return predict(model, plan, sample, place, config)
        return _measured(model, plan, profile, sample, config, hardware)
    except Exception as error:
        how = "simulated" if profile.source == "static" else "run"
        note = f"the plan could not be {how} ({type(error).__name__}), its peak is an estimate"
        return replace(plan, notes=(*plan.notes, *_way(profile), note))


def _predicted_in_part(
    model: nn.Module, plan: Plan, profile: ModelProfile, sample: Sample, config: Config, hardware: Hardware
) -> Plan:
    """Simulate the plan alone: what the plain step of a deep model needs follows from a few of its blocks."""
    place = Place.of(hardware.device)
    if uses_cache(model):
        profile = profile_static(model, sample, place, with_cache=True)
    as_it_is = decide(profile, hardware, Config(enable_checkpointing=False, enable_offloading=False))
    plain = Step(as_it_is.baseline_peak_bytes, as_it_is.baseline_saved_bytes)
    note = f"the plain step was not simulated: its figures follow from {profile.reason}"
    return predict(model, replace(plan, notes=(*plan.notes, note)), sample, place, config, plain)


def _measured(
    model: nn.Module, plan: Plan, profile: ModelProfile, sample: Sample, config: Config, hardware: Hardware
) -> Plan:
    plan = replace(plan, notes=(*plan.notes, *_way(profile)))
    plain = Step(plan.baseline_peak_bytes, plan.baseline_saved_bytes)
    transient = optimizer_transient(profile, hardware.device.kind)
    return measure(model, plan, sample, plain=plain, optimizer_transient=transient, config=config)


def _way(profile: ModelProfile) -> tuple[str, ...]:
    return () if profile.source == "static" else (f"profiled by {profile.reason}",)
