"""Plans for budgets against plans by hand, and what the engine need not recompute: on a small GPT-2."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from benchmarks.budgets import FEWER, BudgetRow, budget_row, selective
from memscale.hardware import virtual_hardware

pytest.importorskip("transformers")

HARDWARE = virtual_hardware("RTX 3090")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=8, n_head=4, vocab_size=4096)).train()


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    words = torch.zeros(4, 256, dtype=torch.long)
    return {"input_ids": words, "labels": words}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("budget", ["160MiB", "240MiB", "110MiB"])
def test_a_plan_for_a_budget_fits_and_is_no_slower_than_one_by_hand(
    model: nn.Module, inputs: dict[str, torch.Tensor], budget: str
) -> None:
    row = budget_row(model, inputs, HARDWARE, budget)
    assert row.hand_time_ratio is not None
    assert row.peak_bytes + row.allowance_bytes <= row.budget_bytes
    assert row.time_ratio <= row.hand_time_ratio
    assert row.holds


def test_a_row_that_does_not_fit_or_is_slower_does_not_hold() -> None:
    row = BudgetRow(1000, 900, 9, 1.2, "", 900, 1.3, "")
    assert row.holds
    assert not dataclasses.replace(row, peak_bytes=995).holds
    assert not dataclasses.replace(row, time_ratio=1.31).holds


def test_at_the_memory_of_full_checkpointing_less_is_recomputed(
    model: nn.Module, inputs: dict[str, torch.Tensor]
) -> None:
    found = selective(model, {name: words[:2] for name, words in inputs.items()}, HARDWARE)
    # Full checkpointing runs the forward of all layers again: less than a third of the step, as there is a head too.
    assert 0.2 < found.full_flops / found.plain_flops < 1 / 3
    assert found.peak_bytes <= found.full_peak_bytes
    assert found.fewer >= FEWER
