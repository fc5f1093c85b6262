"""The static profile: one step on fake tensors, with equal blocks run only twice.

Note [Shortened models]
~~~~~~~~~~~~~~~~~~~~~~~
Forty-eight equal layers need the same: it is enough to run two of them (two, because the first may differ: its
input may need no gradient). So the fake copy of the model is shortened before it runs: of each run of equal blocks
in a ``ModuleList`` the first two stay. The cost grows with the number of distinct blocks, not with depth. Where a
model does not run without its other blocks (a U-Net's skip connections), it is run whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from memscale.errors import ProfileError
from memscale.profiler.blocks import Block, find_blocks, leftover_parameters, stacks
from memscale.profiler.profile import BlockProfile, ModelProfile, ProfileSource
from memscale.profiler.recorder import BlockRecord, Recorder, StepRecord
from memscale.profiler.sample import Sample
from memscale.recompute.trees import Tree
from memscale.simulator import Simulation, simulate

ROOM = 1 << 50  # a profile is not bounded by any device
KEPT_OF_EQUAL = 2


def profile_static(model: nn.Module, sample: Sample, *, device: str) -> ModelProfile:
    """Profile a training step on fake tensors; ``device`` is "cpu" or "vgpu".

    Raises:
        Exception: whatever the model raises on fake tensors; the caller falls back to a real run.
    """
    blocks = find_blocks(model)
    short = _shortening(model, blocks)
    if short:
        try:
            return _profile(model, sample, device, blocks, short)
        except Exception as error:
            whole = _profile(model, sample, device, blocks, {})
            return _with_reason(whole, f"run whole, as it does not run shortened ({type(error).__name__})")
    return _profile(model, sample, device, blocks, {})


def _with_reason(profile: ModelProfile, reason: str) -> ModelProfile:
    from dataclasses import replace

    return replace(profile, reason=f"{profile.reason}; {reason}")


def _profile(
    model: nn.Module, sample: Sample, device: str, blocks: Sequence[Block], short: dict[str, str]
) -> ModelProfile:
    with simulate(ROOM, device=device) as simulation:
        twin = simulation.copy_of(model).train(model.training)
        named = {
            block.name: [twin.get_submodule(member) for member in block.members]
            for block in blocks
            if block.name not in short
        }
        _shorten(twin, short)
        batch = Sample(simulation.batch_of(sample.args), simulation.batch_of(sample.kwargs))
        recorder = Recorder(simulation.tracker, simulation.device)
        with recorder.listening(list(named.items())):
            _step(twin, batch, recorder)
        recorder.step_ends()
    ran = sum(1 for block in blocks if block.name not in short)
    reason = f"{ran} of {len(blocks)} blocks run on fake tensors" if short else "run on fake tensors"
    return build_profile(
        model,
        blocks,
        recorder.step,
        stand_ins=short,
        source="static",
        reason=reason,
        batch=sample.describe(),
        size_of=_allocated_size(simulation),
    )


def _allocated_size(simulation: Simulation) -> Any:
    from memscale.memory.allocator import ROUNDING

    if simulation.device.type == "cpu":
        return lambda nbytes: nbytes
    return lambda nbytes: -(-nbytes // ROUNDING) * ROUNDING


def _step(model: nn.Module, batch: Sample, recorder: Recorder) -> None:
    recorder.forward_begins()
    output = model(*batch.args, **batch.kwargs)
    targets, gradients = backward_targets(output)
    output = None
    recorder.forward_ends()
    if targets:
        torch.autograd.backward(targets, gradients)


def backward_targets(output: Any) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Where backward starts: the model's own loss, or all outputs, each with a gradient of its size.

    A loss outside of the model is not known; what it keeps is not part of the profile.
    """
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return [loss], None
    targets = [tensor for tensor in Tree.of(output).tensors() if tensor.requires_grad]
    return targets, [torch.ones_like(tensor) for tensor in targets]


# ---------------------------------------------------------------------- shortening


def _shortening(model: nn.Module, blocks: Sequence[Block]) -> dict[str, str]:
    """Blocks that need not run, each with the equal block that stands in for it."""
    short: dict[str, str] = {}
    for stack in stacks(blocks):
        if not isinstance(model.get_submodule(stack[0].container), nn.ModuleList):
            continue
        for _, run in groupby(stack, key=lambda block: block.signature):
            equal = list(run)
            for block in equal[KEPT_OF_EQUAL:]:
                short[block.name] = equal[KEPT_OF_EQUAL - 1].name
    return short


def _shorten(twin: nn.Module, short: dict[str, str]) -> None:
    by_container: dict[str, set[str]] = {}
    for name in short:
        container, _, index = name.rpartition(".")
        by_container.setdefault(container, set()).add(index)
    for container, dropped in by_container.items():
        modules = twin.get_submodule(container)
        kept = [module for index, module in modules._modules.items() if index not in dropped]
        modules._modules.clear()
        modules._modules.update({str(index): module for index, module in enumerate(kept)})


