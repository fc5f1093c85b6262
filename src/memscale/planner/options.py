"""Choices for the blocks of a model, and the uniform plans that one would try by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from memscale.checkpointing.cost import can_recompute, worth_keeping
from memscale.profiler.profile import BlockProfile, ModelProfile

__all__ = [
    "PLAIN",
    "Candidate",
    "Choice",
    "Choices",
    "called_blocks",
    "can_chain",
    "checkpointing_candidates",
    "segment_pays",
    "spans",
    "stack_sizes",
    "uniform_candidates",
    "worthwhile_odd_blocks",
]

SEGMENT_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # blocks recomputed as one, in uniform plans
ALWAYS_TRIED = 4  # blocks: segments up to this length are always considered
LONGEST_SEGMENT = 4  # times the best length of a segment, beyond which a longer one cannot pay
ODD_BLOCKS_SHARE = 1 / 50  # of what the stacks save: if odd blocks save less, they are not worth a choice


class Choice(NamedTuple):
    """What one block gets.

    Attributes:
        technique: the technique for its activations; empty if they are left alone.
        variant: which of that technique's options for the block.
        chained: a recomputed block's input is not held either, but recomputed from the block before.
        offloaded: its parameters are on the tier below.
        input_offloaded: its input, or that of the segment it is in, is on the tier below as well.
    """

    technique: str = ""
    variant: int = 0
    chained: bool = False
    offloaded: bool = False
    input_offloaded: bool = False

    @property
    def recompute(self) -> bool:
        return self.technique == "checkpointing"


Choices = tuple[Choice, ...]
PLAIN = Choice()


@dataclass(frozen=True)
class Candidate:
    """Choices for all blocks, in the order of their calls.

    Attributes:
        choices: one for each block.
        is_full_checkpointing: every repeated block is recomputed whole, as by a framework's own switch.
    """

    choices: Choices
    is_full_checkpointing: bool = False

    @property
    def offloaded(self) -> int:
        """Return how many blocks have their parameters on the tier below."""
        return sum(choice.offloaded for choice in self.choices)


def spans(choices: Sequence[Choice]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each block or segment."""
    start = 0
    for stop in range(1, len(choices) + 1):
        if stop == len(choices) or not choices[stop].chained:
            yield start, stop
            start = stop


def called_blocks(profile: ModelProfile) -> tuple[BlockProfile, ...]:
    """Return the blocks that forward calls, in the order of their first calls."""
    return tuple(sorted((b for b in profile.blocks if b.order >= 0), key=lambda block: block.order))


def can_chain(before: BlockProfile, block: BlockProfile) -> bool:
    """Return whether a block's input is the output of the one before, and each is called once."""
    return (
        before.container == block.container
        and before.calls == block.calls == 1
        and before.order + 1 == block.order
        and block.boundary_bytes > 0
        and before.role == block.role == "repeated"
    )


def worthwhile_odd_blocks(blocks: Sequence[BlockProfile]) -> tuple[BlockProfile, ...]:
    """Return the blocks outside of stacks that can be recomputed, if they save enough to be worth a choice."""
    repeated = sum(block.saved_bytes for block in blocks if block.role == "repeated" and can_recompute(block))
    odd = tuple(block for block in blocks if block.role != "repeated" and can_recompute(block))
    return odd if sum(block.saved_bytes for block in odd) >= ODD_BLOCKS_SHARE * repeated else ()


def stack_sizes(blocks: Sequence[BlockProfile]) -> Counter[str]:
    """Return how many blocks there are in each container."""
    return Counter(block.container for block in blocks)


def segment_pays(length: int, block: BlockProfile, kept: int, stacks: Mapping[str, int]) -> bool:
    """Return whether so many of a stack's blocks are worth considering as one segment, each keeping some products.

    With n blocks in segments of k, n/k inputs are held, and what k blocks dropped comes back at once: the sum is the
    least at the k where both are equal. Shorter and somewhat longer segments pay where the peak is elsewhere, or in the
    first layers, when little is held. One that brings back several times that least sum cannot pay.
    """
    if length <= ALWAYS_TRIED:
        return True
    kept_bytes = sum(op.output_bytes for op in worth_keeping(block)[:kept])
    returned = block.saved_bytes // max(1, block.calls) - kept_bytes
    inputs = stacks[block.container] * block.boundary_bytes
    return length**2 * max(1, returned) <= LONGEST_SEGMENT**2 * inputs


