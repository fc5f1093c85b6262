"""A model that is wrapped in `eval()`, and trained so, gets what its plan claims."""

from __future__ import annotations

import torch
from torch import nn

import memscale
from recompute.harness import LiveBytes
from wrapping import Layer, lossless

CONFIG = lossless("aggressive", enable_offloading=False)
X = torch.ones(8, 64, 32)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*[Layer(32) for _ in range(6)]), nn.Linear(32, 4)).eval()


def test_forward_leaves_what_the_plan_says() -> None:
    model, plain = memscale.wrap(build(), CONFIG, X), build()
    plan = model._memscale_executor.plan
    with LiveBytes() as live:
        out = model(X)
        saved = live.now
    assert plan.predicted_saved_bytes < plan.baseline_saved_bytes
    assert saved == plan.predicted_saved_bytes
    out.sum().backward()
    plain(X).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_evaluation_of_a_model_that_was_wrapped_in_training_is_left_alone() -> None:
    model, plain = memscale.wrap(build().train(), CONFIG, X).eval(), build()
    saved = []
    for each in (model, plain):
        with LiveBytes() as live:
            out = each(X)
            saved.append(live.now)
        del out
    assert saved[0] == saved[1]
