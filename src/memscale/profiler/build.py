"""Run a step under the recorder, and build a profile from its record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale._torch import changed_since_saved
from memscale._util.trees import Tree
from memscale.memory.allocator import CachingAllocator
from memscale.profiler.blocks import Block
from memscale.profiler.profile import BlockProfile, ModelProfile, ProfileSource, Unseen
from memscale.profiler.recorder import BlockRecord, Recorder, StepRecord
from memscale.profiler.sample import Sample


def run_step(
    model: nn.Module, batch: Sample, recorder: Recorder, backward: Callable[[torch.Tensor], object]
) -> None:
    """Run one recorded forward and backward; `backward` is called with the loss."""
    recorder.forward_begins()
    output = model(*batch.args, **batch.kwargs)
    recorder.forward_returns()
    targets = backward_targets(output)
    del output
    recorder.forward_ends()
    if targets:
        backward(loss_of(targets))
    recorder.step_ends()


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
    return _differentiable(targets) if len(targets) > 1 else targets


def _differentiable(targets: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the targets whose backward does not raise because saved tensors were changed in place; all if none.

    A model with such outputs trains if its loss does not use them.
    """
    found = []
    good: set[Any] = {None}  # nodes of the outputs that can be differentiated
    bad: set[Any] = set()
    for target in targets:
        waiting: list[Any] = [target.grad_fn]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            if node in good:
                continue
            if node in bad or changed_since_saved(node):
                bad.add(node)
                break
            for following, _ in node.next_functions:
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        else:
            good |= seen
            found.append(target)
    return found or targets


def loss_of(targets: list[torch.Tensor]) -> torch.Tensor:
    """Return the model's loss, or a stand-in for an unknown loss outside of the model.

    The stand-in is cross-entropy (tiled, if that is): it saves one tensor of the output's size for backward and creates
    two more there. `targets` is emptied, as the outputs are released by `loss = criterion(model(x), y)`.
    """
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


# Bounds on what a simulation does not show.
CONVOLUTION_WORKSPACES = 3  # times what the largest convolution reads and writes: cuDNN's workspaces
RECURRENT_SHARE = 0.15  # of the peak: cuDNN's recurrent layers
BRANCH_SHARE = 0.15  # of the peak: another branch of the model's code


