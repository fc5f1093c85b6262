"""A call of a whole model in training, recorded so that it can be repeated, and the backward pass through it.

Note [Gradients of a model's outputs]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
To repeat the backward pass of a call, one needs the gradients that came to its outputs from outside. They are read by
pre-hooks on the autograd nodes that made the outputs, only at the outputs that a pass reaches from outside
(`reached_outputs`): a model may return its loss beside the logits that the loss was computed from. If a pass reaches
both from outside, what arrives at the logits is a sum of both, and of no use.

*Who owns whom.* graph → node → pre-hook → `GraphHandle`, which refers to the call weakly: a call knows the model, and
the model may hold its output; through a node the garbage collector does not see such a cycle. So the call belongs to
whoever wants to repeat it, for as long as the handle is alive.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.graph import Node

from memscale._torch import graph_nodes, graph_task_id, pytree
from memscale._util.snapshots import inputs_before, is_batch_object
from memscale._util.trees import Tree, is_lazy
from memscale.checkpointing.state import Buffers, Conditions, ModuleFlags, submodules
from memscale.errors import RecomputeError
from memscale.profiler.sample import Sample

_OUTPUTS = "memscale_outputs"  # the key in a node's metadata


class GraphHandle:
    """Is alive as long as the graph of a call is, and leads from there to the call, if somebody has kept it."""

    def __init__(self, call: ModelCall) -> None:
        self.call = weakref.ref(call)

    def before_node(
        self, outputs: Sequence[tuple[int, int]], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Tell the call that backward has come to a node that made some of its outputs (index, number there)."""
        call = self.call()
        if call is None:
            return
        call.awaits_backward = False
        if call.on_backward is not None:
            call.on_backward(graph_task_id())
        if not torch.is_grad_enabled():  # else they are to be differentiated themselves
            call.gradients.update((index, gradients[nr]) for index, nr in outputs if index in call.captured)


class ModelCall:
    """One call of a model, and the state that it started from."""

    def __init__(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device | None
    ) -> None:
        inside = submodules([model])
        self.args, self.kwargs = tuple(args), dict(kwargs)
        self.sample = Sample(*pytree.tree_map(_copied, (self.args, self.kwargs)))
        self._inputs = inputs_before(self.args, self.kwargs, copy_bytes=0)
        self.captured: set[int] = set()  # outputs whose gradients are kept when a backward pass brings them
        self.gradients: dict[int, torch.Tensor | None] = {}  # those that have arrived
        self.awaits_backward = False  # it has a graph that no backward pass has come to
        self.on_backward: Callable[[int], None] | None = None  # called with the graph task id of a pass
        devices = {tensor.device for tensor in self.sample.tensors()}
        if device is not None:
            devices.add(device)
        self.conditions = Conditions(ModuleFlags(inside), devices)
        self._buffers = Buffers(inside, copy_all=False)

    def restore_state(self) -> None:
        """Put random state and buffers back after a forward that failed."""
        self.conditions.restore_random()
        self._buffers.restore()
        self.check_inputs()
        self._inputs.restore()

    def check_inputs(self) -> None:
        """Raise a `RecomputeError` if an input was changed in place: what it was before is not known."""
        tensor = self._inputs.unknown_tensor()
        if tensor is not None:
            raise RecomputeError(
                f"a tensor of the batch (shape {tuple(tensor.shape)}, {tensor.dtype}) was changed in place since the "
                "model was called with it, so that another call would give other numbers"
            )

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Restore inside the block what forward found: inputs, random state, flags, autocast, buffers."""
        put_back = self._inputs.restore()
        try:
            with self.conditions.replay(), self._buffers.put_back():
                yield
        finally:
            put_back()

    def finish_forward(self, output: Any) -> GraphHandle:
        """Note the model's output, and let backward passes report when they come to it."""
        self.conditions.end_forward()
        self._buffers.end_forward()
        nodes: dict[Node, list[tuple[int, int]]] = {}
        for index, tensor in enumerate(self.outputs_of(output)):
            if tensor.grad_fn is not None:
                nodes.setdefault(tensor.grad_fn, []).append((index, tensor.output_nr))
        # A gradient of lazy logits arrives at the hidden states that they are computed from.
        for tensor in Tree.of(output).tensors():
            hidden = getattr(tensor, "hidden", None) if is_lazy(tensor) else None
            if isinstance(hidden, torch.Tensor) and hidden.grad_fn is not None:
                nodes.setdefault(hidden.grad_fn, [])
        self.awaits_backward = bool(nodes)
        handle = GraphHandle(self)
        for node, outputs in nodes.items():
            cast(Any, node).metadata[_OUTPUTS] = (handle, outputs)
            node.register_prehook(functools.partial(handle.before_node, outputs))
        return handle

    @staticmethod
    def outputs_of(output: Any) -> list[torch.Tensor]:
        """Return the tensors of an output that have gradients, in an order that is the same when it is repeated."""
        tensors = Tree.of(output).tensors()
        return list({id(each): each for each in tensors if each.requires_grad and not is_lazy(each)}.values())

    def release(self) -> None:
        """Free what was kept for a repetition."""
        self.gradients = {}
        self.captured = set()
        self.sample = Sample((), {})
        self.args, self.kwargs = (), {}
        self._inputs = inputs_before((), {})
        self._buffers = Buffers(())


def _copied(leaf: Any) -> Any:
    """Return a leaf of the inputs for plans: what they change of it is not changed in the user's object."""
    return copy.copy(leaf) if is_batch_object(leaf) else leaf


class ReachedOutput(NamedTuple):
    """A node through which a backward pass enters a call, and the outputs of the call that it made: none, if lazy."""

    node: Node
    call: ModelCall
    indices: tuple[int, ...]


def _made_by(node: Any) -> tuple[ModelCall | None, tuple[int, ...]]:
    """Return the call that a node made outputs of, and their indices."""
    handle, outputs = node.metadata.get(_OUTPUTS, (None, ()))
    return None if handle is None else handle.call(), tuple(index for index, _ in outputs)


def reached_outputs(roots: Sequence[torch.Tensor]) -> tuple[list[ReachedOutput], list[torch.Tensor]]:
    """Find where a backward pass enters calls of models, and let these capture the gradients that arrive.

    Returns the nodes where it does, and the leaves that it reaches without passing one.
    """
    reached: list[ReachedOutput] = []
    leaves = {id(each): each for each in roots if each.requires_grad and each.is_leaf}
    for node in graph_nodes(roots, lambda node: _made_by(node)[0] is None):
        call, indices = _made_by(node)
        if call is not None:
            call.captured.update(indices)
            reached.append(ReachedOutput(node, call, indices))
        elif (leaf := getattr(node, "variable", None)) is not None:  # of the nodes that accumulate
            leaves[id(leaf)] = leaf
    return reached, list(leaves.values())
