"""A region: a call whose saved tensors are recomputed in backward instead of kept.

Note [Regions]
~~~~~~~~~~~~~~
Forward runs the function once, under saved-tensor hooks that give autograd an empty `Holder` for each tensor
it would save. Nothing is kept but the inputs (and the outputs in Note [Keeping outputs]). When backward opens the first
holder, the function runs again under the conditions of the first time, with hooks that put each tensor it
saves into the holder of the same number; the graph it builds on the way is thrown away. Autograd attaches the
original graph to what it unpacks, so double backward works.

*Ownership.* graph -> holder -> region -> inputs. The region refers to its holders weakly. So it is freed with
the graph: after a backward pass that does not retain it, or with the output, without the garbage collector.

*Backward passes.* Recomputed tensors belong to one backward pass, by its graph task id; a second pass over a
retained graph recomputes again. Each tensor is handed out once and then dropped, so memory falls as backward
proceeds. If one is asked for twice in one pass (a custom function that reads `saved_tensors` twice), the
region runs again for it alone. What was recomputed and not asked for is dropped when the pass ends.

*Early stop.* A private exception ends the recomputation when the last holder that the graph still has is
filled: the rest of the function would compute what nobody reads. It is also why a function may call
`torch.autograd.grad` in the middle: its recomputation stops before that call.

*Nested regions.* The innermost region takes the saved tensors; to the one around it, an inner region's inputs
are saved tensors (Note [Inputs go through the surrounding hooks]). So opening an inner holder recomputes the
outer region first, once.

*Threads.* On an accelerator, backward runs in threads of its own, one per device. Recomputing sets global
state (random generators, buffers, flags), so one recomputation runs at a time, under one lock for all
regions.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.lazy import LazyModuleMixin

from memscale._torch import (
    OUTSIDE_BACKWARD,
    at_end_of_backward,
    graph_task_id,
    hooks_are_allowed,
    running_node_name,
    surrounding_hooks,
)
from memscale._util.trees import Tree
from memscale.checkpointing.chain import Link, OuterHooks, Segment, links_to, order_to_run, remember
from memscale.checkpointing.keep import KeepMode, Kept, ReplayMode
from memscale.checkpointing.state import (
    FREED,
    Buffers,
    Conditions,
    Inputs,
    ModuleFlags,
    changed_parameter,
    submodules,
    version_of,
)
from memscale.errors import RecomputeError

__all__ = ["Region", "run_region"]

T = TypeVar("T")

CAUSES = (
    "Likely causes: the function depends on something that changed since forward, such as a counter, a flag or "
    "a random generator that is not an attribute of a module, a cache that it appends to (use_cache=True), or a "
    "global setting. Make the function depend on its arguments, its modules and the global random generators only, or "
    "switch recomputation off: memscale.Config(enable_checkpointing=False)."
)


def run_region(
    function: Callable[..., T],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    modules: Sequence[nn.Module] = (),
    keep: tuple[str, ...] = (),
    chain: bool = False,
) -> T:
    """Call a function so that backward recomputes what it needs instead of finding it saved.

    Loss and gradients are bit for bit those of the plain call, dropout included, as long as the function
    depends on its arguments, `modules` and the global random generators of torch, Python and NumPy only. Of
    the modules, parameters, buffers and attributes (tensors, containers and generators among them) are put back;
    objects of other classes that forward changes in place are not.

    Where gradients are off, or nothing requires one, this is the plain call; so it is for modules that cannot
    be run again: a lazy one in its first call, a scripted one.

    Args:
        function: What to run; it runs once now and once for each backward pass.
        args: Its positional arguments. Tensors are found in nested containers too.
        kwargs: Its keyword arguments.
        modules: The modules that the function uses, whose submodules count as well: their flags are put back
            for the recomputation, and their buffers and attributes neither spoil it nor are changed by it.
        keep: Operations whose outputs are kept instead of recomputed, as `"aten.addmm.default"` for every call or
            `"aten.addmm.default#3"` for the fourth; see Note [Keeping outputs].
        chain: Do not keep an input that is the output of the region before; see Note [Chained regions].

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

    types = {tensor.device.type for tensor in tensors}
    hooks = surrounding_hooks()
    outer_hooks = OuterHooks(hooks)
    segment, find_link = links_to(tensors, outer_hooks) if chain else (None, None)
    region = Region(
        function,
        Inputs(tree, hooks, find_link),
        Conditions(flags, types),
        Buffers(inside),
        Kept(keep, sorted(types | flags.device_types)) if keep else None,
        outer_hooks,
        segment or Segment(),
    )
    versions = [version_of(tensor) for tensor in tensors]
    output: T = region.run_forward(args, kwargs)
    returned = list(Tree.of(output).tensors())
    region.end_forward(returned)
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
    """Return whether a module's second run may differ from its first.

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
        outer_hooks: OuterHooks,
        segment: Segment,
    ) -> None:
        self.function = function
        self.inputs = inputs
        self.conditions = conditions
        self.buffers = buffers
        self.kept = kept
        self.outer_hooks = outer_hooks
        self.segment = segment
        self.saved: list[Saved] = []
        self.successors: list[weakref.ref[Link]] = []
        self.is_released = False
        self.filled: set[int] = set()  # backward passes in which all holders have been filled once
        self._outputs: dict[tuple[int, int], _ChainedOutput] = {}

    def run_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        mode = contextlib.nullcontext() if self.kept is None else KeepMode(self.kept)
        with saved_tensors_hooks(self._pack, _unpack), mode:
            return self.function(*args, **kwargs)

    def end_forward(self, returned: Sequence[torch.Tensor]) -> None:
        """Drop the state that forward, which has returned these tensors, has not changed."""
        self.conditions.end_forward()
        self.buffers.end_forward()
        if self.kept is not None:
            self.kept.end_forward(returned)

    def release(self) -> None:
        """Free what is kept for a recomputation: the graph will not be used again."""
        self.is_released = True
        self.inputs = Inputs(Tree.of(((), {})), None)
        self.buffers = Buffers(())
        self.kept = None
        self._outputs.clear()

    def _pack(self, tensor: torch.Tensor) -> Holder:
        holder = Holder(self, len(self.saved))
        self.saved.append(Saved(holder, tensor))
        return holder

    def forget(self, task: int) -> None:
        """Drop whatever is still here for a backward pass."""
        self.filled.discard(task)
        for key in list(self._outputs):  # a copy: another pass may be recomputing while this one ends
            if key[0] == task:
                self._outputs.pop(key, None)
        for saved in self.saved:
            holder = saved.holder()
            if holder is not None:
                holder.drop(task)

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
                        f"pass returned at least {link.index + 1}.\n{CAUSES}"
                    )
                key = (task, link.index)
                if key not in self._outputs:
                    self._outputs[key] = _ChainedOutput(outputs[link.index].detach())
                self._outputs[key].waiting.add(id(link))

    def take_output(self, task: int, link: Link) -> torch.Tensor:
        """Return an output for a region chained to this one; it is dropped when all that wait for it have it."""
        key = (task, link.index)
        if key not in self._outputs:  # taken before: a region asks twice only if it is itself run twice
            recompute_outputs(self, task)
        output = self._outputs[key]
        output.waiting.discard(id(link))
        if not output.waiting:
            del self._outputs[key]
        return output.tensor.detach()


class _ChainedOutput:
    """A recomputed output, and the links that have not had it yet."""

    __slots__ = ("tensor", "waiting")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.waiting: set[int] = set()


def _unpack(holder: Holder) -> torch.Tensor:
    # A plain function, not a method: autograd holds it for as long as the graph lives.
    return hand_out(holder, graph_task_id())


# ---------------------------------------------------------------------- saved tensors


class Holder:
    """What autograd saves in place of a tensor: empty, until a recomputation fills it for one backward pass.

    The graph owns the holder, the holder owns the region, and nothing refers back.
    """

    __slots__ = ("__weakref__", "_tensors", "index", "region")

    def __init__(self, region: Region, index: int) -> None:
        self.region = region
        self.index = index
        self._tensors: dict[int, tuple[torch.Tensor, int]] | None = None

    def put(self, task: int, tensor: torch.Tensor) -> None:
        if self._tensors is None:
            self._tensors = {}
        self._tensors[task] = (tensor, version_of(tensor))

    def take(self, task: int) -> torch.Tensor | None:
        """Return the tensor for a backward pass, once; None if it is not there.

        Raises:
            RecomputeError: The region changed the tensor in place after autograd had saved it.
        """
        found = self._tensors.pop(task, None) if self._tensors else None
        if found is None:
            return None
        tensor, version = found
        if version_of(tensor) != version:
            raise RecomputeError(
                f"Saved tensor {self.index} ({_describe(tensor)}) was changed in place by the checkpointed "
                f"region after an operation had saved it for backward: version {version} when it was saved, "
                f"{version_of(tensor)} now. This fails without checkpointing too: use the out-of-place form "
                "of the operation."
            )
        return tensor

    def memscale_release(self) -> None:
        """Free the region and its inputs; see `memscale._torch.release_saved_tensors`."""
        self.region.release()
        self._tensors = None

    def drop(self, task: int) -> None:
        if self._tensors:
            self._tensors.pop(task, None)


class Saved:
    """One tensor that forward would have saved: its holder, if the graph still has it, and its metadata."""

    __slots__ = ("_device", "_dtype", "_requires_grad", "_shape", "_version", "holder", "index")

    def __init__(self, holder: Holder, tensor: torch.Tensor) -> None:
        self.holder = weakref.ref(holder)
        self.index = holder.index
        self._shape = _shape_of(tensor)
        self._dtype = tensor.dtype
        self._device = tensor.device
        self._requires_grad = tensor.requires_grad
        self._version = version_of(tensor) if _is_weight(tensor) else None

    def check(self, tensor: torch.Tensor) -> RecomputeError | None:
        """Return what is wrong with the tensor that a recomputation saved in this place; None if nothing is."""
        is_same = (
            _shape_of(tensor) == self._shape
            and tensor.dtype == self._dtype
            and tensor.device == self._device
            and tensor.requires_grad == self._requires_grad
        )
        if not is_same:
            made_by = "" if tensor.grad_fn is None else f", made by {tensor.grad_fn.name()}"
            node = running_node_name()
            expected = _metadata(self._shape, self._dtype, self._device, self._requires_grad)
            return RecomputeError(
                "Recomputing a checkpointed region gave another tensor than its forward pass. It was to save "
                f"tensor {self.index} with {expected}; it saved one with {_describe(tensor)}{made_by}."
                f"{f' Backward was in {node}.' if node else ''}\n{CAUSES}"
            )
        if self._version is not None and self.holder() is not None and version_of(tensor) != self._version:
            return changed_parameter(tensor, self._version)
        return None


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if tensor.is_nested else tensor.shape  # of a ragged one, asking is an error


def _metadata(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool) -> str:
    return f"shape {tuple(shape)}, {dtype}, {device}{'' if requires_grad else ', no gradient'}"


def _describe(tensor: torch.Tensor) -> str:
    return _metadata(_shape_of(tensor), tensor.dtype, tensor.device, tensor.requires_grad)


def _is_weight(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter, or a view of one (`nn.Linear` saves its weight transposed).

    Only of those can the version be compared with that at forward: of all else the recomputation makes new
    tensors.
    """
    owner = tensor._base if tensor._is_view() else tensor
    return isinstance(owner, nn.Parameter) or (owner is not None and owner.is_leaf and owner.requires_grad)


