"""What can be done with a block, and a whole model's choices as data."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memscale.profiler.profile import BlockProfile, ModelProfile, OpProfile


@dataclass(frozen=True)
class Choice:
    """What one block gets.

    Attributes:
        recompute: forget what forward saved, run forward again in backward.
        keep: operations whose outputs are kept nevertheless.
        chained: forget the input as well, and recompute it from the block before.
        home: its parameters live on the tier below, and are copied up for use.
        down: its input, or that of the segment it is in, waits on the tier below as well.
    """

    recompute: bool = False
    keep: tuple[OpProfile, ...] = ()
    chained: bool = False
    home: bool = False
    down: bool = False

    @functools.cached_property
    def kept_bytes(self) -> int:
        return sum(op.output_bytes for op in self.keep)

    @functools.cached_property
    def kept_flops(self) -> int:
        return sum(op.flops for op in self.keep)


PLAIN = Choice()
AS_IT_IS = "as it is"
SHORT = 4  # segments of so many blocks are always looked at
SERVES = 4  # times the best length, beyond which no others are
ODD_SHARE = 50  # odd blocks that hold less than a fiftieth of what the stacks hold are not worth a choice


@dataclass(frozen=True)
class Candidate:
    """Choices for all blocks, by their place in the order of calls."""

    choices: tuple[Choice, ...]
    is_full_checkpointing: bool = (
        False  # every repeated block recomputed whole: what one would switch on by hand
    )

    @property
    def at_home(self) -> int:
        """How many blocks have their parameters on the tier below."""
        return sum(choice.home for choice in self.choices)

    @property
    def label(self) -> str:
        """What is done, in words."""
        recomputed = [choice for choice in self.choices if choice.recompute]
        parts = []
        if recomputed:
            parts.append(f"{len(recomputed)} blocks recomputed")
            lengths = Counter(_segments(self.choices))
            if set(lengths) != {1}:
                parts.append(f"in segments of {_in_words(sorted(lengths))}")
            kept = sorted({len(choice.keep) for choice in recomputed})
            if kept != [0]:
                parts.append(f"keeping {_in_words(kept)} products each")
        if self.at_home:
            all_of_them = self.at_home == len(self.choices)
            parts.append(
                "parameters at home" if all_of_them else f"parameters of {self.at_home} blocks at home"
            )
        inputs = sum(choice.down and not choice.chained for choice in self.choices)
        if inputs:
            parts.append(f"inputs of {inputs} below")
        return ", ".join(parts) or AS_IT_IS


def _segments(choices: Sequence[Choice]) -> Iterator[int]:
    length = 0
    for choice in choices:
        if length and not choice.chained:
            yield length
            length = 0
        if choice.recompute:
            length += 1
    if length:
        yield length


def _in_words(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


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


def odd_blocks(blocks: Sequence[BlockProfile]) -> tuple[BlockProfile, ...]:
    """The blocks outside of stacks that can be recomputed, if they hold enough to be worth a choice."""
    repeated = sum(block.saved_bytes for block in blocks if block.role == "repeated" and can_recompute(block))
    odd = tuple(block for block in blocks if block.role != "repeated" and can_recompute(block))
    return odd if sum(block.saved_bytes for block in odd) * ODD_SHARE >= repeated else ()


def uniform(
    profile: ModelProfile, *, recompute: bool, home: bool, steps: int | None = None
) -> Iterator[Candidate]:
    """Every stack alike, from nothing to everything: what one would try by hand.

    Three knobs: how many blocks are chained into one segment, how many of the best operations of each block are
    kept (one more at a time, or in so many steps), and whether odd blocks are recomputed as well; all of it with
    parameters on the device and at home.
    """
    blocks = called_blocks(profile)
    found = [Candidate(tuple(PLAIN for _ in blocks))]
    if recompute:
        found += _recomputed(blocks, steps)
    yield from found
    if home:
        everywhere = range(len(blocks))
        at_home: dict[int, Choice] = {}
        for candidate in found:
            yield Candidate(_at_home(candidate.choices, everywhere, at_home))


def by_hand(profile: ModelProfile, *, home: bool, steps: int | None = None) -> Iterator[Candidate]:
    """Full checkpointing, and what one would add by hand where that is not enough.

    The parameters of the last layers at home, one layer more at a time, or in so many steps; then those of all blocks.
    Nothing if no block can be recomputed.
    """
    every = _recomputed(called_blocks(profile), steps)
    full = next((each for each in every if each.is_full_checkpointing), None)
    if full is None:
        return
    yield full
    if home:
        layers = [index for index, block in enumerate(called_blocks(profile)) if block.role == "repeated"]
        at_home: dict[int, Choice] = {}
        for count in _in_steps(len(layers), steps)[1:]:
            yield replace(full, choices=_at_home(full.choices, layers[-count:], at_home))
        yield replace(full, choices=_at_home(full.choices, range(len(full.choices)), at_home))


def _at_home(
    choices: Sequence[Choice], which: Collection[int], known: dict[int, Choice]
) -> tuple[Choice, ...]:
    """The choices, some of them with parameters at home; equal ones are one object, by the id of what it was."""
    for choice in choices:
        if id(choice) not in known:
            known[id(choice)] = replace(choice, home=True)
    return tuple(known[id(choice)] if index in which else choice for index, choice in enumerate(choices))


def _in_steps(most: int, steps: int | None) -> list[int]:
    """From nothing to the most, one by one or in so many steps."""
    if steps is None or steps >= most:
        return list(range(most + 1))
    return [most * step // steps for step in range(steps + 1)]


def _recomputed(blocks: Sequence[BlockProfile], steps: int | None) -> Iterator[Candidate]:
    repeated = [block for block in blocks if block.role == "repeated" and can_recompute(block)]
    stacks = stack_sizes(blocks)
    kinds = {(block.container, block.saved_bytes, block.boundary_bytes): block for block in repeated}.values()
    odd = odd_blocks(blocks)
    most_ops = max((len(worth_keeping(block)) for block in repeated), default=0)
    products = [worth_keeping(block) for block in blocks]
    lengths = segment_lengths(len(repeated)) if repeated else (1,)
    known: dict[Choice, Choice] = {}
    for with_odd in (False, True) if odd else (False,):
        if not repeated and not with_odd:
            continue
        for length in lengths:
            for kept_ops in _in_steps(most_ops, steps):
                if length > 1 and not any(
                    serves(length, block, worth_keeping(block)[:kept_ops], stacks) for block in kinds
                ):
                    continue
                made = _alike(blocks, products, length, kept_ops, odd if with_odd else ())
                choices = tuple(known.setdefault(choice, choice) for choice in made)
                full = length == 1 and kept_ops == 0 and not with_odd
                yield Candidate(choices, is_full_checkpointing=full)


def stack_sizes(blocks: Sequence[BlockProfile]) -> Counter[str]:
    """How many blocks there are in each container."""
    return Counter(block.container for block in blocks)


def serves(length: int, block: BlockProfile, keep: Sequence[OpProfile], stacks: Mapping[str, int]) -> bool:
    """Whether so many of a stack's blocks are worth a look as one segment, if each keeps some products.

    With n blocks in segments of k, n/k inputs are held, and what k blocks forget comes back at once: the sum is the
    least at some k, where both are equal. Shorter and somewhat longer segments serve where something else is the peak,
    or in the first layers, when little is held. One that brings back twice that least sum alone serves nobody; short
    ones are looked at nevertheless.
    """
    if length <= SHORT:
        return True
    comes_back = block.saved_bytes // max(1, block.calls) - sum(op.output_bytes for op in keep)
    inputs = stacks[block.container] * block.boundary_bytes
    return length**2 * max(1, comes_back) <= SERVES**2 * inputs


def segment_lengths(count: int) -> tuple[int, ...]:
    """Lengths of segments worth a look in a stack of ``count`` blocks."""
    return tuple(length for length in (1, 2, 3, 4, 6, 8, 12, 16, 24) if length <= count)


def _alike(
    blocks: Sequence[BlockProfile],
    products: Sequence[tuple[OpProfile, ...]],
    length: int,
    kept_ops: int,
    odd: Sequence[BlockProfile],
) -> list[Choice]:
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
        choices.append(Choice(recompute=True, keep=products[index][:kept_ops], chained=chained))
    return choices
