"""A region: a call whose saved tensors are recomputed in backward instead of kept.

Note [Regions]
~~~~~~~~~~~~~~
Forward runs the function once, under saved-tensor hooks that give autograd an empty `Holder` for each tensor it would
save. Nothing is kept but the inputs (and the outputs in Note [Keeping outputs]). When backward opens the first holder,
the function runs again under the conditions of the first time, with hooks that put each tensor it saves into the holder
of the same number; the graph it builds on the way is thrown away. Autograd attaches the original graph to what it
unpacks, so double backward works.

*Ownership.* graph -> holder -> region -> inputs. The region refers to its holders weakly, so it is freed with the
graph, without the garbage collector.

*Backward passes.* Recomputed tensors belong to one backward pass, by its graph task id; a second pass over a retained
graph recomputes again. Each tensor is handed out once and then dropped. If one is asked for twice in one pass (a custom
function that reads `saved_tensors` twice), the region runs again for it alone. The rest is dropped when the pass ends.

*Early stop.* A private exception ends the recomputation when the last holder that the graph still has is filled. So a
function may call `torch.autograd.grad` in the middle: its recomputation stops before that call.

*Nested regions.* The innermost region takes the saved tensors; to the one around it, an inner region's inputs are saved
tensors (Note [Inputs go through the surrounding hooks]). So opening an inner holder recomputes the outer region first,
once.

*Threads.* On an accelerator, backward runs in one thread per device. Recomputing sets global state (random generators,
buffers, flags), so one recomputation runs at a time, under one lock for all regions.

Note [Chained regions]
~~~~~~~~~~~~~~~~~~~~~~
Of two blocks in a row, each a region, the tensor between them is kept as the second one's input. With `chain=True` it
is not: the second region refers to the first (`Link`), and has it recomputed first, to its end, and takes its output.
This fills the first region's holders as well, which its own backward needs next: nothing is computed more often, and
nothing more is kept, than if both blocks were one checkpointed function.

*Which tensor comes from which region* is in `_origins`, weakly by the tensor. If the region is gone, or the tensor was
changed in place, the second region keeps its input.

*Segments.* A region that chains joins the segment of the latest region among its inputs' origins, and leaves out just
the inputs that come from its own segment. A tensor from further back (an encoder's output that each decoder block
takes, a skip connection of a U-Net) is kept: recomputing it for each of its users would cost a whole encoder each time.

*Inside another region* a region chains only to regions of the same run of the outer one: when that is recomputed, a
tensor from outside it is no region's output any more.

*How long an output lives.* Until the last chained region that will ask for it, in this backward pass, has it, or until
the pass ends.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.weak import WeakTensorKeyDictionary

from memscale._torch import (
    OUTSIDE_BACKWARD,
    at_end_of_backward,
    base_of,
    graph_task_id,
    hooks_are_allowed,
    running_node_name,
    surrounding_hooks,
    version_of,
)
from memscale._util.trees import Tree
from memscale.checkpointing.keep import KeepMode, Kept
from memscale.checkpointing.state import (
    FREED,
    Buffers,
    Conditions,
    Inputs,
    ModuleFlags,
    changed_parameter,
    submodules,
)
from memscale.errors import RecomputeError

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

    Loss and gradients are bit for bit those of the plain call, dropout included, as long as the function depends on its
    arguments (tensors are found in nested containers too), `modules` and the global random generators of torch, Python
    and NumPy only. Where nothing requires a gradient, and for modules that cannot be run again, this is the plain call.

    Args:
        modules: The modules that the function uses: parameters, flags, buffers and attributes of these and of their
            submodules are restored for the recomputation, which leaves no trace in them.
        keep: Operations whose outputs are kept instead of recomputed, as `"aten.addmm.default"` for every call or
            `"aten.addmm.default#3"` for the fourth; see Note [Keeping outputs].
        chain: Do not keep an input that is the output of the region before; see Note [Chained regions].

    Raises:
        RecomputeError: Now, if the function changed an input in place; in backward, if the recomputation differs.

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

    region = Region(function, tree, tensors, inside, flags, keep, chain)
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
    given = {id(tensor) for tensor in tensors}
    number = next(_numbers)
    for index, tensor in enumerate(returned):
        if id(tensor) not in given and not isinstance(tensor, nn.Parameter):
            _origins[tensor] = _Origin(weakref.ref(region), index, number, version_of(tensor))
    return output


def _cannot_run_again(module: nn.Module) -> bool:
    """Return whether a module's second run may differ from its first."""
    # A lazy module makes its parameters in its first call. A scripted one is compiled anew, and saves other tensors.
    if isinstance(module, LazyModuleMixin):
        return bool(module.has_uninitialized_params())
    return isinstance(module, torch.jit.ScriptModule)