# ---------------------------------------------------------------------- recomputation

_lock = threading.RLock()


def hand_out(holder: Holder, task: int) -> torch.Tensor:
    """Return the tensor that a holder stands for, recomputed if it is not there."""
    tensor = holder.take(task)
    if tensor is not None:
        return tensor
    with _lock:
        tensor = holder.take(task)  # another thread may have been at it
        if tensor is None:
            _recompute(holder, task)
            tensor = holder.take(task)
    if tensor is None:
        raise RecomputeError(
            f"Recomputing a checkpointed region did not reach its saved tensor {holder.index}.\n{CAUSES}"
        )
    return tensor


def _recompute(holder: Holder, task: int) -> None:
    region = holder.region
    if region.is_released:
        raise RuntimeError(FREED)
    *earlier, _ = order = order_to_run(region, task)
    try:
        for predecessor in earlier:
            recompute_outputs(predecessor, task)
        if _may_fill(region, task):
            _Rerun(region, task, fill=True, to_the_end=False).run()
            _mark_filled(region, task)
        else:
            _Rerun(region, task, fill=holder, to_the_end=False).run()
    except BaseException:
        for one in order:
            one.forget(task)
        raise
    if task == OUTSIDE_BACKWARD:
        for one in earlier:
            one.forget(task)


