"""Offloaded activations: what a layer saves for backward goes to a tier, and comes back when backward asks for it.

Note [Offloaded activations]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Saved-tensor hooks around a layer see each tensor that autograd keeps for backward; around a recomputed one these are
its inputs (Note [Inputs go through the surrounding hooks]).

*By storage.* What holds device memory is the storage, whichever view of it was saved. So the storage is stored, once,
and its views (queries, keys and values cut from one product; a mask that all layers share) are described by their
geometry. In backward the first view that is asked for loads the storage; it stays until all of its views were asked for
in this pass, or the pass ends. A second pass over a retained graph loads it again.

*Ownership.* The graph owns `_SavedView`s, these own `OffloadedStorage`s, and these own memory of the tier, which so is
freed with the graph. A graph that outlives `detach` can still be run backward.

*What stays.* Parameters, buffers and leaves (of the 16-bit copies that autocast makes of them nothing is kept: they are
made again); small tensors; parts of a storage that are no views of one tensor; what is on another device; and what the
tier has no room for, of which a line is logged once.

*In place.* Backward gets a tensor as it was when it was saved. To change it while an asynchronous engine stores it is
an error, by its version counter, and never wrong numbers: a copy would cost the memory that offloading saves.

*In flight.* With an asynchronous engine, the sources of the last `depth + 1` calls of layers stay on the device.
Virtual devices, which copy at once, hold them as long as a real one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memscale._torch import (
    OUTSIDE_BACKWARD,
    at_end_of_backward,
    base_of,
    graph_task_id,
    hooks_are_allowed,
    is_fake,
    is_traceable_wrapper_subclass,
    surrounding_hooks,
    version_of,
)
from memscale.checkpointing.state import KeptTensor
from memscale.errors import RecomputeError, TierFullError, TransferError
from memscale.observe.counters import Meter, OffloadTier
from memscale.profiler.recorder import LEAST_BYTES
from memscale.techniques.forward import ForwardStage, Stage
from memscale.tiers.disk import DiskStore
from memscale.tiers.engine import Engine, HostMemory, Lane, Transfer
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.offload.layer import OffloadedLayer

logger = logging.getLogger("memscale")


class Activations:
    """Saved-tensor hooks that keep what is saved on a tier. See Note [Offloaded activations].

    Args:
        engine: Who moves it.
        device: Where the layers compute; what they save elsewhere stays there.
        store: The disk, if that is where it goes; else it goes to host memory.
        capacity: The most host memory to take, a hard cap; None for what is free.
        logs: Whether to log that the cap was reached.
        meter: Counts what is moved.
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
        self.engine = engine
        self.meter = meter or Meter()
        self.tier: OffloadTier = "host" if store is None else "disk"
        self.bytes_sent = 0  # so far
        self.memory = store or HostMemory(capacity, engine.pinned)
        self._device = device
        self._logs = logs
        self._known = weakref.WeakValueDictionary[tuple[object, ...], OffloadedStorage]()
        self.prefetched = weakref.WeakSet[OffloadedStorage]()  # to be dropped if nobody loads them
        self._calls = _Calls()

    @contextlib.contextmanager
    def around(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Offload what is saved inside the block, which is one call of a layer, but its parameters and buffers."""
        resident = {
            tensor.untyped_storage()._cdata
            for module in modules
            for tensor in (*module.parameters(), *module.buffers())
            if _has_storage(tensor)
        }
        self.drop_prefetched()  # of a backward pass that was given up
        calls = self._calls
        call = _Call(resident, calls.latest)
        calls.stack.append(call)
        try:
            # The methods of one object for all layers: chained regions tell by it that they belong together.
            with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack):
                yield
        finally:
            calls.stack.pop()
            calls.latest = weakref.ref(call)

    def pack(self, tensor: torch.Tensor) -> KeptTensor | _SavedView | Refetch:
        """Return what autograd saves in place of a tensor, or raise a TransferError if an earlier transfer failed."""
        call = self._calls.stack[-1]
        if tensor.device.type != self._device.type or not _is_worth_storing(tensor, call.resident):
            return KeptTensor(tensor)
        master = _parameter_behind(tensor)
        if master is not None:
            return Refetch(master, tensor, None)
        try:
            with torch.no_grad(), self.meter.timing("offloading"):
                return self._store_storage(tensor, call)
        except TierFullError as error:
            if self._logs:
                self._logs = False
                logger.warning(
                    "Activations stay on the device from here on, as the tier is full. %s", str(error)
                )
            return KeptTensor(tensor)

    def _store_storage(self, tensor: torch.Tensor, call: _Call) -> _SavedView:
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.dtype)
        stored = self._known.get(key)
        if stored is None or stored.storage() is not storage or stored.version != version_of(tensor):
            stored = self._known[key] = OffloadedStorage(self, tensor)
            call.stored.append(weakref.ref(stored))
            self.bytes_sent += storage.nbytes()
            if self.engine.is_async:
                self._calls.limit_in_flight(call, self.engine.depth + 1)
        return _SavedView(stored, call, tensor)

    # ------------------------------------------------------------------ for storages

    def write(self, target: torch.Tensor, run: torch.Tensor) -> None:
        """Copy a flat tensor to memory of the tier; in any thread."""
        with torch.no_grad(), self._explained(run.nbytes, "stored"):
            if isinstance(self.memory, HostMemory):
                target.copy_(run, non_blocking=self.engine.is_async)
            else:
                self.memory.fill(target, run.to("cpu"))

    def read(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Copy memory of the tier to a tensor on the device, and return that; in any thread."""
        with torch.no_grad(), self._explained(source.nbytes, "loaded"):
            if isinstance(self.memory, HostMemory):
                return target.copy_(source, non_blocking=self.engine.is_async)
            return target.copy_(self.memory.read(source))

    def lane(self, run: torch.Tensor) -> Lane:
        """Return where the transfers of a tensor run."""
        if is_fake(run) or run.device.type not in ("cpu", "cuda"):
            return Lane.CALLER
        return Lane.STREAM if run.device.type == "cuda" and self.tier == "host" else Lane.WORKER

    def drop_prefetched(self) -> None:
        """Free what was prefetched and not loaded; it will be read when it is asked for."""
        for stored in list(self.prefetched):
            stored.prefetched = None
        self.prefetched.clear()

    @contextlib.contextmanager
    def _explained(self, nbytes: int, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TransferError(
                f"{format_bytes(nbytes)} could not be {verb} by the {self.tier} tier: {error}. See the cause above, "
                "and save your model before you go on."
            ) from error


class OffloadActivationsStage(ForwardStage):
    """Offloads what a block saves for backward. See Note [Offloaded activations]."""

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


def unpack(saved: KeptTensor | _SavedView | Refetch) -> torch.Tensor:
    """Return the tensor that backward asks for."""
    return saved.get()


class Refetch:
    """A working copy, or a view of one, that backward will ask for again.

    `layer` will fetch it; without one it is copied from its master directly.
    """

    __slots__ = ("_device", "_dtype", "_geometry", "_layer", "_master", "_version")

    def __init__(self, master: nn.Parameter, tensor: torch.Tensor, layer: OffloadedLayer | None) -> None:
        self._master = master
        self._layer = layer
        self._version = master._version
        self._device = tensor.device
        self._dtype = tensor.dtype
        self._geometry = tensor.shape, tensor.stride(), tensor.storage_offset()

    def get(self) -> torch.Tensor:
        """Return the tensor again, or raise a RecomputeError if the parameter was changed in place meanwhile."""
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
        return copy.as_strided(*self._geometry)


# ---------------------------------------------------------------------- on the tier


class OffloadedStorage:
    """The storage of a saved tensor, which a tier keeps for backward; a TierFullError if that has no room for it."""

    def __init__(self, activations: Activations, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        run = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
        self.activations = activations
        self.storage = weakref.ref(storage)
        self.version = version_of(tensor)
        self.views = weakref.WeakSet[_SavedView]()  # what stands for it in the graph
        self._device = run.device
        self._lane = activations.lane(run)
        self._memory = memory = activations.memory.empty_like(run)
        self._source: torch.Tensor | None = run  # until it is stored
        self._was_changed = False  # in place, while it was being stored
        self.prefetched: Transfer[torch.Tensor] | None = None
        self._loaded: torch.Tensor | None = None  # while other views of this backward pass may ask for it
        self._task = OUTSIDE_BACKWARD
        self._waiting: set[int] = set()
        activations.meter.count_written("activations", activations.tier, run.nbytes)
        work = functools.partial(activations.write, memory, run)
        self._storing = activations.engine.run(work, self._lane, run.device, outward=True)
        if not activations.engine.is_async:
            self.finish_storing()

    def finish_storing(self) -> None:
        """Free the source on the device once it is copied, or raise a TransferError."""
        if self._source is not None:
            self._storing.wait()
            self._storing.abandon()  # another stream may be current than that of the source
            self._was_changed = version_of(self._source) != self.version
            self._source = None

    def prefetch(self, task: int) -> None:
        """Begin to copy it to the device, unless this backward pass has had it already."""
        stored = self._source is None and not self._was_changed
        if self._task != task and stored and self.prefetched is None:
            with contextlib.suppress(torch.OutOfMemoryError):  # it is loaded when backward asks for it
                self.prefetched = self._start_fetch(self._lane)
                self.activations.prefetched.add(self)

    def load(self, task: int, view: _SavedView) -> torch.Tensor:
        """Return its elements on the device for one of its views; they stay until its others have had them."""
        loaded = self._loaded if self._task == task else None
        if loaded is None:
            loaded = self._fetch()
            if task == OUTSIDE_BACKWARD:
                return loaded
            self._task = task
            self._waiting = {id(each) for each in self.views}
        self._waiting.discard(id(view))
        if self._waiting and self._loaded is None:
            at_end_of_backward(self.drop_loaded, task)
        self._loaded = loaded if self._waiting else None
        return loaded

    def drop_loaded(self, task: int) -> None:
        """Free the copy on the device: the backward pass is over."""
        if self._task == task:
            self._loaded = None
            self._task = OUTSIDE_BACKWARD

    def _fetch(self) -> torch.Tensor:
        source = self._source
        if self._was_changed or (source is not None and version_of(source) != self.version):
            raise TransferError(
                f"A tensor of {self._memory.numel()} {str(self._memory.dtype).removeprefix('torch.')} was changed in "
                "place while it was being stored. Do not change in place what backward needs, or switch "
                "Config(async_offload=...) off."
            )
        if source is not None:
            return source  # still there: nothing has to be copied
        fetching, self.prefetched = self.prefetched, None
        self.activations.meter.count_read("activations", self.activations.tier, self._memory.nbytes)
        if fetching is None:  # who would wait for a worker can as well do it
            fetching = self._start_fetch(Lane.CALLER if self._lane is Lane.WORKER else self._lane)
        return fetching.wait()

    def _start_fetch(self, lane: Lane) -> Transfer[torch.Tensor]:
        target = torch.empty_like(self._memory, device=self._device)
        work = functools.partial(self.activations.read, target, self._memory)
        return self.activations.engine.run(work, lane, self._device, allocated=True, after=self._storing)

    def __del__(self) -> None:
        source = getattr(self, "_source", None)
        if source is not None and hasattr(self, "_storing"):
            self._storing.abandon()


class _SavedView:
    """What autograd has in place of a saved tensor."""

    __slots__ = ("__weakref__", "_call", "_geometry", "_stored")

    def __init__(self, stored: OffloadedStorage, call: _Call, tensor: torch.Tensor) -> None:
        self._stored = stored
        self._call = call
        self._geometry = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        stored.views.add(self)

    def get(self) -> torch.Tensor:
        task = graph_task_id()
        self._call.reached(task, self._stored)
        with torch.no_grad():
            with self._stored.activations.meter.timing("offloading"):
                run = self._stored.load(task, self)
            shape, stride, offset = self._geometry
            return run.as_strided(shape, stride, run.storage_offset() + offset).detach()


# ---------------------------------------------------------------------- calls of layers


class _Calls(threading.local):
    """The calls of layers in this thread."""

    def __init__(self) -> None:
        self.stack: list[_Call] = []  # those that are running
        self.latest: Callable[[], _Call | None] = lambda: None  # the one that ended last, by a weak reference
        self._in_flight: deque[_Call] = deque()  # whose storages may still be on the device, oldest first

    def limit_in_flight(self, call: _Call, limit: int) -> None:
        """Wait for the storages of the oldest calls beyond the limit, or raise a TransferError."""
        if not self._in_flight or self._in_flight[-1] is not call:
            self._in_flight.append(call)
        while len(self._in_flight) > limit:
            for stored in self._in_flight.popleft().alive():
                stored.finish_storing()


class _Call:
    """One call of a layer. The graph owns it by what was saved in it; it knows the call before it weakly."""

    def __init__(self, resident: Collection[int], before: Callable[[], _Call | None]) -> None:
        self.resident = resident  # storages that are on the device anyway
        self.stored: list[weakref.ref[OffloadedStorage]] = []  # in it, in order
        self._before = before
        self._task = OUTSIDE_BACKWARD

    def alive(self) -> list[OffloadedStorage]:
        """Return the storages that are still in the graph, in order."""
        return [stored for reference in self.stored if (stored := reference()) is not None]

    def reached(self, task: int, now: OffloadedStorage) -> None:
        """Prefetch the rest of this call, and of the layers that come next: backward has reached it."""
        activations = now.activations
        if task in (OUTSIDE_BACKWARD, self._task) or not activations.engine.is_async:
            return
        self._task = task
        call: _Call | None = self
        for _ in range(activations.engine.depth + 1):
            for stored in reversed(call.alive() if call is not None else ()):
                if stored is not now:
                    stored.prefetch(task)
            call = None if call is None else call._before()
        at_end_of_backward(activations.drop_prefetched)


# ---------------------------------------------------------------------- what is saved


def _is_worth_storing(tensor: torch.Tensor, resident: Collection[int]) -> bool:
    if isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
        return False
    if not _has_storage(tensor) or tensor.is_conj() or tensor.is_neg():
        return False
    storage = tensor.untyped_storage()
    in_part = storage.nbytes() % tensor.element_size() != 0
    if storage.nbytes() < LEAST_BYTES or storage._cdata in resident or in_part:
        return False
    # Views of one tensor share its version, so one copy of its memory serves all of them. The results of
    # `unsafe_chunk` (the gates of a GRU) are no views: each has a part of the memory and its own version.
    owner = base_of(tensor)
    return owner is not None and owner.nbytes >= storage.nbytes()


def _parameter_behind(tensor: torch.Tensor) -> nn.Parameter | None:
    """Return the parameter that a tensor is a copy of in another type, or a view of such a copy, as autocast makes."""
    copy = base_of(tensor)
    node = None if copy is None else copy.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    parameter = getattr(node.next_functions[0][0], "variable", None)
    same_device = isinstance(parameter, nn.Parameter) and parameter.device == tensor.device
    return parameter if same_device else None


def _has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but a view of memory."""
    if tensor.layout is not torch.strided or tensor.is_meta or is_lazy(tensor):
        return False
    return not (tensor.is_nested or tensor.is_quantized or is_traceable_wrapper_subclass(tensor))
