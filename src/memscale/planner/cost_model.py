"""The cost model: what each choice for each block costs in bytes and seconds, as a row for the frontier.

What can be done with a block, and the time of it, comes from the techniques (`Technique.options`); how the bytes of
neighbouring blocks add up over a step is computed here. See Note [The memory of a step] in frontier.py.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from memscale.checkpointing.technique import can_recompute, worth_keeping
from memscale.config import Config
from memscale.execution_plan import StepTime
from memscale.executor.registry import LAYER_TECHNIQUES
from memscale.hardware import Hardware
from memscale.offload.technique import activation_time
from memscale.optimizer.needs import StepCosts, bucket_bytes_for
from memscale.planner.frontier import ModelRow, Option, trade_of
from memscale.planner.settings import NOTHING, Setting
from memscale.profiler.profile import BlockProfile, ModelProfile
from memscale.techniques.cost import BlockOption, CostTerms, ReachedRates
from memscale.tiers.disk import PAGE
from memscale.tiers.engine import MASTERS_SHARE

SLAB_BYTES = 2**16  # the file that small tensors share
SEGMENT_LENGTHS = (2, 3, 4, 6, 8)  # blocks recomputed as one
ALWAYS_TRIED = 4  # blocks: segments up to this length are always considered
LONGEST_SEGMENT = 4  # times the best length of a segment, beyond which a longer one cannot pay
ODD_BLOCKS_SHARE = 1 / 50  # of what the stacks save: if odd blocks save less, they are not worth a choice
# Products that the first block of a segment keeps, and the others: a segment returns all it dropped at once, so that
# keeping more gains little.
KEPT_IN_SEGMENT = ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2))


class Choice(NamedTuple):
    """What one block gets."""

    technique: str = ""  # for its activations; empty if they are left alone
    variant: int = 0  # which of that technique's options for the block
    chained: bool = False  # a recomputed block's input is recomputed too, from the block before
    offloaded: bool = False  # its parameters are on the offload tier
    input_offloaded: bool = False  # its input, or that of the segment it is in, is on the offload tier

    @property
    def recompute(self) -> bool:
        return self.technique == "checkpointing"

    @property
    def saved_offloaded(self) -> bool:
        """Whether what it saves for backward, its input included, is on the offload tier."""
        return self.technique == "offloading"

    @property
    def with_activations_here(self) -> Choice:
        """The choice with what it keeps for backward on the device."""
        if self.saved_offloaded:
            return Choice(offloaded=self.offloaded)
        return self._replace(input_offloaded=False)


Choices = tuple[Choice, ...]
PLAIN = Choice()
SAVED_OFFLOADED = Choice("offloading", input_offloaded=True)


@dataclass(frozen=True)
class Point:
    """Choices for all blocks, in the order of their calls, and what they cost."""

    choices: Choices
    peak_bytes: int  # of device memory
    saved_bytes: int  # what forward saves for backward
    seconds: float  # of a step
    offloaded_bytes: int = 0  # parameters, gradients and optimizer state on the offload tier
    offload_peak_bytes: int = 0  # the most there at once: those, in whole pages on disk, and activations
    setting: Setting = NOTHING
    prefetch: int = 0  # how many layers ahead parameters are fetched
    states_on_host: int = 0  # of how many blocks, the last ones on the device, optimizer state is on the host


def spans(choices: Sequence[Choice]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each block or segment."""
    start = 0
    for stop in range(1, len(choices) + 1):
        if stop == len(choices) or not choices[stop].chained:
            yield start, stop
            start = stop


def full_checkpointing(blocks: Sequence[BlockProfile], *, odd: bool = False) -> Choices:
    """Return the choices of a framework's own switch: recompute every repeated block; with `odd` the others too."""
    return tuple(
        Choice("checkpointing") if (odd or block.role == "repeated") and can_recompute(block) else PLAIN
        for block in blocks
    )


def _can_chain(before: BlockProfile, block: BlockProfile) -> bool:
    """Return whether a block's input is the output of the one before, and each is called once."""
    return (
        before.container == block.container
        and before.calls == block.calls == 1
        and before.order + 1 == block.order
        and block.boundary_bytes > 0
        and before.role == block.role == "repeated"
    )