class Region:
    """One call of `run_region`, for as long as its graph lives. See Note [Regions]."""

    def __init__(
        self,
        function: Callable[..., Any],
        tree: Tree,
        tensors: Sequence[torch.Tensor],
        modules: Sequence[nn.Module],
        flags: ModuleFlags,
        keep: tuple[str, ...],
        chain: bool,
    ) -> None:
        devices = {tensor.device for tensor in tensors}
        hooks = surrounding_hooks()
        # What tells one run of an outer region from another. A bound method is made anew at every use.
        owner = Region if hooks is None else getattr(hooks[0], "__self__", hooks[0])
        self._outer: Callable[[], object] = weakref.ref(owner)
        self._segment = object()
        self.successors: list[weakref.ref[Link]] = []
        self.function = function
        self.inputs = Inputs(tree, hooks, self._links_to(tensors) if chain else {})
        self.conditions = Conditions(flags, devices)
        self.buffers = Buffers(modules)
        self.kept = Kept(keep, devices | flags.devices) if keep else None
        self.saved: list[_Saved] = []
        self.filled: set[int] = set()  # backward passes in which all holders have been filled once
        self._is_released = False
        self._outputs: dict[tuple[int, int], _ChainedOutput] = {}

    def _links_to(self, tensors: Iterable[torch.Tensor]) -> dict[int, Link]:
        """Join the segment of the latest region that made an input; return the links to it, by the inputs' ids."""
        found: dict[int, tuple[_Origin, Region, bool]] = {}
        for tensor in tensors:
            origin = _origins.get(tensor)
            region = None if origin is None else origin.region()
            if origin is None or region is None or origin.version != version_of(tensor):
                continue
            if region._outer() is self._outer() is not None:
                found[id(tensor)] = (origin, region, tensor.requires_grad)
        if not found:
            return {}
        _, latest, _ = max(found.values(), key=lambda each: each[0].number)
        self._segment = latest._segment
        return {
            key: Link(region, origin.position, requires_grad)
            for key, (origin, region, requires_grad) in found.items()
            if region._segment is self._segment
        }

    def run_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        mode = contextlib.nullcontext() if self.kept is None else KeepMode(self.kept)
        with saved_tensors_hooks(self._pack, _unpack), mode:
            return self.function(*args, **kwargs)

    def _pack(self, tensor: torch.Tensor) -> Holder:
        holder = Holder(self, len(self.saved))
        self.saved.append(_Saved(holder, tensor))
        return holder

    def end_forward(self, returned: Sequence[torch.Tensor]) -> None:
        """Drop the state that forward, which has returned these tensors, has not changed."""
        self.conditions.end_forward()
        self.buffers.end_forward()
        if self.kept is not None:
            self.kept.end_forward(returned)

    def release(self) -> None:
        """Free what is kept for a recomputation: the graph will not be used again."""
        self._is_released = True
        self.inputs = Inputs(Tree.of(((), {})), None)
        self.buffers = Buffers(())
        self.kept = None
        self._outputs.clear()

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

    def recompute(self, holder: Holder, task: int) -> None:
        """Fill a holder, and with it all others of the region, if they were not yet in this backward pass."""
        if self._is_released:
            raise RuntimeError(FREED)
        order = self._order_to_run(task)
        try:
            for region in order[:-1]:
                region._recompute_outputs(task)
            self._rerun(task, holder=holder)
        except BaseException:
            for region in order:
                region.forget(task)
            raise
        if task == OUTSIDE_BACKWARD:
            for region in order[:-1]:
                region.forget(task)

    def _rerun(self, task: int, *, holder: Holder | None = None) -> list[torch.Tensor]:
        """Run again, to the end or until a holder is filled; the first time in a pass, fill all others too."""
        fills_all = task not in (OUTSIDE_BACKWARD, *self.filled)
        outputs = _Rerun(self, task, fills_all, holder).run()
        if fills_all:
            self.filled.add(task)
            at_end_of_backward(self.forget, task)
        return outputs

    # Chained regions. See the note.

    def _order_to_run(self, task: int) -> list[Region]:
        """Return the regions to recompute so that this one can be: the head of its chain first, itself last."""
        # Not by recursion: a chain may be longer than Python's stack is deep.
        order: list[Region] = []
        seen: set[int] = set()
        pending: list[tuple[Region, bool]] = [(self, False)]
        while pending:
            region, inputs_are_in = pending.pop()
            if inputs_are_in:
                order.append(region)
            elif id(region) not in seen:
                seen.add(id(region))
                pending.append((region, True))
                for slot in region.inputs.slots:
                    if isinstance(slot, Link) and (task, slot.index) not in slot.region._outputs:
                        pending.append((slot.region, False))
        return order

    def _recompute_outputs(self, task: int) -> None:
        """Run to the end, and hold those outputs that chained regions will ask for."""
        outputs = self._rerun(task)
        for successor in self.successors:
            link = successor()
            if link is None:
                continue
            if link.index >= len(outputs):
                raise RecomputeError(
                    f"Recomputing a checkpointed region returned {len(outputs)} tensors; its forward "
                    f"pass returned at least {link.index + 1}.\n{CAUSES}"
                )
            key = (task, link.index)
            if key not in self._outputs:
                self._outputs[key] = _ChainedOutput(outputs[link.index].detach(), set())
            self._outputs[key].waiting.add(id(link))

    def pop_output(self, task: int, link: Link) -> torch.Tensor:
        """Return an output for a region chained to this one; it is dropped when all that wait for it have it."""
        key = (task, link.index)
        if key not in self._outputs:  # taken before: a region asks twice only if it is itself run twice
            self._recompute_outputs(task)
        output = self._outputs[key]
        output.waiting.discard(id(link))
        if not output.waiting:
            del self._outputs[key]
        return output.tensor.detach()


