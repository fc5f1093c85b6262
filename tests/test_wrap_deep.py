"""Deep models: their plain step is not simulated, and its figures are those that a simulation would give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale
from memscale.hardware import detect, virtual_hardware
from memscale.planner.make_plan import DEEP_MODEL_BLOCKS
from memscale.planner.predict import _simulated
from memscale.profiler import Place, sample_of
from support.wrapping import Stack, lossless

QUIET = lossless("aggressive", enable_offloading=False)
LAYERS = DEEP_MODEL_BLOCKS + 4


def stack() -> tuple[nn.Module, object]:
    return Stack(LAYERS, 16), torch.ones(64, 16)


def gpt2() -> tuple[nn.Module, object]:
    transformers = pytest.importorskip("transformers")
    ids = torch.zeros(2, 24, dtype=torch.long)
    with torch.device("meta"):
        config = transformers.GPT2Config(
            n_layer=LAYERS, n_embd=32, n_head=2, vocab_size=97, n_positions=32, use_cache=True
        )
        return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(("make", "kind"), [(stack, "cpu"), (stack, "vgpu"), (gpt2, "cpu")])
def test_the_plain_step_of_a_deep_model_follows_from_a_few_blocks(make, kind: str) -> None:
    model, sample = make()
    hardware = detect("cpu") if kind == "cpu" else virtual_hardware("RTX 3090")
    plan = memscale.plan(model, sample, QUIET, hardware=hardware)
    assert plan.prediction_source == "simulated"
    assert any("was not simulated" in note for note in plan.notes)

    whole = _simulated(model, None, sample_of(sample, model), Place(kind), QUIET, None)
    assert plan.baseline_saved_bytes == whole.saved_bytes
    # Adam's counts of steps are left out on a CPU, four bytes of each parameter.
    counts = 4 * len(list(model.parameters())) if kind == "cpu" else 0
    assert abs(plan.baseline_peak_bytes + counts - whole.peak_bytes) <= 0.002 * whole.peak_bytes


def test_a_model_of_a_few_layers_is_simulated_as_a_whole() -> None:
    plan = memscale.plan(Stack(DEEP_MODEL_BLOCKS), torch.ones(4, 8), QUIET)
    assert not plan.notes
