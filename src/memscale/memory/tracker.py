"""The tracker: every tensor storage of a training step, to the byte, by device and by what it is for.

Note [Following storages]
~~~~~~~~~~~~~~~~~~~~~~~~~
Memory belongs to storages, not tensors: views and aliases share one, in-place operations keep it, ``.data =``
exchanges it. The tracker is a dispatch mode: it sees the operands and the result of every operation (real or
fake, forward or backward), takes their storages and holds a weak reference to each. A storage's Python object
lives exactly as long as the storage itself, so the reference dies when the memory is freed. An operand that
nobody has seen is memory from before the block, counted from then on. What a kernel allocates and frees
inside itself is not seen.

``UntypedStorage.resize_`` is the one way to change memory without an operation; it is patched while a tracker
is active.

Which module is running: in forward by its hooks, in backward by autograd's numbers.

Note [Names in backward]
~~~~~~~~~~~~~~~~~~~~~~~~
Autograd numbers its nodes as forward makes them, so that the number of the node that runs in backward tells
which module was running in forward. Each thread counts for itself: what a device's own thread makes during
backward (a recomputation of the reentrant kind) can't be put in order with the rest and gets no name.

Tensors whose bytes are not in memory: those of mapped files, which the tracker leaves out.

To torch they are ordinary CPU tensors. Their pages come and go, and the system can take them back at any time: what
is in memory of them at some moment is not theirs to say, but that of whoever uses them
(`memscale.offload.mapped_parameters`).

Pages of mapped tensors that are in memory for a while: trackers count them as long as that is.
"""

from __future__ import annotations

import contextlib
import functools
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

from memscale._torch import (
    OUTSIDE_BACKWARD,
    TorchDispatchMode,
    at_end_of_backward,
    current_dispatch_modes,
    disable_current_modes,
    graph_task_id,
    in_backward,
    is_traceable_wrapper_subclass,
    next_sequence_number,
    running_sequence_number,
    tree_leaves,
)
from memscale.errors import ProfileError
from memscale.memory.allocator import OutOfDeviceMemory
from memscale.memory.ledger import AllocatorFactory, DeviceMemory, Entry, Ledger, Replay, StepLog
from memscale.memory.record import Category, Phase, Snapshot, Timeline
from memscale.units import format_bytes

__all__ = ["Pages", "is_elsewhere", "made_elsewhere", "mark_elsewhere"]

Watchable = nn.Module | Optimizer | torch.Tensor

