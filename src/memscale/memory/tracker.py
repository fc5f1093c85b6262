"""The tracker: every tensor storage of a training step, to the byte, by device and by what it is for.

Note [Following storages]
~~~~~~~~~~~~~~~~~~~~~~~~~
Memory belongs to storages, not tensors: views and aliases share one, in-place operations keep it, ``.data =``
exchanges it. The tracker is a dispatch mode: it sees the result of every operation (real or fake, forward or
backward), takes the result's storage and holds a weak reference to it. A storage's Python object lives exactly
as long as the storage itself, so the reference dies when the memory is freed. What a kernel allocates and frees
inside itself is not seen.

``UntypedStorage.resize_`` is the one way to change memory without an operation; it is patched while a tracker
is active.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memscale.memory import _autograd
from memscale.memory.allocator import Allocator, Block, ExactAllocator, OutOfDeviceMemory
from memscale.memory.record import (
    Allocation,
    Category,
    Mark,
    Phase,
    Snapshot,
    Timeline,
    snapshot,
    timeline,
)
from memscale.units import format_bytes

Watchable = nn.Module | Optimizer | torch.Tensor
AllocatorFactory = Callable[[], Allocator]


class _StorageRef(weakref.ref[Any]):
    """A weak reference that knows which entry to remove when the storage dies."""

    __slots__ = ("key",)
    key: int


class _Device:
    """One device's memory: its allocator and its high-water mark."""

    __slots__ = ("allocator", "name", "peak", "peak_reserved", "peak_tick")

    def __init__(self, name: str, allocator: Allocator) -> None:
        self.name = name
        self.allocator = allocator
        self.peak = allocator.allocated
        self.peak_reserved = allocator.reserved
        self.peak_tick = 0


class _Entry:
    """A storage that is alive."""

    __slots__ = ("allocation", "block", "device", "ref")

    def __init__(
        self, ref: _StorageRef, block: Block | None, device: _Device, allocation: Allocation
    ) -> None:
        self.ref = ref
        self.block = block
        self.device = device
        self.allocation = allocation


