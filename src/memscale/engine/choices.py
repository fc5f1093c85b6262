"""What can be done with a block, and a whole model's choices as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memscale.profiler.profile import BlockProfile, ModelProfile, OpProfile


@dataclass(frozen=True)
class Choice:
    """What one block gets.

    Attributes:
        recompute: forget what forward saved, run forward again in backward.
        keep: operations whose outputs are kept nevertheless.
        chained: forget the input as well, and recompute it from the block before.
    """

    recompute: bool = False
    keep: tuple[OpProfile, ...] = ()
    chained: bool = False

    @property
    def kept_bytes(self) -> int:
        return sum(op.output_bytes for op in self.keep)

    @property
    def kept_flops(self) -> int:
        return sum(op.flops for op in self.keep)


PLAIN = Choice()
ODD_SHARE = 50  # odd blocks that hold less than a fiftieth of what the stacks hold are not worth a choice


@dataclass(frozen=True)
class Candidate:
    """Choices for all blocks, by their place in the order of calls.

    ``label`` says in words what was done, for the frontier and the reasons.
    """

    label: str
    choices: tuple[Choice, ...]
    offloaded: bool = False  # every block's parameters are at home on the tier below, and copied up for use
    is_full_checkpointing: bool = (
        False  # every repeated block recomputed whole: what one would switch on by hand
    )


def called_blocks(profile: ModelProfile) -> tuple[BlockProfile, ...]:
    """The blocks that forward calls, in the order of their first calls."""
    return tuple(sorted((b for b in profile.blocks if b.order >= 0), key=lambda block: block.order))


def can_recompute(block: BlockProfile) -> bool:
    """Recomputing pays only where forward leaves something, and is possible only from inputs that stay.

    A block that recomputes itself is left alone.
    """
    return block.saved_bytes > 0 and not block.has_own_checkpointing and not block.changes_input


def can_chain(before: BlockProfile, block: BlockProfile) -> bool:
    """The input of ``block`` is the output of ``before``, both are called once, and both are recomputed."""
    return (
        before.container == block.container
        and before.calls == block.calls == 1
        and before.order + 1 == block.order
        and block.boundary_bytes > 0
        and before.role == block.role == "repeated"
    )


def worth_keeping(block: BlockProfile) -> tuple[OpProfile, ...]:
    """The block's heavy operations, those that save the most computation per byte first."""
    useful = [op for op in block.ops if op.output_bytes > 0]
    return tuple(sorted(useful, key=lambda op: (-op.flops / op.output_bytes, op.key)))


def candidates(profile: ModelProfile) -> Iterator[Candidate]:
    """Uniform choices over the model's stacks, from none to everything.

    Four knobs: how many blocks are chained into one segment, how many of the best operations of each block are
    kept, in which share of the blocks, and whether odd blocks are recomputed as well. Each stack gets the same.
    The full frontier over single blocks will take this place.
    """
    blocks = called_blocks(profile)
    yield Candidate("as it is", tuple(PLAIN for _ in blocks))
    repeated = [block for block in blocks if block.role == "repeated" and can_recompute(block)]
    odd = [block for block in blocks if block.role != "repeated" and can_recompute(block)]
    if sum(block.saved_bytes for block in odd) * ODD_SHARE < sum(block.saved_bytes for block in repeated):
        odd = []
    most_ops = max((len(worth_keeping(block)) for block in repeated), default=0)
    lengths = _segment_lengths(len(repeated)) if repeated else (1,)
    for with_odd in (False, True) if odd else (False,):
        if not repeated and not with_odd:
            continue
        for length in lengths:
            for kept_ops in range(most_ops + 1):
                for share in (1.0,) if kept_ops == 0 else (0.25, 0.5, 0.75, 1.0):
                    yield _uniform(blocks, length, kept_ops, share, with_odd)


def _segment_lengths(count: int) -> tuple[int, ...]:
    wanted = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}
    return tuple(sorted(length for length in wanted if length <= count))


def _uniform(
    blocks: Sequence[BlockProfile], length: int, kept_ops: int, share: float, with_odd: bool
) -> Candidate:
    choices: list[Choice] = []
    in_segment = 0
    eligible = sum(block.role == "repeated" and can_recompute(block) for block in blocks)
    seen = 0
    for index, block in enumerate(blocks):
        if not can_recompute(block) or (block.role != "repeated" and not with_odd):
            choices.append(PLAIN)
            in_segment = 0
            continue
        if block.role == "repeated":
            seen += 1
        # The share of blocks that keep one operation more is spread evenly over the stack.
        more = int(seen * share) > int((seen - 1) * share) if block.role == "repeated" else False
        keep = worth_keeping(block)[: kept_ops if more else max(0, kept_ops - 1)]
        chained = (
            0 < in_segment < length and choices[index - 1].recompute and can_chain(blocks[index - 1], block)
        )
        in_segment = in_segment + 1 if chained else 1
        choices.append(Choice(recompute=True, keep=keep, chained=chained))
    parts = [f"{eligible} blocks recomputed" if eligible else "odd blocks recomputed"]
    if length > 1:
        parts.append(f"in segments of {length}")
    if kept_ops:
        parts.append(f"keeping {kept_ops} of their products" + ("" if share == 1 else f" in {share:.0%}"))
    if with_odd and eligible:
        parts.append("odd blocks too")
    full = length == 1 and kept_ops == 0 and not with_odd
    return Candidate(", ".join(parts), tuple(choices), is_full_checkpointing=full)