HISTORY = 50_000
_ORDINARY: frozenset[type] = frozenset({torch.Tensor, nn.Parameter})


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its `__init_subclass__`
    """Follows the memory of everything that runs inside its ``with`` block.

    What existed before is counted from the moment it is watched or used: pass the model (and optimizer) to
    the constructor or to :meth:`watch`. Modules and optimizers that run inside the block are found by
    themselves.

    Args:
        watched: modules, optimizers or tensors to count from the start.
        allocators: how memory is handed out, by device type ("cuda": a ``CachingAllocator``); exact bytes
            where none is given.
        history: how many pieces of memory are remembered after their death; :meth:`timeline` goes back as far
            (Note [History] in ``ledger.py``).

    Example:
        >>> model = nn.Linear(8, 4, bias=False)
        >>> with MemoryTracker(model) as tracker:
        ...     model(torch.ones(2, 8)).sum().backward()
        >>> at_peak = tracker.at_peak("cpu")
        >>> at_peak.of(Category.WEIGHTS), at_peak.of(Category.GRADIENTS)
        (128, 128)
    """

    # Kinds of tensors that have a storage of their own, where this need not be found out for each.
    _plain = _ORDINARY

    # What the last operation allocated beside its results, and has freed again, as far as that is known.
    temporary_bytes = 0
    # Numbers that Python has asked for and that nobody had computed; only a simulation has them.
    guesses = 0

    # Operators that take functions (flex_attention, cond) refuse to run under a mode that does not say this.
    supports_higher_order_operators = True

    def __init__(
        self,
        *watched: Watchable,
        allocators: Mapping[str, AllocatorFactory] | None = None,
        history: int = HISTORY,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = Ledger(allocators or {}, history)
        self._live = self._ledger.live
        self._running = RunningModules()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._in_backward = False
        self._undo: list[Callable[[], object]] = []
        for each in watched:
            self.watch(each)

    # ------------------------------------------------------------------ what to follow

    def watch(self, target: Watchable) -> None:
        """Count what exists already: a module's parameters, gradients and buffers, an optimizer's state."""
        if isinstance(target, nn.Module):
            self._running.add_root(target)
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
        try:
            self._ledger.reserve(nbytes, device, what)
        except OutOfDeviceMemory as full:
            raise self._out_of_memory(device, full.requested, f" for {what}") from None

    def hold(self, nbytes: int, device: torch.device, what: str) -> Callable[[], None]:
        """Account for memory that no tensor of its own shows, until what is returned is called."""
        try:
            return self._ledger.hold(nbytes, device, what)
        except OutOfDeviceMemory as full:
            raise self._out_of_memory(device, full.requested, f" for {what}") from None

    # ------------------------------------------------------------------ what was seen

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that have had memory in use."""
        return tuple(memory.name for memory in self._ledger.devices.values())

    @property
    def phase(self) -> Phase:
        return self._ledger.phase

    @property
    def clock(self) -> int:
        """Ticks so far: one for each piece of memory that came or went, and for each phase that began."""
        return self._ledger.clock

    def live_bytes(self, device: str | torch.device = "cpu") -> int:
        """Bytes in use now."""
        memory = self._ledger.find(device)
        return memory.allocator.allocated if memory else 0

    def workspace_bytes(self, device: str | torch.device = "cpu") -> int:
        """Bytes in use now that no tensor shows: what :meth:`reserve` has taken."""
        return self._ledger.reserved_for_libraries(device)

    def peak_bytes(self, device: str | torch.device = "cpu") -> int:
        """The most bytes in use at once since the start or the last :meth:`reset_peak`."""
        memory = self._ledger.find(device)
        return memory.peak if memory else 0

    def reserved_bytes(self, device: str | torch.device = "cpu") -> int:
        """Bytes the allocator holds now, in use or cached."""
        memory = self._ledger.find(device)
        return memory.allocator.reserved if memory else 0

    def peak_reserved_bytes(self, device: str | torch.device = "cpu") -> int:
        """The most bytes the allocator held: what a card of that size needs."""
        memory = self._ledger.find(device)
        return memory.peak_reserved if memory else 0

    def now(self, device: str | torch.device = "cpu", top: int = 10) -> Snapshot:
        """What is alive now."""
        self._claim_all()
        return self._ledger.now(self._name(device), top)

    def at_peak(self, device: str | torch.device = "cpu", top: int = 10) -> Snapshot:
        """What was alive at the peak, the largest tensors with the module that made them."""
        self._claim_all()
        memory = self._ledger.find(device)
        return self._ledger.at_peak(memory, top) if memory else self._ledger.now(self._name(device), top)

    def timeline(self, device: str | torch.device = "cpu") -> Timeline:
        """Memory over time, by category, with the phases of each step."""
        self._claim_all()
        return self._ledger.timeline(self._name(device))

    def alive_since(self, tick: int, device: str | torch.device, until: int | None = None) -> dict[int, int]:
        """Bytes of what was born after ``tick`` and is alive now, by storage (``storage._cdata``).

        ``until``: not of what was born after that tick.
        """
        memory = self._ledger.find(device)
        last = self.clock if until is None else until
        return {
            key: entry.allocation.nbytes
            for key, entry in list(self._live.items())
            if entry.device is memory and tick < entry.allocation.born <= last
        }

    def bytes_of_storage(self, key: int) -> int:
        """Bytes of one storage that is alive, by its ``_cdata``; 0 if it is not followed."""
        entry = self._live.get(key)
        return entry.allocation.nbytes if entry else 0

    @contextlib.contextmanager
    def logging(self, device: str | torch.device) -> Iterator[StepLog]:
        """Write down what a device's memory is asked for inside the block, to be replayed."""
        log = self._ledger.log = StepLog(self._name(device))
        try:
            yield log
        finally:
            self._ledger.log = None

    def replay(self, log: StepLog, marks: Iterable[int] = ()) -> Replay:
        """Ask a device's memory for the same again. See Note [Steps again and again]."""
        memory = self._ledger.find(log.device)
        assert memory is not None  # the log is of it
        return log.replay(memory.allocator, marks)

    def reset_peak(self) -> None:
        """Start a new high-water mark, and forget what died before it."""
        self._claim_all()
        self._ledger.reset_peak()

    def empty_cache(self) -> None:
        """Give back what the allocators hold without using it."""
        for memory in self._ledger.devices.values():
            release = getattr(memory.allocator, "empty_cache", None)
            if release is not None:
                release()

    # ------------------------------------------------------------------ the mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch hides a mode from the compiler by a wrapper that costs as much as the tracker itself, and
        # imports the compiler at the first operation. Under a mode the compiler leaves code alone anyway.
        return False

    def __enter__(self) -> MemoryTracker:
        if self._undo:
            raise ProfileError(
                "This MemoryTracker is active already; use another one for a block inside a block."
            )
        self._install()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        while self._undo:
            self._undo.pop()()
        self._running.clear()
        self._leave_backward()
        self._claim_all()
        self._ledger.enter_phase(Phase.SETUP)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._in_backward != (graph_task_id() != OUTSIDE_BACKWARD):
            self._turn_backward()
        self._meet(args)
        if kwargs:
            self._meet(kwargs.values())
        result = self._run(func, args, kwargs or {})
        kind = type(result)
        if kind in self._plain and result.layout is torch.strided:
            self._follow_storage(result, func)  # nearly all results, so without a detour
        elif kind is tuple or kind is list:
            self._follow_each(result, func)
        elif isinstance(result, torch.Tensor):
            self._follow(result, func)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _meet(self, values: Iterable[Any]) -> None:
        """Count operands that nobody has seen: what the user had before the block began."""
        live, plain = self._live, self._plain
        for value in values:
            kind = type(value)
            if kind in plain and value.layout is torch.strided:
                if value.untyped_storage()._cdata not in live:
                    self._claim(value, Category.INPUTS)
            elif kind is list or kind is tuple:
                self._meet(value)
            elif isinstance(value, torch.Tensor):
                if self._has_parts(value):
                    self._meet(parts_of(value))
                elif value.untyped_storage()._cdata not in live:
                    self._claim(value, Category.INPUTS)

    def _follow_each(self, results: Iterable[Any], func: Any) -> None:
        for result in results:
            if isinstance(result, torch.Tensor):
                self._follow(result, func)
            elif isinstance(result, (tuple, list)):
                self._follow_each(result, func)

    def _follow(self, tensor: torch.Tensor, func: Any) -> None:
        if self._has_parts(tensor):
            self._follow_each(parts_of(tensor), func)
        else:
            self._follow_storage(tensor, func)

    def _follow_storage(self, tensor: torch.Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata)
        if entry is None:
            self._add(storage, tensor, func)
        elif entry.size != storage.nbytes():  # by resize_, set_ or an out= argument
            self._on_resize(storage, storage.nbytes())()

    def _add(self, storage: torch.UntypedStorage, tensor: torch.Tensor, op: object | None) -> Entry | None:
        device = self._device_of(tensor, storage)
        if device is None or is_elsewhere(storage):
            return None
        try:
            return self._ledger.add(storage, tensor, device, op, self._running.current(self._in_backward))
        except OutOfDeviceMemory as full:
            what = f" for {str(tensor.dtype)[6:]}{list(tensor.shape)}"
            raise self._out_of_memory(device, full.requested, what) from None

    def _device_of(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.device | None:
        """Where a tensor's memory is; None if it has none: a meta tensor, or one of a simulation inside."""
        if type(tensor) in _ORDINARY:
            return None if tensor.is_meta else tensor.device
        return None if storage.device.type == "meta" else tensor.device

    def _has_parts(self, tensor: torch.Tensor) -> bool:
        if type(tensor) in self._plain:
            return tensor.layout is not torch.strided
        return tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor)

    def _on_resize(self, storage: torch.UntypedStorage, size: int) -> Callable[[], None]:
        """Before a storage is resized; returns what to do when that is done."""
        entry = self._live.get(storage._cdata)
        if entry is None or size == entry.size:
            return _nothing  # a storage that nobody watches
        # The new memory is taken before the old is given back: torch copies from the one to the other.
        try:
            block = self._ledger.take(entry.device, size) if size else None
        except OutOfDeviceMemory as full:
            raise self._out_of_memory(entry.device.name, full.requested, " to resize a storage") from None
        return lambda: self._ledger.replace(entry, block, size)

    # ------------------------------------------------------------------ categories

    def _claim(self, tensor: torch.Tensor, category: Category, module: str = "") -> None:
        if self._has_parts(tensor):
            for part in parts_of(tensor):
                self._claim(part, category, module)
            return
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata) or self._add(storage, tensor, None)
        if entry is None:
            return
        piece = entry.allocation
        # An input stays an input unless it turns out to be more than that; weights stay weights.
        if piece.category is None or piece.category is Category.INPUTS:
            piece.category = category
            piece.module = piece.module or module

    def _claim_module(self, root: nn.Module) -> None:
        for module in root.modules():
            parameters, buffers = module._parameters, module._buffers
            if not parameters and not buffers:
                continue
            name = self._running.name_of(module)
            for parameter in parameters.values():
                if parameter is not None:
                    self._claim_parameter(parameter, name)
            for buffer in buffers.values():
                if buffer is not None:
                    self._claim(buffer, Category.BUFFERS, name)

    def _claim_parameter(self, parameter: torch.Tensor, module: str = "") -> None:
        self._claim(parameter, Category.WEIGHTS, module)
        if parameter.grad is not None:
            self._claim(parameter.grad, Category.GRADIENTS, module)

    def _claim_optimizer(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._claim_parameter(parameter)
        for parameter, state in optimizer.state.items():
            module = self._module_of(parameter)
            for leaf in state.values() if isinstance(state, dict) else tree_leaves(state):
                for each in (leaf,) if isinstance(leaf, torch.Tensor) else tree_leaves(leaf):
                    if isinstance(each, torch.Tensor):
                        self._claim(each, Category.OPTIMIZER, module)

    def _claim_inputs(self, inputs: Any) -> None:
        for leaf in tree_leaves(inputs):
            # What an earlier module computed (a loss is a module, too) is that module's result.
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is None and not self._module_of(leaf):
                self._claim(leaf, Category.INPUTS)

    def _claim_all(self) -> None:
        for root in list(self._running.roots):
            self._claim_module(root)
        for optimizer in list(self._optimizers):
            self._claim_optimizer(optimizer)

    def _module_of(self, tensor: Any) -> str:
        """The module that a tensor's memory belongs to, if that is known."""
        if not isinstance(tensor, torch.Tensor) or self._has_parts(tensor):
            return ""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return entry.allocation.module if entry else ""

    # ------------------------------------------------------------------ phases

    def _turn_backward(self) -> None:
        """An operation is the first inside, or the first after, a backward pass."""
        if self._in_backward:
            self._leave_backward()
        else:
            self._in_backward = True
            self._ledger.enter_phase(Phase.BACKWARD)
            at_end_of_backward(self._leave_backward)

    def _leave_backward(self) -> None:
        if self._in_backward:
            self._in_backward = False
            # Inside a module a backward is a part of its forward (a gradient penalty).
            self._ledger.enter_phase(Phase.FORWARD if self._running else Phase.SETUP)
            self._claim_all()  # the gradients are there now, and zero_grad() may come next

    def _install(self) -> None:
        self._undo.append(module_hooks.register_module_forward_pre_hook(self._before_module).remove)
        after = module_hooks.register_module_forward_hook(
            self._after_module, with_kwargs=True, always_call=True
        )
        self._undo.append(after.remove)
        # torch 2.13 leaves this behind when it removes the hook.
        self._undo.append(lambda: module_hooks._global_forward_hooks_with_kwargs.pop(after.id, None))
        self._undo.append(optimizer_hooks.register_optimizer_step_pre_hook(self._before_step).remove)
        self._undo.append(optimizer_hooks.register_optimizer_step_post_hook(self._after_step).remove)
        self._undo.append(_on_storage_resize(self._on_resize))

    def _before_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not self._running and not in_backward():
            self._begin_forward(module, inputs)
        self._running.enter(module)

    def _begin_forward(self, root: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._leave_backward()
        self._running.add_root(root)
        self._claim_module(root)
        self._claim_inputs(inputs)
        self._ledger.enter_phase(Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION)

    def _after_module(self, module: nn.Module, inputs: Any, *rest: Any) -> None:
        if not self._running.leave(module) or self._running:
            return
        # Only here torch shows keyword arguments to a hook of all modules; after an error, not even here.
        if len(rest) == 2:
            self._claim_inputs(rest[0])

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._leave_backward()
        self._optimizers.add(optimizer)
        self._claim_optimizer(optimizer)
        self._ledger.enter_phase(Phase.OPTIMIZER)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._claim_optimizer(optimizer)
        self._ledger.enter_phase(Phase.SETUP)

    # ------------------------------------------------------------------ messages

    def _name(self, device: str | torch.device) -> str:
        memory = self._ledger.find(device)
        return memory.name if memory else str(torch.device(device))

    def _out_of_memory(self, device: str | torch.device, requested: int, what: str) -> torch.OutOfMemoryError:
        memory = self._ledger.find(device)
        assert memory is not None
        self._claim_all()
        module = self._running.current(self._in_backward)
        where = f" in {module}" if module else ""
        return torch.OutOfMemoryError(
            f"{memory.name} out of memory. Tried to allocate {format_bytes(requested)}{what}{where} "
            f"({self.phase}). {_state(memory)}\n{_contents(self._ledger.now(memory.name, 5))}"
        )


def _state(memory: DeviceMemory) -> str:
    capacity, allocated, reserved = (
        memory.allocator.capacity or 0,
        memory.allocator.allocated,
        memory.allocator.reserved,
    )
    return (
        f"The device has a total capacity of {format_bytes(capacity)}, of which "
        f"{format_bytes(capacity - reserved)} is free; {format_bytes(allocated)} is allocated and "
        f"{format_bytes(reserved - allocated)} is reserved but unallocated."
    )


def _contents(here: Snapshot) -> str:
    categories = ", ".join(f"{name} {format_bytes(count)}" for name, count in here.by_category)
    largest = "".join(f"\n  {format_bytes(each.nbytes)}  {each.description}" for each in here.top)
    return f"In use: {categories or 'nothing yet'}.\nLargest:{largest or ' none'}"


def _nothing() -> None:
    pass


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that make up a sparse one, or one that is a wrapper around others."""
    if is_traceable_wrapper_subclass(tensor):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    with disable_current_modes():  # to ask a sparse tensor for its parts is an operation, too
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _on_storage_resize(
    begin: Callable[[torch.UntypedStorage, int], Callable[[], None]],
) -> Callable[[], None]:
    """Call ``begin`` before every ``storage.resize_``, which no mode sees, and what it returned afterwards.

    Returns how to undo it.
    """
    before = torch.UntypedStorage.resize_
    inherited = "resize_" not in vars(torch.UntypedStorage)

    def resize_(storage: Any, size: int) -> Any:
        done = begin(storage, size)
        result = before(storage, size)
        done()
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]

    def undo() -> None:
        if inherited:
            del torch.UntypedStorage.resize_
        else:
            torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]

    return undo


MOST_SPANS = 50_000  # module calls whose backward can be named; the oldest are forgotten


class RunningModules:
    """The modules that are running, and the names of all that have run."""

    def __init__(self) -> None:
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._stack: list[tuple[nn.Module, str]] = []
        self._numbers: list[int] = []  # autograd's number at each change of the running module,
        self._from_then: list[str] = []  # and who ran from then on

    def __bool__(self) -> bool:
        """Is any module running?"""
        return bool(self._stack)

    def name_of(self, module: nn.Module) -> str:
        return self._names.get(module, "")

    def add_root(self, root: nn.Module) -> None:
        """Learn the names of a model's modules."""
        self.roots.add(root)
        if self._names.get(root, type(root).__name__) != type(root).__name__:
            return  # a part of a model that is known: its names say where it is
        for name, module in root.named_modules():
            if name or module not in self._names:
                self._names[module] = name or type(root).__name__

    def enter(self, module: nn.Module) -> None:
        self._stack.append((module, self._names.get(module) or type(module).__name__))
        self._mark()

    def leave(self, module: nn.Module) -> bool:
        """Returns False for a module that was never entered, because its call failed before."""
        if not self._stack or self._stack[-1][0] is not module:
            return False
        self._stack.pop()
        self._mark()
        return True

    def clear(self) -> None:
        self._stack.clear()

    def current(self, in_backward: bool) -> str:
        """The module that an operation belongs to; empty if that is not known."""
        if self._stack:
            return self._stack[-1][1]
        number = running_sequence_number() if in_backward else None
        if number is None:
            return ""
        position = bisect_right(self._numbers, number)
        return self._from_then[position - 1] if position else ""

    def _mark(self) -> None:
        """See Note [Names in backward]."""
        number = next_sequence_number()
        if self._numbers and self._numbers[-1] > number:
            return
        self._numbers.append(number)
        self._from_then.append(self._stack[-1][1] if self._stack else "")
        if len(self._numbers) > MOST_SPANS:
            del self._numbers[: MOST_SPANS // 2], self._from_then[: MOST_SPANS // 2]


_storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by the address of the C++ object
_making = 0


def mark_elsewhere(storage: torch.UntypedStorage) -> None:
    """Say of a storage that its bytes are not in memory; before a tracker sees it.

    Example:
        >>> x = torch.ones(2)
        >>> mark_elsewhere(x.untyped_storage())
        >>> is_elsewhere(x.untyped_storage()), is_elsewhere(torch.ones(2).untyped_storage())
        (True, False)
    """
    key = storage._cdata
    _storages[key] = weakref.ref(storage, functools.partial(_forget, key))


def is_elsewhere(storage: torch.UntypedStorage) -> bool:
    """Whether a storage's bytes are not in memory."""
    if _making:
        mark_elsewhere(storage)
        return True
    found = _storages.get(storage._cdata)
    return found is not None and found() is storage


@contextlib.contextmanager
def made_elsewhere() -> Iterator[None]:
    """Whatever a tracker meets for the first time inside the block is not in memory: for simulated tensors."""
    global _making
    _making += 1
    try:
        yield
    finally:
        _making -= 1


def _forget(key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
    if _storages.get(key) is reference:
        del _storages[key]


_HOST = torch.device("cpu")


class Pages:
    """Bytes of mapped tensors that are in use, from now until `leave` is called.

    Args:
        nbytes: how many.
        simulated: they are in a simulation, and only its tracker is to know.

    Example:
        >>> with MemoryTracker() as tracker:
        ...     pages = Pages(4096)
        ...     before = tracker.live_bytes("cpu")
        ...     pages.leave()
        >>> before, tracker.live_bytes("cpu")
        (4096, 0)
    """

    def __init__(self, nbytes: int, *, simulated: bool = False) -> None:
        # Private in torch (tried on 2.13): the modes that are active in this thread, the innermost last.
        active = [mode for mode in current_dispatch_modes() if isinstance(mode, MemoryTracker)]
        looking_on = active[-1:] if simulated else active
        self._leave: list[Callable[[], None]] = [
            tracker.hold(nbytes, _HOST, "pages of mapped tensors") for tracker in looking_on
        ]

    def leave(self) -> None:
        """They are given back."""
        while self._leave:
            self._leave.pop()()