class _Origin(NamedTuple):
    """The region that made a tensor, as which of its outputs, in which order, and the tensor's version then."""

    region: weakref.ref[Region]
    position: int
    number: int
    version: int


class _ChainedOutput(NamedTuple):
    """A recomputed output, and the ids of the links that have not had it yet."""

    tensor: torch.Tensor
    waiting: set[int]


_numbers = itertools.count()
_origins: MutableMapping[torch.Tensor, _Origin] = WeakTensorKeyDictionary()


class Link:
    """An input that is an earlier region's output and is not kept. See Note [Chained regions]."""

    __slots__ = ("__weakref__", "_requires_grad", "index", "region")

    def __init__(self, region: Region, index: int, requires_grad: bool) -> None:
        self.region = region
        self.index = index
        self._requires_grad = requires_grad
        region.successors.append(weakref.ref(self))

    def __call__(self, task: int) -> torch.Tensor:
        return self.region.pop_output(task, self).requires_grad_(self._requires_grad)


class Holder:
    """What autograd saves in place of a tensor: empty, until a recomputation fills it for one backward pass."""

    __slots__ = ("__weakref__", "_tensors", "index", "region")

    def __init__(self, region: Region, index: int) -> None:
        self.region = region
        self.index = index
        self._tensors: dict[int, tuple[torch.Tensor, int]] = {}

    def store(self, task: int, tensor: torch.Tensor) -> None:
        self._tensors[task] = (tensor, version_of(tensor))

    def pop(self, task: int) -> torch.Tensor | None:
        """Return the tensor for a backward pass, once; None if it is not there."""
        tensor, version = self._tensors.pop(task, (None, 0))
        if tensor is not None and version_of(tensor) != version:
            raise RecomputeError(
                f"Saved tensor {self.index} ({_described(_metadata(tensor))}) was changed in place by the checkpointed "
                f"region after an operation had saved it for backward: version {version} when it was saved, "
                f"{version_of(tensor)} now. This fails without checkpointing too: use the out-of-place form "
                "of the operation."
            )
        return tensor

    def memscale_release(self) -> None:
        """Free the region and its inputs; see `memscale._torch.release_saved_tensors`."""
        self.region.release()
        self._tensors.clear()

    def drop(self, task: int) -> None:
        self._tensors.pop(task, None)


