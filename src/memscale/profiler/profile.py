"""The profile of a model, block by block, which the planner decides on.

Note [Held bytes]
The memory of a step is counted in two parts. *Held* bytes follow from the plan: parameters, optimizer state, resident
tensors, what forward saves outside of blocks and in the blocks that have run (in backward: that remain), and the
gradients so far. *Peaks* are bytes in use above that while a block runs: temporaries, the incoming gradient, the
gradients it creates. They may be negative: what a loss saves counts as held from the start, and comes at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from memscale._torch import is_checkpoint_wrapper
from memscale.memory.allocator import CachingAllocator
from memscale.profiler.blocks import Block, Role
from memscale.profiler.recorder import OpProfile as OpProfile
from memscale.profiler.recorder import StepRecord

ProfileSource = Literal["static", "empirical"]


@dataclass(frozen=True)
class BlockProfile:
    """The needs of one block in one training step; bytes are device memory as the allocator counts it."""

    name: str
    container: str  # the list that holds it; blocks that may be chained share it
    members: tuple[str, ...]  # paths of its modules
    role: Role
    calls: int  # how often forward calls it
    order: int  # its position in the order of first calls; -1 if forward never calls it
    parameter_bytes: int
    gradient_bytes: int  # that its backward creates; of a tied parameter in the block that is called last
    optimizer_bytes: int  # the optimizer state of its parameters; AdamW's if the optimizer is not known
    used_bytes: int  # all parameters that it computes with, including those of another block (ties)
    saved_bytes: int  # what its forward saves for backward, in all calls, without its inputs and outputs
    boundary_bytes: int  # its inputs that nothing else holds: the output of the block before it
    output_bytes: int  # its outputs that are saved for backward
    forward_peak_bytes: int  # the most in use in its forward, above the held bytes: Note [Held bytes]
    backward_peak_bytes: int
    forward_flops: int  # floating-point operations
    backward_flops: int
    forward_traffic: int  # bytes that operations read and write
    backward_traffic: int
    has_own_checkpointing: bool  # the model itself recomputes this block
    ops: tuple[OpProfile, ...]  # the operations whose results may be kept if the block is recomputed
    dropped_bytes: int = 0  # what its forward allocates that lives until the model returns (a cache)
    # Its forward writes into its inputs (an in-place activation first), so that it can't be run again from them.
    changes_input: bool = False
    # FSDP2 gathers parts of it one by one, with hooks that a recomputation would run at another time.
    gathers_inside: bool = False
    passed_bytes: int = 0  # its outputs that are not saved for backward
    parameter_count: int = 0  # its parameters (tensors)
    # Names of its parameters that cannot leave the device, since they are read while the block does not run: by another
    # module, a hook, or a checkpoint inside it. The other figures are without them.
    resident: tuple[str, ...] = ()
    forward_half_flops: int = 0  # those in 16 bits
    backward_half_flops: int = 0
    large_saved_bytes: int = 0  # of the saved bytes those in storages that are large enough to be offloaded
    large_saved_count: int = 0  # how many such storages there are


@dataclass(frozen=True)
class Unseen:
    """Memory that a step may need and a simulation does not show."""

    what: str  # in words, for the user
    nbytes: int = 0  # an upper bound
    share: float = 0.0  # an upper bound as a share of the plain step's peak, where none in bytes is known


@dataclass(frozen=True)
class ModelProfile:
    """The needs of a model in one training step."""

    blocks: tuple[BlockProfile, ...]  # in model order
    source: ProfileSource  # "static" (fake tensors) or "empirical" (a real run)
    reason: str  # why that way
    batch: str  # the batch it holds for, in words
    parameter_bytes: int
    gradient_bytes: int
    largest_gradient_bytes: int  # the gradient of the largest parameter that is trained
    optimizer_bytes: int
    resident_bytes: int  # what else is allocated all the time: buffers, inputs, workspaces
    other_saved_bytes: int  # what forward saves for backward outside of the blocks
    # The most in use, above the held bytes, from the end of the last block's forward to that of the model's,
    loss_peak_bytes: int
    tail_peak_bytes: int  # and from there to the first backward of a block
    other_flops: int  # of a step, outside of the blocks
    other_traffic: int  # bytes read and written outside of the blocks
    blocks_left_out: int = 0  # how many blocks did not run, and have the figures of an equal one
    offloaded: bool = False  # parameters were offloaded: peaks of blocks include their working copies
    unseen: tuple[Unseen, ...] = ()  # what a step may need beyond that
    # Bytes of temporaries of the optimizer's step, for each byte of all parameters stepped at once, and for each byte
    # of the largest; None for AdamW's.
    step_temporaries: tuple[float, float] | None = None
    step_accesses: int | None = None  # bytes that its step reads and writes, for each byte of parameters
    fused_on_cpu: bool = True  # whether that optimizer has a fused implementation for parameters on the host
    other_half_flops: int = 0  # those in 16 bits

    @property
    def calls_blocks(self) -> bool:
        """Whether forward called any block; True for a model without blocks."""
        return not self.blocks or any(block.calls for block in self.blocks)

    def block(self, name: str) -> BlockProfile:
        return next(block for block in self.blocks if block.name == name)


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
    stand_ins: Mapping[str, str],  # the blocks that did not run, each with the block whose figures it gets
    source: ProfileSource,
    reason: str,
    batch: str,
    exact_bytes: bool,  # the device counts tensors at their own size, not in the allocator's blocks
    offloaded: bool = False,  # parameters and gradients were offloaded
    # Names of the parameters that cannot be offloaded, by block; by default those read outside of their blocks.
    resident: Mapping[str, tuple[str, ...]] | None = None,
) -> ModelProfile:
    def size_of(parameters: Iterable[nn.Parameter]) -> int:
        sizes = [parameter.nbytes for parameter in parameters]
        return sum(sizes if exact_bytes else (CachingAllocator().allocate(size).size for size in sizes))

    records = {block.name: step.blocks[stand_ins.get(block.name, block.name)] for block in blocks}
    if resident is None:
        # Read while their block does not run: they stay on an accelerator. On a CPU nothing is copied: a
        # memory-mapped parameter has its values wherever it is read.
        resident = {
            block.name: tuple(
                ".".join(filter(None, (block.members[member], path)))
                for member, path in sorted(records[block.name].read_outside)
            )
            for block in blocks
            if not exact_bytes and records[block.name].read_outside
        }
    parameters = dict(model.named_parameters())
    staying = {id(model.get_parameter(name)) for names in resident.values() for name in names}
    members = {block.name: [model.get_submodule(member) for member in block.members] for block in blocks}
    used = {
        name: {
            id(each): each for module in modules for each in module.parameters() if id(each) not in staying
        }
        for name, modules in members.items()
    }

    # The order of calls; a block that did not run comes right after its stand-in.
    called = sorted(
        (block for block in blocks if records[block.name].calls), key=lambda b: records[b.name].order
    )
    order = {block.name: index for index, block in enumerate(called)}

    # The gradients that each block's backward creates: a tied one in the first to do so.
    gradients: dict[str, int] = {}
    seen: set[int] = set()
    for block in sorted(blocks, key=lambda block: order.get(block.name, -1), reverse=True):
        created = {
            key: each for key, each in used[block.name].items() if each.requires_grad and key not in seen
        }
        seen |= created.keys()
        gradients[block.name] = size_of(created.values())

    peaks, other_saved, loss_peak = _peaks(step, {} if offloaded else gradients)
    checkpointed = [
        name
        for name, module in model.named_modules()
        if getattr(module, "gradient_checkpointing", False) is True  # Hugging Face's flag
        or is_checkpoint_wrapper(module)
    ]
    profiles = []
    for block in blocks:
        record = records[block.name]
        own = [parameters[name] for name in block.parameter_names if id(parameters[name]) not in staying]
        forward_peak, backward_peak = peaks.get(stand_ins.get(block.name, block.name), (0, 0))
        profiles.append(
            BlockProfile(
                name=block.name,
                container=block.container,
                members=block.members,
                role=block.role,
                calls=record.calls,
                order=order.get(block.name, -1),
                parameter_bytes=size_of(own),
                gradient_bytes=gradients[block.name],
                optimizer_bytes=2 * size_of(each for each in own if each.requires_grad),
                used_bytes=size_of(used[block.name].values()),
                saved_bytes=record.saved,
                large_saved_bytes=record.large_saved,
                large_saved_count=record.large_saved_count,
                boundary_bytes=record.boundary,
                output_bytes=record.output,
                passed_bytes=record.passed,
                dropped_bytes=record.dropped,
                forward_peak_bytes=forward_peak,
                backward_peak_bytes=backward_peak,
                forward_flops=record.forward.flops,
                backward_flops=record.backward.flops,
                forward_traffic=record.forward.traffic,
                backward_traffic=record.backward.traffic,
                forward_half_flops=record.forward.half_flops,
                backward_half_flops=record.backward.half_flops,
                has_own_checkpointing=any(
                    not name or f"{member}.".startswith(f"{name}.")
                    for member in block.members
                    for name in checkpointed
                ),
                changes_input=record.changes_input,
                parameter_count=len(own),
                ops=tuple(record.ops),
                resident=resident.get(block.name, ()),
            )
        )
    # Of the parameters, those that were allocated when the recorded forward began. A tied parameter of a block that
    # did not run may exist in another: it is counted, on the safe side.
    absent = {name for block in blocks if block.name in stand_ins for name in block.parameter_names}
    present = size_of(
        each
        for name, each in parameters.items()
        if (id(each) in staying if offloaded else name not in absent)
    )
    trained = [each for each in parameters.values() if each.requires_grad]
    return ModelProfile(
        blocks=tuple(profiles),
        source=source,
        reason=reason,
        batch=batch,
        parameter_bytes=size_of(parameters.values()),
        gradient_bytes=size_of(trained),
        largest_gradient_bytes=max((size_of([each]) for each in trained), default=0),
        optimizer_bytes=2 * size_of(trained),
        resident_bytes=max(0, step.resident - present) + step.workspace,
        other_saved_bytes=other_saved,
        loss_peak_bytes=loss_peak,
        tail_peak_bytes=step.tail_peak - step.resident - step.saved_total,
        other_flops=step.other.flops,
        other_traffic=step.other.traffic,
        other_half_flops=step.other.half_flops,
        blocks_left_out=len(stand_ins),
        offloaded=offloaded,
        unseen=_unseen(model, step, on_cpu=exact_bytes),
    )


def _peaks(step: StepRecord, gradients: Mapping[str, int]) -> tuple[dict[str, tuple[int, int]], int, int]:
    """Return the blocks' peaks above the held bytes, what is saved outside of blocks, and the peak of the loss."""
    # See Note [Held bytes].
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
        forward = record.forward.peak - before[name] if record.forward.peak else 0
        backward = record.backward.peak - held if record.backward.peak else 0
        found[name] = (forward, backward)
        held += gradients.get(name, 0) - record.saved - record.output
    return found, other_saved, loss
