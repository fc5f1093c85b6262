"""What every computation in tiles needs: where the tiles are, and how their small graphs are kept apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from memscale._torch import FakeTensor
from memscale.errors import RecomputeError

__all__ = ["first_order_only", "sum_dtype", "tiles_of", "without_saved_tensor_hooks"]

ResultT = TypeVar("ResultT")


def tiles_of(tensor: torch.Tensor, dim: int, rows: int) -> Iterator[slice]:
    """Yield the tiles of a tensor along one dimension: `rows` each, the last one the remainder.

    Of a fake tensor, yield only the first two and the last: there is nothing to compute, and to a simulation of
    memory the others are like the second, which finds what the first has left.

    Example:
        >>> [(tile.start, tile.stop) for tile in tiles_of(torch.ones(7), 0, 3)]
        [(0, 3), (3, 6), (6, 7)]
    """
    size = tensor.shape[dim]
    starts = range(0, size, rows)
    chosen = [*starts[:2], starts[-1]] if isinstance(tensor, FakeTensor) and len(starts) > 3 else starts
    for start in chosen:
        yield slice(start, min(start + rows, size))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type to add tiles up in: float32 at least, as one matrix product over all rows does."""
    return torch.promote_types(dtype, torch.float32)


def without_saved_tensor_hooks() -> saved_tensors_hooks:
    """Return a block in which saved tensors stay as they are: its graph is used at once, or holds nothing new."""
    return saved_tensors_hooks(_identity, _identity)


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def first_order_only(backward: Callable[..., ResultT]) -> Callable[..., ResultT | tuple[None, ...]]:
    """Decorate a `Function.backward` to refuse a pass whose result is to be differentiated again.

    Torch's `once_differentiable` refuses only if the incoming gradient has a history. That of `output.sum()` has
    none, and the second derivatives of a gradient penalty would be silently missing.

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
