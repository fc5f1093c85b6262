"""Transfers that wait take less memory than prefetched ones: under a limit, the faster plan of the two is taken."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from memscale import Config
from memscale.hardware import virtual_hardware
from memscale.planner.decide import WORTH_WAITING, decide
from memscale.planner.make_plan import profile_settings
from memscale.planner.predict import rehearsal
from memscale.profiler import Sample

HARDWARE = virtual_hardware("RTX 3090")
TOKENS = torch.zeros(4, 128, dtype=torch.long)
CONFIG = Config(enable_logging=False, memory_budget=2**20)


@pytest.mark.parametrize(("times", "prefetches"), [(1.2, False), (1.7, False), (2.0, True)])
def test_the_faster_way_that_fits_a_budget_is_taken(times: float, prefetches: bool) -> None:
    """At 1.2 times the least peak there is no room to prefetch; at 1.7 times there is, but it does not pay."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=768, n_head=8, vocab_size=1024)).train()
    with rehearsal(model):
        sample = Sample((), {"input_ids": TOKENS, "labels": TOKENS})
        known = profile_settings(model, sample, CONFIG, HARDWARE)
    least = decide(known.profile, HARDWARE, CONFIG, under=known.under).predicted_peak_bytes
    budget = CONFIG.replace(memory_budget=int(times * least))
    ours, prefetching, waiting = (
        decide(known.profile, HARDWARE, config, under=known.under)
        for config in (budget, budget.replace(async_offload=True), budget.replace(async_offload=False))
    )
    assert ours.async_offload == prefetches
    assert ours.predicted_peak_bytes <= int(times * least)
    assert (prefetching.predicted_peak_bytes <= int(times * least)) == (times > 1.2)
    fitting = [waiting, prefetching] if times > 1.2 else [waiting]
    assert ours.predicted_time_ratio <= min(each.predicted_time_ratio for each in fitting) / WORTH_WAITING
