"""``torch.compile`` over a wrapped model: the compiler must not look into what MemScale does before a step."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import memscale
from memscale import Config


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4)))


def gradients(model: nn.Module, call: object) -> list[torch.Tensor]:
    for size in (2, 5):  # the second is larger than what was planned for
        model.zero_grad()
        call(torch.ones(size, 32)).pow(2).sum().backward()  # type: ignore[operator]
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_wrapped_model_can_be_compiled(on_meta: bool) -> None:
    expected = build()
    with torch.device("meta") if on_meta else contextlib.nullcontext():
        model = build()
    torch.manual_seed(0)
    memscale.wrap(model, Config(enable_logging=False, force_optimize=True), torch.ones(2, 32))
    compiled = torch.compile(model, backend="eager")
    for one, other in zip(gradients(model, compiled), gradients(expected, expected), strict=True):
        assert torch.equal(one, other)
    memscale.detach(model)


def test_a_layer_can_be_compiled_before_it_has_values() -> None:
    expected = build()
    with torch.device("meta"):
        model = build()
    torch.manual_seed(0)
    memscale.wrap(model, Config(enable_logging=False), torch.ones(2, 32))
    first = torch.compile(model[0], backend="eager")
    assert torch.equal(first(torch.ones(2, 32)), expected[0](torch.ones(2, 32)))
    memscale.detach(model)
