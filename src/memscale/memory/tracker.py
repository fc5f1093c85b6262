"""The tracker: every tensor storage of a training step, to the byte, by device and category.

Note [Following storages]
Memory belongs to storages, not tensors: views share one, `.data =` exchanges it. The tracker is a dispatch mode: it
sees the operands and the result of every operation and holds a weak reference to each storage, whose Python object
lives exactly as long as the memory. An operand that was not seen before is memory from before the block, and is
counted from then on. `UntypedStorage.resize_`, the one way to change memory without an operation, is patched.

Note [Module names in backward]
Autograd numbers its nodes in the order of forward, so the number of the node that runs in backward tells which module
was running in forward. Each thread has its own numbers: what the device's thread creates during backward (a reentrant
recomputation) gets no name.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks

from memscale._torch import (
    OUTSIDE_BACKWARD,
    LightDispatchMode,
    at_end_of_backward,
    attribute,
    current_dispatch_modes,
    disable_current_modes,
    forget_global_forward_hook,
    graph_task_id,
    in_backward,
    is_traceable_wrapper_subclass,
    next_sequence_number,
    running_sequence_number,
    tree_leaves,
)
from memscale.errors import ProfileError
from memscale.memory.record import AllocatorFactory, Category, Entry, Ledger, Phase, is_mapped

Watchable = nn.Module | Optimizer | torch.Tensor

_ORDINARY: frozenset[type] = frozenset({torch.Tensor, nn.Parameter})
MAX_SPANS = 50_000  # module calls whose backward can be named; the oldest are dropped


class ForwardSpans:
    """Which module ran in forward when a node of autograd was made. See Note [Module names in backward]."""

    def __init__(self) -> None:
        self._numbers: list[int] = []  # autograd's sequence number at each change of the running module,
        self._names: list[str | None] = []  # and the module that ran from then on

    def begin(self, name: str | None) -> None:
        """Note that a module, or none (None), runs from now on."""
        number = next_sequence_number()
        if self._numbers and self._numbers[-1] > number:
            return
        self._numbers.append(number)
        self._names.append(name)
        if len(self._numbers) > MAX_SPANS:
            del self._numbers[: MAX_SPANS // 2], self._names[: MAX_SPANS // 2]

    def in_backward(self) -> str | None:
        """Return the module whose backward is running; None if unknown."""
        number = running_sequence_number()
        position = 0 if number is None else bisect_right(self._numbers, number)
        return self._names[position - 1] if position else None


class RunningModules:
    """The stack of modules whose forward is running, and the names of all that have run."""

    def __init__(self) -> None:
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.stack: list[tuple[nn.Module, str]] = []
        self._spans = ForwardSpans()

    def add_root(self, root: nn.Module) -> None:
        """Read the names of a model's modules."""
        self.roots.add(root)
        if self.names.get(root, type(root).__name__) != type(root).__name__:
            return  # part of a known model, whose names tell where it is
        for name, module in root.named_modules():
            if name or module not in self.names:
                self.names[module] = name or type(root).__name__

    def enter(self, module: nn.Module) -> None:
        self.stack.append((module, self.names.get(module) or type(module).__name__))
        self._spans.begin(self.stack[-1][1])

    def leave(self, module: nn.Module) -> bool:
        """Return False for a module that was never entered because its call failed before."""
        place = next((at for at in reversed(range(len(self.stack))) if self.stack[at][0] is module), None)
        if place is None:
            return False
        del self.stack[place:]  # with those inside it, which an exception may have ended
        self._spans.begin(self.stack[-1][1] if self.stack else "")
        return True

    def current(self, in_backward: bool) -> str:
        """Return the name of the module that an operation belongs to; empty if unknown."""
        if self.stack:
            return self.stack[-1][1]
        return (self._spans.in_backward() if in_backward else None) or ""


