"""What the engine counts for a plan is what the executor needs on the virtual GPU, in 32 bits and in 16."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from memscale import Config, OptimizationMode
from memscale.hardware import virtual_hardware
from memscale.planner.assembly import Verdict, plan_of
from memscale.planner.cost_model import CostModel, Point, full_checkpointing
from memscale.planner.decide import decide
from memscale.planner.make_plan import ProfiledModel, profile_settings
from memscale.planner.predict import Step, predict, rehearsal
from memscale.profiler import Place, Sample

MIB = 2**20
HARDWARE = virtual_hardware("RTX 3090")
MODES = {
    "32 bits": Config(enable_logging=False),
    "16 bits": Config(enable_logging=False, mode=OptimizationMode.AGGRESSIVE),
}


def bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(num_hidden_layers=6, hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    )


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=256, n_head=4))


@functools.cache
def looked_at(make: type, mode: str) -> tuple[nn.Module, Sample, ProfiledModel]:
    with torch.device("meta"):
        model = make().train()
    tokens = torch.zeros(16, 128, dtype=torch.long)
    sample = Sample((), {"input_ids": tokens, "labels": tokens})
    with rehearsal(model):
        return model, sample, profile_settings(model, sample, MODES[mode], HARDWARE)


def uniform(model: CostModel, segment: int, kept: int, home: bool) -> Point:
    """All layers recomputed in segments of equal length, each layer keeping so many products."""
    choices, in_stack = [], 0
    for choice in full_checkpointing(model.blocks):
        if choice.recompute:
            choice = choice._replace(variant=kept, chained=in_stack % segment > 0)
            in_stack += 1
        choices.append(choice._replace(offloaded=home))
    return model.point(tuple(choices))


@pytest.mark.matrix(7)
@pytest.mark.parametrize("home", [False, True], ids=["resident", "home"])
@pytest.mark.parametrize(("segment", "kept"), [(1, 0), (1, 2), (2, 0), (3, 0), (6, 0)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [bert, gpt2])
def test_count_is_what_is_needed(make: type, mode: str, segment: int, kept: int, home: bool) -> None:
    model, sample, known = looked_at(make, mode)
    config = MODES[mode]
    setting, needs = known.under[-1]
    point = uniform(CostModel(needs, HARDWARE, config, setting), segment, kept, home)
    plan = plan_of(Verdict(point, "by-hand"), known.profile, HARDWARE, config, under=known.under)
    with rehearsal(model):
        simulated = predict(model, plan, sample, Place.of(HARDWARE.device), config, Step(1, 1))
    assert plan.predicted_peak_bytes == pytest.approx(simulated.predicted_peak_bytes, rel=0.02)


@pytest.mark.parametrize("mode", MODES)
def test_inputs_of_recomputed_layers_wait_below(mode: str) -> None:
    model, sample, known = looked_at(bert, mode)
    config = MODES[mode].replace(memory_budget=MIB)  # nothing fits that, so that the smallest plan is taken
    plan = decide(known.profile, HARDWARE, config, under=known.under)
    layers = [layer for layer in plan.layers if layer.name.startswith("bert.encoder.layer.")]
    waiting = [layer for layer in layers if layer.offloading is not None and layer.offloading.activations]
    assert len(waiting) > 3
    with rehearsal(model):
        simulated = predict(model, plan, sample, Place.of(HARDWARE.device), config, Step(1, 1))
    assert plan.predicted_peak_bytes == pytest.approx(simulated.predicted_peak_bytes, rel=0.02)
