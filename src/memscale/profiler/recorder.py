"""One recorded training step: what each block holds, computes and moves.

The same recording works on fake tensors (static profile) and on real ones (empirical profile): it listens to the
blocks' forward hooks, to every operation, and to the memory tracker, and knows in backward whose operation is
running by autograd's sequence numbers.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from memscale._torch import (
    LightDispatchMode,
    in_backward,
    next_sequence_number,
    pytree,
    running_sequence_number,
)
from memscale._util.trees import Tree, is_lazy
from memscale.memory.tracker import MemoryTracker, parts_of
from memscale.profiler.profile import OpProfile


@dataclass
class BlockRecord:
    """What was seen of one block; peaks are all that was in use, workspaces left out."""

    calls: int = 0
    order: int = -1
    changes_input: bool = False
    saved: int = 0
    boundary: int = 0
    output: int = 0
    passed: int = 0
    dropped: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    forward_traffic: int = 0
    backward_traffic: int = 0
    ops: list[OpProfile] = field(default_factory=list)
    # Parameters, as (member, name in it), that were read while no block that has them was running: in forward by
    # another module or by a hook, in backward by a checkpoint inside of the block, which runs a part of it again.
    read_outside: set[tuple[int, str]] = field(default_factory=set)


@dataclass
class StepRecord:
    """What was seen of one step."""

    blocks: dict[str, BlockRecord]
    resident: int = 0  # bytes in use when forward began
    workspace: int = 0  # bytes that libraries took for themselves during the step, and keep
    saved_total: int = 0  # bytes in use at the end of forward, above what was resident
    loss_peak: int = 0  # after the last block's forward, to the end of the model's
    tail_peak: int = 0  # from there to the first operation of a block's backward
    other_flops: int = 0
    other_traffic: int = 0
    peak: int = 0
    largest_convolution: int = 0  # bytes of its operands and its result
    guesses: int = 0  # numbers that Python asked for and nobody had computed


class _OpMode(LightDispatchMode):
    """Sees every operation after the tracker has accounted for it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._recorder.saw(func, args, kwargs, result)
        return result