def _segment_pays(length: int, block: BlockProfile, kept: int, stacks: Mapping[str, int]) -> bool:
    """Return whether a segment of so many blocks is worth considering, each keeping some products.

    With n blocks in segments of k, n/k inputs are held, and what k blocks dropped comes back at once: the sum is the
    least where both are equal. A segment that brings back several times that least sum cannot pay.
    """
    if length <= ALWAYS_TRIED:
        return True
    kept_bytes = sum(op.output_bytes for op in worth_keeping(block)[:kept])
    returned = block.saved_bytes // max(1, block.calls) - kept_bytes
    inputs = stacks[block.container] * block.boundary_bytes
    return length**2 * max(1, returned) <= LONGEST_SEGMENT**2 * inputs


def offload_room(hardware: Hardware, config: Config) -> int:
    """Return what may be on the offload tier: the user's cap, else what is free of the host's memory or the disk."""
    if hardware.offloads_to_disk:
        cap, there = config.max_disk_offload_bytes, hardware.disk.free_bytes if hardware.disk.writable else 0
    else:
        cap, there = config.max_cpu_offload_bytes, hardware.host.offload_bytes
    return there if cap is None else cap


class CostModel:
    """What plans cost for one profile of a model under a setting, with `prefetch` layers fetched ahead.

    Attributes:
        room: The most that a plan may have on the offload tier; with page-locked memory what masters may take of that.
        fits_page_locked: Whether that is enough for all parameters, gradients and state.
    """

    def __init__(
        self,
        profile: ModelProfile,
        hardware: Hardware,
        config: Config,
        setting: Setting = NOTHING,
        prefetch: int = 0,
    ) -> None:
        self._profile = profile
        self.setting = setting
        self.prefetch = prefetch
        pool = None if config.async_config is None else config.async_config.pinned_pool_bytes
        if pool is None:
            pool = hardware.host.page_locked_bytes
        everything = profile.parameter_bytes + profile.gradient_bytes + profile.optimizer_bytes
        self.bucket_bytes = bucket_bytes_for(profile)
        self.terms = CostTerms(
            ReachedRates.for_profile(hardware, profile),
            config,
            setting.working_share,
            prefetch > 0,
            hardware.offloads_to_disk or setting.page_locked,  # a disk is as fast in either case
            profile.fused_on_cpu,
            self.bucket_bytes if setting.device_step else 0,
            setting.overlapped,
        )
        self.steps = StepCosts(profile, self.terms, hardware.device.kind, setting.bucketed, setting.eight_bit)
        called = (block for block in profile.blocks if block.order >= 0)
        self.blocks = tuple(sorted(called, key=lambda block: block.order))
        self._on_cpu = hardware.device.kind == "cpu"
        self._accumulates = config.gradient_accumulation_steps > 1
        self.room = offload_room(hardware, config) if config.enable_offloading else 0
        locked = int(MASTERS_SHARE * pool)
        self.fits_page_locked = hardware.offloads_to_disk or everything <= locked
        if setting.page_locked and not hardware.offloads_to_disk:
            self.room = min(self.room, locked)
        self._stacks = Counter(block.container for block in self.blocks)
        layers = [block for block in self.blocks if block.role == "repeated"]
        odd = [block for block in self.blocks if block.role != "repeated" and can_recompute(block)]
        saved = sum(block.saved_bytes for block in layers if can_recompute(block))
        worthwhile = sum(block.saved_bytes for block in odd) >= ODD_BLOCKS_SHARE * saved
        self._recomputable = [*layers, *odd] if worthwhile else layers
        # Equal blocks with equal neighbours have equal options, which are computed once.
        kinds: dict[BlockProfile, int] = {}
        self._kinds = [
            kinds.setdefault(replace(block, name="", members=(), order=0), len(kinds))
            for block in self.blocks
        ]
        by_kind = [self._options_of(block) for block in kinds]
        self._options = [by_kind[kind] for kind in self._kinds]
        self._known_with_state: dict[tuple[object, ...], Option[Choices]] = {}
        self._known_options: dict[tuple[object, ...], Option[Choices]] = {}
        self._known_positions: dict[tuple[object, ...], tuple[Option[Choices], ...]] = {}
        self._frame = functools.cache(self._row)
        # Points differ in few blocks: what depends on one block and its choice is computed once.
        self._cover = functools.cache(self._idle_link)
        self._state_time = functools.cache(self._time_of_state)
        self._early_copies = functools.cache(self._copies_of)

    def _options_of(self, block: BlockProfile) -> dict[str, tuple[BlockOption, ...]]:
        """Return what each technique offers for a block's activations, and under "" what there is for parameters."""
        offers: dict[str, tuple[BlockOption, ...]] = {"": ()}
        for technique in LAYER_TECHNIQUES.values():
            options = tuple(technique.options(block, self.terms))
            offers[technique.name] = tuple(each for each in options if each.target == "activations")
            offers[""] += tuple(each for each in options if each.target == "parameters")
        return offers

    def activation_option(self, index: int, choice: Choice) -> BlockOption | None:
        """Return the option that a choice takes for a block's activations; None if they are kept."""
        options = self._options[index][choice.technique] if choice.technique else ()
        return options[choice.variant] if choice.variant < len(options) else None

    def parameter_option(self, index: int, choice: Choice) -> BlockOption | None:
        options = self._options[index][""] if choice.offloaded else ()
        return next((each for each in options if each.reruns_forward == choice.recompute), None)

    # Whole plans -------------------------------------------------------------------------------------

    def numbers_of_states_on_host(self, parts: int) -> list[int]:
        """Return how many blocks may have their optimizer state on the host: none, all, and evenly in between."""
        config, setting = self.terms.config, self.setting
        may = config.enable_offloading and setting.bucketed and not setting.eight_bit
        most = len(self.blocks) if may and not self.terms.rates.tier_is_disk else 0
        return sorted({round(most * part / parts) for part in range(parts + 1)})

    def rows(self, states_on_host: Collection[int] = ()) -> Iterator[ModelRow[Choices]]:
        """Yield rows with every choice that is allowed at every position, the state of some of them on the host.

        Blocks outside of stacks, which may share parameters, are offloaded together or not at all: a row for each. Of
        the layers of stacks the last ones are offloaded, as many as pay.
        """
        saved = [self.offloaded_activation_bytes(index, SAVED_OFFLOADED) for index in range(len(self.blocks))]
        sums = list(itertools.accumulate(reversed(saved)))  # where the room ends, the last blocks
        room_for_saved = [total <= self.room for total in reversed(sums)]
        for odd_offloaded in (False, True) if self.terms.config.enable_offloading else (False,):
            allowed = self._may_be_offloaded(odd_offloaded)
            # With prefetching, plans that offload what is saved have some of it in flight: a row of their own.
            for saved_offloaded in (False, True) if self.prefetch else (True,):
                if allowed is None:
                    continue
                options = [
                    self._options_at(index, allowed, odd_offloaded, saved_offloaded and room_for_saved[index])
                    for index in range(len(self.blocks))
                ]
                sent = [
                    self.offloaded_activation_bytes(index, option.what[0])
                    for index, here in enumerate(options)
                    for option in here
                    if option.what[0].saved_offloaded
                ]
                if self.prefetch and saved_offloaded and not sent:
                    continue
                if states_on_host:
                    options = [
                        tuple(self._with_state_on_host(index, each, states_on_host) for each in here)
                        for index, here in enumerate(options)
                    ]
                in_flight = self._in_flight([max(sent)] * len(self.blocks)) if sent else 0
                frame = self._frame(odd_offloaded, self.prefetch, bool(states_on_host), in_flight, True)
                yield replace(frame, options=options)

    def _in_flight(self, sent: Sequence[int]) -> int:
        """Return the most that is on the device of saved tensors on their way, if blocks send so much one by one.

        Those of the last blocks are there until backward: see Note [Offloaded activations]. Without prefetching, none.
        """
        if not self.prefetch:
            return 0
        return max((sum(sent[first : first + self.prefetch + 1]) for first in range(len(sent))), default=0)

    def blocks_with_state_on_host(self, choices: Choices, number: int) -> list[int]:
        """Return so many blocks on the device, in order: the last layers, whose gradients come first, then others.

        The longer backward goes on after a gradient has come, the more of a step it can hide; not that of embeddings.
        """
        here = [index for index, choice in enumerate(choices) if not choice.offloaded]
        here.sort(key=lambda index: (self.blocks[index].role != "repeated", -index))
        return sorted(here[:number])

    def _with_state_on_host(
        self, start: int, option: Option[Choices], states_on_host: Collection[int]
    ) -> Option[Choices]:
        """Return an option with the state of those of its blocks on the host that are on the device themselves.

        An overlapped step has the new values of parameters beside them from backward to the step's end.
        """
        pairs = [(start + offset, choice) for offset, choice in enumerate(option.what)]
        moved = tuple(pair for pair in pairs if pair[0] in states_on_host and not pair[1].offloaded)
        if not moved:
            return option
        key = (id(option), moved)  # known options live as long as this
        if key not in self._known_with_state:
            self._known_with_state[key] = self._cost_with_state_on_host(option, moved)
        return self._known_with_state[key]

    def _cost_with_state_on_host(
        self, option: Option[Choices], moved: Sequence[tuple[int, Choice]]
    ) -> Option[Choices]:
        blocks = [self.blocks[index] for index, _ in moved]
        copies = sum(
            self.blocks[index].parameter_bytes for index, choice in moved if self._is_early(index, choice)
        )
        in_flight = max(self.bucket_bytes, *(each.parameter_bytes for each in blocks)) if copies else 0
        return replace(
            option,
            seconds=option.seconds + sum(self._state_time(*each).total for each in moved),
            resident=option.resident - sum(each.optimizer_bytes for each in blocks),
            backward=option.backward + in_flight,
            gradient=option.gradient + copies,
            stepping=option.stepping + copies,
        )

    def _is_early(self, index: int, choice: Choice) -> bool:
        return self.terms.steps_early(self.blocks[index], offloaded=choice.offloaded)

    def _time_of_state(self, index: int, choice: Choice) -> StepTime:
        """Return what copying the state of a block to the device and back takes: in buckets, both at once."""
        block, accumulated = self.blocks[index], self.terms.accumulated
        latency = 2 * self.terms.rates.latency * block.parameter_count
        copies = block.optimizer_bytes / min(self.terms.link)
        if self._is_early(index, choice):
            copies = self.terms.exposed_early(block, self._cover(index, choice), offloaded=False)
        return StepTime(transfers=copies / accumulated, overhead=latency / accumulated)

    def _copies_of(self, index: int, choice: Choice) -> float | None:
        """Return the time of the copies for the step of a block in backward, where it is made there."""
        if not self._is_early(index, choice):
            return None
        return self.terms.early_copies(self.blocks[index], offloaded=choice.offloaded)

    def _idle_link(self, index: int, choice: Choice) -> float:
        """Return the time of a block's backward in which the link has nothing to copy for that."""
        block, rates = self.blocks[index], self.terms.rates
        computing = rates.backward(block) + rates.forward(block) * choice.recompute
        copied = self.offloaded_activation_bytes(index, choice)
        if choice.offloaded:
            copied += int(max(block.used_bytes, block.gradient_bytes) * self.terms.working_share)
        return max(0.0, computing - copied / min(self.terms.link))

    def _shared_cover(self, choices: Choices, states_on_host: Collection[int]) -> StepTime:
        """Return what steps that overlap with backward take less together than if only their own block hid each.

        From the first gradient on, the backward of all blocks hides the copies for all. Those of the last are not
        hidden.
        """
        moved = {*states_on_host, *(index for index, choice in enumerate(choices) if choice.offloaded)}
        early = [
            (copies, index, choices[index])
            for index in sorted(moved)
            if (copies := self._early_copies(index, choices[index])) is not None
        ]
        if not early:
            return StepTime()
        alone = sum(max(0.0, copies - self._cover(index, choice)) for copies, index, choice in early)
        cover = sum(self._cover(index, choices[index]) for index in range(early[-1][1]))
        together = max(early[0][0], sum(copies for copies, _, _ in early) - cover)
        return StepTime(transfers=min(0.0, together - alone))

    def point(self, choices: Choices, states_on_host: int = 0) -> Point:
        """Return what choices for all blocks cost, with the optimizer state of so many on the host."""
        pairs = list(zip(self.blocks, choices, strict=True))
        with_state_on_host = self.blocks_with_state_on_host(choices, states_on_host)
        offloaded = [block for block, choice in pairs if choice.offloaded]
        odd_offloaded = any(block.role != "repeated" for block in offloaded)
        prefetch = min(self.prefetch, len(offloaded))
        options = []
        for start, stop in spans(choices):
            option = self._option(start, choices[start:stop], odd_offloaded, prefetch)
            options.append(self._with_state_on_host(start, option, with_state_on_host))
        sent = [self.offloaded_activation_bytes(index, choice) for index, choice in enumerate(choices)]
        sent_saved = [size for size, choice in zip(sent, choices, strict=True) if choice.saved_offloaded]
        in_flight = self._in_flight(sent_saved)
        frame = self._frame(odd_offloaded, prefetch, states_on_host > 0, in_flight, bool(offloaded))
        trade = trade_of(frame, options)
        # Steps in backward write new state beside the old, and new parameters if they are there.
        offloaded_bytes = 0
        for index in with_state_on_host:
            is_early = self._is_early(index, choices[index])
            offloaded_bytes += self.blocks[index].optimizer_bytes * (1 + is_early)
        for index, (block, choice) in enumerate(pairs):
            if choice.offloaded:
                is_early = self._is_early(index, choice)
                offloaded_bytes += all_bytes(block) + is_early * (
                    block.parameter_bytes + block.optimizer_bytes
                )
        offload_peak = offloaded_bytes + sum(sent)
        if self._on_cpu and offloaded:
            offload_peak += SLAB_BYTES + sum(map(self._unused_in_pages, offloaded))
        saved = self._profile.other_saved_bytes + trade.held
        return Point(
            choices,
            trade.peak,
            saved,
            trade.seconds + self._shared_cover(choices, with_state_on_host).total,
            offloaded_bytes,
            offload_peak,
            self.setting,
            self.prefetch if any(sent) else prefetch,
            states_on_host,
        )

    def step_time(self, point: Point) -> StepTime:
        """Return where the seconds of a point of this model go; they differ from its own by rounding."""
        times = [self.terms.rates.step(self._profile, self.terms.accumulated)]
        for start, stop in spans(point.choices):
            choices = point.choices[start:stop]
            times.append(self._time(start, choices))
        on_host = self.blocks_with_state_on_host(point.choices, point.states_on_host)
        times += [self._state_time(index, point.choices[index]) for index in on_host]
        return sum(times, self._shared_cover(point.choices, on_host))

    def without_transfers(self, point: Point, nbytes: int) -> Point:
        """Return a point that has at least so many bytes of activations less on the offload tier, if it has as many."""
        choices = list(point.choices)
        for start, stop in spans(point.choices):
            if nbytes <= 0:
                break
            nbytes -= self.offloaded_activation_bytes(start, choices[start])
            choices[start:stop] = [each.with_activations_here for each in choices[start:stop]]
        return self.point(tuple(choices), point.states_on_host)

    def offloaded_activation_bytes(self, index: int, choice: Choice) -> int:
        """Return what of a block's activations, with the input of a block or segment, is on the offload tier."""
        if not choice.input_offloaded or choice.chained:
            return 0
        option = self.activation_option(index, choice)
        if option is None or not choice.saved_offloaded:
            return self.input_bytes(index)
        return self.blocks[index].saved_bytes - option.held_bytes + self._held_input(index)

    def _unused_in_pages(self, block: BlockProfile) -> int:
        """Return the most that the last pages of a block's parameters, gradients and state on disk leave unused."""
        if not self._on_cpu or not block.parameter_bytes:
            return 0
        return int(all_bytes(block) / block.parameter_bytes * PAGE * block.parameter_count)

    def _row(
        self, odd_offloaded: bool, prefetch: int, loads_state: bool, in_flight: int, has_masters: bool
    ) -> ModelRow[Choices]:
        """Return the row without options: what is in use whatever is chosen."""
        profile, blocks = self._profile, self.blocks
        other_saved = profile.other_saved_bytes + in_flight
        constant = profile.parameter_bytes + profile.resident_bytes + other_saved
        constant -= sum(block.parameter_bytes for block in blocks)
        constant += profile.optimizer_bytes - sum(block.optimizer_bytes for block in blocks)
        # When backward begins, the parameters of its first blocks are prefetched; where none is sure to be offloaded,
        # that is left to the simulation.
        prefetched = self._prefetched(len(blocks), -1, prefetch, True) if odd_offloaded else 0
        other_gradients = profile.gradient_bytes - sum(block.gradient_bytes for block in blocks)
        if self._accumulates:  # they are there from the first batch on
            constant, other_gradients = constant + other_gradients, 0
        temporaries = self.steps.temporary_bytes(odd_offloaded=odd_offloaded, loads_state=loads_state)
        if has_masters:
            temporaries = max(temporaries, self.steps.device_step_bytes)
        return ModelRow(
            options=[()] * len(blocks),
            dropped=[block.dropped_bytes for block in blocks],
            constant=constant,
            seconds=self.terms.rates.step(profile, self.terms.accumulated).total,
            loss=profile.loss_peak_bytes,
            tail=profile.tail_peak_bytes + prefetched,
            # What forward saves outside of the blocks is released before the optimizer steps.
            stepping=other_gradients + temporaries - other_saved,
        )

    def _prefetched(self, index: int, towards: int, prefetch: int, odd_offloaded: bool) -> int:
        """Return the most that is prefetched beside a block: the next ones, `towards` the end (1) or the start (-1)."""
        next_blocks = self.blocks[index + 1 :] if towards > 0 else self.blocks[:index][::-1]
        offloaded = [block for block in next_blocks if odd_offloaded or block.role == "repeated"]
        return sum(map(self._working, offloaded[:prefetch]))

    # Positions ---------------------------------------------------------------------------------------

    def _may_be_offloaded(self, odd: bool) -> list[tuple[bool, ...]] | None:
        """Return for each block whether its parameters may, or must, be offloaded; None if no odd ones can."""
        room = self.room
        allowed: list[tuple[bool, ...]] = [(False,)] * len(self.blocks)
        has_option = [bool(options[""]) for options in self._options]
        for index, block in enumerate(self.blocks):
            if odd and block.role != "repeated" and has_option[index]:
                allowed[index] = (True,)
                room -= all_bytes(block) + self._unused_in_pages(block)
        if room < 0 or (odd and (True,) not in allowed):
            return None
        for index, block in reversed(list(enumerate(self.blocks))):  # where the room ends, the last layers
            if block.role == "repeated" and has_option[index]:
                room -= all_bytes(block) + self._unused_in_pages(block)
                if room < 0:
                    break
                allowed[index] = (False, True)
        return allowed

    def _options_at(
        self, index: int, allowed: Sequence[tuple[bool, ...]], odd_offloaded: bool, saved_offloaded: bool
    ) -> tuple[Option[Choices], ...]:
        near = slice(max(0, index - 1 - self.prefetch), index + SEGMENT_LENGTHS[-1] + self.prefetch)
        chained = tuple(_can_chain(*pair) for pair in itertools.pairwise(self.blocks[near]))
        ways = odd_offloaded, saved_offloaded
        key = (index - near.start, tuple(self._kinds[near]), tuple(allowed[near]), chained, ways)
        if key not in self._known_positions:
            found: list[Option[Choices]] = []
            for offloaded in allowed[index]:
                those = [
                    self._option(index, choices, odd_offloaded, self.prefetch)
                    for choices in self._choices_at(index, allowed, offloaded)
                    if saved_offloaded or not choices[0].saved_offloaded
                ]
                phase = int(offloaded) if len(allowed[index]) > 1 else None
                # What is in flight is not in an option's peak, and no reason to prefer it.
                in_flight = [
                    self._in_flight([self.offloaded_activation_bytes(index, option.what[0])])
                    if option.what[0].saved_offloaded
                    else 0
                    for option in those
                ]
                found += [replace(option, phase=phase) for option in _undominated(those, in_flight)]
            self._known_positions[key] = tuple(found)
        return self._known_positions[key]

    def _choices_at(
        self, index: int, allowed: Sequence[tuple[bool, ...]], offloaded: bool
    ) -> Iterator[Choices]:
        """Yield what may begin at a position: choices for one block, or for a segment."""
        block = self.blocks[index]
        yield (PLAIN._replace(offloaded=offloaded),)
        for technique, options in self._options[index].items():
            for variant, option in enumerate(options if technique else ()):
                # One for each place of its parameters; what is saved has its input.
                if technique == "offloading":
                    if variant == offloaded:
                        yield (SAVED_OFFLOADED._replace(variant=variant, offloaded=offloaded),)
                elif not option.reruns_forward or block in self._recomputable:
                    yield from self._with_input_offloaded(
                        index, (Choice(technique, variant, offloaded=offloaded),), option
                    )
        options = self._options[index]["checkpointing"]
        for length in SEGMENT_LENGTHS:
            segment = range(index, index + length)
            if not self._is_segment(segment) or not all(offloaded in allowed[each] for each in segment):
                continue
            for kept_first, kept in KEPT_IN_SEGMENT:
                if kept < len(options) and _segment_pays(length, block, kept, self._stacks):
                    first = Choice("checkpointing", kept_first, offloaded=offloaded)
                    most = [len(self._options[each]["checkpointing"]) - 1 for each in segment[1:]]
                    others = [Choice("checkpointing", min(kept, each), True, offloaded) for each in most]
                    yield from self._with_input_offloaded(index, (first, *others), options[kept_first])

    def _with_input_offloaded(self, index: int, choices: Choices, option: BlockOption) -> Iterator[Choices]:
        """Yield a block or segment with its input on the device, and with its input on the offload tier."""
        yield choices
        allowed = self.terms.config.enable_offloading
        if allowed and option.reruns_forward and not option.keep and self.input_bytes(index):
            yield tuple(choice._replace(input_offloaded=True) for choice in choices)

    def _is_segment(self, indices: range) -> bool:
        return (
            indices.stop <= len(self.blocks)
            and all(self._options[index]["checkpointing"] for index in indices)
            and all(_can_chain(self.blocks[index - 1], self.blocks[index]) for index in indices[1:])
        )

    # One option --------------------------------------------------------------------------------------

    def _option(self, start: int, choices: Choices, odd_offloaded: bool, prefetch: int) -> Option[Choices]:
        """Return what choices for one block or segment cost; computed once for equal blocks after equal ones."""
        prefetched = (0, 0)
        if prefetch and choices[0].offloaded:
            following = self._prefetched(start + len(choices) - 1, 1, prefetch, odd_offloaded)
            # In backward the gradients of the block that follows are still being copied to the host.
            prefetched = (following, following + self._prefetched(start, -1, prefetch, odd_offloaded))
        key = (start == 0, *self._kinds[max(0, start - 1) : start + len(choices)], choices, prefetched)
        option = self._known_options.get(key)
        if option is None:
            option = self._known_options[key] = self._cost(start, choices, prefetched)
        return option

    def _cost(self, start: int, choices: Choices, prefetched: tuple[int, int]) -> Option[Choices]:
        parts = [self._part(start + offset, choice) for offset, choice in enumerate(choices)]
        held = forward = 0
        if choices[0].input_offloaded:
            held = -self._held_input(start)
        elif parts[0].reruns:  # from its input, which the block before may not hold
            held = self._passed_input(start)
        for index, part in enumerate(parts):
            working = self._working(part.block) if part.offloaded and not self._profile.offloaded else 0
            # The first block's own input is in its peak, or in what the block before it holds.
            forward = max(forward, (held if index else 0) + part.block.forward_peak_bytes + working)
            held += part.held
        held += parts[-1].block.output_bytes  # inside of a segment outputs are recomputed
        backward = self._backward(start, parts, held)
        resident = [part.block for part in parts if not part.offloaded]
        live = sum(block.parameter_bytes for block in resident)
        gradient = stepping = sum(block.gradient_bytes for block in resident)
        for block in resident:  # the state of embeddings stays in 32 bits
            share = self.setting.state_share if block.role == "repeated" else 1.0
            live += int(block.optimizer_bytes * share)
        if not self.setting.bucketed:
            stepping += int(self.steps.temporaries[0] * gradient)
        if self._accumulates:  # gradients are there from the first batch on
            live, stepping, gradient = live + gradient, stepping - gradient, 0
        if any(choice.offloaded and self._is_early(start, choice) for choice in choices):
            backward += 2 * self.bucket_bytes  # two buckets in flight
        if choices[0].saved_offloaded:
            backward += 0 if self.prefetch else self._held_input(start)
        elif choices[0].input_offloaded:
            backward += self.input_bytes(start)
        return Option(
            what=choices,
            seconds=self._time(start, choices).total,
            resident=live,
            held=held,
            forward=forward + prefetched[0],
            backward=backward + prefetched[1],
            gradient=gradient,
            stepping=stepping,
            span=len(parts),
        )

    def _time(self, start: int, choices: Choices) -> StepTime:
        """Return what choices for one block or segment add to the time of a step."""
        time = StepTime()
        for index, choice in enumerate(choices, start):
            for option in (self.activation_option(index, choice), self.parameter_option(index, choice)):
                time += StepTime() if option is None else option.time
        if self.setting.bucketed:
            pairs = zip(self.blocks[start : start + len(choices)], choices, strict=True)
            resident = sum(block.gradient_bytes for block, choice in pairs if not choice.offloaded)
            time += StepTime(overhead=self.steps.exposed_in_buckets(resident))
        if choices[0].input_offloaded and not choices[0].saved_offloaded:
            time += self.input_time(start)
        return time

    def _part(self, index: int, choice: Choice) -> _Part:
        """Return the figures of one block under a choice."""
        block = self.blocks[index]
        options = self.activation_option(index, choice), self.parameter_option(index, choice)
        activations, offloaded = options[0], options[1] is not None
        # A resident layer's 16-bit copy, there until backward; a profile with all parameters offloaded has not seen it.
        # Embeddings are read as they are.
        has_copy = self._profile.offloaded and self.terms.working_share < 1 and block.role == "repeated"
        reruns = activations is not None and activations.reruns_forward
        held = block.saved_bytes if activations is None else activations.held_bytes
        if has_copy and activations is None and not offloaded:
            held += self._working(block)
        returned = 0 if activations is None else activations.returned_bytes
        if choice.saved_offloaded and self.prefetch:
            returned = 0  # it is among what is in flight
        if choice.chained:
            returned += self._held_input(index)
        working = self._working(block) if offloaded or has_copy else 0
        return _Part(block, offloaded, reruns, held, returned, working)

    def _held_input(self, index: int) -> int:
        """Return what of a block's input the block before it holds."""
        return min(self.blocks[index].boundary_bytes, self.blocks[index - 1].output_bytes) if index else 0

    def _passed_input(self, index: int) -> int:
        """Return what of a block's input the block before it does not hold."""
        return max(0, self.blocks[index].boundary_bytes - self.blocks[index - 1].output_bytes) if index else 0

    def input_bytes(self, index: int) -> int:
        """Return what of a block's input is the output of the block before it, and may be offloaded."""
        if index == 0:
            return 0
        before = self.blocks[index - 1]
        return min(self.blocks[index].boundary_bytes, before.output_bytes + before.passed_bytes)

    def input_time(self, index: int) -> StepTime:
        """Return the time of offloading a block's input, which its own forward and backward cover."""
        covered = self.terms.rates.forward(self.blocks[index])
        return activation_time(self.input_bytes(index), self.terms, (covered, covered))

    def _working(self, block: BlockProfile) -> int:
        """Return the bytes of a working copy of a block's parameters."""
        return int(block.used_bytes * self.terms.working_share)

    def _backward(self, start: int, parts: Sequence[_Part], held: int) -> int:
        """Return the peak in the backward of a block or segment, above what is live before its forward."""
        is_offloaded = self._profile.offloaded
        # A segment is recomputed as a whole: what its blocks save, the tensors between them, their working copies.
        returned = sum(part.returned for part in parts)
        # Where the profile has working copies, they are in the peaks of blocks; recomputing has them all at once.
        working = sum(part.working for part in parts if part.reruns or not is_offloaded)
        peak, last = 0, parts[-1]
        if last.reruns:
            # In 16 bits running forward again may need more than backward: copies that are not saved. In that peak is
            # a working copy, where the profile has it, and the input, unless the block before holds it.
            own = self._passed_input(start) if len(parts) == 1 else 0
            own += min(working, self._working(last.block)) if is_offloaded else 0
            peak = held + returned - last.returned + last.block.forward_peak_bytes - own + working
        for part in reversed(parts):
            peak = max(peak, held + returned + part.block.backward_peak_bytes + working)
            returned -= part.returned
            held -= part.held
            working = max(0, working - part.working)
            if not part.offloaded and not self._accumulates:
                held += part.block.gradient_bytes
        return peak


class _Part(NamedTuple):
    """One block of an option."""

    block: BlockProfile
    offloaded: bool  # its parameters are on the offload tier
    reruns: bool  # its forward runs again in backward
    held: int  # inside of it between forward and backward
    returned: int  # what comes back when backward reaches it
    working: int  # the working copy of its parameters, if it has one


def all_bytes(block: BlockProfile) -> int:
    """Return the bytes of a block's parameters, gradients and optimizer state."""
    return block.parameter_bytes + block.gradient_bytes + block.optimizer_bytes


def _undominated(options: Sequence[Option[Choices]], in_flight: Sequence[int]) -> list[Option[Choices]]:
    """Return the options that no other of the same span equals or beats in everything; of equal ones the first.

    In backward, each has so many bytes more in flight.
    """
    costs = [
        (o.seconds, o.resident, o.held, o.forward, o.backward + more, o.gradient, o.stepping)
        for o, more in zip(options, in_flight, strict=True)
    ]
    return [
        option
        for index, option in enumerate(options)
        if not any(
            other.span == option.span
            and (costs[number] != costs[index] or number < index)
            and all(one <= two for one, two in zip(costs[number], costs[index], strict=True))
            for number, other in enumerate(options)
        )
    ]