# ---------------------------------------------------------------------- putting it together


def build_profile(
    model: nn.Module,
    blocks: Sequence[Block],
    step: StepRecord,
    *,
    stand_ins: dict[str, str],
    source: ProfileSource,
    reason: str,
    batch: str,
    size_of: Any,
) -> ModelProfile:
    """A profile from a record; blocks that did not run take the figures of their stand-ins."""
    parameters = dict(model.named_parameters())
    own_checkpointing = _own_checkpointing(model)
    order = _call_order(blocks, step, stand_ins)
    profiles = []
    for block in blocks:
        record = step.blocks[stand_ins.get(block.name, block.name)]
        profiles.append(
            _block_profile(block, record, order.get(block.name, -1), parameters, own_checkpointing, size_of)
        )
    ran_saved = sum(record.saved for record in step.blocks.values())
    ran_outputs = sum(record.output for record in step.blocks.values() if record.calls)
    leftovers = [parameters[name] for name in leftover_parameters(model, blocks)]
    shared = [size_of(each.nbytes) for each in leftovers]
    trained = [size_of(each.nbytes) for each in leftovers if each.requires_grad]
    return ModelProfile(
        blocks=tuple(profiles),
        source=source,
        reason=reason,
        batch=batch,
        parameter_bytes=sum(block.parameter_bytes for block in profiles) + sum(shared),
        gradient_bytes=sum(block.gradient_bytes for block in profiles) + sum(trained),
        optimizer_bytes=sum(block.optimizer_bytes for block in profiles) + 2 * sum(trained),
        resident_bytes=max(0, step.resident - _resident_parameters(model, stand_ins, blocks, size_of)),
        other_saved_bytes=max(0, step.saved_total - ran_saved - ran_outputs),
        tail_peak_bytes=step.tail_peak,
        other_flops=step.other_flops,
        other_traffic=step.other_traffic,
        peak_bytes=0 if stand_ins else step.peak,
    )


def _block_profile(
    block: Block,
    record: BlockRecord,
    order: int,
    parameters: dict[str, nn.Parameter],
    own_checkpointing: tuple[str, ...],
    size_of: Any,
) -> BlockProfile:
    own = [parameters[name] for name in block.parameter_names]
    trained = sum(size_of(each.nbytes) for each in own if each.requires_grad)
    return BlockProfile(
        name=block.name,
        container=block.container,
        members=block.members,
        role=block.role,
        signature=block.signature,
        calls=record.calls,
        order=order,
        parameter_bytes=sum(size_of(each.nbytes) for each in own),
        gradient_bytes=trained,
        optimizer_bytes=2 * trained,
        saved_bytes=record.saved,
        boundary_bytes=record.boundary,
        output_bytes=record.output,
        forward_peak_bytes=record.forward_peak,
        backward_peak_bytes=record.backward_peak,
        forward_flops=record.forward_flops,
        backward_flops=record.backward_flops,
        forward_traffic=record.forward_traffic,
        backward_traffic=record.backward_traffic,
        has_own_checkpointing=any(
            member == name or member.startswith(f"{name}.") or not name
            for member in block.members
            for name in own_checkpointing
        ),
        ops=tuple(record.ops),
    )


def _call_order(
    blocks: Sequence[Block], step: StepRecord, stand_ins: dict[str, str]
) -> dict[str, int]:
    """Every block's place in the order of calls; a block that did not run comes right after its stand-in."""
    called = [block for block in blocks if step.blocks[stand_ins.get(block.name, block.name)].calls]
    places = {block.name: index for index, block in enumerate(blocks)}

    def key(block: Block) -> tuple[int, int]:
        return step.blocks[stand_ins.get(block.name, block.name)].order, places[block.name]

    return {block.name: index for index, block in enumerate(sorted(called, key=key))}


def _own_checkpointing(model: nn.Module) -> tuple[str, ...]:
    """Modules whose code checkpoints its layers by itself: Hugging Face's switch, found by its flag."""
    return tuple(
        name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False) is True
    )


def _resident_parameters(
    model: nn.Module, stand_ins: dict[str, str], blocks: Sequence[Block], size_of: Any
) -> int:
    """Bytes of the parameters that were there when the recorded forward began."""
    absent = {name for block in blocks if block.name in stand_ins for name in block.parameter_names}
    # Dropped blocks are gone from the twin, but a tied parameter of theirs may live on elsewhere: its bytes are
    # then counted as resident, which errs on the safe side.
    return sum(
        size_of(parameter.nbytes) for name, parameter in model.named_parameters() if name not in absent
    )


@contextlib.contextmanager
def set_aside_gradients(model: nn.Module) -> Iterator[None]:
    """Gradients are as before after the block, whatever happened inside."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


__all__ = ["ProfileError", "backward_targets", "build_profile", "profile_static", "set_aside_gradients"]
