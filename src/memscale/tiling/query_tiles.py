"""A function that gives a row for each query, called some queries at a time and again, tile by tile, in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memscale.checkpointing.conditions import Conditions, ModuleFlags
from memscale.tiling.first_order import first_order_only
from memscale.tiling.ranges import tiles_of

__all__ = ["run_in_query_tiles"]

Attention = Callable[..., Tensor]


def run_in_query_tiles(
    function: Attention, query: Tensor, key: Tensor, value: Tensor, operands: Sequence[Tensor], rows: int
) -> Tensor:
    """`function(query, key, value, *operands)`, some queries at a time.

    Args:
        function: Gives a row for each query, whatever the other queries are.
        query: Queries, in the last dimension but one.
        key: Keys; all of them are used for each query, and so are the values.
        value: Values.
        operands: Tensors that broadcast to queries × keys; those that differ by query are cut like the queries.
        rows: How many queries make a tile.

    Example:
        >>> q, k, v = torch.ones(7, 2, requires_grad=True), torch.ones(2, 5), torch.ones(5, 3)
        >>> run_in_query_tiles(lambda q, k, v: q @ k @ v, q, k, v, [], rows=4).shape
        torch.Size([7, 3])
    """
    tensors = [query, key, value, *operands]
    queries = query.shape[-2]
    is_cut = [True, False, False, *(each.dim() > 1 and each.shape[-2] == queries for each in operands)]
    conditions = Conditions(ModuleFlags(()), [query.device.type])
    out: Tensor = _QueryTiles.apply(_Call(function, rows, is_cut, conditions), *tensors)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class _Call:
    function: Attention
    rows: int
    is_cut: list[bool]
    conditions: Conditions

    def inputs(self, tensors: Sequence[Tensor], tile: slice) -> list[Tensor]:
        return [
            each[..., tile, :] if is_cut else each for each, is_cut in zip(tensors, self.is_cut, strict=True)
        ]


class _QueryTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*tensors)
        out: Any = None
        for tile in tiles_of(tensors[0], -2, call.rows):
            part = call.function(*call.inputs(tensors, tile))
            if out is None:
                out = part.new_empty(*part.shape[:-2], tensors[0].shape[-2], part.shape[-1])
            out[..., tile, :] = part
        result: Tensor = out
        return result

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        wanted = ctx.needs_input_grad[1:]
        tensors = [
            each.detach().requires_grad_(is_wanted and not is_cut)
            for each, is_wanted, is_cut in zip(ctx.saved_tensors, wanted, call.is_cut, strict=True)
        ]
        sums = [
            _Sum(each, is_cut) if is_wanted else None
            for each, is_wanted, is_cut in zip(tensors, wanted, call.is_cut, strict=True)
        ]
        with call.conditions.replay(), saved_tensors_hooks(_as_it_is, _as_it_is):
            for tile in tiles_of(tensors[0], -2, call.rows):
                inputs = [
                    each.detach().requires_grad_() if is_wanted and is_cut else each
                    for each, is_wanted, is_cut in zip(
                        call.inputs(tensors, tile), wanted, call.is_cut, strict=True
                    )
                ]
                out = call.function(*inputs)
                found = torch.autograd.grad(
                    out,
                    [each for each in inputs if each.requires_grad],
                    gradient[..., tile, :],
                    allow_unused=True,
                )
                del out, inputs
                with torch.no_grad():
                    for total, part in zip((each for each in sums if each is not None), found, strict=True):
                        total.add(tile, part)
        return None, *(None if total is None else total.finish() for total in sums)


class _Sum:
    """The gradient of one input: put together from tiles if it is cut like the queries, else added up."""

    def __init__(self, of: Tensor, is_cut: bool) -> None:
        self._is_cut = is_cut
        self._dtype = of.dtype
        wide = of.dtype if is_cut else torch.promote_types(of.dtype, torch.float32)
        self._total = torch.zeros(of.shape, dtype=wide, device=of.device)

    def add(self, tile: slice, part: Tensor | None) -> None:
        if part is None:
            return
        if self._is_cut:
            self._total[..., tile, :] = part
        else:
            self._total += part

    def finish(self) -> Tensor:
        return self._total.to(self._dtype)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
