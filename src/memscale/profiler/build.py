"""From a recorded step to a profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memscale.memory.allocator import ROUNDING
from memscale.profiler.blocks import Block, leftover_parameters
from memscale.profiler.profile import BlockProfile, ModelProfile, ProfileSource
from memscale.profiler.recorder import BlockRecord, Recorder, StepRecord
from memscale.profiler.sample import Sample
from memscale.recompute.trees import Tree


def run_step(
    model: nn.Module, batch: Sample, recorder: Recorder, backward: Callable[[torch.Tensor], object]
) -> None:
    """One recorded forward and backward; ``backward`` is given the loss."""
    recorder.forward_begins()
    targets = backward_targets(model(*batch.args, **batch.kwargs))
    recorder.forward_ends()
    if targets:
        backward(loss_of(targets))
    recorder.step_ends()


def backward_targets(output: Any) -> list[torch.Tensor]:
    """Where backward starts: the model's own loss or, if it has none, all outputs that have a gradient."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return [loss]
    found = {id(tensor): tensor for tensor in Tree.of(output).tensors() if tensor.requires_grad}
    targets = list(found.values())
    if isinstance(output, (tuple, list)) and targets and targets[0].dim() == 0:
        return targets[:1]  # (loss, logits, ...), as models that return tuples have it
    return targets


def loss_of(targets: list[torch.Tensor]) -> torch.Tensor:
    """The model's loss, or a stand-in for a loss outside of the model, which is not known.

    A stand-in needs what cross-entropy needs: it keeps one tensor of the output's size for backward, and makes
    two more there. The targets are let go of, as by ``loss = criterion(model(x), y)``.
    """
    losses = [target.sum() if target.dim() else target for target in targets if target.numel() == 1]
    for target in targets:
        if target.numel() > 1:
            losses.append(torch.log_softmax(target.abs() if target.is_complex() else target, -1).mean())
    targets.clear()
    return losses[0] if len(losses) == 1 else torch.stack([loss.float() for loss in losses]).sum()


def build_profile(
    model: nn.Module,
    blocks: Sequence[Block],
    step: StepRecord,
    *,
    stand_ins: dict[str, str],
    source: ProfileSource,
    reason: str,
    batch: str,
    exact_bytes: bool,
) -> ModelProfile:
    """A profile from a record; blocks that did not run take the figures of their stand-ins.

    ``exact_bytes``: the device counts tensors at their own size, not rounded up to the allocator's unit.
    """
    size_of = _exact if exact_bytes else _rounded
    parameters = dict(model.named_parameters())
    own_checkpointing = _own_checkpointing(model)
    order = _call_order(blocks, step, stand_ins)
    profiles = []
    for block in blocks:
        record = step.blocks[stand_ins.get(block.name, block.name)]
        profiles.append(
            _block_profile(model, block, record, order.get(block.name, -1), parameters, own_checkpointing, size_of)
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
        largest_gradient_bytes=max(
            (size_of(each.nbytes) for each in parameters.values() if each.requires_grad), default=0
        ),
        optimizer_bytes=sum(block.optimizer_bytes for block in profiles) + 2 * sum(trained),
        resident_bytes=max(0, step.resident - _resident_parameters(model, stand_ins, blocks, size_of))
        + step.workspace,
        other_saved_bytes=max(0, step.saved_total - ran_saved - ran_outputs),
        tail_peak_bytes=step.tail_peak,
        other_flops=step.other_flops,
        other_traffic=step.other_traffic,
        peak_bytes=0 if stand_ins else step.peak,
    )


def _block_profile(
    model: nn.Module,
    block: Block,
    record: BlockRecord,
    order: int,
    parameters: dict[str, nn.Parameter],
    own_checkpointing: tuple[str, ...],
    size_of: Callable[[int], int],
) -> BlockProfile:
    own = [parameters[name] for name in block.parameter_names]
    trained = sum(size_of(each.nbytes) for each in own if each.requires_grad)
    members = [model.get_submodule(member) for member in block.members]
    used = {id(each): each for module in members for each in module.parameters()}
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
        used_bytes=sum(size_of(each.nbytes) for each in used.values()),
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
    """Modules that recompute by themselves: Hugging Face's switch, by its flag, and torch's wrapper."""
    return tuple(
        name
        for name, module in model.named_modules()
        if getattr(module, "gradient_checkpointing", False) is True
        or "_checkpoint_wrapped_module" in module._modules
    )


def _resident_parameters(
    model: nn.Module, stand_ins: dict[str, str], blocks: Sequence[Block], size_of: Callable[[int], int]
) -> int:
    """Bytes of the parameters that were there when the recorded forward began."""
    absent = {name for block in blocks if block.name in stand_ins for name in block.parameter_names}
    # Dropped blocks are gone from the twin, but a tied parameter of theirs may live on elsewhere: its bytes are
    # then counted as resident, which errs on the safe side.
    return sum(
        size_of(parameter.nbytes) for name, parameter in model.named_parameters() if name not in absent
    )


def _exact(nbytes: int) -> int:
    return nbytes


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ROUNDING) * ROUNDING
