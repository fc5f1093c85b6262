"""What a model needs, block by block: the profile that the engine decides on.

Note [What is held]
~~~~~~~~~~~~~~~~~~~
The memory of a step is counted in two parts. What is *held* follows from the choices: parameters, optimizer state,
what is resident, what forward leaves outside of blocks; in forward what the blocks so far have made and not freed;
in backward that of the blocks to come, and the gradients of the blocks behind. *Peaks* are what is in use above that
while a block runs: temporaries, the gradient that arrives, gradients that it makes. They may be below zero: what a
loss saves is held from the start by this count, and is made at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memscale.profiler.blocks import Role

ProfileSource = Literal["static", "empirical", "hints"]


@dataclass(frozen=True)
class OpProfile:
    """One operation of a block's forward that computes much (a product of matrices, attention, a convolution).

    Attributes:
        key: the overload and its number among the block's calls of it: ``"aten.addmm.default#3"``.
        flops: floating-point operations of one call.
        output_bytes: device memory of its result.
    """

    key: str
    flops: int
    output_bytes: int


@dataclass(frozen=True)
class BlockProfile:
    """One block's needs in one training step; bytes are device memory as the allocator counts it.

    Attributes:
        name: the block's name in the model.
        container: the list that holds it; blocks that may be chained share it.
        members: paths of its modules.
        role: a layer of a stack, or what else it is.
        signature: equal for blocks of equal structure.
        calls: how often forward calls it.
        order: its place in the order of first calls; -1 if forward never calls it.
        parameter_bytes: its parameters.
        gradient_bytes: the gradients that its backward makes; that of a tied parameter is made by the block
            that is called last.
        optimizer_bytes: the state that the optimizer keeps for its parameters; AdamW's if that is not known.
        parameter_count: how many tensors its parameters are.
        used_bytes: all parameters that it computes with, those included that belong to another block (ties).
        saved_bytes: what its forward leaves for backward, all calls together, without its inputs and outputs.
        boundary_bytes: its inputs that nothing else holds: the output of the block before it.
        output_bytes: its outputs, as far as forward leaves them for backward.
        passed_bytes: its outputs, as far as it does not.
        forward_peak_bytes: the most in use in its forward, above what is held before it (Note [What is held]).
        backward_peak_bytes: the most in use in its backward, above what is held before that.
        forward_flops: floating-point operations of forward.
        backward_flops: floating-point operations of backward.
        forward_traffic: bytes that forward's operations read and write.
        backward_traffic: bytes that backward's operations read and write.
        has_own_checkpointing: the model recomputes this block by itself already.
        ops: the operations worth keeping, if the block is recomputed.
        dropped_bytes: what its forward makes that lives on until the model returns, and no longer (a cache).
        resident: names of its parameters that cannot leave the device, since they are read while the block does not
            run: by another module, by a hook, or by a checkpoint inside of it. The other figures are without them.
        changes_input: its forward writes into its own inputs (an in-place activation first), so that it can't be
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


@dataclass(frozen=True)
class Unseen:
    """Memory that a step may need and a simulation does not see.

    Attributes:
        what: in words, for the user.
        nbytes: a bound on it.
        share: the same as a share of the plain step's peak, where no bound in bytes is known.
    """

    what: str
    nbytes: int = 0
    share: float = 0.0


@dataclass(frozen=True)
class ModelProfile:
    """A model's needs in one training step.

    Attributes:
        blocks: in model order.
        source: how it was found: "static" (fake tensors), "empirical" (a real run) or "hints" (structure only).
        reason: why that way.
        batch: the batch it holds for, in words.
        parameter_bytes: all parameters.
        gradient_bytes: all gradients.
        largest_gradient_bytes: the gradient of the largest parameter that is trained.
        optimizer_bytes: all of the optimizer's state.
        resident_bytes: what is there all the time besides: buffers, inputs, workspaces.
        other_saved_bytes: what forward leaves for backward outside of the blocks.
        loss_peak_bytes: the most in use after the last block's forward to the end of the model's (head, loss),
            above what is held then.
        tail_peak_bytes: the most in use from there to a block's backward, above what is held then.
        other_flops: floating-point operations of a step outside of the blocks.
        other_traffic: bytes read and written outside of the blocks.
        peak_bytes: the step's peak, as the profile's own run saw it; 0 if the run was of a shortened model.
        blocks_left_out: how many blocks did not run, and have the figures of an equal one.
        at_home: parameters were on the tier below: peaks of blocks include their working copies.
        unseen: what a step may need beyond that.
        step_temporaries: bytes that the optimizer's step makes in between, for each byte of all parameters stepped at
            once, and for each byte of the largest; None for AdamW's.
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

    @property
    def calls_blocks(self) -> bool:
        """Whether forward called any block; a model without blocks has none to call."""
        return not self.blocks or any(block.calls for block in self.blocks)

    def block(self, name: str) -> BlockProfile:
        """One block by name."""
        return next(block for block in self.blocks if block.name == name)
