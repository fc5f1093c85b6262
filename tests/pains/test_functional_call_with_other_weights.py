"""A model called with other weights than its own (MAML, hypernetworks) gets the gradients of those weights.

A recomputation runs after `torch.func.functional_call` has put the module's own parameters back.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import memscale
from support.every_technique import BF16, PLANS, TILED, batch, build, device_of, off_by, on
from support.steps import counted_regions
from support.wrapping import lossless


def with_other_leaves(
    model: nn.Module, x: Tensor, context: AbstractContextManager[Any] | None = None
) -> list[Tensor]:
    weights = {name: (each.detach() * 2 + 0.1).requires_grad_() for name, each in model.named_parameters()}
    model.zero_grad()
    with context or nullcontext():
        output = functional_call(model, weights, (x,))
    output.to(x.dtype).pow(2).mean().backward()
    assert all(each.grad is None for each in model.parameters())
    return [each.grad for each in weights.values()]


def with_computed_weights(model: nn.Module, x: Tensor, *, second_order: bool = False) -> list[Tensor]:
    """Two inner steps of MAML, and the gradient of the loss after them."""
    model.zero_grad()
    weights = dict(model.named_parameters())
    for _ in range(2):
        loss = functional_call(model, weights, (x,)).pow(2).mean()
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=second_order)
        weights = {
            name: each - 0.5 * slope for (name, each), slope in zip(weights.items(), gradients, strict=True)
        }
    functional_call(model, weights, (x * 2,)).pow(2).mean().backward()
    return [each.grad.clone() for each in model.parameters()]


@pytest.mark.matrix(5)
@pytest.mark.parametrize("device", ["cpu", "virtual GPU"])
@pytest.mark.parametrize("name", [*PLANS, *TILED])
def test_gradients_are_those_of_the_weights_of_the_call(name: str, device: str) -> None:
    plan, tolerance = (PLANS | TILED)[name], 1e-14 if name in TILED else 0
    with device_of(device) as where:
        model, x = build(where), batch(where)
        plain = [with_other_leaves(model, x), with_computed_weights(model, x)]
        for asynchronous in (False, True):
            with on(build(where), plan, asynchronous=asynchronous) as executor:
                ours = [with_other_leaves(executor.model, x), with_computed_weights(executor.model, x)]
        assert max(map(off_by, ours, plain)) <= tolerance


@pytest.mark.matrix(5)
@pytest.mark.parametrize("device", ["cpu", "virtual GPU"])
@pytest.mark.parametrize("name", PLANS)
def test_second_order_gradients_too(name: str, device: str) -> None:
    """Of parameters that are offloaded, gradients of several calls are added up in another order."""
    with device_of(device) as where:
        model, x = build(where), batch(where)
        plain = with_computed_weights(model, x, second_order=True)
        with on(build(where), PLANS[name]) as executor:
            ours = with_computed_weights(executor.model, x, second_order=True)
        assert off_by(ours, plain) <= (1e-14 if name.startswith(("host", "disk")) else 0)


def test_in_sixteen_bits_as_under_autocast() -> None:
    model, x = build(dtype=torch.float32), batch(dtype=torch.float32)
    plain = with_other_leaves(model, x, torch.autocast("cpu", torch.bfloat16, cache_enabled=False))
    with on(model, BF16), counted_regions() as regions:
        ours = with_other_leaves(model, x)
    assert regions == [3]
    assert off_by(ours, plain) == 0


def test_a_wrapped_model() -> None:
    x = batch()
    plain = with_computed_weights(build(), x)
    model = memscale.wrap(build(), lossless("aggressive"), x)
    with counted_regions() as regions:
        ours = with_computed_weights(model, x)
    assert regions[0] > 0
    assert off_by(ours, plain) == 0
    assert all(isinstance(each, nn.Parameter) for each in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "virtual GPU"])
def test_no_plan_is_made_while_the_weights_are_others(device: str) -> None:
    """The first batch comes with other weights: the plan is made from the first one that comes with the model's own."""
    with device_of(device) as where:
        x = batch(where)
        plain = with_other_leaves(build(where), x)
        model = memscale.wrap(build(where), lossless("aggressive", use_static_profiling=False))
        plan = model._memscale_executor.plan
        assert off_by(with_other_leaves(model, x), plain) == 0
        assert model._memscale_executor.plan is plan
        model(x).sum().backward()
        assert model._memscale_executor.plan is not plan
