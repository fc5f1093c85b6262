"""The corridor up to the plan: hardware, profile, decision, prediction. Nothing here touches the user's model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from memscale.config import Config
from memscale.engine import decide
from memscale.engine.structure import decide_by_structure
from memscale.hardware import Hardware
from memscale.plan import Plan
from memscale.prediction import predict
from memscale.profiler import ModelProfile, Sample, find_blocks, profile_model
from memscale.recompute.rng import RngState


def make_plan(model: nn.Module, sample: Sample | None, config: Config, hardware: Hardware) -> Plan:
    """The plan for one model, batch, Config and device.

    Without a sample the plan follows from structure alone, and says so.

    Raises:
        ProfileError: the model does not run on the sample.
    """
    if sample is None:
        return decide_by_structure(model, find_blocks(model), hardware, config)
    device = "cpu" if hardware.device.kind == "cpu" else "vgpu"
    random = RngState(sorted({parameter.device.type for parameter in model.parameters()}))
    # Whoever listens to the training loop (a FLOP counter, a profiler) must not hear the rehearsal.
    with _disable_current_modes():
        profile = profile_model(
            model,
            sample,
            device=device,
            static=config.use_static_profiling,
            empirical=config.use_empirical_fallback,
        )
        plan = decide(profile, hardware, config)
        plan = _with_prediction(model, plan, profile, sample, device, config)
    random.restore()
    return plan


def _with_prediction(
    model: nn.Module, plan: Plan, profile: ModelProfile, sample: Sample, device: str, config: Config
) -> Plan:
    if profile.source != "static":
        return replace(plan, prediction_source="estimated", notes=(*plan.notes, f"profiled by {profile.reason}"))
    try:
        return predict(model, plan, sample, device=device, config=config)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = f"the plan could not be simulated ({type(error).__name__}), its peak is an estimate"
        return replace(plan, prediction_source="estimated", notes=(*plan.notes, reason))

