"""A call of a model in training, as it can be made again; and the boundary between its graph and the loop's.

Note [The boundary]
~~~~~~~~~~~~~~~~~~~
Each tensor that a model returns goes to the loop through a node of autograd, which changes nothing. When backward
comes to that node, it has the gradient of the output, complete, and from outside only: a model may return its loss
beside the logits that the loss was made from, and the gradient that goes from one to the other inside must not be
taken for one that came from the loop. With these gradients, the model's forward can be run again and its backward
too, without the loop.

There is a node for each output, because a node leads backward to all of its inputs: what is behind an output that the
loss does not use would run without a gradient, and raise if it can't be differentiated, or take zeros for one if it is
a user's `torch.autograd.Function`.

The nodes come before all others that are ready (by their sequence numbers), so that of two outputs, or of two calls of
one model, both have their gradients before backward goes on inside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memscale._torch import disabled_torch_function, graph_task_id
from memscale._util.trees import Tree
from memscale.checkpointing.buffers import Buffers
from memscale.checkpointing.conditions import Conditions, ModuleFlags, submodules
from memscale.profiler.sample import Sample

__all__ = ["Call", "call_of"]

_FIRST = 2**62  # of sequence numbers: autograd takes the highest first


class Call:
    """One call of a model, and what it found.

    Args:
        model: the model.
        args: what it is called with.
        kwargs: the same, by name.
        device: where the model computes, if its parameters are elsewhere.

    Attributes:
        gradients: of its outputs, by their numbers, as far as backward has brought them.
        awaits_backward: whether a graph of it is there that backward has not been through.
        on_backward: called when backward comes to it, with the graph task id.
    """

    def __init__(
        self, model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device | None
    ) -> None:
        inside = submodules([model])
        self.sample = Sample(tuple(args), dict(kwargs))
        self.gradients: dict[int, torch.Tensor | None] = {}
        self.awaits_backward = False
        self.on_backward: Callable[[int], None] | None = None
        types = {tensor.device.type for tensor in self.sample.tensors()}
        if device is not None:
            types.add(device.type)
        self._conditions = Conditions(ModuleFlags(inside), types)
        self._buffers = Buffers(inside, copy_all=False)

    def take_back(self) -> None:
        """Forward has failed: random state and buffers as it found them."""
        self._conditions.restore_random()
        self._buffers.take_back()

    def settle(self) -> None:
        """Forward has run."""
        self._conditions.forward_has_run()
        self._buffers.settle()

    def parameters(self) -> list[torch.Tensor]:
        """The model's."""
        return self._conditions.parameters()

    @property
    def has_computed_parameters(self) -> bool:
        """Whether the model was called with weights that are not leaves, by `torch.func.functional_call`."""
        return self._conditions.any_was_computed

    def check_parameters(self) -> None:
        """Raise a ``RecomputeError`` if the model's parameters have been changed since."""
        self._conditions.check_parameters()

    def parameters_moved(self) -> None:
        """Another plan has them elsewhere, with the same values."""
        self._conditions.parameters_moved()

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Inside the block everything is as forward found it; afterwards it is as now."""
        with self._conditions.replay(), self._buffers.put_back():
            yield

    def through_boundary(self, output: Any) -> Any:
        """A model's output, its tensors on the other side of the boundary."""
        tree = Tree.of(output)
        inner = _differentiable(tree)
        if not inner:
            return output
        self.awaits_backward = True
        exchanged: dict[int, torch.Tensor] = {}
        for number, tensor in enumerate(inner):
            outer = _Boundary.apply(self, number, tensor)  # type: ignore[no-untyped-call]
            _go_first(outer.grad_fn)
            exchanged[id(tensor)] = outer
        return tree.map(torch.Tensor, lambda tensor: exchanged.get(id(tensor), tensor)).build()

    def outputs_of(self, output: Any) -> list[torch.Tensor]:
        """Of an output of the same call made again, those tensors that the gradients are of, by their numbers."""
        return _differentiable(Tree.of(output))

    def release(self) -> None:
        """Backward is through: hold on to nothing."""
        self.gradients = {}
        self.sample = Sample((), {})
        self._buffers = Buffers(())


def _differentiable(tree: Tree) -> list[torch.Tensor]:
    found = {id(tensor): tensor for tensor in tree.tensors() if tensor.requires_grad and _is_plain(tensor)}
    return list(found.values())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Not one with functions of its own, which the boundary would not get past, such as lazy logits."""
    function = type(tensor).__torch_function__
    return function in (
        torch.Tensor.__torch_function__,
        disabled_torch_function,
    ) or isinstance(tensor, nn.Parameter)


class _Boundary(torch.autograd.Function):
    """See Note [The boundary]."""

    @staticmethod
    def forward(ctx: Any, call: Call, number: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.memscale_call = call
        ctx.memscale_number = number
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None, torch.Tensor | None]:
        call: Call = ctx.memscale_call
        call.awaits_backward = False
        if call.on_backward is not None:
            call.on_backward(graph_task_id())
        if not torch.is_grad_enabled():  # else they are to be differentiated themselves
            call.gradients[ctx.memscale_number] = gradient
        return None, None, gradient


def call_of(node: Any) -> tuple[Call, int] | None:
    """The call whose boundary a node of autograd belongs to, and the number of the output."""
    call: Call | None = getattr(node, "memscale_call", None)
    return None if call is None else (call, node.memscale_number)


def _go_first(node: Any) -> None:
    # Private in torch (tried on 2.13). Without it, of a model that is called twice before one backward only the
    # later call can be made again.
    set_number = getattr(node, "_set_sequence_nr", None)
    if set_number is not None:
        set_number(_FIRST)