def uniform_candidates(
    profile: ModelProfile, *, recompute: bool, offload: bool, steps: int | None = None
) -> Iterator[Candidate]:
    """Yield plans that treat every stack alike, from nothing to everything.

    They vary the length of segments, how many products each block keeps (one more at a time, or in `steps` steps), and
    whether odd blocks are recomputed as well; all of it with parameters on the device, then with all offloaded.
    """
    blocks = called_blocks(profile)
    found = [Candidate((PLAIN,) * len(blocks))]
    if recompute:
        found += _recomputed(blocks, steps)
    yield from found
    if offload:
        for candidate in found:
            yield Candidate(_offloaded(candidate.choices, range(len(blocks))))


def checkpointing_candidates(
    profile: ModelProfile, *, offload: bool, steps: int | None = None
) -> Iterator[Candidate]:
    """Yield full checkpointing, and what one would add by hand where that is not enough.

    The parameters of the last layers offloaded, one layer more at a time or in `steps` steps; then those of all blocks.
    Yields nothing if no block can be recomputed.
    """
    blocks = called_blocks(profile)
    full = next((each for each in _recomputed(blocks, steps) if each.is_full_checkpointing), None)
    if full is None:
        return
    yield full
    if offload:
        layers = [index for index, block in enumerate(blocks) if block.role == "repeated"]
        for count in _in_steps(len(layers), steps)[1:]:
            yield replace(full, choices=_offloaded(full.choices, layers[-count:]))
        yield replace(full, choices=_offloaded(full.choices, range(len(blocks))))


def _offloaded(choices: Choices, which: Collection[int]) -> Choices:
    return tuple(
        choice._replace(offloaded=True) if index in which else choice for index, choice in enumerate(choices)
    )


def _in_steps(most: int, steps: int | None) -> list[int]:
    """Return the numbers from 0 to `most`, all of them or so many steps."""
    if steps is None or steps >= most:
        return list(range(most + 1))
    return [most * step // steps for step in range(steps + 1)]


def _recomputed(blocks: Sequence[BlockProfile], steps: int | None) -> Iterator[Candidate]:
    repeated = [block for block in blocks if block.role == "repeated" and can_recompute(block)]
    stacks = stack_sizes(blocks)
    kinds = {(block.container, block.saved_bytes, block.boundary_bytes): block for block in repeated}.values()
    odd = worthwhile_odd_blocks(blocks)
    products = [len(worth_keeping(block)) for block in blocks]
    most_kept = max((len(worth_keeping(block)) for block in kinds), default=0)
    lengths = [length for length in SEGMENT_LENGTHS if length <= max(1, len(repeated))]
    for with_odd in (False, True) if odd else (False,):
        if not repeated and not with_odd:
            continue
        for length in lengths:
            for kept in _in_steps(most_kept, steps):
                if length > 1 and not any(segment_pays(length, block, kept, stacks) for block in kinds):
                    continue
                choices = _alike(blocks, products, length, kept, odd if with_odd else ())
                full = length == 1 and kept == 0 and not with_odd
                yield Candidate(choices, is_full_checkpointing=full)


def _alike(
    blocks: Sequence[BlockProfile],
    products: Sequence[int],
    length: int,
    kept: int,
    odd: Sequence[BlockProfile],
) -> Choices:
    choices: list[Choice] = []
    in_segment = 0
    for index, block in enumerate(blocks):
        if not can_recompute(block) or (block.role != "repeated" and block not in odd):
            choices.append(PLAIN)
            in_segment = 0
            continue
        chained = (
            0 < in_segment < length and choices[index - 1].recompute and can_chain(blocks[index - 1], block)
        )
        in_segment = in_segment + 1 if chained else 1
        choices.append(Choice("checkpointing", min(kept, products[index]), chained))
    return tuple(choices)
