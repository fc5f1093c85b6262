"""Record one training step: what each block allocates, computes and moves.

It works on fake tensors (static profile) and on real ones (empirical profile), by the blocks' forward hooks, a dispatch
mode and the memory tracker. In backward, autograd's sequence numbers tell which block an operation belongs to.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from memscale._torch import (
    LightDispatchMode,
    changed_since_saved,
    current_dispatch_modes,
    graph_nodes,
    in_backward,
    pytree,
    version_of,
)
from memscale._util.trees import Tree, is_lazy
from memscale.memory.tracker import ForwardSpans, MemoryTracker, parts_of
from memscale.profiler.sample import Sample

LEAST_BYTES = 64 * 2**10
"""Smaller storages are not offloaded. A transfer takes some ten microseconds however small it is, in which a link of
10 GB/s moves a hundred kilobytes: below this, the time is spent and hardly any memory is saved."""


@dataclass(frozen=True)
class OpProfile:
    """An expensive operation of a block's forward: a matrix product, attention, a convolution."""

    key: str  # the overload and its number among the block's calls of it: "aten.addmm.default#3"
    flops: int  # floating-point operations of one call
    output_bytes: int  # device memory of its result
    half: bool = False  # it computes in 16 bits


@dataclass
class Work:
    peak: int = 0  # all bytes in use, without workspaces
    flops: int = 0
    half_flops: int = 0  # those in 16 bits
    traffic: int = 0  # bytes that operations read and wrote


@dataclass
class BlockRecord:
    """The record of one block; see `BlockProfile`."""

    calls: int = 0
    order: int = -1
    changes_input: bool = False
    saved: int = 0
    boundary: int = 0
    output: int = 0
    passed: int = 0
    dropped: int = 0
    large_saved: int = 0
    large_saved_count: int = 0
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    ops: list[OpProfile] = field(default_factory=list)
    # Parameters, as (member, name in it), that were read while no block that has them was running: in forward
    # by another module or a hook, in backward by a checkpoint inside the block, which runs a part of it again.
    read_outside: set[tuple[int, str]] = field(default_factory=set)


@dataclass
class StepRecord:
    blocks: dict[str, BlockRecord]
    resident: int = 0  # bytes in use when forward began
    workspace: int = 0  # bytes that libraries allocated during the step, and keep
    saved_total: int = 0  # bytes in use at the end of forward, above `resident`
    loss_peak: int = 0  # after the last block's forward, to the end of the model's
    tail_peak: int = 0  # from there to the first operation of a block's backward
    other: Work = field(default_factory=Work)  # outside of the blocks
    largest_convolution: int = 0  # bytes of its operands and its result
    guesses: int = 0  # made-up numbers that Python code read


@functools.cache
def _flop_formula(packet: Any) -> Callable[..., Any] | None:
    """Return torch's formula for the floating-point operations of an operator, or of the one that it is in place of."""
    out_of_place = getattr(torch.ops.aten, packet.__name__.removesuffix("_"), None)
    formula: Callable[..., Any] | None = flop_registry.get(packet) or flop_registry.get(out_of_place)
    return formula


@contextlib.contextmanager
def recorded_times(times: int) -> Iterator[None]:
    """Record the work of the block so many times over: it stands for others like it that are not simulated."""
    recorders = [mode for mode in current_dispatch_modes() if isinstance(mode, Recorder)]
    for recorder in recorders:
        recorder.times = times
    try:
        yield
    finally:
        for recorder in recorders:
            recorder.times = 1


