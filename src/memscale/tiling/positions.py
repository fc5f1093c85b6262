"""A position-wise layer, called some positions at a time and recomputed tile by tile in backward.

Note [Tiles of positions]
~~~~~~~~~~~~~~~~~~~~~~~~~
Forward calls the layer for one tile after the other, without a graph, and keeps the layer's input alone. Backward
calls it again, tile by tile, each with a small graph that is used at once. So neither the wide tensors inside the
layer nor what would be saved of them exist for more than one tile at a time, in either direction.

*Exact.* The tiles are recomputed in the order of forward from the random state of forward, so that dropout draws the
same masks; they are other masks than the whole layer would have drawn, of the same distribution.

*Inside a recomputed block.* The input is handed to the hooks around before the layer runs. If those are of a region
(Note [Regions]) that has nothing else to fill, its recomputation stops there: the layer is computed twice in all,
once in forward and once for backward, as if its block were recomputed without tiles.

*Parameters* are those that the modules have in forward. Inside an offloaded block these are copies on the device, in
place of which the parameters behind them are held: they are fetched again in backward, once for all tiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memscale._torch import (
    backward_keeps_graph,
    graph_task_id,
    hooks_are_allowed,
    surrounding_hooks,
)
from memscale._util.trees import Tree
from memscale.checkpointing.chain import no_links
from memscale.checkpointing.conditions import Conditions, ModuleFlags, submodules
from memscale.checkpointing.inputs import Inputs
from memscale.tiling.first_order import first_order_only
from memscale.tiling.ranges import tiles_of

__all__ = ["run_in_tiles"]

Layer = Callable[[torch.Tensor], torch.Tensor]


def run_in_tiles(function: Layer, x: torch.Tensor, rows: int, modules: Sequence[nn.Module]) -> torch.Tensor:
    """`function(x)`, some positions at a time.

    Args:
        function: Gives for each position what it would give for that position alone. It is called with one
            sequence, of shape (1, positions, width).
        x: Its input, of shape (batch, positions, width).
        rows: How many positions make a tile.
        modules: The modules that it uses, whose submodules count as well.

    Example:
        >>> layer = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> x = torch.ones(3, 5, 2, requires_grad=True)
        >>> y = run_in_tiles(layer, x, 4, [layer])
        >>> torch.allclose(y, layer(x))
        True
    """
    slots = _Slots(modules)
    tensors = slots.tensors()
    flat = x.reshape(1, -1, x.shape[-1])
    needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (x, *tensors))
    if not needs_gradient or not hooks_are_allowed():
        out = _forward(function, flat, rows)
        return out.reshape(*x.shape[:-1], out.shape[-1])
    call = _Call(
        function,
        rows,
        slots,
        Inputs(Tree.of(((flat,), {})), no_links, surrounding_hooks()),
        Conditions(ModuleFlags(submodules(modules)), [x.device.type]),
        x.device,
        [each.dtype for each in tensors],
    )
    out = _Tiles.apply(call, flat, *tensors)  # type: ignore[no-untyped-call]
    result: torch.Tensor = out.reshape(*x.shape[:-1], out.shape[-1])
    return result


class _Slots:
    """The places in modules where parameters are, each parameter once."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._places: list[list[tuple[nn.Module, str]]] = []
        found: dict[int, int] = {}
        for module in submodules(modules):
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in found:
                    found[id(parameter)] = len(self._places)
                    self._places.append([])
                self._places[found[id(parameter)]].append((module, name))

    def tensors(self) -> list[torch.Tensor]:
        """What is there now: parameters, or working copies."""
        tensors: list[torch.Tensor] = []
        for (module, name), *_ in self._places:
            parameter = module._parameters[name]
            assert parameter is not None
            tensors.append(parameter)
        return tensors

    @contextlib.contextmanager
    def holding(self, tensors: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """Inside the block other tensors are there."""
        before = self.tensors()
        try:
            self._put(tensors)
            yield
        finally:
            self._put(before)

    def _put(self, tensors: Sequence[torch.Tensor | None]) -> None:
        for places, tensor in zip(self._places, tensors, strict=True):
            for module, name in places:
                module._parameters[name] = tensor  # type: ignore[assignment]


@dataclass(frozen=True)
class _Call:
    """One call of a layer in tiles, for as long as its graph lives."""

    function: Layer
    rows: int
    slots: _Slots
    inputs: Inputs
    conditions: Conditions
    device: torch.device
    dtypes: list[torch.dtype]


def _forward(function: Layer, flat: torch.Tensor, rows: int) -> torch.Tensor:
    out: torch.Tensor | None = None
    for tile in tiles_of(flat, 1, rows):
        part = function(flat[:, tile])
        if out is None:
            out = part.new_empty(1, flat.shape[1], part.shape[-1])
        out[:, tile] = part
    assert out is not None
    return out


class _Tiles(torch.autograd.Function):
    """See Note [Tiles of positions]."""

    @staticmethod
    def forward(ctx: Any, call: _Call, flat: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.call = call
        # Without history, or autocast would keep casts of them that have none.
        with call.slots.holding([each.detach() for each in tensors]):
            return _forward(call.function, flat, call.rows)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call | None = ctx.call
        if call is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: the input of a tiled layer has been freed. "
                "Specify retain_graph=True if you need to backward through the graph a second time."
            )
        if not backward_keeps_graph():
            ctx.call = None  # or the input would live as long as the loss
        call.conditions.check_parameters()
        ((flat,), _) = call.inputs.rebuild(graph_task_id())
        wanted = ctx.needs_input_grad[2:]
        with call.conditions.replay():
            parameters = call.slots.tensors()
        leaves = [
            each.detach().to(call.device, dtype).requires_grad_(is_wanted)
            for each, dtype, is_wanted in zip(parameters, call.dtypes, wanted, strict=True)
        ]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        sums: list[torch.Tensor | None] = [None] * len(trained)
        of_input = torch.empty_like(flat) if ctx.needs_input_grad[1] else None
        with call.conditions.replay(), saved_tensors_hooks(_as_it_is, _as_it_is), call.slots.holding(leaves):
            for tile in tiles_of(flat, 1, call.rows):
                part = flat[:, tile].detach().requires_grad_(of_input is not None)
                out = call.function(part)
                inputs = [*trained] if of_input is None else [*trained, part]
                found = torch.autograd.grad(out, inputs, gradient[:, tile], allow_unused=True)
                del out
                with torch.no_grad():
                    if of_input is not None:
                        of_input[:, tile] = 0 if found[-1] is None else found[-1]
                    for index, each in enumerate(found[: len(trained)]):
                        sums[index] = _sum(sums[index], each)
        remaining = iter(sums)
        return (
            None,
            of_input,
            *(_in_type(next(remaining), leaf) if leaf.requires_grad else None for leaf in leaves),
        )


def _sum(total: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    """A sum over tiles, in float32 at least: the whole layer adds up all positions in one matrix product."""
    if part is None:
        return total
    if total is None:
        return part.to(torch.promote_types(part.dtype, torch.float32))
    return total.add_(part)


def _in_type(total: torch.Tensor | None, of: torch.Tensor) -> torch.Tensor | None:
    return None if total is None else total.to(of.dtype)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
