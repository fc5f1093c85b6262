"""Loops that call a part of the wrapped model and never the model itself: the part is planned for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale.executor import executor_of
from support.steps import counted_regions
from support.wrapping import Stack, lossless

CONFIG = lossless("aggressive", force_optimize=True)
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


class Shell(nn.Module):
    """Two networks and a head; it has no forward of its own that training calls."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = Stack(layers=4), Stack(layers=2)
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.large(x))


def train(
    model: nn.Module,
    call: Callable[[Any, torch.Tensor], torch.Tensor],
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    optimizer = kind(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = call(model, X).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "one part": lambda model, x: model.large(x),
    "two parts": lambda model, x: model.inner(model.large(x)) + model.small(x),
    "a part twice": lambda model, x: model.large(x) + model.large(2 * x),
}


def built() -> Shell:
    torch.manual_seed(0)
    return Shell()


@pytest.mark.parametrize("call", CALLS)
def test_the_part_that_is_called_gets_the_plan(call: str) -> None:
    expected = train(built(), CALLS[call])
    model = built()
    before = [dict(vars(module)) for module in model.modules()]
    memscale.wrap(model, CONFIG)
    with counted_regions() as regions:
        assert all(map(torch.equal, train(model, CALLS[call]), expected))
    assert regions[0] > 0
    executor = executor_of(model)
    assert executor is executor_of(model.large)
    assert executor.model is model.large
    assert "[16, 8]" in executor.plan.batch
    assert any("checkpointing" in layer.techniques for layer in executor.plan.layers)
    memscale.detach(model)
    for old, module in zip(before, model.modules(), strict=True):
        assert old.keys() == vars(module).keys()
    assert executor_of(model) is executor_of(model.large) is None


def test_a_model_that_is_called_keeps_its_plan_whatever_else_is_called() -> None:
    def call(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.large(x) + model(x)

    expected = train(built(), call)
    model = memscale.wrap(built(), CONFIG)
    assert all(map(torch.equal, train(model, call), expected))
    assert executor_of(model).model is model
    assert "[16, 8]" in executor_of(model).plan.batch


def test_the_log_names_the_part_and_those_without_a_plan(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memscale"):
        model = memscale.wrap(built(), CONFIG.replace(enable_logging=True))
        train(model, CALLS["two parts"])
    assert any("Training calls 'large' and not the Shell itself" in text for text in caplog.messages)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("small" in text and "no plan" in text for text in warnings)
    memscale.wrap(model.small, CONFIG)  # as it says
    caplog.clear()
    memscale.detach(model)
    (text,) = caplog.messages
    assert "memscale.detach(model.get_submodule('small'))" in text
    memscale.detach(model.get_submodule("small"))
    assert not [name for name, module in model.named_modules() if executor_of(module) is not None]


class Encoder(nn.Module):
    """Has its layers in a list, and is trained by a method other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Stack(layers=4).layers

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    forward = encode


@pytest.mark.parametrize(
    ("call", "logs", "warnings"),
    [
        (Encoder.encode, True, 1),
        (Encoder.encode, False, 0),
        (lambda model, x: model.forward(x), True, 1),
        (lambda model, x: model(x), True, 0),
        (lambda model, x: model.layers[0](x), True, 1),
    ],
    ids=["a method", "a method, silent", "forward", "the model", "a layer"],
)
def test_a_model_whose_calls_are_not_seen_is_warned_of_once(
    call: Any, logs: bool, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = memscale.wrap(Encoder(), CONFIG.replace(enable_logging=logs))
    with caplog.at_level(logging.WARNING, "memscale"):
        train(model, call)
        train(model, call)
    said = [
        text
        for text in caplog.messages
        if "3 optimizer steps were made without a call of the Encoder" in text
    ]
    assert len(said) == warnings


def test_steps_behind_the_version_counter_are_seen() -> None:
    """As those of bitsandbytes."""
    bnb = pytest.importorskip("bitsandbytes")
    expected = train(built(), CALLS["one part"], bnb.optim.Lion8bit)
    model = memscale.wrap(built(), CONFIG)
    assert all(map(torch.equal, train(model, CALLS["one part"], bnb.optim.Lion8bit), expected))
    assert executor_of(model).model is model.large
