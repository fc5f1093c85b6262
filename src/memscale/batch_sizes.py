"""The largest batch that fits, the longest sequence, and the batch that trains the most samples a second.

All by prediction: batches without values are profiled and planned for, and what is answered was simulated.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from memscale.config import Config
from memscale.engine import has_plan_within, room_of
from memscale.execution_plan import Plan
from memscale.fitting import Estimates, largest_that
from memscale.hardware import Hardware
from memscale.planning import Profiled, estimates_of, fits, make_plan, profiled, rehearsal, usable
from memscale.profiler import Sample
from memscale.report import Terminal, table
from memscale.sizes import batch_size_of, length_of, most_positions, with_batch_size, with_length
from memscale.units import format_bytes

__all__ = ["BatchFit", "BatchSizes", "batch_sizes"]

MOST_SAMPLES = 2**16
EXACT_TO = 64  # sizes above are found to within a sixty-fourth
HALVINGS = 6  # of the largest size, to begin the search for the fastest one with
ROUNDS = 3  # of looks for the fastest size, each between the last ones


@dataclass(frozen=True)
class BatchFit:
    """A batch that fits.

    Attributes:
        batch_size: its samples.
        length: of its sequences; 1 if it has none.
        plan: what makes it fit, with its simulated peak.
        config: what `wrap` makes this plan from.
    """

    batch_size: int
    length: int
    plan: Plan
    config: Config

    @property
    def samples_per_second(self) -> float:
        """Estimated from the device's rates."""
        return self.batch_size / self.plan.predicted_seconds


@dataclass(frozen=True)
class BatchSizes:
    """What fits a device.

    Attributes:
        device: in words.
        room_bytes: what plans may take: the device's memory, or the budget.
        largest: the batch with the most samples, as long as those that were given; None if not even one sample fits.
        longest: the batch with the longest sequences, as many as were given; None if none fits, or there are none.
        fastest: the batch with the most samples a second, and its plan.
    """

    device: str
    room_bytes: int
    largest: BatchFit | None
    longest: BatchFit | None
    fastest: BatchFit | None

    @property
    def batch_size(self) -> int:
        """The most samples that fit; 0 if none do."""
        return 0 if self.largest is None else self.largest.batch_size

    def explain(self, *, terminal: Terminal | None = None) -> str:
        """As a table."""
        rows = []
        for name in ("largest", "longest", "fastest"):
            fit: BatchFit | None = getattr(self, name)
            if fit is not None:
                rows.append(
                    (
                        name,
                        str(fit.batch_size),
                        str(fit.length),
                        format_bytes(fit.plan.predicted_peak_bytes),
                        f"{fit.plan.predicted_time_ratio:.2f}×",
                        f"{fit.samples_per_second:.3g}",
                    )
                )
        title = (
            f"Batches in {format_bytes(self.room_bytes)} of {self.device} (simulated; samples/s estimated)"
        )
        columns = ["batch", "samples", "length", "peak", "step time", "samples/s"]
        return table(title, columns, rows, terminal=terminal or Terminal.detect())

    def __str__(self) -> str:
        return self.explain()


def batch_sizes(model: nn.Module, sample: Sample, config: Config, hardware: Hardware) -> BatchSizes:
    """Look for what fits; the model is not changed.

    Raises:
        ProfileError: the model does not run on the sample, or cannot be followed on fake tensors.
    """
    search = _Search(model, config, hardware)
    batch, length = batch_size_of(sample), length_of(sample)
    longest = None
    with rehearsal(model):
        samples = _Sizes(functools.partial(with_batch_size, model, sample), (batch, 4 * batch), MOST_SAMPLES)
        estimates = search.estimates(samples)
        largest = search.most(samples, estimates)
        fastest = None if largest is None else search.fastest(samples, estimates, largest.batch_size)
        if length > 1:
            limit = max(most_positions(model), length)
            known = sorted({length, max(1, length // 2), min(limit, 4 * length)})
            lengths = _Sizes(functools.partial(with_length, model, sample), known, limit)
            longest = search.most(lengths, search.estimates(lengths))
    return BatchSizes(hardware.device.describe(), search.room, largest, longest, fastest)


@dataclass(frozen=True)
class _Sizes:
    """Batches that differ in one size.

    Attributes:
        sample: the batch of a size.
        known: sizes to estimate the others by.
        most: the largest to look at.
    """

    sample: Callable[[int], Sample]
    known: Sequence[int]
    most: int


class _Search:
    def __init__(self, model: nn.Module, config: Config, hardware: Hardware) -> None:
        self._model = model
        self._config = config
        self._hardware = hardware
        self._known: dict[tuple[int, int], Profiled] = {}
        self.room = room_of(hardware, config)

    def estimates(self, sizes: _Sizes) -> Estimates:
        def of_size(size: int) -> Profiled:
            return self._profiled(sizes.sample(size), self._config)

        return estimates_of(of_size, sizes.known, self._config, self._hardware)

    def most(self, sizes: _Sizes, estimates: Estimates) -> BatchFit | None:
        """The largest size that fits, by simulation: around the estimated one, in steps that double."""
        found: dict[int, BatchFit | None] = {}

        def has_room(size: int) -> bool:
            found[size] = self._fit(sizes.sample(size), self._config)
            return found[size] is not None

        largest = largest_that(
            has_room, sizes.most, around=max(1, estimates.largest(sizes.most)), parts=EXACT_TO
        )
        return found.get(largest)

    def fastest(self, sizes: _Sizes, estimates: Estimates, largest: int) -> BatchFit | None:
        """The batch with the most samples a second, of those up to the largest that fits."""

        def rate(size: int) -> float:
            seconds = estimates.seconds(size)
            return 0.0 if seconds is None else size / seconds

        tried = sorted({max(1, largest >> shift) for shift in range(HALVINGS)})
        for _ in range(ROUNDS):  # between the best and its neighbours
            place = tried.index(max(tried, key=rate))
            around = tried[max(0, place - 1) : place + 2]
            tried = sorted({*tried, *((one + other) // 2 for one, other in itertools.pairwise(around))})
        quick = self._config.replace(memory_budget=self.room)
        fits_in_order = (
            self._fit(sizes.sample(size), quick) for size in sorted(tried, key=rate, reverse=True)
        )
        return next((fit for fit in fits_in_order if fit is not None), None)

    def _fit(self, sample: Sample, config: Config) -> BatchFit | None:
        known = self._profiled(sample, config)
        if not has_plan_within(known.under, self._hardware, config, usable(self.room)):
            return None  # it is not even planned
        plan = make_plan(
            self._model, sample, _without_values(config), self._hardware, suggest=False, known=known
        )
        if not fits(plan, self._hardware, config):
            return None
        return BatchFit(batch_size_of(sample), length_of(sample), plan, config)

    def _profiled(self, sample: Sample, config: Config) -> Profiled:
        """Once for each size; what there is to choose from depends on the Config."""
        key = (batch_size_of(sample), length_of(sample))
        if config is not self._config:
            return profiled(self._model, sample, _without_values(config), self._hardware)
        if key not in self._known:
            self._known[key] = profiled(self._model, sample, _without_values(config), self._hardware)
        return self._known[key]


def _without_values(config: Config) -> Config:
    """Batches of other sizes have none to run with."""
    return config.replace(use_empirical_fallback=False)
