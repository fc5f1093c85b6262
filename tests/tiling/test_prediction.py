"""A plan with tiles is predicted as it runs: the simulator and the executing device agree to the byte."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from memscale.execution_plan import LayerPlan, LossTiling, Plan, Tiling
from memscale.executor import Executor
from memscale.planner.predict import predict
from memscale.profiler.blocks import find_blocks
from memscale.profiler.run import Place, profile_static
from memscale.profiler.sample import Sample
from memscale.testing import executing
from support.families import FAMILIES
from support.wrapping import QUIET, memory_of

BATCH, LENGTH, ROWS = 8, 20, 16  # ten tiles, of which a simulation runs three


def plan_of(model: nn.Module, *, tiled: bool) -> Plan:
    techniques = ("checkpointing", "tiling") if tiled else ("checkpointing",)
    layers = tuple(
        LayerPlan(block.name, block.members, techniques, "", "", tiling=Tiling(ROWS) if tiled else None)
        for block in find_blocks(model)
        if block.role == "repeated"
    )
    return Plan(layers, loss=LossTiling(ROWS) if tiled else None)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_the_peak_is_as_predicted(name: str) -> None:
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    model = family.build()
    sample = Sample((), dict(family.batch(batch_size=BATCH, length=LENGTH)))
    place = Place("vgpu")
    predicted = [predict(model, plan_of(model, tiled=tiled), sample, place, QUIET) for tiled in (False, True)]
    assert predicted[1].predicted_peak_bytes < predicted[0].predicted_peak_bytes
    with executing() as gpu:
        model = family.build().to(gpu.device)
        Executor(model, predicted[1], QUIET).attach()
        batch = family.batch(gpu.device, batch_size=BATCH, length=LENGTH)
        seen = memory_of(family, model, batch, gpu.tracker, gpu.device)
    assert seen.saved_bytes == predicted[1].predicted_saved_bytes
    assert seen.peak_bytes == predicted[1].predicted_peak_bytes


def test_a_loss_outside_of_the_model_is_predicted_in_tiles_too() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5000, 8)
            self.head = nn.Linear(8, 5000)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(ids))

    sample = Sample((torch.zeros(4, 64, dtype=torch.long),), {})
    logits = 4 * 64 * 5000 * 4
    peaks = [
        predict(Words(), Plan((), loss=loss), sample, Place("cpu"), QUIET).predicted_peak_bytes
        for loss in (None, LossTiling(ROWS))
    ]
    assert peaks[0] > 2 * logits
    assert peaks[1] < peaks[0] - logits


@pytest.mark.parametrize("tied", [False, True])
def test_the_work_of_tiles_that_are_not_simulated_is_counted(tied: bool) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(500, 8)
            self.head = nn.Linear(8, 500, bias=False)
            if tied:
                self.head.weight = self.table.weight

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.table(ids)).flatten(0, 1), labels.flatten())

    model, ids = Words(), torch.zeros(4, 40, dtype=torch.long)
    attach = functools.partial(_attach_to, Plan((), loss=LossTiling(ROWS)))
    profile = profile_static(model, Sample((ids, ids), {}), Place("vgpu"), prepare=attach)
    assert 3 * ROWS < 4 * 40
    products = sum(each.forward_flops + each.backward_flops for each in profile.blocks) + profile.other_flops
    assert (
        products == 3 * 2 * (4 * 40) * 500 * 8
    )  # of the logits, of the hidden states' gradient, of the weight's


def _attach_to(plan: Plan, model: nn.Module) -> None:
    Executor(model, plan, QUIET).attach()
