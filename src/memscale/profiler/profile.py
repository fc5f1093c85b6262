"""The profile of a model, block by block, which the planner decides on.

Note [Held bytes]
~~~~~~~~~~~~~~~~~
The memory of a step is counted in two parts. *Held* bytes follow from the plan: parameters, optimizer state, resident
tensors, what forward saves outside of blocks; in forward what the blocks so far have saved; in backward what the
remaining blocks have saved, and the gradients of the finished ones. *Peaks* are bytes in use above that while a block
runs: temporaries, the incoming gradient, the gradients it creates. They may be negative: what a loss saves counts as
held from the start, and is allocated at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memscale.profiler.blocks import Role

ProfileSource = Literal["static", "empirical", "hints"]


@dataclass(frozen=True)
class OpProfile:
    """An expensive operation of a block's forward: a matrix product, attention, a convolution.

    Attributes:
        key: the overload and its number among the block's calls of it: "aten.addmm.default#3".
        flops: floating-point operations of one call.
        output_bytes: device memory of its result.
        half: whether it computes in 16 bits.
    """

    key: str
    flops: int
    output_bytes: int
    half: bool = False


@dataclass(frozen=True)
class BlockProfile:
    """The needs of one block in one training step; bytes are device memory as the allocator counts it.

    Attributes:
        name: the block's name in the model.
        container: the list that holds it; blocks that may be chained share it.
        members: paths of its modules.
        role: a layer of a stack, or what else it is.
        signature: equal for blocks of equal structure.
        calls: how often forward calls it.
        order: its position in the order of first calls; -1 if forward never calls it.
        parameter_bytes: its parameters.
        gradient_bytes: the gradients that its backward creates; that of a tied parameter belongs to the block that is
            called last.
        optimizer_bytes: the optimizer state of its parameters; AdamW's if the optimizer is not known.
        parameter_count: the number of its parameters (tensors).
        used_bytes: all parameters that it computes with, including those of another block (ties).
        saved_bytes: what its forward saves for backward, all calls together, without its inputs and outputs.
        boundary_bytes: its inputs that nothing else holds: the output of the block before it.
        output_bytes: its outputs that are saved for backward.
        passed_bytes: its outputs that are not.
        forward_peak_bytes: the most in use in its forward, above the held bytes (Note [Held bytes]).
        backward_peak_bytes: the same for its backward.
        forward_flops: floating-point operations of forward.
        backward_flops: floating-point operations of backward.
        forward_half_flops: those of forward in 16 bits.
        backward_half_flops: those of backward in 16 bits.
        forward_traffic: bytes that forward's operations read and write.
        backward_traffic: bytes that backward's operations read and write.
        has_own_checkpointing: whether the model itself recomputes this block.
        ops: the operations whose results may be kept if the block is recomputed.
        dropped_bytes: what its forward allocates that lives until the model returns, and no longer (a cache).
        resident: names of its parameters that cannot leave the device, since they are read while the block does not
            run: by another module, a hook, or a checkpoint inside it. The other figures are without them.
        changes_input: whether its forward writes into its inputs (an in-place activation first), so that it can't be
            run again from them.
    """

    name: str
    container: str
    members: tuple[str, ...]
    role: Role
    signature: str
    calls: int
    order: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    used_bytes: int
    saved_bytes: int
    boundary_bytes: int
    output_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    forward_flops: int
    backward_flops: int
    forward_traffic: int
    backward_traffic: int
    has_own_checkpointing: bool
    ops: tuple[OpProfile, ...]
    dropped_bytes: int = 0
    changes_input: bool = False
    passed_bytes: int = 0
    parameter_count: int = 0
    resident: tuple[str, ...] = ()
    forward_half_flops: int = 0
    backward_half_flops: int = 0


@dataclass(frozen=True)
class Unseen:
    """Memory that a step may need and a simulation does not show.

    Attributes:
        what: in words, for the user.
        nbytes: an upper bound.
        share: an upper bound as a share of the plain step's peak, where none in bytes is known.
    """

    what: str
    nbytes: int = 0
    share: float = 0.0


@dataclass(frozen=True)
class ModelProfile:
    """The needs of a model in one training step.

    Attributes:
        blocks: in model order.
        source: how it was found: "static" (fake tensors), "empirical" (a real run) or "hints" (structure only).
        reason: why that way.
        batch: the batch it holds for, in words.
        parameter_bytes: all parameters.
        gradient_bytes: all gradients.
        largest_gradient_bytes: the gradient of the largest parameter that is trained.
        optimizer_bytes: all of the optimizer's state.
        resident_bytes: what else is allocated all the time: buffers, inputs, workspaces.
        other_saved_bytes: what forward saves for backward outside of the blocks.
        loss_peak_bytes: the most in use from the end of the last block's forward to that of the model's (head, loss),
            above the held bytes.
        tail_peak_bytes: the most in use from there to the first backward of a block, above the held bytes.
        other_flops: floating-point operations of a step outside of the blocks.
        other_traffic: bytes read and written outside of the blocks.
        other_half_flops: those operations outside of the blocks in 16 bits.
        peak_bytes: the recorded peak of the step; 0 if the model was shortened.
        blocks_left_out: how many blocks did not run, and have the figures of an equal one.
        at_home: parameters were offloaded: peaks of blocks include their working copies.
        unseen: what a step may need beyond that.
        step_temporaries: bytes of temporaries of the optimizer's step, for each byte of all parameters stepped at once,
            and for each byte of the largest; None for AdamW's.
    """

    blocks: tuple[BlockProfile, ...]
    source: ProfileSource
    reason: str
    batch: str
    parameter_bytes: int
    gradient_bytes: int
    largest_gradient_bytes: int
    optimizer_bytes: int
    resident_bytes: int
    other_saved_bytes: int
    loss_peak_bytes: int
    tail_peak_bytes: int
    other_flops: int
    other_traffic: int
    peak_bytes: int
    blocks_left_out: int = 0
    at_home: bool = False
    unseen: tuple[Unseen, ...] = ()
    step_temporaries: tuple[float, float] | None = None
    other_half_flops: int = 0

    @property
    def calls_blocks(self) -> bool:
        """Whether forward called any block; True for a model without blocks."""
        return not self.blocks or any(block.calls for block in self.blocks)

    def block(self, name: str) -> BlockProfile:
        """Return a block by name."""
        return next(block for block in self.blocks if block.name == name)
