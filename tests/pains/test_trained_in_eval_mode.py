"""A model that is trained in `eval()` mode (batch norm frozen, dropout off) saves what its plan says.

The techniques used to wait for `train()`, so that the plan claimed savings and none happened.
"""

from __future__ import annotations

import copy

import pytest
import torch

import memscale
from support.families import FAMILIES
from support.regions import LiveBytes
from support.steps import AGGRESSIVE, assert_same_step, counted_regions, plan_of, step
from support.wrapping import Stack, lossless


@pytest.mark.parametrize("name", ["gpt2", "tied", "frozen_embeddings"])
@pytest.mark.parametrize("when", ["before wrap", "after wrap"])
def test_a_step_in_eval_mode_is_recomputed(name: str, when: str) -> None:
    if name == "gpt2":
        pytest.importorskip("transformers")
    family = FAMILIES[name]
    plain, ours = family.build().eval(), family.build()
    if when == "before wrap":
        ours.eval()
    memscale.wrap(ours, AGGRESSIVE, family.batch())
    ours.eval()
    assert_same_step(step(family, ours), step(family, plain))


def test_a_cache_that_keeps_a_step_in_eval_mode_from_being_recomputed_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the loss outside, a call in eval() mode may be the first of a loop that generates."""
    pytest.importorskip("transformers")
    family = FAMILIES["gpt2"]
    batch = {name: value for name, value in family.batch().items() if name != "labels"}
    model = family.build().eval()
    memscale.wrap(model, AGGRESSIVE.replace(enable_logging=True), batch)

    def cache_lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "cache" in record.getMessage()]

    with torch.no_grad():
        model(**batch)
    model(**batch, use_cache=False).logits.sum().backward()
    assert not cache_lines()
    for _ in range(2):
        model(**batch).logits.sum().backward()
    assert len(cache_lines()) == 1
    assert "use_cache=False" in cache_lines()[0]
    memscale.detach(model)


def test_plans_follow_the_batch_in_eval_mode() -> None:
    model = memscale.wrap(Stack().eval(), AGGRESSIVE, torch.ones(2, 8))
    before = plan_of(model).batch
    model(torch.ones(64, 8)).sum().backward()
    assert plan_of(model).batch != before
    memscale.detach(model)


def test_with_gradients_off_nothing_is_kept_in_either_mode() -> None:
    model = memscale.wrap(Stack(), lossless("aggressive"), torch.ones(64, 8))
    plain = copy.deepcopy(model)
    memscale.detach(plain)
    x = torch.randn(64, 8)
    for mode in (True, False):
        plain.train(mode), model.train(mode)
        for off in (torch.no_grad, torch.inference_mode):
            torch.manual_seed(3)
            with off():
                expected = plain(x)
            torch.manual_seed(3)
            with counted_regions() as regions, LiveBytes() as live, off():
                ours = model(x)
                assert torch.equal(ours, expected)
                del ours, expected
                held = live.now
            assert regions[0] == 0
            assert held == 0
