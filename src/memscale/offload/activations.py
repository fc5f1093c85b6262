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

*What stays.* Parameters, buffers and leaves, which are on the device anyway (of their 16-bit copies, which autocast
makes, nothing is kept: they are made again); small tensors; parts of a storage that are no views of one tensor; what is
on another device; and what the tier has no room for, of which a line is logged once.

*In place.* Backward gets a tensor as it was when it was saved. With an asynchronous engine a tensor must not be changed
while it is being stored, as a copy of it would cost the memory that offloading saves: by its version counter that is an
error, never wrong numbers.

*In flight.* With an asynchronous engine, the sources of the last `depth + 1` calls of layers stay on the device.
Virtual devices, which copy at once, hold them as long as a real one.
"""

from __future__ import annotations

import contextlib
import enum
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
    graph_task_id,
    hooks_are_allowed,
    is_fake,
    is_traceable_wrapper_subclass,
    surrounding_hooks,
)
from memscale.checkpointing.state import KeptTensor
from memscale.errors import RecomputeError, TierFullError, TransferError
from memscale.observe.counters import Below, Meter
from memscale.techniques.forward import ForwardStage, Stage
from memscale.tiers.disk import DiskStore
from memscale.tiers.engine import Engine, HostMemory, Lane, Transfer
from memscale.units import format_bytes

__all__ = ["LEAST_BYTES", "Activations", "OffloadActivationsStage", "OffloadedStorage", "Refetch", "unpack"]

if TYPE_CHECKING:
    from memscale.offload.layer import OffloadedLayer

logger = logging.getLogger("memscale")

LEAST_BYTES = 64 * 2**10
"""Smaller storages stay on the device. A transfer takes some ten microseconds however small it is, in which a link of
10 GB/s moves a hundred kilobytes: below this, the time is spent and hardly any memory is saved."""

_CPU = torch.device("cpu")

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

    Attributes:
        bytes_sent: Bytes that were stored so far.
        prefetched: Storages that are prefetched, and to be dropped if nobody loads them.

    Example:
        >>> activations = Activations(Engine(), torch.device("cpu"), capacity=2**20)
        >>> x = torch.ones(128, 128, requires_grad=True)
        >>> with activations.around([]):
        ...     y = (x * 2).square().sum()  # saves x * 2
        >>> activations.bytes_stored
        65536
        >>> y.backward()
        >>> float(x.grad[0, 0]), activations.bytes_stored
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
        self.engine = engine
        self.meter = meter or Meter()
        self.tier: Below = "host" if store is None else "disk"
        self.bytes_sent = 0
        self._device = device
        self._memory = store or HostMemory(capacity, engine.pinned)
        self._logs = logs
        self._known: weakref.WeakValueDictionary[tuple[object, ...], OffloadedStorage] = (
            weakref.WeakValueDictionary()
        )
        self.prefetched: weakref.WeakSet[OffloadedStorage] = weakref.WeakSet()
        self._calls = _Calls()

    @property
    def bytes_stored(self) -> int:
        """Bytes that are on the tier now (of a disk that is shared: all that are)."""
        return self._memory.bytes_used

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
        self.drop_prefetched()  # of a backward pass that was given up
        calls = self._calls
        call = _Call(resident, None if calls.latest is None else calls.latest(), self.engine.depth)
        calls.stack.append(call)
        try:
            # The methods of one object for all layers: chained regions tell by it that they belong together.
            with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack):
                yield
        finally:
            calls.stack.pop()
            calls.latest = weakref.ref(call)

    def pack(self, tensor: torch.Tensor) -> KeptTensor | _SavedView | Refetch:
        """Return what autograd saves in place of a tensor.

        Raises:
            TransferError: An earlier transfer has failed.
            TierError: The directory of the disk can't be used.
        """
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
                logger.warning("Activations stay on the device from here on, as the tier is full. %s", error)
            return KeptTensor(tensor)

    def _store_storage(self, tensor: torch.Tensor, call: _Call) -> _SavedView:
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.dtype)
        version = _version(tensor)
        stored = self._known.get(key)
        if stored is None or stored.storage() is not storage or stored.version != version:
            run = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            stored = self._known[key] = OffloadedStorage(self, run, weakref.ref(storage), version)
            call.stored.append(weakref.ref(stored))
            self.bytes_sent += run.nbytes
            if self.engine.is_async:
                self._calls.limit_in_flight(call, self.engine.depth + 1)
        geometry = (int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
        return _SavedView(stored, call, geometry)

    # ------------------------------------------------------------------ for storages

    def allocate(self, run: torch.Tensor) -> torch.Tensor:
        """Return memory of the tier for a flat tensor, or raise a TierFullError."""
        memory = self._memory
        return memory.empty(run.shape, run.dtype) if isinstance(memory, DiskStore) else memory.empty_like(run)

    def write(self, target: torch.Tensor, run: torch.Tensor) -> None:
        """Copy a flat tensor to memory of the tier; in any thread."""
        with torch.no_grad(), self._explained(run.nbytes, "stored"):
            if isinstance(self._memory, HostMemory):
                target.copy_(run, non_blocking=self.engine.is_async)
            else:
                host = run.to(_CPU)  # the same tensor, on a CPU
                if not is_fake(host):
                    self._memory.fill(target, host)

    def read(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy memory of the tier to a device; in any thread."""
        with torch.no_grad(), self._explained(source.nbytes, "loaded"):
            if isinstance(self._memory, HostMemory):
                return source.to(device, non_blocking=self.engine.is_async, copy=True)
            return self._memory.read(source).to(device)

    def lane(self, run: torch.Tensor) -> Lane:
        """Return where the transfers of a tensor run."""
        if is_fake(run) or run.device.type not in ("cpu", "cuda"):
            return Lane.CALLER
        return Lane.STREAM if run.device.type == "cuda" and self.tier == "host" else Lane.WORKER

    def drop_prefetched(self) -> None:
        """Free what was prefetched and not loaded; it will be read when it is asked for."""
        for stored in list(self.prefetched):
            stored.drop_prefetched()
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

    Args:
        master: The parameter.
        tensor: The copy, or the view of it, that autograd wanted to save.
        layer: Who fetches it; None to copy it from the master directly.
    """

    __slots__ = ("_device", "_dtype", "_layer", "_master", "_offset", "_shape", "_stride", "_version")

    def __init__(self, master: nn.Parameter, tensor: torch.Tensor, layer: OffloadedLayer | None) -> None:
        self._master = master
        self._layer = layer
        self._version = master._version
        self._device = tensor.device
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()

    def get(self) -> torch.Tensor:
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


# ---------------------------------------------------------------------- on the tier


class StorageState(enum.Enum):
    """Where an offloaded storage is."""

    STORING = "being copied to the tier; its source is still on the device"
    STORED = "on the tier"
    PREFETCHED = "on the tier, and being copied to the device"
    CHANGED = "lost: it was changed in place while it was being stored"


class OffloadedStorage:
    """A storage that a tier keeps for backward.

    Args:
        activations: Says where it goes, and how.
        run: Its elements, flat.
        storage: Where they came from; it may be gone.
        version: The version of the saved tensor.

    Raises:
        TierFullError: The tier has no room for it.
    """

    def __init__(
        self,
        activations: Activations,
        run: torch.Tensor,
        storage: weakref.ref[torch.UntypedStorage],
        version: int,
    ) -> None:
        self.activations = activations
        self.storage = storage
        self.version = version
        self.views: weakref.WeakSet[_SavedView] = weakref.WeakSet()  # what stands for it in the graph
        self._device = run.device
        self._lane = activations.lane(run)
        self._memory = memory = activations.allocate(run)
        self._source: torch.Tensor | None = run
        self._source_version = _version(run)
        self._fetching: Transfer[torch.Tensor] | None = None
        self._loaded: torch.Tensor | None = None  # while other views of this backward pass may ask for it
        self._task = OUTSIDE_BACKWARD
        self._waiting: set[int] = set()
        self.state = StorageState.STORING
        activations.meter.down("activations", activations.tier, run.nbytes)
        work = functools.partial(activations.write, memory, run)
        self._storing = activations.engine.run(work, self._lane, run.device, outward=True)
        if not activations.engine.is_async:
            self.finish_storing()

    def finish_storing(self) -> None:
        """Free the source on the device once it is copied, or raise a TransferError."""
        if self.state is StorageState.STORING:
            self._storing.wait()
            self._check_source()
            self._source = None
            self.state = StorageState.STORED if self.state is StorageState.STORING else self.state

    def prefetch(self, task: int) -> None:
        """Begin to copy it to the device, unless this backward pass has had it already."""
        if self._task != task and self.state is StorageState.STORED:
            self._fetching = self._start_fetch(self._lane)
            self.state = StorageState.PREFETCHED
            self.activations.prefetched.add(self)

    def drop_prefetched(self) -> None:
        """Free the prefetched copy."""
        if self.state is StorageState.PREFETCHED:
            self._fetching, self.state = None, StorageState.STORED

    def load(self, task: int, view: _SavedView) -> torch.Tensor:
        """Return its elements on the device for one of its views; they stay until its others have had them.

        Raises:
            TransferError: It could not be stored or loaded, or was changed in place while it was being stored.
        """
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
        if self.state is StorageState.STORING:
            self._check_source()
        if self.state is StorageState.CHANGED:
            raise TransferError(
                f"A tensor of {self._memory.numel()} {str(self._memory.dtype).removeprefix('torch.')} was changed in "
                "place while it was being stored. Do not change in place what backward needs, or switch "
                "Config(async_offload=...) off."
            )
        if self._source is not None:
            return self._source  # still there: nothing has to be copied
        fetching = self._fetching
        self.drop_prefetched()
        self.activations.meter.up("activations", self.activations.tier, self._memory.nbytes)
        if fetching is None:  # who would wait for a worker can as well do it
            fetching = self._start_fetch(Lane.CALLER if self._lane is Lane.WORKER else self._lane)
        return fetching.wait()

    def _start_fetch(self, lane: Lane) -> Transfer[torch.Tensor]:
        work = functools.partial(self.activations.read, self._memory, self._device)
        return self.activations.engine.run(work, lane, self._device, after=self._storing)

    def _check_source(self) -> None:
        if self._source is not None and _version(self._source) != self._source_version:
            self.state, self._source = StorageState.CHANGED, None

    def __del__(self) -> None:
        source = getattr(self, "_source", None)
        if source is not None and hasattr(self, "_storing"):
            self._storing.abandon(source)


class _SavedView:
    """What autograd has in place of a saved tensor."""

    __slots__ = ("__weakref__", "_call", "_geometry", "_stored")

    def __init__(self, stored: OffloadedStorage, call: _Call, geometry: _Geometry) -> None:
        self._stored = stored
        self._call = call
        self._geometry = geometry
        stored.views.add(self)

    def get(self) -> torch.Tensor:
        task = graph_task_id()
        self._call.reached(task, self._stored)
        with torch.no_grad():
            with self._stored.activations.meter.timing("offloading"):
                run = self._stored.load(task, self)
            offset, shape, stride = self._geometry
            return run.as_strided(shape, stride, run.storage_offset() + offset).detach()


# ---------------------------------------------------------------------- calls of layers


class _Calls(threading.local):
    """The calls of layers in this thread."""

    def __init__(self) -> None:
        self.stack: list[_Call] = []  # those that are running
        self.latest: weakref.ref[_Call] | None = None  # the one that ended last
        self._in_flight: deque[_Call] = (
            deque()
        )  # calls whose storages may still be on the device, oldest first

    def limit_in_flight(self, call: _Call, limit: int) -> None:
        """Wait for the storages of the oldest calls beyond the limit, or raise a TransferError."""
        if not self._in_flight or self._in_flight[-1] is not call:
            self._in_flight.append(call)
        while len(self._in_flight) > limit:
            for reference in self._in_flight.popleft().stored:
                stored = reference()
                if stored is not None:
                    stored.finish_storing()


class _Call:
    """One call of a layer. The graph owns it by what was saved in it; it knows the call before it weakly."""

    def __init__(self, resident: Collection[int], before: _Call | None, depth: int) -> None:
        self.resident = resident  # storages that are on the device anyway
        self.stored: list[weakref.ref[OffloadedStorage]] = []  # in it, in order
        self._before = None if before is None else weakref.ref(before)
        self._depth = depth
        self._task = OUTSIDE_BACKWARD

    def reached(self, task: int, now: OffloadedStorage) -> None:
        """Prefetch the rest of this call, and of the layers that come next: backward has reached it."""
        if task in (OUTSIDE_BACKWARD, self._task) or not now.activations.engine.is_async:
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
        at_end_of_backward(now.activations.drop_prefetched)


# ---------------------------------------------------------------------- what is saved


def _is_worth_storing(tensor: torch.Tensor, resident: Collection[int]) -> bool:
    if isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
        return False
    if not _has_storage(tensor) or tensor.is_conj() or tensor.is_neg():
        return False
    storage = tensor.untyped_storage()
    if (
        storage.nbytes() < LEAST_BYTES
        or storage._cdata in resident
        or storage.nbytes() % tensor.element_size()
    ):
        return False
    # Views of one tensor share its version, so one copy of its memory serves all of them. The results of
    # `unsafe_chunk` (the gates of a GRU) are no views: each has a part of the memory and its own version.
    owner = tensor._base if tensor._is_view() else tensor
    return owner is not None and owner.nbytes >= storage.nbytes()


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
