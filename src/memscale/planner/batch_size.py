"""The largest batch that fits, the longest sequence, and the batch that trains the most samples a second.

All by prediction: batches without values are profiled and planned for, and each answer is simulated.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from memscale._util.terminal import Terminal, table
from memscale.config import Config
from memscale.execution_plan import Plan
from memscale.hardware import Hardware
from memscale.optimizer.needs import OptimizerNeeds
from memscale.planner.decide import room_of
from memscale.planner.estimates import (
    Estimates,
    batch_size_of,
    length_of,
    most_positions,
    with_batch_size,
    with_length,
)
from memscale.planner.make_plan import ProfiledModel, fits, profile_settings, simulated_plan, usable
from memscale.planner.predict import rehearsal
from memscale.profiler import ModelProfile, Sample
from memscale.units import format_bytes

MOST_SAMPLES = 2**16  # the largest batch considered
LARGEST_PRECISION = 1 / 64  # to which the largest size is found; exactly up to 64
FASTEST_PRECISION = 1 / 32  # to which the fastest size is found: its neighbours are about as fast
HALVINGS = 6  # of the largest size, with which the search for the fastest one starts


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
        """Return the rate that is estimated from the device's rates."""
        return self.batch_size / self.plan.predicted_seconds


@dataclass(frozen=True)
class BatchSizes:
    """What fits a device.

    Attributes:
        device: its description.
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
        """Return the most samples that fit; 0 if none do."""
        return 0 if self.largest is None else self.largest.batch_size

    def explain(self, *, terminal: Terminal | None = None) -> str:
        """Return the batches as a table."""
        rows = []
        for name in ("largest", "longest", "fastest"):
            fit: BatchFit | None = getattr(self, name)
            if fit is not None:
                size = (str(fit.batch_size), str(fit.length), format_bytes(fit.plan.predicted_peak_bytes))
                ratio = f"{fit.plan.predicted_time_ratio:.2f}×"
                rows.append((name, *size, ratio, f"{fit.samples_per_second:.3g}"))
        room = format_bytes(self.room_bytes)
        title = f"Batches in {room} of {self.device} (simulated; samples/s estimated)"
        columns = ["batch", "samples", "length", "peak", "step time", "samples/s"]
        return table(title, columns, rows, terminal=terminal or Terminal.detect())

    def __str__(self) -> str:
        return self.explain()


def batch_sizes(
    model: nn.Module,
    sample: Sample,
    config: Config,
    hardware: Hardware,
    optimizer: OptimizerNeeds | None = None,
) -> BatchSizes:
    """Search for the batches that fit; the model is not changed."""
    search = _Search(model, config, hardware, optimizer)
    batch, length = batch_size_of(sample), length_of(sample)
    longest = None
    with rehearsal(model, config):
        samples = _Sizes(functools.partial(with_batch_size, model, sample), (batch, 4 * batch), MOST_SAMPLES)
        estimates = search.estimates(samples)
        largest, estimates = search.most(samples, estimates)
        fastest = None if largest is None else search.fastest(samples, estimates, largest.batch_size)
        if length > 1:
            limit = max(most_positions(model), length)
            known = sorted({length, max(1, length // 2), min(limit, 4 * length)})
            lengths = _Sizes(functools.partial(with_length, model, sample), known, limit)
            longest, _ = search.most(lengths, search.estimates(lengths))
    return BatchSizes(hardware.describe(), search.room, largest, longest, fastest)


@dataclass(frozen=True)
class _Sizes:
    """Batches that differ in one size."""

    sample: Callable[[int], Sample]  # the batch of a size
    known: Sequence[int]  # sizes to estimate the others from
    most: int  # the largest to consider


class _Search:
    def __init__(
        self, model: nn.Module, config: Config, hardware: Hardware, optimizer: OptimizerNeeds | None
    ) -> None:
        self._model = model
        self._config = config
        self._hardware = hardware
        self._optimizer = optimizer
        self._profiles: dict[tuple[int, int], ModelProfile] = {}
        self._known: dict[tuple[tuple[int, int], Config], ProfiledModel] = {}
        self.room = room_of(hardware, config)

    def estimates(self, sizes: _Sizes) -> Estimates:
        known = [(size, self._profiled(sizes.sample(size), self._config).under) for size in sizes.known]
        return Estimates(known, self._hardware, self._config, usable(self.room))

    def most(self, sizes: _Sizes, estimates: Estimates) -> tuple[BatchFit | None, Estimates]:
        """Return the largest size that fits, by simulation; that no larger one does is estimated.

        Each size that was simulated improves the estimates of the others, so that mostly one simulation is enough; they
        are returned, too.
        """
        best, low, high = None, 0, sizes.most + 1  # the first fits, the second does not
        size = max(1, estimates.largest(sizes.most))
        while low < size < high:
            sample = sizes.sample(size)
            estimates = estimates.knowing(size, self._profiled(sample, self._config).under)
            found = None
            if estimates.has_room(size):
                found, excess = self._fit(sample, self._config)
                estimates = replace(estimates, room=int(usable(self.room) / excess))
            if found is not None:
                low, best = size, found
            else:
                high = size
            size = low + max(1, int(low * LARGEST_PRECISION))
            if size >= high or (low and not estimates.has_room(size)):
                break
            size = max(1, estimates.largest(high - max(1, int(high * LARGEST_PRECISION))))
        return best, estimates

    def fastest(self, sizes: _Sizes, estimates: Estimates, largest: int) -> BatchFit | None:
        """Return the batch with the most samples a second, of those up to the largest that fits."""

        @functools.cache
        def about(size: int) -> float:
            seconds = estimates.seconds(size)
            return 0.0 if seconds is None else size / seconds

        tried = sorted({max(1, largest >> shift) for shift in range(HALVINGS)})
        between = {1}
        while between:  # the best and its neighbours
            place = tried.index(max(tried, key=about))
            pairs = itertools.pairwise(tried[max(0, place - 1) : place + 2])
            between = {(one + other) // 2 for one, other in pairs if other - one > other * FASTEST_PRECISION}
            between -= set(tried)
            tried = sorted({*tried, *between})
        quick = self._config.replace(memory_budget=self.room)
        best: BatchFit | None = None
        for size in sorted(tried, key=about, reverse=True):
            if best is not None and about(size) <= best.samples_per_second:
                break
            found, _ = self._fit(sizes.sample(size), quick)
            if found is not None and (best is None or found.samples_per_second > best.samples_per_second):
                best = found
        return best

    def _fit(self, sample: Sample, config: Config) -> tuple[BatchFit | None, float]:
        """Return a batch with its plan, None if that does not fit; and the simulated peak over the estimate."""
        known = self._profiled(sample, config)
        plan, excess = simulated_plan(
            self._model, sample, _without_values(config), self._hardware, known, self._optimizer
        )
        if not fits(plan, self._hardware, config):
            return None, excess
        return BatchFit(batch_size_of(sample), length_of(sample), plan, config), excess

    def _profiled(self, sample: Sample, config: Config) -> ProfiledModel:
        """Return the profile of a batch, made once for each size; the settings depend on the Config."""
        size = (batch_size_of(sample), length_of(sample))
        if (size, config) not in self._known:
            profile = self._profiles.get(size)
            known = profile_settings(
                self._model, sample, _without_values(config), self._hardware, profile, self._optimizer
            )
            self._profiles[size] = known.profile
            self._known[size, config] = known
        return self._known[size, config]


def _without_values(config: Config) -> Config:
    """Return a Config that runs no real step: batches of other sizes have no values."""
    return config.replace(use_empirical_fallback=False)