class MemoryTracker(LightDispatchMode, Ledger):
    """Track the memory of everything that runs inside its `with` block.

    What existed before is counted once it is watched or used: pass the model (and optimizer) to the constructor or to
    `watch`. Modules and optimizers that run inside the block are found automatically.

    Args:
        watched: modules, optimizers or tensors to count from the start.
        allocators: models of allocators, by device type ("cuda": a `CachingAllocator`); exact bytes without one.

    Example:
        >>> model = nn.Linear(8, 4, bias=False)
        >>> with MemoryTracker(model) as tracker:
        ...     model(torch.ones(2, 8)).sum().backward()
        >>> at_peak = tracker.at_peak("cpu")
        >>> at_peak.of(Category.WEIGHTS), at_peak.of(Category.GRADIENTS)
        (128, 128)
    """

    # Classes of tensors known to have one storage of their own.
    _plain = _ORDINARY

    # What the last operation allocated besides its results and freed again, as far as known.
    temporary_bytes = 0
    # Numbers that Python code read and that were made up: in a simulation only.
    guesses = 0

    # Operators that take functions (flex_attention, cond) refuse to run under a mode that does not say this.
    supports_higher_order_operators = True

    def __init__(self, *watched: Watchable, allocators: Mapping[str, AllocatorFactory] | None = None) -> None:
        LightDispatchMode.__init__(self)
        Ledger.__init__(self, allocators or {})
        self._running = RunningModules()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._in_backward = False
        self._depth = 0  # of the modules that run outside of backward
        self._active: contextlib.ExitStack | None = None  # hooks and patches
        for each in watched:
            self.watch(each)

    def watch(self, target: Watchable) -> None:
        """Count what exists: a module's parameters, gradients and buffers, an optimizer's state, a tensor."""
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
        """Account for memory without a tensor, such as a library's workspace, from now on."""
        self.hold(nbytes, device, what, Category.WORKSPACE)

    def __enter__(self) -> MemoryTracker:
        if self._active is not None:
            raise ProfileError(
                "This MemoryTracker is active already; use another one for a block inside a block."
            )
        after = module_hooks.register_module_forward_hook(
            self._after_module, with_kwargs=True, always_call=True
        )
        resize: Any = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            done = self._on_resize(storage, size)
            result = resize(storage, size)
            done()
            return result

        self._active = contextlib.ExitStack()
        self._active.enter_context(attribute(torch.UntypedStorage, "resize_", resize_))
        self._active.callback(forget_global_forward_hook, after.id)
        for handle in (
            after,
            module_hooks.register_module_forward_pre_hook(self._before_module),
            optimizer_hooks.register_optimizer_step_pre_hook(self._before_step),
            optimizer_hooks.register_optimizer_step_post_hook(self._after_step),
        ):
            self._active.callback(handle.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._active is not None:
            self._active.close()
            self._active = None
        self._running.stack.clear()
        self._end_backward()
        self._claim_all()
        self._enter_phase(Phase.SETUP)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._in_backward != (graph_task_id() != OUTSIDE_BACKWARD):
            if self._in_backward:
                self._end_backward()
            else:
                self._in_backward = True
                self._enter_phase(Phase.BACKWARD)
                at_end_of_backward(self._end_backward)
        self._count_operands(args)
        if kwargs:
            self._count_operands(kwargs.values())
        result = self._run(func, args, kwargs or {})
        if type(result) in self._plain and result.layout is torch.strided:
            self._count_result(result, func)  # nearly all results
        else:
            for part in self._strided(result):
                self._count_result(part, func)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _count_operands(self, values: Iterable[Any]) -> None:
        """Count operands that were not seen before: what existed before the block."""
        live, plain = self._live, self._plain
        for value in values:
            if type(value) in plain and value.layout is torch.strided:
                if value.untyped_storage()._cdata not in live:
                    self._claim(value, Category.INPUTS)
            else:
                for part in self._strided(value):
                    if part.untyped_storage()._cdata not in live:
                        self._claim(part, Category.INPUTS)

    def _count_result(self, tensor: torch.Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata)
        if entry is None:
            self._add(storage, tensor, func)
        elif entry.size != storage.nbytes():  # by resize_, set_ or an out= argument
            self._on_resize(storage, storage.nbytes())()

    def _strided(self, value: Any) -> Iterator[torch.Tensor]:
        """Yield tensors of one storage each: a tensor itself or its parts, and those of lists and tuples."""
        if isinstance(value, torch.Tensor):
            plain = type(value) in self._plain or not is_traceable_wrapper_subclass(value)
            if plain and value.layout is torch.strided:
                yield value
            else:
                for part in parts_of(value):
                    yield from self._strided(part)
        elif isinstance(value, (list, tuple)):
            for each in value:
                yield from self._strided(each)

    def _add(self, storage: torch.UntypedStorage, tensor: torch.Tensor, op: object | None) -> Entry | None:
        device = self._device_of(tensor, storage)
        if device is None or is_mapped(storage):
            return None
        return self._follow(storage, tensor, device, op)

    def _current_module(self) -> str:
        return self._running.current(self._in_backward)

    def _device_of(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.device | None:
        """Return where a tensor's memory is; None for a meta tensor, or one of a simulation inside the block."""
        if type(tensor) in _ORDINARY:
            return None if tensor.is_meta else tensor.device
        return None if storage.device.type == "meta" else tensor.device

    def _on_resize(self, storage: torch.UntypedStorage, size: int) -> Callable[[], None]:
        """Prepare for the resizing of a storage; return what to do afterwards."""
        entry = self._live.get(storage._cdata)
        if entry is None or size == entry.size:
            return lambda: None  # not tracked
        # The new memory is allocated before the old is released: torch copies from one to the other.
        block = self._allocate(entry.device, size, "to resize a storage") if size else None
        return lambda: self._replace(entry, block, size)

    def _claim(self, tensor: torch.Tensor, category: Category, module: str = "") -> None:
        for part in self._strided(tensor):
            storage = part.untyped_storage()
            entry = self._live.get(storage._cdata) or self._add(storage, part, None)
            # An input may turn out to be a weight or a buffer; other categories are final.
            if entry is not None and entry.allocation.category in (None, Category.INPUTS):
                entry.allocation.category = category
                entry.allocation.module = entry.allocation.module or module

    def _claim_module(self, root: nn.Module) -> None:
        for module in root.modules():
            parameters, buffers = module._parameters, module._buffers
            if not parameters and not buffers:
                continue
            name = self._running.names.get(module, "")
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
            for leaf in tree_leaves(state):
                if isinstance(leaf, torch.Tensor):
                    self._claim(leaf, Category.OPTIMIZER, module)

    def _claim_inputs(self, inputs: Any) -> None:
        for leaf in tree_leaves(inputs):
            # The result of an earlier module (a loss is a module, too) is not an input.
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is None and not self._module_of(leaf):
                self._claim(leaf, Category.INPUTS)

    def _claim_all(self) -> None:
        for root in list(self._running.roots):
            self._claim_module(root)
        for optimizer in list(self._optimizers):
            self._claim_optimizer(optimizer)

    def _module_of(self, tensor: Any) -> str:
        """Return the module that a tensor's memory belongs to; empty if unknown."""
        part = next(self._strided(tensor), None)
        entry = None if part is None else self._live.get(part.untyped_storage()._cdata)
        return entry.allocation.module if entry else ""

    def _end_backward(self) -> None:
        if self._in_backward:
            self._in_backward = False
            self._drop_stopped()
            # A backward inside a module's forward is part of it (a gradient penalty).
            self._enter_phase(Phase.FORWARD if self._running.stack else Phase.SETUP)
            self._claim_all()  # the gradients exist now, and zero_grad() may come next

    def _drop_stopped(self) -> None:
        """Forget modules that backward has entered: a recomputation stops early, in the middle of them."""
        del self._running.stack[self._depth :]

    def _before_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not in_backward():
            self._drop_stopped()
        if not self._running.stack and not in_backward():
            self._end_backward()
            self._running.add_root(module)
            self._claim_module(module)
            self._claim_inputs(inputs)
            self._enter_phase(Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION)
        self._running.enter(module)
        if not in_backward():
            self._depth = len(self._running.stack)

    def _after_module(self, module: nn.Module, inputs: Any, *rest: Any) -> None:
        # A global pre-hook gets no keyword arguments; after an error, neither does this hook.
        if self._running.leave(module) and not self._running.stack and len(rest) == 2:
            self._claim_inputs(rest[0])
        if not in_backward():
            self._depth = len(self._running.stack)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._end_backward()
        self._optimizers.add(optimizer)
        self._claim_optimizer(optimizer)
        self._enter_phase(Phase.OPTIMIZER)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._claim_optimizer(optimizer)
        self._enter_phase(Phase.SETUP)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors that make up a sparse tensor or a wrapper subclass."""
    if is_traceable_wrapper_subclass(tensor):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    with disable_current_modes():  # asking a sparse tensor for its parts is an operation
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


class ResidentPages:
    """Bytes of memory-mapped tensors that are in memory until `release` is called."""

    def __init__(self, nbytes: int, *, simulated: bool = False) -> None:
        active = [mode for mode in current_dispatch_modes() if isinstance(mode, MemoryTracker)]
        counting = active[-1:] if simulated else active  # simulated ones in the simulation only
        self._releases: list[Callable[[], None]] = [
            tracker.hold(nbytes, torch.device("cpu"), "pages of mapped tensors") for tracker in counting
        ]

    def release(self) -> None:
        while self._releases:
            self._releases.pop()()
