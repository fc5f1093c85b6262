"""Checkpointing that a Hugging Face model has of its own: a plan replaces it, and it is back after detach."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memscale
from memscale import Config
from support.families import FAMILIES
from support.steps import AGGRESSIVE, Step, assert_has_techniques, assert_same_step, plan_of, step
from support.wrapping import Layer, lossless

pytest.importorskip("transformers")

KEPT = lossless("aggressive", enable_offloading=False)


def with_own(name: str, **options: Any) -> nn.Module:
    model = FAMILIES[name].build()
    model.gradient_checkpointing_enable(**options)
    return model


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    return [dict(vars(module)) for module in model.modules()]


def same_numbers(ours: Step, expected: Step) -> bool:
    gradients = ours.gradients.keys() == expected.gradients.keys() and all(
        torch.equal(gradient, expected.gradients[name]) for name, gradient in ours.gradients.items()
    )
    return torch.equal(ours.loss, expected.loss) and gradients


# Reentrant checkpoints add up gradients of T5's tied weights in another order.
@pytest.mark.parametrize(
    ("name", "reentrant"), [("gpt2", False), ("gpt2", True), ("llama", False), ("llama", True), ("t5", False)]
)
def test_it_is_replaced_while_the_model_is_wrapped(name: str, reentrant: bool) -> None:
    family = FAMILIES[name]
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    expected = step(family, with_own(name, **kwargs))
    model = with_own(name, **kwargs)
    before = attributes(model)
    memscale.wrap(model, AGGRESSIVE, family.batch())
    assert_has_techniques(model, "checkpointing")
    assert not model.is_gradient_checkpointing
    taken = step(family, model)
    assert same_numbers(taken, expected)
    assert_same_step(taken, step(family, family.build()))
    model.zero_grad()
    memscale.detach(model)
    after = attributes(model)
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert all(old[key] is new[key] for key in old)
    assert same_numbers(step(family, model), expected)


def test_switched_on_after_wrap_it_is_replaced_at_the_next_batch() -> None:
    family = FAMILIES["llama"]
    model = memscale.wrap(FAMILIES["llama"].build(), KEPT, family.batch())
    expected = step(family, model)
    model.gradient_checkpointing_enable()
    again = step(family, model)
    assert same_numbers(again, expected)
    assert again.regions == expected.regions > 0
    assert not model.is_gradient_checkpointing
    memscale.detach(model)
    assert model.is_gradient_checkpointing


def test_switched_off_while_wrapped_it_stays_off() -> None:
    family, model = FAMILIES["llama"], with_own("llama")
    memscale.wrap(model, KEPT, family.batch())
    model.gradient_checkpointing_disable()
    memscale.detach(model)
    assert not model.is_gradient_checkpointing


def test_a_plan_that_does_nothing_leaves_it(caplog: pytest.LogCaptureFixture) -> None:
    family, model = FAMILIES["llama"], with_own("llama")
    config = Config(
        memory_budget="8GB", enable_offloading=False, use_mixed_precision=False, use_8bit_optimizer=False
    )
    with caplog.at_level(logging.WARNING, "memscale"):
        memscale.wrap(model, config, family.batch())
    assert plan_of(model).does_nothing
    assert any("the budget has room" in layer.reason for layer in plan_of(model).layers)
    assert model.is_gradient_checkpointing
    assert not caplog.messages  # it is what was asked for


def test_a_plan_that_recomputes_nothing_leaves_it() -> None:
    """It was switched off for any plan that does something, and more was held than before `wrap`."""
    family, model = FAMILIES["llama"], with_own("llama")
    expected = step(family, model)
    model.zero_grad()
    memscale.wrap(model, AGGRESSIVE, family.batch())
    layers = (replace(each, techniques=("offloading",), checkpointing=None) for each in plan_of(model).layers)
    model._memscale_executor.replan(replace(plan_of(model), layers=tuple(layers)))
    assert model.is_gradient_checkpointing
    assert same_numbers(step(family, model), expected)


def test_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    family, model = FAMILIES["llama"], with_own("llama")
    with caplog.at_level(logging.INFO, "memscale"):
        memscale.wrap(model, KEPT.replace(enable_logging=True), family.batch())
        step(family, model)
    assert sum("own gradient checkpointing" in text for text in caplog.messages) == 1


def test_a_copy_has_its_own_replaced_too() -> None:
    family, model = FAMILIES["llama"], with_own("llama")
    memscale.wrap(model, KEPT, family.batch())
    twin = copy.deepcopy(model)
    assert same_numbers(step(family, twin), step(family, model))
    assert not twin.is_gradient_checkpointing
    memscale.detach(twin)
    assert twin.is_gradient_checkpointing
    assert not model.is_gradient_checkpointing


def test_a_model_that_calls_checkpoint_by_hand_is_left_alone() -> None:
    """There is no switch to turn: its layers are recomputed once, by itself."""

    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gradient_checkpointing = True
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = ByHand()
    memscale.wrap(model, KEPT, torch.ones(4, 8))
    assert {plan_of(model).layer(f"layers.{index}").rule for index in range(3)} == {"already-checkpointed"}
    assert model.gradient_checkpointing is True
