"""From a profile to the row that the frontier is found on: what each choice costs a block, in bytes and seconds."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memscale.planner.choices import (
    PLAIN,
    Candidate,
    Choice,
    called_blocks,
    can_chain,
    can_recompute,
    odd_blocks,
    serves,
    stack_sizes,
    worth_keeping,
)
from memscale.planner.cost import Clock
from memscale.planner.frontier import Option, Row, Trade, trade_of
from memscale.profiler.profile import BlockProfile, ModelProfile

PAGE = 4096  # of a file
SLAB = 2**16  # that small tensors share there

Choices = tuple[Choice, ...]
"""The choices of one option: of one block, or of the neighbours that are one segment."""

SEGMENTS = (2, 3, 4, 6, 8)  # lengths of segments that the frontier is looked for in
KEPT_IN_SEGMENTS = 2  # a segment brings back all it forgot at once: keeping much in it gains little


@dataclass(frozen=True)
class Terms:
    """What is allowed, and where.

    Attributes:
        clock: the device's rates.
        kind: of the device.
        recompute: blocks may be recomputed.
        home: parameters may live on the tier below.
        home_bytes: the most that may live there.
        ahead: how many layers ahead parameters are fetched; 0 if none are.
        working_share: of the parameters' bytes that a working copy takes.
        state_share: of Adam's 8 bytes a parameter that its state takes.
        bucket_bytes: what is in memory at once while an optimizer steps what is at home on disk.
    """

    clock: Clock
    kind: str
    recompute: bool = True
    home: bool = False
    home_bytes: int = 0
    ahead: int = 0
    working_share: float = 1.0
    state_share: float = 1.0
    bucket_bytes: int = 0


class Rows:
    """The rows of one profile. See Note [The memory of a step] in trades.py."""

    def __init__(self, profile: ModelProfile, terms: Terms) -> None:
        self._profile = profile
        self.terms = terms
        self.blocks = called_blocks(profile)
        self._odd = odd_blocks(self.blocks)
        self._stacks = stack_sizes(self.blocks)
        # Equal blocks with equal neighbours have equal options, which are worked out once.
        kinds: dict[BlockProfile, int] = {}
        self._kinds = [kinds.setdefault(_anonymous(block), len(kinds)) for block in self.blocks]
        self._known: dict[tuple[object, ...], tuple[Option[Choices], ...]] = {}
        self._known_options: dict[tuple[int, ...], Option[Choices]] = {}
        self._known_choices: dict[tuple[int, int, bool, bool], Choice] = {}
        self._plain = {home: replace(PLAIN, home=home) for home in (False, True)}
        self._known_below: dict[int, Choice] = {}  # by the id of the same choice with its input where it is
        self._known_ahead: dict[
            tuple[int, int], Option[Choices]
        ] = {}  # by the id of what it is without, and depth
        self._known_rows: dict[tuple[bool, int], Row[Choices]] = {}  # without options

    def rows(self) -> Iterator[Row[Choices]]:
        """Every choice that is allowed at every position.

        Blocks outside of stacks, which may share parameters, are at home together or not at all: a row for each.
        Of the layers of stacks the last ones are, as many as serve (phases in trades.py).
        """
        for odd_home in (False, True) if self.terms.home else (False,):
            homes, depth = self._may_be_home(odd_home), self.terms.ahead
            if homes is not None:
                known: dict[int, list[Option[Choices]]] = {}  # of equal positions they are one list
                options = []
                for index in range(len(self.blocks)):
                    here = self._options_at(index, homes)
                    if id(here) not in known:
                        known[id(here)] = [self._with_those_ahead(each, odd_home, depth) for each in here]
                    options.append(known[id(here)])
                yield self._row(options, odd_home, depth)

    def trade(self, candidate: Candidate) -> Trade[Choices]:
        """What one candidate costs."""
        pairs = zip(self.blocks, candidate.choices, strict=True)
        odd_home = any(choice.home for block, choice in pairs if block.role != "repeated")
        depth = min(self.terms.ahead, candidate.at_home)
        options = []
        for start, stop in _spans(candidate.choices):
            option = self._option_of(start, candidate.choices[start:stop])
            options.append(self._with_those_ahead(option, odd_home, depth))
        if (odd_home, depth) not in self._known_rows:
            self._known_rows[odd_home, depth] = self._row([()] * len(self.blocks), odd_home, depth)
        return trade_of(self._known_rows[odd_home, depth], options)

    @property
    def other_saved_bytes(self) -> int:
        """What forward leaves for backward outside of the blocks."""
        return self._profile.other_saved_bytes

    def home_bytes(self, choices: Choices) -> int:
        """What lives on the tier below: parameters, their gradients and their optimizer state."""
        return sum(
            _home_bytes(block) for block, choice in zip(self.blocks, choices, strict=True) if choice.home
        )

    def below_bytes(self, choices: Choices) -> int:
        """The most that the tier below needs at once.

        A file on disk is taken in whole pages, and activations count as well. On the host below an accelerator they
        have what the cap leaves them (`techniques/transfers.py`).
        """
        at_home = self.home_bytes(choices)
        if self.terms.kind != "cpu":
            return at_home
        pages = sum(
            self._unused_in_pages(block)
            for block, choice in zip(self.blocks, choices, strict=True)
            if choice.home
        )
        waiting = sum(self.input_bytes(index) for index, choice in enumerate(choices) if choice.down)
        return at_home + pages + waiting + (SLAB if at_home else 0)

    def _unused_in_pages(self, block: BlockProfile) -> int:
        """The most that the last pages of a block's parameters, gradients and state leave unused."""
        if self.terms.kind != "cpu" or not block.parameter_bytes:
            return 0
        copies = _home_bytes(block) / block.parameter_bytes
        return int(copies * PAGE * block.parameter_count)

    # The row -----------------------------------------------------------------------------------------

    def _row(self, options: Sequence[Sequence[Option[Choices]]], odd_home: bool, depth: int) -> Row[Choices]:
        profile, blocks = self._profile, self.blocks
        with_choices = sum(block.parameter_bytes + block.optimizer_bytes for block in blocks)
        # What is fetched ahead while something else runs.
        ahead = depth * self._largest(blocks) if odd_home else 0
        other_gradients = profile.gradient_bytes - sum(block.gradient_bytes for block in blocks)
        return Row(
            options=options,
            dropped=[block.dropped_bytes for block in blocks],
            constant=profile.parameter_bytes
            + profile.optimizer_bytes
            + profile.resident_bytes
            + profile.other_saved_bytes
            + ahead
            - with_choices,
            seconds=self.terms.clock.step(profile),
            loss=profile.loss_peak_bytes,
            tail=profile.tail_peak_bytes + (0 if odd_home else depth * self._largest_layer),
            # What forward leaves outside of the blocks is gone when the optimizer steps.
            stepping=other_gradients + self._temporaries(odd_home) - profile.other_saved_bytes - ahead,
        )

    def _largest(self, blocks: Sequence[BlockProfile]) -> int:
        return max(map(self._working, blocks), default=0)

    @functools.cached_property
    def _largest_layer(self) -> int:
        return self._largest([block for block in self.blocks if block.role == "repeated"])

    def _with_those_ahead(self, option: Option[Choices], odd_home: bool, depth: int) -> Option[Choices]:
        """Around a layer that is at home others are, of which the next ones are there already.

        So it is when backward begins, with the last layers. If all kinds of blocks are at home, it is so wherever a
        step is, and in the row's constant.
        """
        if odd_home or not depth or not option.what[0].home:
            return option
        key = (id(option), depth)  # the known options stay
        if key not in self._known_ahead:
            ahead = depth * self._largest_layer
            with_it = replace(option, forward=option.forward + ahead, backward=option.backward + ahead)
            self._known_ahead[key] = with_it
        return self._known_ahead[key]

    def _temporaries(self, odd_home: bool) -> int:
        """What a step makes of one parameter at a time; for what it makes of all at once see `_stepping`."""
        largest = int(self._step_temporaries[1] * self._profile.largest_gradient_bytes)
        if self.terms.kind != "cpu":
            return largest + (
                self.terms.bucket_bytes if self.terms.state_share < 1 else 0
            )  # moments in 32 bits again
        # The largest are embeddings: at home they are stepped in buckets.
        return self.terms.bucket_bytes if odd_home else largest

    @functools.cached_property
    def _step_temporaries(self) -> tuple[float, float]:
        """AdamW makes two temporaries of one parameter at a time on a CPU, elsewhere one of all at once (foreach)."""
        adamw = (0.0, 2.0) if self.terms.kind == "cpu" else (1.0, 0.0)
        return self._profile.step_temporaries or adamw

    def _may_be_home(self, odd: bool) -> list[tuple[bool, ...]] | None:
        """For each block whether its parameters may be, or must be, at home.

        The tier below may have room for some layers only, the last ones; None if not even for the odd blocks.
        """
        room = self.terms.home_bytes if self.terms.home else 0
        allowed: list[tuple[bool, ...]] = [(False,)] * len(self.blocks)
        for index, block in enumerate(self.blocks):
            if odd and block.role != "repeated" and block.used_bytes:
                allowed[index] = (True,)
                room -= _home_bytes(block) + self._unused_in_pages(block)
        if room < 0:
            return None
        for index, block in reversed(list(enumerate(self.blocks))):
            if block.role != "repeated" or not block.used_bytes:
                continue
            room -= _home_bytes(block) + self._unused_in_pages(block)
            if room < 0 or not self.terms.home:
                break
            allowed[index] = (False, True)
        return allowed

    def _options_at(self, index: int, homes: Sequence[tuple[bool, ...]]) -> tuple[Option[Choices], ...]:
        near = slice(max(0, index - 1), index + SEGMENTS[-1])
        chained = tuple(can_chain(*pair) for pair in itertools.pairwise(self.blocks[near]))
        key = (index == 0, tuple(self._kinds[near]), tuple(homes[near]), chained)
        if key not in self._known:
            self._known[key] = tuple(self._options(index, homes))
        return self._known[key]

    def _options(self, index: int, homes: Sequence[tuple[bool, ...]]) -> Iterator[Option[Choices]]:
        block = self.blocks[index]
        for home in homes[index]:
            found = [self._option_of(index, (self._plain[home],))]
            if self._is_recomputable(block):
                for kept in range(len(worth_keeping(block)) + 1):
                    choice = self._recomputed(index, kept, home=home)
                    found += self._up_and_down(index, (choice,))
            for length in SEGMENTS:
                segment = self.blocks[index : index + length]
                if not self._is_segment(segment, length):
                    continue
                if not all(home in each for each in homes[index : index + length]):
                    continue
                rest = range(index + 1, index + length)
                for kept_first, kept in _kept_in(block):
                    if not serves(length, block, worth_keeping(block)[:kept], self._stacks):
                        continue
                    choices = [self._recomputed(index, kept_first, home=home)]
                    choices += [self._recomputed(each, kept, home=home, chained=True) for each in rest]
                    found += self._up_and_down(index, tuple(choices))
            phase = int(home) if len(homes[index]) > 1 else None
            yield from (replace(option, phase=phase) for option in _undominated(found))

    def _up_and_down(self, index: int, choices: Choices) -> Iterator[Option[Choices]]:
        """A recomputed block or segment with its input where it is, and with its input on the tier below."""
        yield self._option_of(index, choices)
        first = choices[0]
        if first.home and not first.keep and self.input_bytes(index):
            yield self._option_of(index, tuple(map(self._below, choices)))

    def _below(self, choice: Choice) -> Choice:
        if id(choice) not in self._known_below:  # the known ones stay, and so do their ids
            self._known_below[id(choice)] = replace(choice, down=True)
        return self._known_below[id(choice)]

    def _is_recomputable(self, block: BlockProfile) -> bool:
        may = self.terms.recompute and can_recompute(block)
        return may and (block.role == "repeated" or block in self._odd)

    def _is_segment(self, blocks: Sequence[BlockProfile], length: int) -> bool:
        return (
            len(blocks) == length
            and all(self._is_recomputable(block) for block in blocks)
            and all(can_chain(*pair) for pair in itertools.pairwise(blocks))
        )

    def _recomputed(self, index: int, kept: int, *, home: bool, chained: bool = False) -> Choice:
        key = (self._kinds[index], kept, home, chained)
        choice = self._known_choices.get(key)
        if choice is None:
            keep = worth_keeping(self.blocks[index])[:kept]
            choice = Choice(recompute=True, keep=keep, chained=chained, home=home)
            self._known_choices[key] = choice
        return choice

    # One option --------------------------------------------------------------------------------------

    def _option_of(self, start: int, choices: Choices) -> Option[Choices]:
        """`_option`, worked out once for equal blocks after equal ones; candidates have most choices in common."""
        kinds = self._kinds[max(0, start - 1) : start + len(choices)]
        key = (start == 0, *kinds, -1, *map(id, choices))
        option = self._known_options.get(key)
        if option is None:  # it holds the choices, so that no other ones will have their ids
            option = self._known_options[key] = self._option(start, choices)
        return option

    def _option(self, start: int, choices: Choices) -> Option[Choices]:
        """What a choice for one block, or for the blocks of one segment, costs."""
        blocks = self.blocks[start : start + len(choices)]
        pairs = list(zip(blocks, choices, strict=True))
        held = self._extra_input(start, choices[0])
        forward = 0
        for index, (block, choice) in enumerate(pairs):
            working = self._working(block) if choice.home and not self._profile.at_home else 0
            # The first block's own input is in its peak, or in what the block before it holds.
            forward = max(forward, (held if index else 0) + block.forward_peak_bytes + working)
            held += self._held(block, choice)
            if index == len(pairs) - 1:
                held += block.output_bytes  # inside of a segment it is recomputed
        return Option(
            what=choices,
            seconds=sum(self._seconds(block, choice) for block, choice in pairs)
            + (self.down_seconds(start) if choices[0].down else 0.0),
            resident=sum(
                block.parameter_bytes + self._state_bytes(block) for block, choice in pairs if not choice.home
            ),
            held=held,
            forward=forward,
            backward=self._backward(start, pairs, held) + (self.input_bytes(start) if choices[0].down else 0),
            gradient=sum(block.gradient_bytes for block, choice in pairs if not choice.home),
            stepping=sum(self._stepping(block) for block, choice in pairs if not choice.home),
            span=len(pairs),
        )

    def _extra_input(self, index: int, choice: Choice) -> int:
        """A plain block may not need its input for backward; one that is recomputed does, if it is not below."""
        if index == 0 or not choice.recompute:
            return 0
        return -self._held_input(index) if choice.down else self._passed_input(index)

    def _held_input(self, index: int) -> int:
        """What of a block's input the block before it holds."""
        return min(self.blocks[index].boundary_bytes, self.blocks[index - 1].output_bytes) if index else 0

    def _passed_input(self, index: int) -> int:
        """What of a block's input the block before it does not hold."""
        return max(0, self.blocks[index].boundary_bytes - self.blocks[index - 1].output_bytes) if index else 0

    def input_bytes(self, index: int) -> int:
        """What of a block's input is the output of the block before it: that may wait below."""
        if index == 0:
            return 0
        before = self.blocks[index - 1]
        return min(self.blocks[index].boundary_bytes, before.output_bytes + before.passed_bytes)

    def _seconds(self, block: BlockProfile, choice: Choice) -> float:
        clock = self.terms.clock
        seconds = clock.recompute(block, choice.kept_flops) if choice.recompute else 0.0
        return seconds + (self.home_seconds(block) if choice.home else 0.0)

    def home_seconds(self, block: BlockProfile) -> float:
        """What it costs that a block's parameters are at home."""
        share, ahead = self.terms.working_share, self.terms.ahead > 0
        return self.terms.clock.home(block, share=share, ahead=ahead)

    def down_seconds(self, index: int) -> float:
        """What it costs that a block's input waits on the tier below."""
        return self.terms.clock.down(self.input_bytes(index), ahead=self.terms.ahead > 0)

    def _working(self, block: BlockProfile) -> int:
        return int(block.used_bytes * self.terms.working_share)

    def _state_bytes(self, block: BlockProfile) -> int:
        """Embeddings keep their state in 32 bits."""
        share = self.terms.state_share if block.role == "repeated" else 1.0
        return int(block.optimizer_bytes * share)

    def _backward(self, start: int, pairs: Sequence[tuple[BlockProfile, Choice]], held: int) -> int:
        """The most in use in the backward of a block, or of a segment's blocks, above what is live before them."""
        now = held
        # A segment is recomputed as a whole: what its blocks save, the tensors between them, their parameters.
        made = [
            _recomputed(block, choice) + (self._held_input(start + index) if choice.chained else 0)
            for index, (block, choice) in enumerate(pairs)
        ]
        recomputed = sum(made)
        # Where the profile has them, they are in the peaks of blocks; recomputing has them all at once.
        working = sum(
            self._working(block)
            for block, choice in pairs
            if choice.recompute and (choice.home or self._has_copy(block))
        )
        if not self._profile.at_home:
            working = sum(self._working(block) for block, choice in pairs if choice.home)
        most = 0
        last, choice = pairs[-1]
        if choice.recompute:
            # In 16 bits running it again may need more than its backward: copies that are not saved. In that peak are
            # its parameters, where the profile has them, and its input, unless the block before it holds it.
            own = self._passed_input(start) if len(pairs) == 1 else 0
            own += min(working, self._working(last)) if self._profile.at_home else 0
            most = now + recomputed - made[-1] + last.forward_peak_bytes - own + working
        for block, choice in reversed(pairs):
            most = max(most, now + recomputed + block.backward_peak_bytes + working)
            recomputed -= made.pop()
            now -= self._held(block, choice)
            if choice.home or self._has_copy(block):
                working = max(0, working - self._working(block))
            if not choice.home:
                now += block.gradient_bytes
        return most

    def _held(self, block: BlockProfile, choice: Choice) -> int:
        """What a block holds inside between forward and backward."""
        if choice.recompute:
            return choice.kept_bytes * block.calls
        copied = self._has_copy(block) and not choice.home
        return block.saved_bytes + (self._working(block) if copied else 0)

    def _has_copy(self, block: BlockProfile) -> bool:
        """Whether a layer's parameters that are on the device have a 16-bit copy there, until backward.

        A profile with all parameters at home has not seen it. Embeddings are read as they are.
        """
        return self._profile.at_home and self.terms.working_share < 1 and block.role == "repeated"

    def _stepping(self, block: BlockProfile) -> int:
        """The gradients, and temporaries of all parameters at once."""
        return block.gradient_bytes + int(self._step_temporaries[0] * block.gradient_bytes)


