"""A call of a model in training, as it can be made again; and the boundary between its graph and the loop's.

Note [The boundary]
~~~~~~~~~~~~~~~~~~~
What a model returns goes to the loop through one node of autograd, which changes nothing. When backward comes to
that node, it has the gradients of the model's outputs, complete, and those from outside only: a model may return its
loss beside the logits that the loss was made from, and the gradient that goes from one to the other inside must not
be taken for one that came from the loop. With these gradients, the model's forward can be run again and its backward
too, without the loop.

The node comes before all others that are ready (by its sequence number), so that of two calls of one model both
have their gradients before the backward of either begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

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
        gradients: of its outputs, once backward has brought them.
        awaits_backward: whether a graph of it is there that backward has not been through.
        on_backward: called when backward comes to it, with the graph task id.
    """

    def __init__(
        self, model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device | None
    ) -> None:
        inside = submodules([model])
        self.sample = Sample(tuple(args), dict(kwargs))
        self.gradients: tuple[torch.Tensor | None, ...] | None = None
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
        outer = _Boundary.apply(self, *inner)  # type: ignore[no-untyped-call]
        _go_first(outer[0].grad_fn)
        exchanged = {id(one): other for one, other in zip(inner, outer, strict=True)}
        return tree.map(torch.Tensor, lambda tensor: exchanged.get(id(tensor), tensor)).build()

    def outputs_of(self, output: Any) -> list[torch.Tensor]:
        """Of an output of the same call made again, those tensors that the gradients are of."""
        return _differentiable(Tree.of(output))

    def release(self) -> None:
        """Backward is through: hold on to nothing."""
        self.gradients = None
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
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.memscale_call = call
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.memscale_call
        call.awaits_backward = False
        if call.on_backward is not None:
            call.on_backward(graph_task_id())
        if not torch.is_grad_enabled():  # else they are to be differentiated themselves
            call.gradients = gradients
        return None, *gradients


def call_of(node: Any) -> Call | None:
    """The call whose boundary a node of autograd is."""
    return cast("Call | None", getattr(node, "memscale_call", None))


def _go_first(node: Any) -> None:
    # Private in torch (tried on 2.13). Without it, of a model that is called twice before one backward only the
    # later call can be made again.
    set_number = getattr(node, "_set_sequence_nr", None)
    if set_number is not None:
        set_number(_FIRST)
