"""The memory of a step over time, as a function of the choices: forward up, backward down, optimizer step.

An estimate for choosing; what the user is told is the peak of simulating the very plan with the very executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memscale.engine.choices import Candidate, Choice, called_blocks
from memscale.engine.cost import Clock
from memscale.profiler.profile import BlockProfile, ModelProfile


@dataclass(frozen=True)
class Estimate:
    """What a candidate costs.

    Attributes:
        peak_bytes: the most device memory in use at once.
        saved_bytes: what forward leaves for backward.
        seconds: predicted time of a step.
        host_bytes: what lives on the tier below: parameters, their gradients and their optimizer state.
    """

    peak_bytes: int
    saved_bytes: int
    seconds: float
    host_bytes: int = 0


@dataclass(frozen=True)
class _Bytes:
    """What is at home on the tier below."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def _at_home(profile: ModelProfile) -> _Bytes:
    called = [block for block in profile.blocks if block.order >= 0]
    return _Bytes(
        sum(block.parameter_bytes for block in called),
        sum(block.gradient_bytes for block in called),
        sum(block.optimizer_bytes for block in called),
    )


def optimizer_transient(profile: ModelProfile, kind: str) -> int:
    """What Adam needs while it steps: one temporary of all parameters at once (foreach), or two of one on a CPU."""
    return 2 * profile.largest_gradient_bytes if kind == "cpu" else profile.gradient_bytes


def estimate(profile: ModelProfile, candidate: Candidate, clock: Clock, optimizer_transient: int) -> Estimate:
    """The timeline of one candidate, reduced to its peak."""
    blocks = called_blocks(profile)
    choices = candidate.choices
    away = _at_home(profile) if candidate.offloaded else _Bytes()
    constant = (
        profile.parameter_bytes
        - away.parameters
        + profile.optimizer_bytes
        - away.optimizer
        + profile.resident_bytes
    )
    held = [_held(block, choice) for block, choice in zip(blocks, choices, strict=True)]
    outputs = [_held_output(blocks, choices, index) for index in range(len(blocks))]
    saved = profile.other_saved_bytes + sum(held) + sum(outputs)
    dropped = sum(block.dropped_bytes for block in blocks)
    peaks = [constant + saved + profile.tail_peak_bytes, constant + saved + dropped + profile.loss_peak_bytes]
    start = constant + profile.other_saved_bytes
    peaks += _forward_peaks(blocks, held, outputs, start, candidate.offloaded)
    peaks += _backward_peaks(blocks, choices, held, outputs, start, candidate.offloaded)
    peaks.append(constant + (0 if candidate.offloaded else profile.gradient_bytes + optimizer_transient))
    recompute = sum(
        clock.recompute(block, choice.kept_flops)
        for block, choice in zip(blocks, choices, strict=True)
        if choice.recompute
    )
    seconds = clock.step(profile) + recompute
    if candidate.offloaded:
        seconds += clock.offloading(profile)
    return Estimate(max(peaks), saved, seconds, away.total)


def _held(block: BlockProfile, choice: Choice) -> int:
    """What a block holds inside between forward and backward."""
    return choice.kept_bytes * block.calls if choice.recompute else block.saved_bytes


def _held_output(blocks: Sequence[BlockProfile], choices: Sequence[Choice], index: int) -> int:
    """A block's output is held as the next one's input, unless the next one recomputes it.

    A plain block may not need its input for backward; one that is recomputed does.
    """
    following = index + 1
    if following == len(choices) or not choices[following].recompute:
        return blocks[index].output_bytes
    return (
        0 if choices[following].chained else max(blocks[index].output_bytes, blocks[following].boundary_bytes)
    )


def _forward_peaks(
    blocks: Sequence[BlockProfile],
    held: Sequence[int],
    outputs: Sequence[int],
    start: int,
    offloaded: bool,
) -> list[int]:
    peaks = []
    now = start
    for block, inside, output in zip(blocks, held, outputs, strict=True):
        peaks.append(now + block.forward_peak_bytes + (block.used_bytes if offloaded else 0))
        now += inside + output + block.dropped_bytes
    return peaks


def _backward_peaks(
    blocks: Sequence[BlockProfile],
    choices: Sequence[Choice],
    held: Sequence[int],
    outputs: Sequence[int],
    start: int,
    offloaded: bool,
) -> list[int]:
    peaks = []
    now = start + sum(held) + sum(outputs)
    recomputed = 0  # what the segment that is running has recomputed and not yet used up
    for index in reversed(range(len(blocks))):
        block, choice = blocks[index], choices[index]
        if choice.recompute and not recomputed:
            recomputed = _segment_bytes(blocks, choices, index)
        working = block.used_bytes if offloaded else 0
        peaks.append(now + recomputed + block.backward_peak_bytes + working)
        if choice.recompute:
            recomputed -= _recomputed(block, choice) + (block.boundary_bytes if choice.chained else 0)
            if not choice.chained:
                recomputed = 0
        now -= held[index] + outputs[index]
        if not offloaded:  # else they have gone home
            now += block.gradient_bytes
    return peaks


def _segment_bytes(blocks: Sequence[BlockProfile], choices: Sequence[Choice], last: int) -> int:
    """What recomputing a segment brings back: what its blocks save, and the tensors between them."""
    total = 0
    for index in range(last, -1, -1):
        total += _recomputed(blocks[index], choices[index])
        if not choices[index].chained:
            break
        total += blocks[index].boundary_bytes
    return total


def _recomputed(block: BlockProfile, choice: Choice) -> int:
    """What running a block again brings back, a call at a time."""
    return max(0, block.saved_bytes // max(1, block.calls) - choice.kept_bytes)