def _unpack(holder: Holder) -> torch.Tensor:
    # A plain function, not a method: autograd holds it for as long as the graph lives.
    task = graph_task_id()
    tensor = holder.pop(task)
    if tensor is None:
        with _lock:
            tensor = holder.pop(task)  # another thread may have been at it
            if tensor is None:
                holder.region.recompute(holder, task)
                tensor = holder.pop(task)
    if tensor is None:
        raise RecomputeError(
            f"Recomputing a checkpointed region did not reach its saved tensor {holder.index}.\n{CAUSES}"
        )
    return tensor


_lock = threading.RLock()

_Metadata = tuple[tuple[int, ...], torch.dtype, torch.device, bool]


def _metadata(tensor: torch.Tensor) -> _Metadata:
    shape = () if tensor.is_nested else tensor.shape  # of a ragged one, asking is an error
    return shape, tensor.dtype, tensor.device, tensor.requires_grad


def _described(metadata: _Metadata) -> str:
    shape, dtype, device, requires_grad = metadata
    return f"shape {tuple(shape)}, {dtype}, {device}{'' if requires_grad else ', no gradient'}"


class _Saved:
    """One tensor that forward would have saved: its holder, if the graph still has it, and its metadata."""

    __slots__ = ("_metadata", "_version", "holder", "index")

    def __init__(self, holder: Holder, tensor: torch.Tensor) -> None:
        self.holder = weakref.ref(holder)
        self.index = holder.index
        self._metadata = _metadata(tensor)
        # Only of a parameter, or a view of one (`nn.Linear` saves its weight transposed), can the version be compared
        # with that at forward: of all else the recomputation makes new tensors.
        owner = base_of(tensor)
        is_weight = isinstance(owner, nn.Parameter) or (
            owner is not None and owner.is_leaf and owner.requires_grad
        )
        self._version = version_of(tensor) if is_weight else None

    def check(self, tensor: torch.Tensor) -> RecomputeError | None:
        """Return what is wrong with the tensor that a recomputation saved in this place; None if nothing is."""
        found = _metadata(tensor)
        if found != self._metadata:
            made_by = "" if tensor.grad_fn is None else f", made by {tensor.grad_fn.name()}"
            node = running_node_name()
            return RecomputeError(
                "Recomputing a checkpointed region gave another tensor than its forward pass. It was to save tensor "
                f"{self.index} with {_described(self._metadata)}; it saved one with {_described(found)}{made_by}."
                f"{f' Backward was in {node}.' if node else ''}\n{CAUSES}"
            )
        if self._version is not None and self.holder() is not None and version_of(tensor) != self._version:
            return changed_parameter(tensor, self._version)
        return None


class _Stop(BaseException):
    """Ends a recomputation early. Not an `Exception`, so that the function does not catch it by mistake."""


class _Rerun:
    """One more run of a region's function for a backward pass, to its end or until a holder is filled."""

    def __init__(self, region: Region, task: int, fills_all: bool, holder: Holder | None) -> None:
        self._region = region
        self._task = task
        self._fills_all = fills_all
        self._holder = holder
        self._count = 0
        self._is_done = False
        self._error: RecomputeError | None = None
        self._last = len(region.saved)
        if holder is not None:
            needed = (saved.index for saved in reversed(region.saved) if saved.holder() is not None)
            self._last = next(needed) if fills_all else holder.index

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
                stack.enter_context(KeepMode(kept, replays=True))
            # The graph of a recomputation is used only by a function that calls backward itself.
            stack.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
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
        if holder is not None and (self._fills_all or holder is self._holder):
            holder.store(self._task, plain)
        if index >= self._last:
            self._is_done = True
            raise _Stop
        return plain
