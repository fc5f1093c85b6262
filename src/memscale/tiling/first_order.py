"""Backward passes that cannot be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from memscale.errors import RecomputeError

__all__ = ["first_order_only"]

ResultT = TypeVar("ResultT")


def first_order_only(backward: Callable[..., ResultT]) -> Callable[..., ResultT | tuple[None, ...]]:
    """Refuse a backward pass whose graph is to be differentiated again.

    Torch's `once_differentiable` refuses only if the incoming gradient has a history. That of `output.sum()` has
    none, and the result would be taken for a constant: the second derivatives of a gradient penalty would be
    silently missing.

    An undefined gradient, of an output that the loss does not use, stays undefined: the forward of the function must
    call `ctx.set_materialize_grads(False)`.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> ResultT | tuple[None, ...]:
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            raise RecomputeError(
                "A backward pass with create_graph=True came to a tiled layer or loss, which computes its gradients "
                "tile by tile and cannot be differentiated twice. Switch tiling off for this model: "
                "memscale.Config(enable_tiling=False)."
            )
        return backward(ctx, *gradients)

    return checked
