"""What other sizes of a batch need and take, from profiles of a few of them.

Note [Sizes between]
~~~~~~~~~~~~~~~~~~~~
Everything in a profile grows with the number of samples along a line, and with the length of sequences at most along a
parabola (attention). So two or three profiles say what any other would, and the fastest plan for any size follows
without running it. Peaks, which are the most of several such numbers, may have a bend in between, and the allocator
rounds: so what is found is an estimate, and whoever gives it to a user simulates it first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

from memscale.config import Config
from memscale.errors import ProfileError
from memscale.hardware import Hardware
from memscale.planner import has_plan_within, mixed_seconds, points_by_hand, unseen_bytes
from memscale.planner.rules import Point
from memscale.planner.settings import Setting
from memscale.profiler import ModelProfile

__all__ = ["Estimates", "Under", "largest_that", "profile_between"]

FINE = 64  # the first step from where a search begins is such a part of it
STEPS = 3  # from nothing to everything, in the plans by hand that sizes are compared by
SECANTS = 4  # looks for where to begin

Under = Sequence[tuple[Setting, ModelProfile]]
"""The settings to choose from, each with what the model needs under it."""


class Estimates:
    """Batches of any size, by what a few sizes need. See Note [Sizes between].

    Args:
        known: What some sizes need: two, or three if something grows with their square.
        hardware: Where.
        config: With which settings.
        room: The highest peak of a plan, where no more is allowed for than usual.

    Raises:
        ProfileError: The model is another at each of the sizes.
    """

    def __init__(
        self, known: Sequence[tuple[int, Under]], hardware: Hardware, config: Config, room: int
    ) -> None:
        self._known = sorted(known, key=lambda each: each[0])
        self._hardware = hardware
        self._config = config
        self._room = room
        self._under = cache(self._under_size)
        self._by_hand = cache(self._tried_by_hand)
        self.about_seconds = cache(self._about_seconds)

    def knowing(self, size: int, under: Under) -> Estimates:
        """The same with a size more that is known, in place of the one nearest to it."""
        known = [each for each in self._known if each[0] != size]
        if len(known) == len(self._known):
            known.remove(min(known, key=lambda each: abs(each[0] - size)))
        return Estimates([*known, (size, under)], self._hardware, self._config, self._room)

    def within(self, room: int) -> Estimates:
        """The same with other room."""
        return Estimates(self._known, self._hardware, self._config, room)

    def has_room(self, size: int) -> bool:
        room = self._room_for(size)
        if any(point.peak_bytes <= room for point in self._by_hand(size)):
            return True  # it most often is one that is tried by hand
        return has_plan_within(self._under(size), self._hardware, self._config, room)

    def largest(self, most: int) -> int:
        """The largest size up to `most` that has room; 0 if not even 1 has."""
        return largest_that(self.has_room, most, around=self._about(most))

    def _under_size(self, size: int) -> Under:
        for at, needs in self._known:
            if at == size:
                return needs
        _, first = self._known[0]
        under = []
        for index, (setting, _) in enumerate(first):
            known = [(at, needs[index][1]) for at, needs in self._known]
            under.append((setting, profile_between(known, size)))
        return under

    def _room_for(self, size: int) -> int:
        """The highest peak of a plan for a size: what no prediction sees grows with it."""
        return self._room - unseen_bytes(self._under(size)[0][1], self._hardware)

    def _tried_by_hand(self, size: int) -> list[Point]:
        return [
            point
            for setting, needs in self._under(size)
            for point in points_by_hand(needs, self._hardware, self._config, setting, steps=STEPS)
        ]

    def _about_seconds(self, size: int) -> float | None:
        """About the step time of the fastest plan that has room; None if none has. See Note [Mixed plans]."""
        return mixed_seconds(self._by_hand(size), self._room_for(size))

    def _about(self, most: int) -> int:
        """Where to look for the largest size: where the smallest plan by hand fills the room, by the secant method."""
        (one, _), *_, (other, _) = self._known
        for _ in range(SECANTS):
            least, more = self._least_by_hand(one), self._least_by_hand(other)
            if (more - least) * (other - one) <= 0:
                break
            size = other + (self._room - more) * (other - one) // (more - least)
            size = min(max(1, size), most)
            if size in (one, other):
                break
            one, other = other, size
        return min(other, most)

    def _least_by_hand(self, size: int) -> int:
        return min(point.peak_bytes for point in self._by_hand(size))


def largest_that(fits: Callable[[int], bool], most: int, *, around: int) -> int:
    """The largest number up to `most` that fits, if all below one that fits do; 0 if none does.

    Args:
        fits: Asked as seldom as may be.
        most: The largest to look at.
        around: Where to begin, in steps that double.

    Example:
        >>> largest_that(lambda number: number <= 700, 1000, around=690)
        700
    """
    low, high = 0, most + 1  # the first fits, the second does not
    number = min(max(1, around), most)
    step = max(1, number // FINE)
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
    """The profile of a size, from those of others.

    Raises:
        ProfileError: They are not of the same operations.
    """
    # A batch without values may have guesses that one with values has not: those of the largest hold for all.
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
    profile: ModelProfile = _mixed([profile for _, profile in known], weights)
    return profile


def _mixed(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Between values of one kind: numbers by their weights, and what consists of numbers part by part."""
    first = values[0]
    if all(value == first for value in values):
        return first
    if type(first) is int:
        return round(sum(weight * value for weight, value in zip(weights, values, strict=True)))
    if type(first) is str:
        return first  # the batch in words
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        return replace(
            first, **{name: _mixed([getattr(value, name) for value in values], weights) for name in names}
        )
    if type(first) is tuple and len({len(value) for value in values}) == 1:
        return tuple(_mixed(each, weights) for each in zip(*values, strict=True))
    raise ProfileError(
        "The model does other operations for other sizes of its batch, so that one cannot be told from another."
    )
