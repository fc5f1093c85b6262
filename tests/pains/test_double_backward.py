"""A gradient penalty under every technique: the right second derivatives, or an error that names the technique."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale import Config
from memscale.errors import RecomputeError
from support.every_technique import BF16, PLANS, TILED, batch, build, device_of, off_by, on
from support.steps import counted_regions
from support.wrapping import lossless


def penalty(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of the squared slope of the model's output: `output.sum()` has a constant gradient."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    return [x.grad, *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def penalty_by_backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    model(x).square().sum().backward(create_graph=True)
    gradients = [each.grad for each in model.parameters()]
    sum(each.square().sum() for each in gradients).backward()
    found = [each.grad.detach().clone() for each in model.parameters()]
    model.zero_grad()  # or the graph of gradients is in a cycle with them
    return found


@pytest.mark.matrix(5)
@pytest.mark.parametrize("device", ["cpu", "virtual GPU"])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_second_derivatives_are_right(name: str, device: str) -> None:
    with device_of(device) as where:
        model, x = build(where), batch(where)
        plain = [penalty(model, x), penalty_by_backward(model, x)]
        for asynchronous in (False, True):
            with on(build(where), PLANS[name], asynchronous=asynchronous) as executor:
                ours = [penalty(executor.model, x), penalty_by_backward(executor.model, x)]
            assert off_by(ours[0], plain[0]) <= (1e-14 if name.startswith(("host", "disk")) else 0)
            assert off_by(ours[1], plain[1]) <= (1e-14 if name.startswith(("host", "disk")) else 0)


@pytest.mark.parametrize("name", ["host", "host, recomputed"])
def test_an_offloaded_layer_that_is_called_twice_is_off_by_the_order_of_a_sum(name: str) -> None:
    """The four uses of a weight are added up by calls: the bound in Note [Master and working copy]."""

    def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
        loss = model[3](model[:3](model[:3](x))).square().mean()
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum(each.square().sum().to(loss.device) for each in first)
        (loss + penalty).backward()
        return [each.grad for each in model.parameters()]

    with device_of("virtual GPU") as where:
        x = batch(where, torch.float32)
        plain = gradients(build(where, torch.float32), x)
        with on(build(where, torch.float32), PLANS[name]) as executor:
            ours = gradients(executor.model, x)
    assert off_by(ours, plain) <= 4 * torch.finfo(torch.float32).eps


def cross_entropy(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that is computed in tiles, if the plan says so; the sum of all logits is not."""
    logits = model(x).flatten(0, 1)
    return nn.functional.cross_entropy(logits, torch.zeros(len(logits)).long())


@pytest.mark.parametrize("name", TILED)
def test_tiling_refuses(name: str) -> None:
    x = batch().requires_grad_()
    with on(build(), TILED[name]) as executor:
        loss = cross_entropy(executor.model, x) if name == "tiled loss" else executor.model(x).sum()
        with pytest.raises(RecomputeError, match="enable_tiling=False"):
            torch.autograd.grad(loss, x, create_graph=True)


def test_in_sixteen_bits_as_under_autocast() -> None:
    model, x = build(dtype=torch.float32), batch(dtype=torch.float32)

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return model(x).float()

    plain = nn.Module()
    plain.forward = cast  # type: ignore[method-assign]
    plain.inner = model
    expected = penalty(plain, x)
    with on(model, BF16), counted_regions() as regions:
        ours = penalty(model, x)
    assert regions == [3]
    assert off_by(ours, expected) == 0


def test_a_wrapped_model_trains_right_or_says_what_is_in_the_way() -> None:
    x = batch()
    plain = penalty(build(), x)
    model = memscale.wrap(build(), lossless("aggressive"), x)
    with counted_regions() as regions:
        assert off_by(penalty(model, x), plain) == 0
    assert regions[0] > 0
    memscale.detach(model)
    large = x.repeat(1, 64, 1)
    memscale.wrap(model, Config(mode="aggressive", use_mixed_precision=False, enable_logging=False), large)
    plan = model._memscale_executor.plan
    assert plan.loss is not None or any(layer.tiling for layer in plan.layers)
    large.requires_grad_()
    loss = cross_entropy(model, large)
    with pytest.raises(RecomputeError, match="enable_tiling=False"):
        torch.autograd.grad(loss, large, create_graph=True)
