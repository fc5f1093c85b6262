"""What other sizes of a batch need and take, interpolated from profiles of a few sizes.

Note [Sizes between]
~~~~~~~~~~~~~~~~~~~~
Everything in a profile grows with the number of samples along a line, and with the length of sequences at most along a
parabola (attention). So two or three profiles say what any other would, and the plans on the frontier of one size can
be costed at another without running it. Peaks, which are maxima of several such numbers, may have a bend in between,
and the allocator rounds: what is found is an estimate, and whoever shows it to a user simulates it first.

Note [Which dimensions are which]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The first dimension of the first tensor is the number of samples; every tensor that begins with the same number has
as many. Sequences are what `Sample.positions_and_tokens` finds: token ids ``[samples, length]``, or features
``[samples, length, width]``. With them change the dimensions of that size in tensors of integers and booleans (labels,
masks), the second one in features, and the last two in masks of four dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

from torch import nn

from memscale.config import Config
from memscale.errors import ProfileError
from memscale.hardware import Hardware
from memscale.planner.assembly import unseen_bytes
from memscale.planner.cost_model import CostModel, Point
from memscale.planner.decide import cost_models, frontier_points
from memscale.planner.frontier import fastest_within
from memscale.planner.settings import Under
from memscale.profiler import ModelProfile
from memscale.profiler.sample import Sample, named_tensors, resized

FIRST_STEP = 1 / 64  # of where a search begins
FRONTIER_WIDTH = 40  # partial plans kept at a position of the frontiers whose plans are costed at other sizes
MOST_POSITIONS = 2**20  # of a model that does not say how long its sequences may be


class Estimates:
    """Estimates for batches of any size, from what two or three sizes need. See Note [Sizes between].

    `room` is the highest peak of a plan that fits, before what no prediction sees.

    Raises:
        ProfileError: The model does other operations at each of the sizes.
    """

    def __init__(
        self, known: Sequence[tuple[int, Under]], hardware: Hardware, config: Config, room: int
    ) -> None:
        self._known = sorted(known, key=lambda each: each[0])
        self._hardware = hardware
        self._config = config
        self._room = room
        self._frontier = cache(self._frontier_at)
        self._models = cache(self._models_at)

    def knowing(self, size: int, under: Under) -> Estimates:
        """Return estimates that know one size more, in place of the one nearest to it."""
        known = [each for each in self._known if each[0] != size]
        if len(known) == len(self._known):
            known.remove(min(known, key=lambda each: abs(each[0] - size)))
        return Estimates([*known, (size, under)], self._hardware, self._config, self._room)

    def within(self, room: int) -> Estimates:
        """Return the same estimates with other room."""
        return Estimates(self._known, self._hardware, self._config, room)

    def has_room(self, size: int) -> bool:
        """Return whether there is a plan for a size that fits."""
        if next(self._fitting(size), None) is not None:
            return True  # mostly a plan of another size fits if any does
        room, models = self._models(size)
        rows = (row for model in models for below in {0, model.most_state_below} for row in model.rows(below))
        return any(fastest_within(row, room, FRONTIER_WIDTH) is not None for row in rows)

    def seconds(self, size: int) -> float | None:
        """Return the step time of the fastest plan for a size that fits; None if none does."""
        return min((point.seconds for point in self._fitting(size)), default=None)

    def largest(self, most: int) -> int:
        """Return the largest size up to `most` that fits; 0 if not even 1 does."""
        return largest_that(self.has_room, most, around=self._known[-1][0])

    def _fitting(self, size: int) -> Iterator[Point]:
        """Yield the plans on the frontier of the nearest size that is known, costed at this one, if they fit."""
        nearest = min((known for known, _ in self._known), key=lambda known: abs(known - size))
        room, models = self._models(size)
        for setting, point in self._frontier(nearest):
            here = models[setting].point(point.choices, point.state_below)
            if here.peak_bytes <= room:
                yield here

    def _frontier_at(self, size: int) -> list[tuple[int, Point]]:
        """Return the plans on the frontier of a size, smallest first, each with the index of its setting."""
        under = self._under(size)
        points = frontier_points(under, self._hardware, self._config, prefetch=False, most=FRONTIER_WIDTH)
        index = {id(setting): number for number, (setting, _) in enumerate(under)}
        return [(index[id(each.setting)], each) for each in sorted(points, key=lambda each: each.peak_bytes)]

    def _models_at(self, size: int) -> tuple[int, list[CostModel]]:
        """Return the highest peak of a plan for a size (what no prediction sees grows with it), and cost models."""
        under = self._under(size)
        models = list(cost_models(under, self._hardware, self._config, prefetch=False))
        return self._room - unseen_bytes(under[0][1], self._hardware), models

    def _under(self, size: int) -> Under:
        for at, needs in self._known:
            if at == size:
                return needs
        _, first = self._known[0]
        under = []
        for index, (setting, _) in enumerate(first):
            known = [(at, needs[index][1]) for at, needs in self._known]
            under.append((setting, profile_between(known, size)))
        return under


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