def _unseen(model: nn.Module, step: StepRecord, *, on_cpu: bool) -> tuple[Unseen, ...]:
    """Return what a step may need that the recorded one did not show."""
    found = []
    if step.guesses:
        what = "forward asks for values of tensors (a branch, .item()), which were guessed: training may do other work"
        found.append(Unseen(what, share=BRANCH_SHARE))
    if not on_cpu and any(isinstance(module, nn.RNNBase) for module in model.modules()):
        what = "the memory that cuDNN keeps for recurrent layers is not known"
        found.append(Unseen(what, share=RECURRENT_SHARE))
    if not on_cpu and step.largest_convolution:
        what = "the workspaces of cuDNN's convolutions are not known"
        found.append(Unseen(what, CONVOLUTION_WORKSPACES * step.largest_convolution))
    return tuple(found)


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
    at_home: bool = False,
    resident: Mapping[str, tuple[str, ...]] | None = None,
) -> ModelProfile:
    """Build a profile from a record.

    Args:
        model: The model.
        blocks: Its blocks.
        step: The record.
        stand_ins: The blocks that did not run, each with the block whose figures it gets.
        source: How the record was made.
        reason: Why that way.
        batch: The batch, in words.
        exact_bytes: Whether the device counts tensors at their own size, not in the allocator's blocks.
        at_home: Whether parameters and gradients were offloaded to the tier below.
        resident: Names of the parameters that cannot be offloaded, by block; by default those that were read outside of
            their blocks.
    """
    if resident is None:
        resident = {} if exact_bytes else _read_outside(blocks, step, stand_ins)
    staying = {id(model.get_parameter(name)) for names in resident.values() for name in names}
    size_of = _exact if exact_bytes else _in_blocks
    parameters = dict(model.named_parameters())
    own_checkpointing = _own_checkpointing(model)
    order = _call_order(blocks, step, stand_ins)
    gradients = _gradients(model, blocks, order, size_of, staying)
    left = dict.fromkeys(gradients, 0) if at_home else gradients
    peaks = _peaks(step, {name: size for name, size in left.items() if name not in stand_ins})
    profiles = []
    for block in blocks:
        ran = stand_ins.get(block.name, block.name)
        profiles.append(
            _block_profile(
                model,
                block,
                step.blocks[ran],
                peaks.blocks.get(ran, (0, 0)),
                order=order.get(block.name, -1),
                parameters=[
                    parameters[name] for name in block.parameter_names if id(parameters[name]) not in staying
                ],
                gradient_bytes=gradients[block.name],
                own_checkpointing=own_checkpointing,
                size_of=size_of,
                resident=resident.get(block.name, ()),
                staying=staying,
            )
        )
    trained = sum(size_of(each.nbytes) for each in parameters.values() if each.requires_grad)
    if at_home:
        present = sum(size_of(each.nbytes) for each in parameters.values() if id(each) in staying)
    else:
        present = _resident_parameters(model, stand_ins, blocks, size_of)
    return ModelProfile(
        blocks=tuple(profiles),
        source=source,
        reason=reason,
        batch=batch,
        parameter_bytes=sum(size_of(each.nbytes) for each in parameters.values()),
        gradient_bytes=trained,
        largest_gradient_bytes=max(
            (size_of(each.nbytes) for each in parameters.values() if each.requires_grad), default=0
        ),
        optimizer_bytes=2 * trained,
        resident_bytes=max(0, step.resident - present) + step.workspace,
        other_saved_bytes=peaks.other_saved,
        loss_peak_bytes=peaks.loss,
        tail_peak_bytes=peaks.tail,
        other_flops=step.other_flops,
        other_traffic=step.other_traffic,
        other_half_flops=step.other_half_flops,
        peak_bytes=0 if stand_ins else step.peak,
        blocks_left_out=len(stand_ins),
        at_home=at_home,
        unseen=_unseen(model, step, on_cpu=exact_bytes),
    )


@dataclass(frozen=True)
class _Peaks:
    """Peaks above the held bytes. See Note [Held bytes] in `profile.py`."""

    other_saved: int
    loss: int
    tail: int
    blocks: dict[str, tuple[int, int]]  # forward, backward


def _peaks(step: StepRecord, gradients: dict[str, int]) -> _Peaks:
    """Subtract the held bytes from the peaks of the blocks that ran."""
    ran = sorted((item for item in step.blocks.items() if item[1].calls), key=lambda item: item[1].order)
    other_saved = step.saved_total - sum(record.saved + record.output for _, record in ran)
    held = step.resident + other_saved
    before: dict[str, int] = {}
    for name, record in ran:
        before[name] = held
        held += record.saved + record.output + record.dropped
    loss = step.loss_peak - held
    held = step.resident + step.saved_total
    found: dict[str, tuple[int, int]] = {}
    for name, record in reversed(ran):
        forward = record.forward_peak - before[name] if record.forward_peak else 0
        backward = record.backward_peak - held if record.backward_peak else 0
        found[name] = (forward, backward)
        held += gradients[name] - record.saved - record.output
    return _Peaks(other_saved, loss, step.tail_peak - step.resident - step.saved_total, found)


def _read_outside(
    blocks: Sequence[Block], step: StepRecord, stand_ins: dict[str, str]
) -> dict[str, tuple[str, ...]]:
    """Return the parameters that are read while their block does not run: they stay on an accelerator.

    On a CPU nothing is copied: a memory-mapped parameter has its values wherever it is read.
    """
    found: dict[str, tuple[str, ...]] = {}
    for block in blocks:
        read = sorted(step.blocks[stand_ins.get(block.name, block.name)].read_outside)
        if read:
            found[block.name] = tuple(
                ".".join(filter(None, (block.members[member], path))) for member, path in read
            )
    return found


