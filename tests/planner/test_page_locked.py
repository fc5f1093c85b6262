"""Page-locked memory is counted by what a plan has on the host, not by the size of the model."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from memscale import AsyncOffloadConfig, Config, Plan
from memscale.hardware import virtual_hardware
from memscale.planner.decide import decide
from memscale.planner.make_plan import profile_settings
from memscale.planner.predict import rehearsal
from memscale.planner.settings import Under
from memscale.profiler import Sample
from memscale.tiers.engine import MASTERS_SHARE

HARDWARE = virtual_hardware("RTX 3090")
TOKENS = torch.zeros(4, 256, dtype=torch.long)
BUDGET = 450 * 2**20


@functools.cache
def planned(pool: int | None, *, overlap: bool, budget: int = BUDGET) -> tuple[Plan, Under]:
    """Return the plan for a model with so many bytes of page-locked memory, and what it was chosen from."""
    gigabytes = None if pool is None else pool / 1e9
    config = Config(
        enable_logging=False,
        memory_budget=budget,
        overlap_optimizer=overlap,
        async_config=AsyncOffloadConfig(pinned_pool_gb=gigabytes),
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=512, n_head=8, vocab_size=8192)).train()
    with rehearsal(model):
        known = profile_settings(model, Sample((), {"input_ids": TOKENS, "labels": TOKENS}), config, HARDWARE)
    return decide(known.profile, HARDWARE, config, under=known.under), known.under


@pytest.mark.parametrize("overlap", [False, True])
def test_a_plan_is_the_same_while_what_it_offloads_fits(overlap: bool) -> None:
    plan, under = planned(None, overlap=overlap)
    profile = under[0][1]
    everything = profile.parameter_bytes + profile.gradient_bytes + profile.optimizer_bytes
    assert 0 < plan.host_bytes < everything / 4
    smaller, choices = planned(everything // 3, overlap=overlap)
    assert {setting.page_locked for setting, _ in choices} == {True, False}
    assert any(setting.overlapped for setting, _ in choices) == overlap
    assert replace(smaller, frontier=()) == replace(plan, frontier=())


def test_a_plan_that_exceeds_it_is_timed_at_the_rate_of_ordinary_memory() -> None:
    pool = 2**25
    fast, _ = planned(None, overlap=False)
    slow, _ = planned(pool, overlap=False)
    assert slow.host_bytes > MASTERS_SHARE * pool
    assert slow.predicted_peak_bytes <= BUDGET
    assert slow.step_time.transfers > fast.step_time.transfers


def test_the_least_peak_does_not_depend_on_it() -> None:
    least = [planned(pool, overlap=False, budget=2**20)[0].predicted_peak_bytes for pool in (None, 2**25)]
    assert least[0] == least[1]


def test_steps_overlap_only_within_it() -> None:
    _, under = planned(2**25, overlap=True)
    assert all(setting.page_locked for setting, _ in under if setting.overlapped)
