"""What other sizes of a batch need and take, interpolated from profiles of a few sizes.

Note [Sizes between]
~~~~~~~~~~~~~~~~~~~~
Everything in a profile grows with the number of samples along a line, and with the length of sequences at most along a
parabola (attention). So two or three profiles say what any other would. Peaks, which are maxima of several such
numbers, may have a bend in between, and the allocator rounds: whoever shows an estimate to a user simulates it first.

Note [Which dimensions are which]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The first dimension of the first tensor is the number of samples; every tensor that begins with the same number has
as many. Sequences are what `Sample.positions_and_tokens` finds: token ids ``[samples, length]``, or features
``[samples, length, width]``. With them change the dimensions of that size in tensors of integers and booleans (labels,
masks), the second one in features, and the last two in masks of four dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import nn

from memscale.config import Config
from memscale.errors import ProfileError
from memscale.hardware import Hardware
from memscale.planner.assembly import unseen_bytes
from memscale.planner.cost_model import PLAIN
from memscale.planner.decide import cost_models, untouched_points
from memscale.planner.frontier import fastest_within
from memscale.planner.settings import Under
from memscale.profiler import ModelProfile
from memscale.profiler.sample import Sample, named_tensors, resized

FIRST_STEP = 1 / 64  # of where a search begins
FRONTIER_WIDTH = 40  # partial plans kept at a position where only an estimate is wanted
MOST_POSITIONS = 2**20  # of a model that does not say how long its sequences may be


@dataclass(frozen=True)
class Estimates:
    """Estimates for batches of any size. See Note [Sizes between].

    Raises:
        ProfileError: The model does other operations at each of the sizes.
    """

    known: Sequence[tuple[int, Under]]  # what two or three sizes need
    hardware: Hardware
    config: Config
    room: int  # the highest peak of a plan that fits, before what no prediction sees

    def knowing(self, size: int, under: Under) -> Estimates:
        """Return estimates that know one size more, in place of the one nearest to it."""
        known = [each for each in self.known if each[0] != size]
        if len(known) == len(self.known):
            known.remove(min(known, key=lambda each: abs(each[0] - size)))
        return replace(self, known=[*known, (size, under)])

    def has_room(self, size: int) -> bool:
        """Return whether there is a plan for a size that fits."""
        return next(self._step_times(size), None) is not None

    def largest(self, most: int) -> int:
        """Return the largest size up to `most` that fits; 0 if not even 1 does."""
        return largest_that(self.has_room, most, around=max(size for size, _ in self.known))

    def seconds(self, size: int) -> float | None:
        """Return the step time of the fastest plan for a size that fits; None if none does."""
        return min(self._step_times(size), default=None)

    def _step_times(self, size: int) -> Iterator[float]:
        """Yield the step times of plans for a size that fit, first of what needs little memory."""
        under = self._under(size)
        # What no prediction sees grows with the size.
        room = self.room - unseen_bytes(under[0][1], self.hardware, self.config)
        models = list(cost_models(under, self.hardware, self.config, prefetch=False))
        for states in (1, 0):  # of all blocks on the host, or of none
            for model in models:
                numbers = model.numbers_of_states_on_host(1)
                if states >= len(numbers):
                    continue
                on_host = model.blocks_with_state_on_host((PLAIN,) * len(model.blocks), numbers[states])
                for row in reversed(list(model.rows(on_host))):
                    trade = fastest_within(row, room, FRONTIER_WIDTH)
                    if trade is not None:
                        yield trade.seconds
        for point in untouched_points(under, self.hardware, self.config):
            if point.peak_bytes <= room:
                yield point.seconds

    def _under(self, size: int) -> Under:
        sizes = sorted(self.known, key=lambda each: each[0])
        for at, needs in sizes:
            if at == size:
                return needs
        settings = [setting for setting, _ in sizes[0][1]]
        return [
            (setting, profile_between([(at, needs[index][1]) for at, needs in sizes], size))
            for index, setting in enumerate(settings)
        ]


def largest_that(fits: Callable[[int], bool], most: int, *, around: int) -> int:
    """Return the largest number up to `most` that fits, if all below one that fits do; 0 if none does.

    The search starts `around` a number, in steps that double.

    Example:
        >>> largest_that(lambda number: number <= 700, 1000, around=690)
        700
    """
    low, high = 0, most + 1  # the first fits, the second does not
    number = min(max(1, around), most)
    step = max(1, int(number * FIRST_STEP))
    while high - low > 1:
        if fits(number):
            low = number
        else:
            high = number
        if low and high <= most:
            number = (low + high) // 2
        else:
            number = min(low + step, most) if low else max(1, high - step)
            step *= 2
    return low


def profile_between(known: Sequence[tuple[int, ModelProfile]], size: int) -> ModelProfile:
    """Interpolate the profile of a size from those of others."""
    # Profiling a batch without values may have guessed more: the guesses of the largest hold for all.
    unseen = max(known, key=lambda each: each[0])[1].unseen
    if any(len(profile.unseen) != len(unseen) for _, profile in known):
        known = [(at, replace(profile, unseen=unseen)) for at, profile in known]
    weights = []
    for one, _ in known:
        weight = 1.0
        for other, _ in known:
            if other != one:
                weight *= (size - other) / (one - other)
        weights.append(weight)
    profile: ModelProfile = _interpolated([profile for _, profile in known], weights)
    return profile


def _interpolated(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Interpolate values of one type: numbers by their weights, containers part by part."""
    first = values[0]
    if all(value == first for value in values):
        return first
    if type(first) is int:
        return round(sum(weight * value for weight, value in zip(weights, values, strict=True)))
    if type(first) is str:
        return first  # the batch in words
    if is_dataclass(first) and not isinstance(first, type):
        columns = {field.name: [getattr(value, field.name) for value in values] for field in fields(first)}
        return replace(first, **{name: _interpolated(each, weights) for name, each in columns.items()})
    if type(first) is tuple and len({len(value) for value in values}) == 1:
        return tuple(_interpolated(each, weights) for each in zip(*values, strict=True))
    raise ProfileError(
        "The model does other operations for other sizes of its batch, so that one cannot be told from another."
    )


def batch_size_of(sample: Sample) -> int:
    """Return how many samples a batch has.

    >>> import torch
    >>> batch_size_of(Sample((torch.ones(8, 128),), {}))
    8
    """
    return next((tensor.shape[0] for tensor in sample.tensors() if tensor.dim()), 1)


def length_of(sample: Sample) -> int:
    """Return how long a batch's sequences are; 1 if it has none."""
    return sample.positions_and_tokens()[0]


def with_batch_size(model: nn.Module, sample: Sample, size: int) -> Sample:
    """Return the same batch with so many samples, without values."""
    before = batch_size_of(sample)
    shapes = {
        name: (size, *tensor.shape[1:]) if tensor.dim() and tensor.shape[0] == before else tuple(tensor.shape)
        for name, tensor in named_tensors(model, sample)
    }
    return resized(model, sample, shapes)


def with_length(model: nn.Module, sample: Sample, length: int) -> Sample:
    """Return the same batch with sequences of that length, without values."""
    before = length_of(sample)
    shapes = {}
    for name, tensor in named_tensors(model, sample):
        changed = {index for index, size in enumerate(tensor.shape) if index and size == before}
        if tensor.is_floating_point():
            changed &= {2, 3} if tensor.dim() == 4 else {1}
        shapes[name] = tuple(length if index in changed else size for index, size in enumerate(tensor.shape))
    return resized(model, sample, shapes)


def most_positions(model: nn.Module) -> int:
    """Return how long a model says that its sequences may be."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else MOST_POSITIONS