def recompute_outputs(region: Region, task: int) -> None:
    """Run a region to its end, for those chained to it, and fill its holders on the way if they were not yet."""
    fill = _may_fill(region, task)
    outputs = _Rerun(region, task, fill=fill, to_the_end=True).run()
    if fill:
        _mark_filled(region, task)
    region.put_outputs(task, outputs)


def _may_fill(region: Region, task: int) -> bool:
    return task != OUTSIDE_BACKWARD and task not in region.filled


def _mark_filled(region: Region, task: int) -> None:
    region.filled.add(task)
    at_end_of_backward(functools.partial(_end_of_backward, weakref.ref(region), task))


def _end_of_backward(region: weakref.ref[Region], task: int) -> None:
    found = region()
    if found is not None:
        found.forget(task)


class _Stop(BaseException):
    """Ends a recomputation early. Not an `Exception`, so that the function does not catch it by mistake."""


class _Rerun:
    """One more run of a region's function.

    Args:
        region: The region.
        task: The backward pass that it is for.
        fill: Whether to fill the region's holders, or which one.
        to_the_end: Run to the end of the function, and not only until the last holder is filled.
    """

    def __init__(self, region: Region, task: int, *, fill: Holder | bool, to_the_end: bool) -> None:
        self._region = region
        self._task = task
        self._fill = fill
        self._count = 0
        self._is_done = False
        self._error: RecomputeError | None = None
        self._last = -1
        if to_the_end:
            self._last = len(region.saved)
        elif isinstance(fill, Holder):
            self._last = fill.index
        else:
            alive = (saved.index for saved in reversed(region.saved) if saved.holder() is not None)
            self._last = next(alive, -1)

    def run(self) -> list[torch.Tensor]:
        """Fill the holders; return the tensors that the function returned, if it was run to its end."""
        region = self._region
        if self._task not in region.filled:
            region.conditions.flags.check_parameters()
        args, kwargs = region.inputs.rebuild(self._task)
        kept = region.kept
        output: object = None
        with region.conditions.replay(), region.buffers.put_back(), contextlib.ExitStack() as stack:
            if kept is not None:
                stack.callback(setattr, kept, "recording", kept.recording)
                kept.recording = False  # forward may still be running: Note [Regions], early stop
                stack.enter_context(ReplayMode(kept))
            stack.enter_context(saved_tensors_hooks(self._pack, _as_it_is))
            try:
                output = region.function(*args, **kwargs)
            except (_Stop, Exception) as raised:
                if not self._is_done and self._error is None:
                    raise
                # Ours, or what the function made of it: TorchScript's interpreter makes a RuntimeError. The
                # traceback holds the frames of the function, with every tensor in them.
                raised.__traceback__ = raised.__context__ = raised.__cause__ = None
        if self._error is not None:
            raise self._error
        if not self._is_done and self._count != len(region.saved):
            raise RecomputeError(
                f"Recomputing a checkpointed region saved {self._count} tensors for backward; its forward "
                f"pass saved {len(region.saved)}.\n{CAUSES}"
            )
        return list(Tree.of(output).tensors())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        region = self._region
        index = self._count
        self._count += 1
        # Without its history, or a node that saves its own output would keep itself alive.
        plain = tensor.detach() if tensor.requires_grad else tensor
        if index >= len(region.saved):
            return plain  # more than forward saved: `run` will say so
        saved = region.saved[index]
        self._error = self._error or saved.check(tensor)
        if self._error is not None:
            raise _Stop
        holder = saved.holder()
        if holder is not None and (self._fill is True or self._fill is holder):
            holder.put(self._task, plain)
        if index >= self._last:
            self._is_done = True
            raise _Stop
        return plain


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    # The graph of a recomputation is used only by a function that calls backward itself.
    return tensor
