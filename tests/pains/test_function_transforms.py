"""`torch.func` over a wrapped model (per-sample gradients, ensembles, forward mode): the plain model's numbers.

Inside of a transform nothing is recomputed, offloaded activations are kept, and logits are whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

from memscale._torch import tree_leaves
from support.every_technique import PLANS, TILED, batch, build, off_by, on
from support.steps import counted_regions


def loss(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda weights, x: functional_call(model, weights, (x,)).pow(2).mean()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in model.named_parameters()}


def ensemble(model: nn.Module, x: Tensor) -> Any:
    """Two models at once, by vmap, and an ordinary backward pass through it."""
    stacked = {
        name: torch.stack([each, 2 * each]).requires_grad_() for name, each in weights_of(model).items()
    }
    vmap(lambda weights: loss(model)(weights, x))(stacked).sum().backward()
    return [each.grad for each in stacked.values()]


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda model, x: grad(loss(model))(weights_of(model), x),
    "per-sample gradients": lambda model, x: vmap(grad(loss(model)), (None, 0))(
        weights_of(model), x[:, None]
    ),
    "ensemble": ensemble,
    "jvp": lambda model, x: jvp(
        lambda weights: loss(model)(weights, x), (weights_of(model),), (weights_of(model),)
    ),
    "jacrev": lambda model, x: jacrev(lambda inputs: model(inputs).sum((1, 2)))(x),
    "vmap of the module": lambda model, x: vmap(model)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", [*PLANS, *TILED])
def test_transforms_give_the_plain_models_numbers(name: str, transform: str) -> None:
    x, run = batch(), TRANSFORMS[transform]
    plain = tree_leaves(run(build(), x))
    with on(build(), (PLANS | TILED)[name]) as executor, counted_regions() as regions:
        ours = tree_leaves(run(executor.model, x))
        assert regions == [0]
        executor.model(x).pow(2).mean().backward()
        assert (regions[0] > 0) == (
            "checkpointing" in {each for layer in executor.plan.layers for each in layer.techniques}
        )
    assert off_by(ours, plain) <= (1e-13 if name in TILED else 0)