def _gradients(
    model: nn.Module,
    blocks: Sequence[Block],
    order: dict[str, int],
    size_of: Callable[[int], int],
    staying: Collection[int],
) -> dict[str, int]:
    """Return the bytes of the gradients that each block's backward creates: a tied one in the first to do so."""
    made = dict.fromkeys((block.name for block in blocks), 0)
    seen: set[int] = set(staying)
    for block in sorted(blocks, key=lambda block: order.get(block.name, -1), reverse=True):
        for member in block.members:
            for parameter in model.get_submodule(member).parameters():
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    made[block.name] += size_of(parameter.nbytes)
    return made


def _block_profile(
    model: nn.Module,
    block: Block,
    record: BlockRecord,
    peaks: tuple[int, int],
    *,
    order: int,
    parameters: Sequence[nn.Parameter],
    gradient_bytes: int,
    own_checkpointing: tuple[str, ...],
    size_of: Callable[[int], int],
    resident: tuple[str, ...],
    staying: Collection[int],
) -> BlockProfile:
    trained = sum(size_of(each.nbytes) for each in parameters if each.requires_grad)
    members = [model.get_submodule(member) for member in block.members]
    used = {id(each): each for module in members for each in module.parameters() if id(each) not in staying}
    return BlockProfile(
        name=block.name,
        container=block.container,
        members=block.members,
        role=block.role,
        signature=block.signature,
        calls=record.calls,
        order=order,
        parameter_bytes=sum(size_of(each.nbytes) for each in parameters),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=2 * trained,
        used_bytes=sum(size_of(each.nbytes) for each in used.values()),
        saved_bytes=record.saved,
        boundary_bytes=record.boundary,
        output_bytes=record.output,
        passed_bytes=record.passed,
        dropped_bytes=record.dropped,
        forward_peak_bytes=peaks[0],
        backward_peak_bytes=peaks[1],
        forward_flops=record.forward_flops,
        backward_flops=record.backward_flops,
        forward_traffic=record.forward_traffic,
        backward_traffic=record.backward_traffic,
        forward_half_flops=record.forward_half_flops,
        backward_half_flops=record.backward_half_flops,
        has_own_checkpointing=any(
            member == name or member.startswith(f"{name}.") or not name
            for member in block.members
            for name in own_checkpointing
        ),
        changes_input=record.changes_input,
        parameter_count=len(parameters),
        ops=tuple(record.ops),
        resident=resident,
    )


def _call_order(blocks: Sequence[Block], step: StepRecord, stand_ins: dict[str, str]) -> dict[str, int]:
    """Return every block's position in the order of calls; one that did not run comes right after its stand-in."""
    called = [block for block in blocks if step.blocks[stand_ins.get(block.name, block.name)].calls]
    places = {block.name: index for index, block in enumerate(blocks)}

    def key(block: Block) -> tuple[int, int]:
        return step.blocks[stand_ins.get(block.name, block.name)].order, places[block.name]

    return {block.name: index for index, block in enumerate(sorted(called, key=key))}


def _own_checkpointing(model: nn.Module) -> tuple[str, ...]:
    """Return the modules that are checkpointed by Hugging Face's flag or by torch's wrapper."""
    return tuple(
        name
        for name, module in model.named_modules()
        if getattr(module, "gradient_checkpointing", False) is True
        or "_checkpoint_wrapped_module" in module._modules
    )


def _resident_parameters(
    model: nn.Module, stand_ins: dict[str, str], blocks: Sequence[Block], size_of: Callable[[int], int]
) -> int:
    """Return the bytes of the parameters that existed when the recorded forward began."""
    absent = {name for block in blocks if block.name in stand_ins for name in block.parameter_names}
    # A tied parameter of a dropped block may exist in another: it is counted as resident, on the safe side.
    return sum(
        size_of(parameter.nbytes) for name, parameter in model.named_parameters() if name not in absent
    )


def _exact(nbytes: int) -> int:
    return nbytes


def _in_blocks(nbytes: int) -> int:
    return CachingAllocator().allocate(nbytes).size