class MemoryTracker(TorchDispatchMode):
    """Follows the memory of everything that runs inside its ``with`` block.

    What existed before is counted from the moment it is watched: pass the model (and optimizer) to the
    constructor or to :meth:`watch`. Modules and optimizers that run inside the block are found by themselves.

    Args:
        watched: modules, optimizers or tensors to count from the start.
        allocators: how memory is handed out, by device type ("cuda": a ``CachingAllocator``); exact bytes
            where none is given.

    Example:
        >>> model = nn.Linear(8, 4, bias=False)
        >>> with MemoryTracker(model) as tracker:
        ...     model(torch.ones(2, 8)).sum().backward()
        >>> at_peak = tracker.at_peak("cpu")
        >>> at_peak.of(Category.WEIGHTS), at_peak.of(Category.GRADIENTS)
        (128, 128)
    """

    def __init__(self, *watched: Watchable, allocators: Mapping[str, AllocatorFactory] | None = None) -> None:
        super().__init__()
        self._factories = dict(allocators or {})
        self._devices: dict[torch.device, _Device] = {}
        self._live: dict[int, _Entry] = {}
        self._allocations: list[Allocation] = []
        self._marks: list[Mark] = []
        self._clock = 0
        self._phase = Phase.SETUP
        self._in_backward = False
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._stack: list[str] = []
        self._spans: list[tuple[int, str]] = []  # autograd sequence number -> module on top of the stack
        self._undo: list[Callable[[], None]] = []
        for each in watched:
            self.watch(each)

    # ------------------------------------------------------------------ what to follow

    def watch(self, target: Watchable) -> None:
        """Count what exists already: a module's parameters, gradients and buffers, an optimizer's state."""
        if isinstance(target, nn.Module):
            self._modules.add(target)
            self._name_modules(target)
            self._claim_module(target)
        elif isinstance(target, Optimizer):
            self._optimizers.add(target)
            self._claim_optimizer(target)
        elif isinstance(target, torch.Tensor):
            self._claim(target, Category.INPUTS)
        else:
            raise TypeError(
                f"MemoryTracker watches modules, optimizers and tensors, got {type(target).__name__}. "
                "Pass the model and, if it exists already, its optimizer."
            )

    def reserve(self, nbytes: int, device: torch.device, what: str) -> None:
        """Account for memory that no tensor shows, such as a library's workspace, from now on."""
        memory = self._device(device)
        block = self._allocate(memory, nbytes)
        piece = self._born(block.size, memory, what, (nbytes,), "uint8")
        piece.category = Category.WORKSPACE

    # ------------------------------------------------------------------ what was seen

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that have had memory in use."""
        return tuple(memory.name for memory in self._devices.values())

    @property
    def phase(self) -> Phase:
        return self._phase

    def live_bytes(self, device: str | torch.device = "cpu") -> int:
        """Bytes in use now."""
        memory = self._find(device)
        return memory.allocator.allocated if memory else 0

    def peak_bytes(self, device: str | torch.device = "cpu") -> int:
        """The most bytes in use at once since the start or the last :meth:`reset_peak`."""
        memory = self._find(device)
        return memory.peak if memory else 0

    def reserved_bytes(self, device: str | torch.device = "cpu") -> int:
        """Bytes the allocator holds now, in use or cached."""
        memory = self._find(device)
        return memory.allocator.reserved if memory else 0

    def peak_reserved_bytes(self, device: str | torch.device = "cpu") -> int:
        """The most bytes the allocator held: what a card of that size needs."""
        memory = self._find(device)
        return memory.peak_reserved if memory else 0

    def now(self, device: str | torch.device = "cpu", top: int = 10) -> Snapshot:
        """What is alive now."""
        self._claim_all()
        return snapshot(self._allocations, self._marks, self._name(device), self._clock, top)

    def at_peak(self, device: str | torch.device = "cpu", top: int = 10) -> Snapshot:
        """What was alive at the peak, the largest tensors with the module that made them."""
        self._claim_all()
        memory = self._find(device)
        tick = memory.peak_tick if memory else 0
        return snapshot(self._allocations, self._marks, self._name(device), tick, top)

    def timeline(self, device: str | torch.device = "cpu") -> Timeline:
        """Memory over time, by category, with the phases of each step."""
        self._claim_all()
        return timeline(self._allocations, self._marks, self._name(device))

    @property
    def clock(self) -> int:
        """Ticks so far: one for each piece of memory that came or went."""
        return self._clock

    def alive_since(self, tick: int, device: str | torch.device) -> dict[int, int]:
        """Bytes of what was born after ``tick`` and is alive now, by storage (``storage._cdata``)."""
        memory = self._find(device)
        return {
            key: entry.allocation.nbytes
            for key, entry in self._live.items()
            if entry.device is memory and entry.allocation.born > tick
        }

    def bytes_of_storage(self, key: int) -> int:
        """Bytes of one storage that is alive, by its ``_cdata``; 0 if it is not followed."""
        entry = self._live.get(key)
        return entry.allocation.nbytes if entry else 0

    def reset_peak(self) -> None:
        """Start a new high-water mark, and forget what died before it."""
        self._claim_all()
        self._allocations = [entry.allocation for entry in self._live.values()] + [
            piece for piece in self._allocations if piece.category is Category.WORKSPACE
        ]
        for memory in self._devices.values():
            memory.peak = memory.allocator.allocated
            memory.peak_reserved = memory.allocator.reserved
            memory.peak_tick = self._clock

    def empty_cache(self) -> None:
        """Give back what the allocators hold without using it."""
        for memory in self._devices.values():
            release = getattr(memory.allocator, "empty_cache", None)
            if release is not None:
                release()

    # ------------------------------------------------------------------ the mode

    def __enter__(self) -> MemoryTracker:
        self._install()
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        while self._undo:
            self._undo.pop()()
        self._stack.clear()
        self._leave_backward()
        self._claim_all()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._in_backward != _autograd.in_backward():
            self._turn_backward()
        result = func(*args, **kwargs) if kwargs else func(*args)
        if isinstance(result, torch.Tensor):
            self._follow(result, func)
        elif isinstance(result, (tuple, list)):
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._follow(leaf, func)
        return result

    def _follow(self, tensor: torch.Tensor, func: Any) -> None:
        if tensor.layout is not torch.strided:
            for part in _dense_parts(tensor):
                self._follow(part, func)
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._add(storage, tensor, str(func))

    def _add(self, storage: torch.UntypedStorage, tensor: torch.Tensor, op: str) -> _Entry:
        memory = self._device(tensor.device)
        # An empty storage is followed too: it may be resized later.
        block = self._allocate(memory, storage.nbytes(), tensor) if storage.nbytes() else None
        piece = self._born(block.size if block else 0, memory, op, tuple(tensor.shape), str(tensor.dtype)[6:])
        ref = _StorageRef(storage, self._on_death)
        ref.key = storage._cdata
        entry = self._live[ref.key] = _Entry(ref, block, memory, piece)
        return entry

    def _allocate(self, memory: _Device, nbytes: int, tensor: torch.Tensor | None = None) -> Block:
        try:
            block = memory.allocator.allocate(nbytes)
        except OutOfDeviceMemory as full:
            shape = f" for {str(tensor.dtype)[6:]}{list(tensor.shape)}" if tensor is not None else ""
            raise torch.OutOfMemoryError(self._out_of_memory(memory, full.requested, shape)) from None
        self._clock += 1
        if memory.allocator.allocated > memory.peak:
            memory.peak = memory.allocator.allocated
            memory.peak_tick = self._clock
        if memory.allocator.reserved > memory.peak_reserved:
            memory.peak_reserved = memory.allocator.reserved
        return block

    def _born(self, nbytes: int, memory: _Device, op: str, shape: tuple[int, ...], dtype: str) -> Allocation:
        piece = Allocation(
            nbytes=nbytes,
            device=memory.name,
            born=self._clock,
            phase=self._phase,
            op=op,
            module=self._current_module(),
            shape=shape,
            dtype=dtype,
        )
        self._allocations.append(piece)
        return piece

    def _on_death(self, ref: weakref.ref[Any]) -> None:
        assert isinstance(ref, _StorageRef)
        entry = self._live.pop(ref.key, None)
        if entry is not None:
            self._died(entry)

    def _died(self, entry: _Entry) -> None:
        self._clock += 1
        entry.allocation.died = self._clock
        if entry.block is not None:
            entry.device.allocator.free(entry.block)

    def _on_resize(self, storage: torch.UntypedStorage) -> None:
        entry = self._live.get(storage._cdata)
        if entry is None:
            return  # a storage that nobody watches
        old = entry.allocation
        self._died(entry)
        entry.block = None
        entry.block = self._allocate(entry.device, storage.nbytes()) if storage.nbytes() else None
        entry.allocation = self._born(
            entry.block.size if entry.block else 0, entry.device, old.op, old.shape, old.dtype
        )
        # The same storage in another size: what it is for does not change.
        entry.allocation.module, entry.allocation.category = old.module, old.category

    # ------------------------------------------------------------------ categories

    def _claim(self, tensor: torch.Tensor, category: Category) -> None:
        if tensor.layout is not torch.strided:
            for part in _dense_parts(tensor):
                self._claim(part, category)
            return
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata) or self._add(storage, tensor, "existing")
        known = entry.allocation.category
        # An input stays an input unless it turns out to be more than that; weights stay weights.
        if known is None or known is Category.INPUTS:
            entry.allocation.category = category

    def _claim_module(self, root: nn.Module) -> None:
        for parameter in root.parameters():
            self._claim(parameter, Category.WEIGHTS)
            if parameter.grad is not None:
                self._claim(parameter.grad, Category.GRADIENTS)
        for buffer in root.buffers():
            self._claim(buffer, Category.BUFFERS)

    def _claim_optimizer(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._claim(parameter, Category.WEIGHTS)
                if parameter.grad is not None:
                    self._claim(parameter.grad, Category.GRADIENTS)
        for state in optimizer.state.values():
            for leaf in tree_leaves(state):
                if isinstance(leaf, torch.Tensor):
                    self._claim(leaf, Category.OPTIMIZER)

    def _claim_all(self) -> None:
        for root in list(self._modules):
            self._claim_module(root)
        for optimizer in list(self._optimizers):
            self._claim_optimizer(optimizer)

    # ------------------------------------------------------------------ phases

    def _enter_phase(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._phase = phase
            self._clock += 1
            self._marks.append(Mark(self._clock, phase))

    def _turn_backward(self) -> None:
        """An operation is the first inside, or the first after, a backward pass."""
        if self._in_backward:
            self._leave_backward()
        else:
            self._in_backward = True
            self._enter_phase(Phase.BACKWARD)

    def _leave_backward(self) -> None:
        if self._in_backward:
            self._in_backward = False
            self._enter_phase(Phase.SETUP)
            self._claim_all()  # the gradients are there now, and zero_grad() may come next

    def _install(self) -> None:
        self._undo.append(module_hooks.register_module_forward_pre_hook(self._before_module).remove)
        self._undo.append(
            module_hooks.register_module_forward_hook(self._after_module, always_call=True).remove
        )
        self._undo.append(optimizer_hooks.register_optimizer_step_pre_hook(self._before_step).remove)
        self._undo.append(optimizer_hooks.register_optimizer_step_post_hook(self._after_step).remove)
        self._undo.append(_on_storage_resize(self._on_resize))

    def _before_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not self._stack and not _autograd.in_backward():
            self._begin_forward(module, inputs)
        self._push(self._names.get(module, type(module).__name__))

    def _begin_forward(self, root: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._leave_backward()
        self._modules.add(root)
        self._name_modules(root)
        self._claim_module(root)
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, torch.Tensor):
                self._claim(leaf, Category.INPUTS)
        self._enter_phase(Phase.FORWARD)

    def _after_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
            self._mark_span()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._leave_backward()
        self._optimizers.add(optimizer)
        self._claim_optimizer(optimizer)
        self._enter_phase(Phase.OPTIMIZER)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._claim_optimizer(optimizer)
        self._enter_phase(Phase.SETUP)

    # ------------------------------------------------------------------ which module made it

    def _name_modules(self, root: nn.Module) -> None:
        for name, module in root.named_modules():
            self._names.setdefault(module, name or type(root).__name__)

    def _push(self, name: str) -> None:
        self._stack.append(name)
        self._mark_span()

    def _mark_span(self) -> None:
        # Autograd numbers its nodes as forward makes them, so a node's number tells which module was running.
        if not self._in_backward:
            self._spans.append((_autograd.next_sequence_number(), self._stack[-1] if self._stack else ""))

    def _current_module(self) -> str:
        if self._stack:
            return self._stack[-1]
        number = _autograd.running_sequence_number() if self._in_backward else None
        if number is None:
            return ""
        position = bisect_right(self._spans, number, key=lambda span: span[0])
        return self._spans[position - 1][1] if position else ""

    # ------------------------------------------------------------------ devices

    def _device(self, device: torch.device) -> _Device:
        memory = self._devices.get(device)
        if memory is None:
            factory = self._factories.get(device.type, ExactAllocator)
            memory = self._devices[device] = _Device(str(device), factory())
        return memory

    def _find(self, device: str | torch.device) -> _Device | None:
        wanted = torch.device(device)
        for candidate in (wanted, torch.device(wanted.type, wanted.index or 0)):
            if candidate in self._devices:
                return self._devices[candidate]
        return None

    def _name(self, device: str | torch.device) -> str:
        memory = self._find(device)
        return memory.name if memory else str(torch.device(device))

    def _out_of_memory(self, memory: _Device, requested: int, what: str) -> str:
        allocator = memory.allocator
        capacity = allocator.capacity or 0
        self._claim_all()
        here = snapshot(self._allocations, self._marks, memory.name, self._clock, 5)
        categories = ", ".join(f"{name} {format_bytes(count)}" for name, count in here.by_category)
        largest = "".join(f"\n  {format_bytes(each.nbytes)}  {each.description}" for each in here.top)
        module = self._current_module()
        return (
            f"{memory.name} out of memory. Tried to allocate {format_bytes(requested)}{what}"
            f"{' in ' + module if module else ''} ({self._phase}). The device has a total capacity of "
            f"{format_bytes(capacity)}, of which {format_bytes(capacity - allocator.reserved)} is free; "
            f"{format_bytes(allocator.allocated)} is allocated and "
            f"{format_bytes(allocator.reserved - allocator.allocated)} is reserved but unallocated.\n"
            f"In use: {categories or 'nothing yet'}.\nLargest:{largest or ' none'}"
        )


def _dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The strided tensors that make up a sparse one."""
    if tensor.layout is torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def _on_storage_resize(callback: Callable[[torch.UntypedStorage], None]) -> Callable[[], None]:
    """Call back after every ``storage.resize_``, which no dispatch mode sees; returns how to undo it."""
    before = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = before(storage, size)
        callback(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]

    def undo() -> None:
        torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]

    return undo