def _recomputed(block: BlockProfile, choice: Choice) -> int:
    """What running a block again brings back, a call at a time."""
    if not choice.recompute:
        return 0
    return max(0, block.saved_bytes // max(1, block.calls) - choice.kept_bytes)


def _anonymous(block: BlockProfile) -> BlockProfile:
    """All that two equal blocks have in common."""
    return replace(block, name="", members=(), order=0)


def _home_bytes(block: BlockProfile) -> int:
    return block.parameter_bytes + block.gradient_bytes + block.optimizer_bytes


def _kept_in(block: BlockProfile) -> Iterator[tuple[int, int]]:
    """How many products the first block of a segment keeps, and how many the others."""
    yield 0, 0
    for kept in range(1, min(KEPT_IN_SEGMENTS, len(worth_keeping(block))) + 1):
        yield kept - 1, kept
        yield kept, kept


def _spans(choices: Choices) -> Iterator[tuple[int, int]]:
    """From where to where the choices form one option: a block, or a segment."""
    start = 0
    for stop in range(1, len(choices) + 1):
        if stop == len(choices) or not choices[stop].chained:
            yield start, stop
            start = stop


def _undominated(options: Sequence[Option[Choices]]) -> Iterator[Option[Choices]]:
    """The options that no other of the same span beats in everything; of equal ones the first."""
    alike: dict[int, list[tuple[int, tuple[float, ...]]]] = {}
    for index, option in enumerate(options):
        alike.setdefault(option.span, []).append((index, _costs(option)))
    for index, option in enumerate(options):
        cost = _costs(option)
        if not any(
            (other != cost or number < index) and all(map(operator.le, other, cost))
            for number, other in alike[option.span]
        ):
            yield option


def _costs(option: Option[Choices]) -> tuple[float, ...]:
    return (
        option.seconds,
        option.resident,
        option.held,
        option.forward,
        option.backward,
        option.gradient,
        option.stepping,
    )