class Recorder(LightDispatchMode):
    """Record one forward and backward of a model."""

    def __init__(self, tracker: MemoryTracker, device: torch.device) -> None:
        super().__init__()
        self.step = StepRecord({})
        self.times = 1  # how often the work of an operation counts
        self._tracker = tracker
        self._device = device
        self._running: list[str] = []
        self._inside: list[str] = []  # blocks whose forward runs, without hooks; also recomputations
        # Parameters as (member, name in it): of each block, and, with the block, of each storage.
        self._parameters: dict[str, set[tuple[int, str]]] = {}
        self._owners: dict[int, list[tuple[str, int, str]]] = {}
        self._entered: list[int] = []  # the tracker's clock at each running block's entry
        # Block, entered, left, storages that it returned.
        self._calls: list[tuple[str, int, int, frozenset[int]]] = []
        self._inputs: list[list[tuple[weakref.ref[torch.Tensor], int]]] = []
        self._counts: list[Counter[str]] = []
        self._spans = ForwardSpans()
        # Storages that a block returned; weakly, as addresses are reused.
        self._outputs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._between = 0  # the peak outside of blocks since the last block
        self._last_backward: Work | None = None

    def run_step(
        self,
        model: nn.Module,
        batch: Sample,
        blocks: Sequence[tuple[str, Sequence[nn.Module]]],
        backward: Callable[[torch.Tensor], object],
    ) -> StepRecord:
        """Run one recorded forward and backward; `blocks` are names and the modules of each, in call order."""
        step, guesses = self.step, self._tracker.guesses
        with self._hooks(blocks), self:
            step.resident = self._in_use()
            output = model(*batch.args, **batch.kwargs)
            # A block's output that backward does not need is gone by now (in 16 bits, where the next block saves a
            # copy), and is in the next block's peak.
            for name, entered, left, _ in self._calls:
                step.blocks[name].dropped += sum(self._alive(entered, left).values())
            targets = backward_targets(output)
            del output
            step.saved_total = self._in_use() - step.resident
            step.loss_peak, self._between = self._between, 0
            for name, entered, left, outputs in self._calls:
                for key, size in self._alive(entered, left).items():
                    if key in outputs:
                        step.blocks[name].output += size
                    else:
                        is_large = size >= LEAST_BYTES
                        step.blocks[name].saved += size
                        step.blocks[name].large_saved += size * is_large
                        step.blocks[name].large_saved_count += is_large
            for record in step.blocks.values():
                record.dropped -= record.saved + record.output
                record.passed -= record.output
            if targets:
                backward(loss_of(targets))
            step.workspace = self._tracker.workspace_bytes(self._device)
            step.tail_peak = self._between
            step.guesses = self._tracker.guesses - guesses
        return step

    @contextlib.contextmanager
    def _hooks(self, blocks: Sequence[tuple[str, Sequence[nn.Module]]]) -> Iterator[None]:
        handles = []
        for name, modules in blocks:
            self.step.blocks[name] = BlockRecord()
            self._parameters[name] = set()
            for member, module in enumerate(modules):
                for path, parameter in module.named_parameters():
                    owners = self._owners.setdefault(parameter.untyped_storage()._cdata, [])
                    owners.append((name, member, path))
                    self._parameters[name].add((member, path))
                # Innermost: what other hooks read (spectral norm), they read outside of the block.
                handles.append(module.register_forward_pre_hook(functools.partial(self._begin_module, name)))
                handles.append(module.register_forward_hook(self._end_module, prepend=True, always_call=True))
            enter, leave = (
                functools.partial(self._enter_block, name),
                functools.partial(self._leave_block, name),
            )
            handles.append(modules[0].register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            handles.append(modules[-1].register_forward_hook(leave, with_kwargs=True, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin_module(self, name: str, module: nn.Module, args: Any) -> None:
        self._inside.append(name)

    def _end_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()

    def _enter_block(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_backward():
            return  # the model recomputes this block itself
        record = self.step.blocks[name]
        if record.order < 0:
            record.order = sum(other.order >= 0 for other in self.step.blocks.values())
        record.calls += 1
        if record.calls == 1:
            record.boundary = sum(
                self._tracker.bytes_of_storage(key)
                for key, storage in _storages((args, kwargs)).items()
                if key in self._outputs and self._outputs[key]() is storage
            )
        record.forward.peak = max(record.forward.peak, self._between)
        self._between = 0
        self._inputs.append(
            [(weakref.ref(each), version_of(each)) for each in Tree.of((args, kwargs)).tensors()]
        )
        self._running.append(name)
        self._counts.append(Counter())
        self._entered.append(self._tracker.clock)
        self._spans.begin(self._running[-1] if self._running else None)

    def _leave_block(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward() or not self._running:
            return
        self._running.pop()
        self._counts.pop()
        record = self.step.blocks[name]
        alive = ((reference(), version) for reference, version in self._inputs.pop())
        record.changes_input |= any(
            each is not None and version_of(each) != version for each, version in alive
        )
        outputs = _storages(output)
        entered = self._entered.pop()
        self._calls.append((name, entered, self._tracker.clock, frozenset(outputs)))
        self._outputs.update({key: weakref.ref(storage) for key, storage in outputs.items()})
        made = self._alive(entered)
        record.passed += sum(size for key, size in made.items() if key in outputs)
        self._spans.begin(self._running[-1] if self._running else None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation after the tracker has counted it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result  # an attribute of a fake tensor was read (`.device`): nothing was computed
        backward = in_backward()
        traffic = 0  # of a view
        if not func.is_view:
            traffic = _bytes((args, kwargs)) + _bytes(result)
            self._record_reads(args, kwargs, backward)
        formula = _flop_formula(func._overloadpacket)
        flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
        half = flops if flops and _is_half(args) else 0
        in_use = self._in_use() + self._tracker.temporary_bytes
        if func is torch.ops.aten.convolution.default:
            self.step.largest_convolution = max(self.step.largest_convolution, traffic)
        name = self._spans.in_backward() if backward else self._running[-1] if self._running else None
        if name is None:
            work = self.step.other
            if backward and self._last_backward is not None:
                self._last_backward.peak = max(self._last_backward.peak, in_use)
            else:
                self._between = max(self._between, in_use)
        else:
            record = self.step.blocks[name]
            work = record.backward if backward else record.forward
            work.peak = max(work.peak, in_use)
            if backward:
                self._last_backward = work
            elif record.calls == 1:
                overload, counts = str(func), self._counts[-1]
                if flops:
                    key = f"{overload}#{counts[overload]}"
                    record.ops.append(OpProfile(key, flops, _bytes(result), half > 0))
                counts[overload] += 1
        work.flops += self.times * flops
        work.half_flops += self.times * half
        work.traffic += self.times * traffic
        return result

    def _record_reads(self, args: tuple[Any, ...], kwargs: dict[str, Any], backward: bool) -> None:
        """Record the parameters that an operation reads while no block that has them is running."""
        # With gradients off, backward reads what autograd saved; with gradients on, forward code runs again.
        if backward and not torch.is_grad_enabled():
            return
        for leaf in pytree.tree_leaves((args, kwargs)):
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                continue
            owners = self._owners.get(leaf.untyped_storage()._cdata, ())
            if any(name in self._inside for name, _, _ in owners):
                continue
            for name, member, path in owners:
                # A checkpoint stops as soon as it has what backward needs: the rest of its reads is not seen.
                read = self._parameters[name] if backward else {(member, path)}
                self.step.blocks[name].read_outside.update(read)

    def _alive(self, since: int, until: int | None = None) -> dict[int, int]:
        return self._tracker.alive_since(since, self._device, until)

    def _in_use(self) -> int:
        # Workspaces are permanent: they would count as memory of the first block that needs one.
        return self._tracker.live_bytes(self._device) - self._tracker.workspace_bytes(self._device)


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    tensors = [each for each in Tree.of(tree).tensors() if not is_lazy(each)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage for storage in storages}


def _bytes(tree: Any) -> int:
    found = 0
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            parts = [leaf] if leaf.layout is torch.strided else parts_of(leaf)  # sparse: indices and values
            found += sum(part.nbytes for part in parts)
    return found


def _is_half(args: tuple[Any, ...]) -> bool:
    """Return whether an operation computes in 16 bits, by its first floating-point operand."""
    tensors = (leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor))
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
    return dtype in (torch.float16, torch.bfloat16)


def backward_targets(output: Any) -> list[torch.Tensor]:
    """Return where backward starts: the model's own loss, else all outputs that can be differentiated."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return [loss]
    found = {id(tensor): tensor for tensor in Tree.of(output).tensors() if tensor.requires_grad}
    targets = list(found.values())
    if isinstance(output, (tuple, list)) and targets and targets[0].dim() == 0:
        return targets[:1]  # (loss, logits, ...)
    if len(targets) < 2:
        return targets
    # Not those whose backward raises because saved tensors were changed in place: the loss will not use them.
    changed = functools.cache(changed_since_saved)  # outputs share most of the graph
    return [each for each in targets if not any(map(changed, graph_nodes([each])))] or targets


def loss_of(targets: list[torch.Tensor]) -> torch.Tensor:
    """Return the model's loss, or cross-entropy (tiled, if that is) as a stand-in for one outside of the model."""
    # `targets` is emptied, as the outputs are released by `loss = criterion(model(x), y)`.
    losses = [target.sum() if target.dim() else target for target in targets if target.numel() == 1]
    losses += [_stand_in(target) for target in targets if target.numel() > 1]
    targets.clear()
    return losses[0] if len(losses) == 1 else torch.stack([loss.float() for loss in losses]).sum()


def _stand_in(target: torch.Tensor) -> torch.Tensor:
    if target.is_complex():
        target = target.abs()
    if target.dim() < 2:
        return torch.log_softmax(target, -1).mean()
    rows = target.flatten(0, -2)
    classes = torch.zeros(rows.shape[0], dtype=torch.long, device=rows.device)
    return nn.functional.cross_entropy(rows, classes)
