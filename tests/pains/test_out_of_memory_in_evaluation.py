"""Evaluation holds nothing that only training needs, and offloaded layers run in it.

Reported as transformers#12878.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale
from memscale.testing import ExecutingDevice, executing
from support.families import FAMILIES, Family
from support.regions import LiveBytes
from support.steps import (
    AGGRESSIVE,
    assert_has_techniques,
    assert_same_step,
    counted_regions,
    step,
    wrapped,
)

NAMES = ["gpt2", "t5", "mixtral", "resnet", "transformer_encoder", "lstm", "cnn", "tied", "kwargs_only"]


def family_of(name: str) -> Family:
    if FAMILIES[name].transformers:
        pytest.importorskip("transformers")
    return FAMILIES[name]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_without_gradients_saves_nothing(name: str) -> None:
    family = family_of(name)
    model, plain = wrapped(family), family.build()
    assert step(family, model).regions > 0, "in training they are in use"
    for training in (False, True):
        for grad_off in (torch.no_grad, torch.inference_mode):
            plain.load_state_dict(model.state_dict())  # batch-norm statistics move
            model.train(training)
            plain.train(training)
            with counted_regions() as regions, grad_off(), LiveBytes() as live:
                torch.manual_seed(1)
                loss = family.loss(model, family.batch())
                saved = live.now - loss.untyped_storage().nbytes()
            with grad_off():
                torch.manual_seed(1)
                expected = family.loss(plain, family.batch())
            if (
                name == "transformer_encoder"
            ):  # hooks keep torch from a kernel that it has for evaluation alone
                torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
            else:
                assert torch.equal(loss, expected)
            assert saved == 0
            assert regions == [0]


@pytest.mark.parametrize("name", ["gpt2", "resnet", "tied"])
def test_evaluation_with_gradients_on_holds_less_than_the_plain_model(name: str) -> None:
    family = family_of(name)
    model = wrapped(family)
    assert step(family, model).regions > 0
    plain = family.build()
    plain.load_state_dict(model.state_dict())
    assert_same_step(step(family, model.eval()), step(family, plain.eval()))


def evaluated(family: Family, model: nn.Module, gpu: ExecutingDevice) -> tuple[float, int]:
    """Loss and peak of an evaluation after a training step, which leaves nothing on the device."""
    batch = family.batch(gpu.device)
    family.loss(model, batch).backward()
    model.zero_grad()
    model.eval()
    before = gpu.tracker.live_bytes(gpu.device)
    gpu.tracker.reset_peak()
    with torch.no_grad():
        loss = float(family.loss(model, batch))
    assert gpu.tracker.live_bytes(gpu.device) == before
    return loss, gpu.peak_bytes


@pytest.mark.parametrize("name", ["gpt2", "tied"])
def test_on_a_device_evaluation_needs_less_than_the_plain_model_and_leaves_nothing(name: str) -> None:
    family = family_of(name)
    with executing() as gpu:
        expected, plain_peak = evaluated(family, family.build().to(gpu.device), gpu)
    with executing() as gpu:
        model = memscale.wrap(family.build().to(gpu.device), AGGRESSIVE, family.batch(gpu.device))
        assert_has_techniques(model, "offloading")
        loss, peak = evaluated(family, model, gpu)
    assert loss == expected
    assert peak < plain_peak