class Recorder:
    """Listens to one forward and backward of a model."""

    def __init__(self, tracker: MemoryTracker, device: torch.device) -> None:
        self.step = StepRecord({})
        self._tracker = tracker
        self._device = device
        self._running: list[str] = []
        self._inside: list[str] = []  # blocks whose forward itself runs, without its hooks; in backward too
        # Parameters as (member, name in it): of each block, and, with the block, of each storage.
        self._parameters: dict[str, set[tuple[int, str]]] = {}
        self._owners: dict[int, list[tuple[str, int, str]]] = {}
        self._entered: list[int] = []  # the tracker's clock at each running block's entry
        self._calls: list[
            tuple[str, int, int, frozenset[int]]
        ] = []  # block, entered, left, storages given out
        self._inputs: list[list[tuple[weakref.ref[torch.Tensor], int]]] = []
        self._counts: list[dict[str, int]] = []
        self._spans: list[tuple[int, str | None]] = []
        # Storages that a block has handed out; weakly, as the address of one that died is given to another.
        self._outputs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._between = 0  # the peak outside of blocks since the last one
        self._last_backward: BlockRecord | None = None

    # ------------------------------------------------------------------ listening

    @contextlib.contextmanager
    def listening(self, blocks: Sequence[tuple[str, Sequence[nn.Module]]]) -> Iterator[None]:
        """Record what runs inside; ``blocks`` are names and the modules of each, in call order."""
        handles = []
        for name, modules in blocks:
            self.step.blocks[name] = BlockRecord()
            self._parameters[name] = set()
            for member, module in enumerate(modules):
                for path, parameter in module.named_parameters():
                    owners = self._owners.setdefault(parameter.untyped_storage()._cdata, [])
                    owners.append((name, member, path))
                    self._parameters[name].add((member, path))
                # Inside of the other hooks: what those read, spectral norm for one, they read where it is.
                handles.append(module.register_forward_pre_hook(_Begin(self._inside, name)))
                handles.append(
                    module.register_forward_hook(_End(self._inside), prepend=True, always_call=True)
                )
            first, last = modules[0], modules[-1]
            handles.append(
                first.register_forward_pre_hook(_Enter(self, name), with_kwargs=True, prepend=True)
            )
            handles.append(last.register_forward_hook(_Leave(self, name), with_kwargs=True, always_call=True))
        try:
            with _OpMode(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def forward_begins(self) -> None:
        self.step.resident = self._in_use()
        self.step.guesses = -self._tracker.guesses

    def forward_returns(self) -> None:
        """Note that the model has returned, and its outputs are alive.

        A block's output that is not needed for backward is not: it was gone when the next block had taken it (in
        16 bits, where that block saves a copy), and is in that block's peak.
        """
        for name, entered, left, _ in self._calls:
            alive = self._tracker.alive_since(entered, self._device, left)
            self.step.blocks[name].dropped += sum(alive.values())

    def forward_ends(self) -> None:
        """Note that outputs which are not needed any more have been released."""
        self.step.saved_total = self._in_use() - self.step.resident
        self.step.loss_peak, self._between = self._between, 0
        for name, entered, left, outputs in self._calls:
            record = self.step.blocks[name]
            alive = self._tracker.alive_since(entered, self._device, left)
            record.output += sum(size for key, size in alive.items() if key in outputs)
            record.saved += sum(size for key, size in alive.items() if key not in outputs)
        for record in self.step.blocks.values():
            record.dropped -= record.saved + record.output
            record.passed -= record.output

    def step_ends(self) -> None:
        self.step.peak = self._tracker.peak_bytes(self._device)
        self.step.workspace = self._tracker.workspace_bytes(self._device)
        self.step.tail_peak = self._between
        self.step.guesses += self._tracker.guesses

    # ------------------------------------------------------------------ blocks

    def enter(self, name: str, inputs: Any) -> None:
        if in_backward():
            return  # the model recomputes this block by itself
        record = self.step.blocks[name]
        if record.order < 0:
            record.order = sum(other.order >= 0 for other in self.step.blocks.values())
        record.calls += 1
        if record.calls == 1:
            record.boundary = sum(
                self._tracker.bytes_of_storage(key)
                for key, storage in _storages(inputs).items()
                if key in self._outputs and self._outputs[key]() is storage
            )
        record.forward_peak = max(record.forward_peak, self._between)
        self._between = 0
        self._inputs.append([(weakref.ref(each), each._version) for each in Tree.of(inputs).tensors()])
        self._running.append(name)
        self._counts.append({})
        self._entered.append(self._tracker.clock)
        self._span()

    def leave(self, name: str, output: Any) -> None:
        if in_backward() or not self._running:
            return
        self._running.pop()
        self._counts.pop()
        record = self.step.blocks[name]
        alive = ((reference(), version) for reference, version in self._inputs.pop())
        record.changes_input |= any(each is not None and each._version != version for each, version in alive)
        outputs = _storages(output)
        entered = self._entered.pop()
        self._calls.append((name, entered, self._tracker.clock, frozenset(outputs)))
        self._outputs.update({key: weakref.ref(storage) for key, storage in outputs.items()})
        made = self._tracker.alive_since(entered, self._device)
        record.passed += sum(size for key, size in made.items() if key in outputs)
        self._span()

    def _span(self) -> None:
        name = self._running[-1] if self._running else None
        self._spans.append((next_sequence_number(), name))

    # ------------------------------------------------------------------ operations

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        backward = in_backward()
        if not _is_view(func):
            self._saw_reads(args, kwargs, backward)
        name = self._block_in_backward() if backward else (self._running[-1] if self._running else None)
        flops = _flops(func, args, kwargs, result)
        traffic = 0 if _is_view(func) else _bytes((args, kwargs)) + _bytes(result)
        in_use = self._in_use() + self._tracker.temporary_bytes
        if func is torch.ops.aten.convolution.default:
            self.step.largest_convolution = max(self.step.largest_convolution, traffic)
        if name is None:
            self.step.other_flops += flops
            self.step.other_traffic += traffic
            if backward and self._last_backward is not None:
                self._last_backward.backward_peak = max(self._last_backward.backward_peak, in_use)
            else:
                self._between = max(self._between, in_use)
            return
        record = self.step.blocks[name]
        if backward:
            self._last_backward = record
            record.backward_peak = max(record.backward_peak, in_use)
            record.backward_flops += flops
            record.backward_traffic += traffic
            return
        record.forward_peak = max(record.forward_peak, in_use)
        record.forward_flops += flops
        record.forward_traffic += traffic
        if flops and record.calls == 1:
            overload = str(func)
            number = self._counts[-1].get(overload, 0)
            record.ops.append(OpProfile(f"{overload}#{number}", flops, _bytes(result)))
        if record.calls == 1:
            overload = str(func)
            self._counts[-1][overload] = self._counts[-1].get(overload, 0) + 1

    def _saw_reads(self, args: tuple[Any, ...], kwargs: dict[str, Any], backward: bool) -> None:
        """Note the parameters that an operation reads while no block that has them is running.

        What backward reads with gradients off was saved by autograd; with gradients on, forward code runs again.
        """
        if backward and not torch.is_grad_enabled():
            return
        for leaf in pytree.tree_leaves((args, kwargs)):
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                continue
            owners = self._owners.get(leaf.untyped_storage()._cdata, ())
            if any(name in self._inside for name, _, _ in owners):
                continue
            for name, member, path in owners:
                # A checkpoint stops as soon as it has what backward needs: which others it reads is not seen.
                read = self._parameters[name] if backward else {(member, path)}
                self.step.blocks[name].read_outside.update(read)

    def _block_in_backward(self) -> str | None:
        number = running_sequence_number()
        if number is None:
            return None
        position = bisect_right(self._spans, number, key=lambda span: span[0])
        return self._spans[position - 1][1] if position else None

    def _in_use(self) -> int:
        # Workspaces stay for good: in the first block that needs one they would look like its own memory.
        return self._tracker.live_bytes(self._device) - self._tracker.workspace_bytes(self._device)


class _Begin:
    """A forward pre-hook for one module of a block, the last one."""

    def __init__(self, inside: list[str], name: str) -> None:
        self._inside, self._name = inside, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._inside.append(self._name)


class _End:
    """A forward hook for one module of a block, the first one."""

    def __init__(self, inside: list[str]) -> None:
        self._inside = inside

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()


class _Enter:
    """A forward pre-hook for one block."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._recorder.enter(self._name, (args, kwargs))


class _Leave:
    """A forward hook for one block."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._recorder.leave(self._name, output)


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    tensors = [each for each in Tree.of(tree).tensors() if not is_lazy(each)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage for storage in storages}


def _bytes(tree: Any) -> int:
    return sum(_nbytes(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(part.nbytes for part in parts_of(tensor))  # a sparse one: its indices and values


def _is_view(func: Any) -> bool:
    # A view's result shares memory with an argument and nothing is read or written.
    return bool(func.is_view)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
