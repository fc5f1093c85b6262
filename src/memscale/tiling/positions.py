"""A position-wise layer, run some positions at a time and recomputed tile by tile in backward.

Note [Tiles of positions]
~~~~~~~~~~~~~~~~~~~~~~~~~
Forward runs the layer on one tile after the other, without a graph, and keeps the layer's input alone. Backward
runs it again, tile by tile, each with a small graph that is used at once. So neither the wide tensors inside the
layer nor what would be saved of them exist for more than one tile at a time, in either direction.

*Exactness.* The tiles are recomputed in the order of forward from the random state of forward, so that dropout draws
the same masks; they are other masks than the whole layer would have drawn, of the same distribution.

*Inside a recomputed block.* The input goes through the surrounding saved-tensor hooks before the layer runs. If those
belong to a region (Note [Regions]) that has nothing else to fill, its recomputation stops there: the layer is computed
twice in all, once in forward and once for backward, as if its block were recomputed without tiles.

*Parameters* are those that the modules have in forward. Inside an offloaded block these are copies on the device;
backward uses the parameters behind them, which are copied to the device again, once for all tiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale._torch import backward_keeps_graph, graph_task_id, hooks_are_allowed, surrounding_hooks
from memscale._util.trees import Tree
from memscale.checkpointing.state import FREED, Conditions, Inputs, ModuleFlags, submodules
from memscale.tiling.tiles import first_order_only, sum_dtype, tiles_of, without_saved_tensor_hooks

__all__ = ["run_in_tiles"]

Layer = Callable[[torch.Tensor], torch.Tensor]


def run_in_tiles(function: Layer, x: torch.Tensor, rows: int, modules: Sequence[nn.Module]) -> torch.Tensor:
    """Return `function(x)`, computed some positions at a time.

    Args:
        function: A position-wise function. It is called with one sequence, of shape (1, positions, width).
        x: Its input, of shape (batch, positions, width).
        rows: Positions per tile.
        modules: The modules that it uses, with their submodules.

    Example:
        >>> layer = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> x = torch.ones(3, 5, 2, requires_grad=True)
        >>> y = run_in_tiles(layer, x, 4, [layer])
        >>> torch.allclose(y, layer(x))
        True
    """
    slots = _ParameterSlots(modules)
    tensors = slots.tensors()
    flat = x.reshape(1, -1, x.shape[-1])
    needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (x, *tensors))
    if not needs_gradient or not hooks_are_allowed():
        out = _run_tiles(function, flat, rows)
    else:
        call = _LayerCall(
            function,
            rows,
            slots,
            Inputs(Tree.of(((flat,), {})), surrounding_hooks()),
            Conditions(ModuleFlags(submodules(modules)), [x.device.type]),
            x.device,
            [each.dtype for each in tensors],
        )
        out = _TiledLayer.apply(call, flat, *tensors)  # type: ignore[no-untyped-call]
    return out.reshape(*x.shape[:-1], out.shape[-1])


class _ParameterSlots:
    """Where modules have their parameters; a shared parameter counts once."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        slots: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in submodules(modules):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    slots.setdefault(id(parameter), []).append((module, name))
        self._slots = list(slots.values())

    def tensors(self) -> list[torch.Tensor]:
        """Return what is there now: parameters, or their copies on the device."""
        return [module._parameters[name] for (module, name), *_ in self._slots]  # type: ignore[misc]

    @contextlib.contextmanager
    def holding(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Put other tensors there inside the block."""
        before = self.tensors()
        try:
            self._put(tensors)
            yield
        finally:
            self._put(before)

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        for slots, tensor in zip(self._slots, tensors, strict=True):
            for module, name in slots:
                module._parameters[name] = tensor  # type: ignore[assignment]


@dataclass
class _LayerCall:
    """One call of a layer in tiles, for as long as its graph lives; without inputs, once backward is through."""

    function: Layer
    rows: int
    slots: _ParameterSlots
    inputs: Inputs | None
    conditions: Conditions
    device: torch.device
    dtypes: list[torch.dtype]

    def release(self) -> None:
        """Free the input, which would live as long as the loss."""
        self.inputs = None


def _run_tiles(function: Layer, flat: torch.Tensor, rows: int) -> torch.Tensor:
    out: Any = None
    for tile in tiles_of(flat, 1, rows):
        part = function(flat[:, tile])
        if out is None:
            out = part.new_empty(1, flat.shape[1], part.shape[-1])
        out[:, tile] = part
    result: torch.Tensor = out
    return result


class _TiledLayer(torch.autograd.Function):
    """See Note [Tiles of positions]."""

    @staticmethod
    def forward(ctx: Any, call: _LayerCall, flat: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.memscale_release = call, call.release
        # Without history, or autocast would cache casts of them that have none.
        with call.slots.holding([each.detach() for each in tensors]):
            return _run_tiles(call.function, flat, call.rows)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _LayerCall = ctx.call
        inputs = call.inputs
        if inputs is None:
            raise RuntimeError(FREED)
        if not backward_keeps_graph():
            call.release()
        call.conditions.flags.check_parameters()
        ((flat,), _) = inputs.rebuild(graph_task_id())
        with call.conditions.replay():
            parameters = call.slots.tensors()
        leaves = [
            each.detach().to(call.device, dtype).requires_grad_(is_wanted)
            for each, dtype, is_wanted in zip(parameters, call.dtypes, ctx.needs_input_grad[2:], strict=True)
        ]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        sums: list[torch.Tensor | None] = [None] * len(trained)
        of_input = torch.empty_like(flat) if ctx.needs_input_grad[1] else None
        with call.conditions.replay(), without_saved_tensor_hooks(), call.slots.holding(leaves):
            for tile in tiles_of(flat, 1, call.rows):
                part = flat[:, tile].detach().requires_grad_(of_input is not None)
                out = call.function(part)
                wanted = trained if of_input is None else [*trained, part]
                found = torch.autograd.grad(out, wanted, gradient[:, tile], allow_unused=True)
                del out
                with torch.no_grad():
                    if of_input is not None:
                        of_input[:, tile] = 0 if found[-1] is None else found[-1]
                    sums = [_sum(*each) for each in zip(sums, found[: len(trained)], strict=True)]
        of_trained = iter(sums)
        of_parameters = [next(of_trained) if leaf.requires_grad else None for leaf in leaves]
        return (
            None,
            of_input,
            *(
                None if each is None else each.to(leaf.dtype)
                for each, leaf in zip(of_parameters, leaves, strict=True)
            ),
        )


def _sum(total: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    if part is None:
        return total
    return part.to(sum_dtype(part.dtype)) if total is None else total.add_(part)
