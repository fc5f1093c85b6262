"""A region: a call whose saved tensors are recomputed in backward instead of kept.

Note [Regions]
~~~~~~~~~~~~~~
Forward runs the function once, under saved-tensor hooks that give autograd an empty `Holder` for each tensor
it would save. Nothing is kept but the inputs (and what a `KeepPolicy` names). When backward opens the first
holder, the function runs again under the conditions of the first time, with hooks that put each tensor it
saves into the holder of the same number; the graph it builds on the way is thrown away. Autograd attaches the
original graph to what it is handed, so double backward works as ever.

*Who owns whom.* graph → holder → region → inputs. The region sees its holders weakly. So it dies with the
graph: after a backward pass that does not retain it, or with the output, at once and without the garbage
collector.

*One backward pass at a time.* Recomputed tensors belong to one backward pass, by its graph task id; a second
pass over a retained graph recomputes again. Each tensor is handed out once and then dropped, so memory falls
as backward goes. If one is asked for twice in one pass (a custom function that reads `saved_tensors` twice),
the region is run again for it alone. What was recomputed and not asked for is dropped when the pass ends.

*Early stop.* The recomputation is left, by a private exception, when the last holder that the graph still has
is filled: the rest of the function would compute what nobody reads. This is also what makes a function work
that calls `torch.autograd.grad` in the middle: its recomputation stops before it gets to that call.

*Regions in regions.* The innermost region takes the saved tensors; to the one around it, an inner region's
inputs are saved tensors (Note [Inputs go through the surrounding hooks]). So opening an inner holder
recomputes the outer region first, once.

*Threads.* On an accelerator, backward runs in threads of its own, one a device. Recomputing sets global
things (random state, buffers, flags), so one recomputation runs at a time, under one lock for all regions.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.lazy import LazyModuleMixin

from memscale._torch import graph_task_id, hooks_are_allowed, surrounding_hooks
from memscale._util.trees import Tree
from memscale.checkpointing import rerun
from memscale.checkpointing.buffers import Buffers
from memscale.checkpointing.chain import Link, Segment, Surroundings, links_to, no_links, remember
from memscale.checkpointing.conditions import Conditions, ModuleFlags, submodules
from memscale.checkpointing.inputs import Inputs, version_of
from memscale.checkpointing.keep import KeepPolicy, Kept
from memscale.checkpointing.saved import Holder, Saved
from memscale.errors import RecomputeError

__all__ = ["Region", "run_region"]

T = TypeVar("T")


def run_region(
    function: Callable[..., T],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    modules: Sequence[nn.Module] = (),
    keep: KeepPolicy | None = None,
    chain: bool = False,
    device_types: Sequence[str] | None = None,
) -> T:
    """Call a function so that backward recomputes what it needs instead of finding it saved.

    Loss and gradients are bit for bit those of the plain call, dropout included, as long as the function
    depends on its arguments, `modules` and the global random generators of torch, Python and NumPy only. Of
    the modules, parameters, buffers, plain attributes and generators are put back; containers that forward
    changes, such as a list that it appends to, are not.

    Where gradients are off, or nothing requires one, this is the plain call; so it is for modules that cannot
    be run again: a lazy one in its first call, a scripted one.

    Args:
        function: What to run; it runs once now and once for each backward pass.
        args: Its positional arguments. Tensors are found in nested containers too.
        kwargs: Its keyword arguments.
        modules: The modules that the function uses, whose submodules count as well: their flags are put back
            for the recomputation, and their buffers and attributes neither spoil it nor are changed by it.
        keep: Operations whose outputs are kept instead of recomputed; see `KeepPolicy`.
        chain: Do not keep an input that is the output of the region before; see Note [Chained regions].
        device_types: Devices whose random state matters, besides the CPU and those of `args` and `modules`.

    Raises:
        RecomputeError: Now, if the function changed one of its inputs in place; in backward, if the
            recomputation comes out other than the forward pass.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> x = torch.ones(1, 2)
        >>> run_region(layer, (x,), {}, modules=[layer]).sum().backward()
        >>> layer.weight.grad
        tensor([[1., 1.],
                [1., 1.]])
    """
    if not torch.is_grad_enabled() or not hooks_are_allowed():
        return function(*args, **kwargs)
    tree = Tree.of((tuple(args), dict(kwargs)))
    tensors = list(tree.tensors())
    inside = submodules(modules)
    if any(map(_cannot_run_again, inside)):
        return function(*args, **kwargs)
    flags = ModuleFlags(inside)
    if inside and not flags.any_requires_grad and not any(tensor.requires_grad for tensor in tensors):
        return function(*args, **kwargs)

    types = {tensor.device.type for tensor in tensors}.union(device_types or ())
    hooks = surrounding_hooks()
    surroundings = Surroundings(hooks)
    segment, find = links_to(tensors, surroundings) if chain else (None, no_links)
    region = Region(
        function,
        Inputs(tree, find, hooks),
        Conditions(flags, types),
        Buffers(inside),
        None if keep is None else Kept(keep, sorted(types | flags.device_types)),
        surroundings,
        segment or Segment(),
    )
    versions = [version_of(tensor) for tensor in tensors]
    output: T = region.run_forward(args, kwargs)
    returned = list(Tree.of(output).tensors())
    region.settle(returned)
    for position, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
        if version_of(tensor) != version and region.saved:
            raise RecomputeError(
                f"A checkpointed region changed input tensor {position} (shape {tuple(tensor.shape)}, "
                f"{tensor.dtype}) in place, so it could not be run again from its inputs. Make the first "
                "operation on that input out of place (inplace=False), or switch recomputation off: "
                "memscale.Config(enable_checkpointing=False)."
            )
    remember(region, returned, tensors)
    return output


def _cannot_run_again(module: nn.Module) -> bool:
    """Whether a module's second run may differ from its first.

    A lazy module makes its parameters in its first call. A scripted one is compiled anew while it learns the
    shapes, and then saves other tensors than before; and its buffers cannot be exchanged.
    """
    if isinstance(module, LazyModuleMixin):
        return bool(module.has_uninitialized_params())
    return isinstance(module, torch.jit.ScriptModule)


class Region:
    """One call of `run_region`, for as long as its graph lives. See Note [Regions]."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Inputs,
        conditions: Conditions,
        buffers: Buffers,
        kept: Kept | None,
        surroundings: Surroundings,
        segment: Segment,
    ) -> None:
        self.function = function
        self.inputs = inputs
        self.conditions = conditions
        self.buffers = buffers
        self.kept = kept
        self.surroundings = surroundings
        self.segment = segment
        self.saved: list[Saved] = []
        self.successors: list[weakref.ref[Link]] = []
        self.is_released = False
        self._filled: set[int] = set()
        self._outputs: dict[tuple[int, int], _Output] = {}

    def run_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        mode = contextlib.nullcontext() if self.kept is None else self.kept.forward_mode()
        with saved_tensors_hooks(self._pack, _unpack), mode:
            return self.function(*args, **kwargs)

    def settle(self, returned: Sequence[torch.Tensor]) -> None:
        """Forward has run, and has returned these tensors."""
        self.conditions.forward_has_run()
        self.buffers.settle()
        if self.kept is not None:
            self.kept.settle(returned)

    def release(self) -> None:
        """Free what is kept for a recomputation: the graph will not be used again."""
        self.is_released = True
        self.inputs = Inputs(Tree.of(((), {})), no_links, None)
        self.buffers = Buffers(())
        self.kept = None
        self._outputs.clear()

    def _pack(self, tensor: torch.Tensor) -> Holder:
        holder = Holder(self, len(self.saved))
        self.saved.append(Saved(holder, tensor))
        return holder

    # What belongs to one backward pass.

    def is_filled(self, task: int) -> bool:
        """Whether all holders have been filled once for this backward pass."""
        return task in self._filled

    def mark_filled(self, task: int) -> None:
        self._filled.add(task)

    def forget(self, task: int) -> None:
        """Drop whatever is still here for a backward pass."""
        self._filled.discard(task)
        for key in list(self._outputs):  # a copy: another pass may be recomputing while this one ends
            if key[0] == task:
                self._outputs.pop(key, None)
        for saved in self.saved:
            holder = saved.holder()
            if holder is not None:
                holder.drop(task)

    # What the regions chained to this one ask for.

    def has_output(self, task: int, index: int) -> bool:
        return (task, index) in self._outputs

    def put_outputs(self, task: int, outputs: Sequence[torch.Tensor]) -> None:
        """Hold those outputs of a recomputation that chained regions will ask for."""
        for successor in self.successors:
            link = successor()
            if link is not None:
                if link.index >= len(outputs):
                    raise RecomputeError(
                        f"Recomputing a checkpointed region returned {len(outputs)} tensors; its forward "
                        f"pass returned at least {link.index + 1}.\n{rerun.CAUSES}"
                    )
                key = (task, link.index)
                if key not in self._outputs:
                    self._outputs[key] = _Output(outputs[link.index].detach())
                self._outputs[key].waiting.add(id(link))

    def give_output(self, task: int, link: Link) -> torch.Tensor:
        """An output, to a region chained to this one; the last that waits for it takes it away."""
        key = (task, link.index)
        if key not in self._outputs:  # taken before: a region asks twice only if it is itself run twice
            rerun.recompute_outputs(self, task)
        output = self._outputs[key]
        output.waiting.discard(id(link))
        if not output.waiting:
            del self._outputs[key]
        return output.tensor.detach()


class _Output:
    """A recomputed output, and the links that have not had it yet."""

    __slots__ = ("tensor", "waiting")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.waiting: set[int] = set()


def _unpack(holder: Holder) -> torch.Tensor:
    # A plain function, not a method: autograd holds it for as long as the graph lives.
    return rerun.hand_out(holder, graph_task_id())
