"""Offloaded activations: what a layer saves for backward goes to a tier, and comes back when backward asks for it.

Note [Offloaded activations]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Saved-tensor hooks around a layer see each tensor that autograd keeps for backward; around a recomputed one these are
its inputs (Note [Inputs go through the surrounding hooks]). It is stored when it is saved, so that nothing waits for
the end of the layer, and what becomes of the tensor afterwards does not matter.

*By storage.* What holds device memory is the storage, whichever view of it was saved. So the storage is stored, once,
and the views of it (the input of three projections; queries, keys and values cut from one product; a mask that all
layers share) are described by their geometry. Only of a storage that a view covers little of, the view alone is stored.

*Backward.* The first view that is asked for loads the storage; it stays until all of its views were asked for in
this backward pass, or the pass ends: what shared memory in forward shares it again. A second pass over a retained
graph loads it again.

*Who owns whom.* graph → `_Saved` → `_Stored` → the tier. So what was stored is freed with the graph: by backward, or
with the output of a forward pass that is never followed by one. After `detach` a graph that is still there can be
run backward as ever.

*What stays.* Parameters, buffers and leaves, which live on the device anyway (of their 16-bit copies, which autocast
makes, nothing is kept: they are made again); small tensors; what is on another device; and what the tier has no room
for: then that much more device memory is used, and a line is logged once.

*In place.* Autograd refuses a saved tensor that was changed in place afterwards; behind hooks it can't. Here backward
gets what was saved, as it was then, which is what the mathematics wants. With an asynchronous engine, a change while
the tensor is still on its way is an error (Note [Sources must not change]).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memscale._torch import (
    OUTSIDE_BACKWARD,
    at_end_of_backward,
    graph_task_id,
    hooks_are_allowed,
    is_traceable_wrapper_subclass,
    surrounding_hooks,
)
from memscale.checkpointing.state import KeptTensor
from memscale.errors import RecomputeError, TierFullError
from memscale.observe.counters import Below, Meter
from memscale.techniques.forward import ForwardStage, Stage
from memscale.tiers.engine import Engine
from memscale.tiers.store import DiskStore
from memscale.tiers.tier import HostTier, Ticket, Tier

__all__ = ["LEAST_BYTES", "Activations", "OffloadActivationsStage", "Refetch", "unpack"]

if TYPE_CHECKING:
    from memscale.offload.fetch import FetchStage

logger = logging.getLogger("memscale")

LEAST_BYTES = 64 * 2**10
"""Smaller storages stay on the device. A transfer takes some ten microseconds however small it is, in which a link of
10 GB/s moves a hundred kilobytes: below this, the time goes and hardly any memory is won."""

_MIN_COVERED = 4  # a view that covers less than a fourth of its storage is stored alone


_Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A tensor's offset in its storage, its shape and its stride, in elements."""


class Activations:
    """Saved-tensor hooks that keep what is saved on a tier. See Note [Offloaded activations].

    Args:
        engine: Who moves it.
        device: Where the layers compute; what they save elsewhere stays there.
        store: The disk, if that is where it goes; else it goes to host memory.
        capacity: The most host memory to take, a hard cap; None for what is free.
        logs: Whether to log that the cap was reached.
        meter: Counts what is moved.

    Example:
        >>> activations = Activations(Engine(), torch.device("cpu"), capacity=2**20)
        >>> x = torch.ones(128, 128, requires_grad=True)
        >>> with activations.around([]):
        ...     y = (x * 2).square().sum()  # saves x * 2
        >>> activations.bytes_below
        65536
        >>> y.backward()
        >>> float(x.grad[0, 0]), activations.bytes_below
        (8.0, 0)
    """

    def __init__(
        self,
        engine: Engine,
        device: torch.device,
        *,
        store: DiskStore | None = None,
        capacity: int | None = None,
        logs: bool = True,
        meter: Meter | None = None,
    ) -> None:
        self._engine = engine
        self._device = device
        self._store = store
        self._capacity = capacity
        self._logs = logs
        self._meter = meter or Meter()
        self._below: _Below | None = None
        self._known: weakref.WeakValueDictionary[tuple[object, ...], _Stored] = weakref.WeakValueDictionary()
        self._calls = _Calls()
        self.bytes_sent = 0
        """Bytes that were stored so far."""

    @property
    def bytes_below(self) -> int:
        """Bytes that are on the tier now (of a disk that is shared: all that are)."""
        return 0 if self._below is None else self._below.tier.bytes_used

    @contextlib.contextmanager
    def around(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Offload what is saved inside the block, which is one call of a layer.

        Args:
            modules: The layer's modules, whose parameters and buffers stay where they are.
        """
        resident = {
            tensor.untyped_storage()._cdata
            for module in modules
            for tensor in (*module.parameters(), *module.buffers())
            if _has_storage(tensor)
        }
        if self._below is not None and self._below.is_async:
            self._below.tier.drop_prefetched()  # of a backward pass that was given up
        call = _Call(resident, self._calls.latest(), self._engine.depth)
        self._calls.stack.append(call)
        try:
            # The methods of one object for all layers: chained regions tell by it that they belong together.
            with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack):
                yield
        finally:
            self._calls.stack.pop()
            self._calls.finished(call)

    def pack(self, tensor: torch.Tensor) -> KeptTensor | _Saved | Refetch:
        """Return what autograd saves in place of a tensor.

        Raises:
            TransferError: An earlier transfer has failed.
            TierError: The directory of the disk can't be used.
        """
        call = self._calls.stack[-1]
        if tensor.device.type != self._device.type or not _is_worth_storing(tensor, call.resident):
            return KeptTensor(tensor)
        home = _parameter_behind(tensor)
        if home is not None:
            return Refetch(home, tensor, None)
        try:
            with torch.no_grad(), self._meter.timing("offloading"):
                stored, view = self._stored(tensor, call)
        except TierFullError as error:
            if self._logs:
                self._logs = False
                logger.warning("Activations stay on the device from here on, as the tier is full. %s", error)
            return KeptTensor(tensor)
        return _Saved(stored, call, view)

    def _stored(self, tensor: torch.Tensor, call: _Call) -> tuple[_Stored, _Geometry | None]:
        storage = tensor.untyped_storage()
        count, rest = divmod(storage.nbytes(), tensor.element_size())
        geometry = (int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
        covered = min(tensor.numel(), count)
        # Views of one tensor share its version, so one copy of its memory serves all of them. The results of
        # `unsafe_chunk` (the gates of a GRU) are no views: each has a part of the memory and its own version.
        owner = tensor._base if tensor._is_view() else tensor
        covers_storage = owner is not None and owner.nbytes >= storage.nbytes()
        whole = not rest and covers_storage and _MIN_COVERED * covered >= count
        key = (
            storage._cdata,
            tensor.dtype,
            *(() if whole else geometry),
        )
        version = _version(tensor)
        stored = self._known.get(key)
        if stored is None or stored.storage() is not storage or stored.version != version:
            below = self._opened()
            source = tensor.detach().as_strided((count,), (1,), 0) if whole else tensor.detach()
            ticket = below.tier.store(source, group=call)
            stored = self._known[key] = _Stored(below, ticket, weakref.ref(storage), version)
            call.stored.append(weakref.ref(stored))
            self.bytes_sent += ticket.nbytes
            self._meter.down("activations", below.name, ticket.nbytes)
        return stored, geometry if whole else None

    def _opened(self) -> _Below:
        if self._below is None:
            engine, store = self._engine, self._store
            tier: Tier[Any] = HostTier(self._capacity, engine=engine) if store is None else store.tier(engine)
            self._below = _Below(tier, "host" if store is None else "disk", self._meter)
        return self._below


class OffloadActivationsStage(ForwardStage):
    """Offloads what a block saves for backward. See Note [Offloaded activations].

    Args:
        activations: Where they go.
    """

    order = Stage.OFFLOAD_ACTIVATIONS

    def __init__(self, activations: Activations) -> None:
        self._activations = activations

    def run(
        self, module: nn.Module, call_next: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        # Whoever has hooks around this, such as a recomputed region, has it that nothing is kept, or where.
        if not hooks_are_allowed() or surrounding_hooks() is not None:
            return call_next(*args, **kwargs)
        with self._activations.around([module]):
            return call_next(*args, **kwargs)


def unpack(saved: KeptTensor | _Saved | Refetch) -> torch.Tensor:
    """Return the tensor that backward asks for."""
    if isinstance(saved, _Saved):
        return saved.load()
    return saved.fetch() if isinstance(saved, Refetch) else saved.get()


class Refetch:
    """A working copy, or a view of one, that backward will ask for again.

    Args:
        master: The parameter.
        tensor: The copy, or the view of it, that autograd wanted to save.
        layer: Who fetches it; None to copy it from the master without anybody's knowledge.
    """

    __slots__ = ("_device", "_dtype", "_layer", "_master", "_offset", "_shape", "_stride", "_version")

    def __init__(self, master: nn.Parameter, tensor: torch.Tensor, layer: FetchStage | None) -> None:
        self._master = master
        self._layer = layer
        self._version = master._version
        self._device = tensor.device
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()

    def fetch(self) -> torch.Tensor:
        """Return the tensor again.

        Raises:
            RecomputeError: The parameter was changed in place meanwhile.
        """
        master = self._master
        if master._version != self._version:
            raise RecomputeError(
                f"An offloaded parameter (shape {tuple(master.shape)}) was changed in place between forward "
                f"and backward: version {self._version} then, {master._version} now. Call backward before "
                "optimizer.step(), or run forward again after it."
            )
        if self._layer is not None:
            copy = self._layer.refetch(master, self._dtype)
        else:
            copy = master.detach().to(self._device, self._dtype, non_blocking=True)
        return copy.as_strided(self._shape, self._stride, self._offset)


class _Below:
    """The tier; closed when nobody has anything there or may store more."""

    def __init__(self, tier: Tier[Any], name: Below, meter: Meter) -> None:
        self.tier = tier
        self.name: Below = name
        self.meter = meter
        self.is_async = tier.engine.is_async

    def __del__(self) -> None:
        self.tier.close()


class _Calls(threading.local):
    """The calls of layers that are running in this thread, and the one that ran last."""

    def __init__(self) -> None:
        self.stack: list[_Call] = []
        self._latest: weakref.ref[_Call] | None = None

    def latest(self) -> _Call | None:
        return None if self._latest is None else self._latest()

    def finished(self, call: _Call) -> None:
        self._latest = weakref.ref(call)


class _Call:
    """One call of a layer. The graph owns it by what was saved in it; it knows the call before it weakly.

    Attributes:
        resident: Storages that are on the device anyway.
        stored: What was stored in it, in order.
    """

    def __init__(self, resident: Collection[int], before: _Call | None, depth: int) -> None:
        self.resident = resident
        self.stored: list[weakref.ref[_Stored]] = []
        self._before = None if before is None else weakref.ref(before)
        self._depth = depth
        self._task = OUTSIDE_BACKWARD

    def reached(self, task: int, now: _Stored) -> None:
        """Prefetch the rest of this call, and of the layers that come next: backward has reached it."""
        if task in (OUTSIDE_BACKWARD, self._task) or not now.below.is_async:
            return
        self._task = task
        call: _Call | None = self
        for _ in range(self._depth + 1):
            if call is None:
                break
            for reference in reversed(call.stored):
                stored = reference()
                if stored is not None and stored is not now:
                    stored.prefetch(task)
            call = None if call._before is None else call._before()
        tier = weakref.ref(now.below)
        at_end_of_backward(functools.partial(_forget_prefetched, tier))


class _Saved:
    """What autograd has in place of a saved tensor."""

    __slots__ = ("__weakref__", "_call", "_stored", "_view")

    def __init__(self, stored: _Stored, call: _Call, view: _Geometry | None) -> None:
        self._stored = stored
        self._call = call
        self._view = view
        stored.views.add(self)

    def load(self) -> torch.Tensor:
        task = graph_task_id()
        self._call.reached(task, self._stored)
        with torch.no_grad():
            with self._stored.below.meter.timing("offloading"):
                memory = self._stored.load(task, self)
            if self._view is None:
                return memory.detach()
            offset, shape, stride = self._view
            return memory.as_strided(shape, stride, memory.storage_offset() + offset).detach()


class _Stored:
    """A storage (or a slice of one) that is on the tier.

    Attributes:
        below: Where.
        ticket: What the tier calls it.
        storage: Where it came from; it may be gone.
        version: The version of the tensor when it was stored.
        views: What stands for it in the graph.
    """

    def __init__(
        self,
        below: _Below,
        ticket: Ticket,
        storage: weakref.ref[torch.UntypedStorage],
        version: int,
    ) -> None:
        self.below = below
        self.ticket = ticket
        self.storage = storage
        self.version = version
        self.views: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._memory: torch.Tensor | None = None
        self._task = OUTSIDE_BACKWARD
        self._waiting: set[int] = set()

    def prefetch(self, task: int) -> None:
        if self._task != task:  # else it is here, or was
            self.below.tier.prefetch(self.ticket)

    def load(self, task: int, view: _Saved) -> torch.Tensor:
        """Return its memory, for one of its views; held until the others of this backward pass have had it."""
        memory = self._memory if self._task == task else None
        if memory is None:
            tier = self.below.tier
            memory = tier.borrow(self.ticket)
            if memory is None:
                memory = tier.load(self.ticket)
                self.below.meter.up("activations", self.below.name, self.ticket.nbytes)
            if task == OUTSIDE_BACKWARD:
                return memory
            self._task = task
            self._waiting = {id(each) for each in self.views}
        self._waiting.discard(id(view))
        if self._waiting and self._memory is None:
            at_end_of_backward(functools.partial(_end_of_backward, weakref.ref(self), task))
        self._memory = memory if self._waiting else None
        return memory

    def drop(self, task: int) -> None:
        if self._task == task:
            self._memory = None
            self._task = OUTSIDE_BACKWARD


def _end_of_backward(reference: weakref.ref[_Stored], task: int) -> None:
    stored = reference()
    if stored is not None:
        stored.drop(task)


def _forget_prefetched(reference: weakref.ref[_Below]) -> None:
    below = reference()
    if below is not None:
        below.tier.drop_prefetched()


def _is_worth_storing(tensor: torch.Tensor, resident: Collection[int]) -> bool:
    if isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
        return False
    if not _has_storage(tensor) or tensor.is_conj() or tensor.is_neg():
        return False
    storage = tensor.untyped_storage()
    return storage.nbytes() >= LEAST_BYTES and storage._cdata not in resident


def _parameter_behind(tensor: torch.Tensor) -> nn.Parameter | None:
    """Return the parameter that a tensor is a copy of in another type, or a view of such a copy, as autocast makes."""
    copy = tensor._base if tensor._is_view() else tensor
    node = None if copy is None else copy.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    parameter = getattr(node.next_functions[0][0], "variable", None)
    same_device = isinstance(parameter, nn.Parameter) and parameter.device == tensor.device
    return parameter if same_device else None


def _has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but a view of memory."""
    return not (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.device.type == "meta"
        or is_traceable_wrapper_subclass(tensor)
        or is_lazy(tensor)
    )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
