"""The largest batch that fits, the longest sequence, and the batch that trains the most samples a second.

All by prediction: batches without values are profiled and planned for, and what is answered was simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch import nn

from memscale.config import Config
from memscale.engine import plain_point, room_of, usable
from memscale.errors import ProfileError
from memscale.execution_plan import Plan
from memscale.fitting import largest_fitting
from memscale.hardware import Hardware
from memscale.planning import Look, fits, look_at, make_plan, rehearsal
from memscale.profiler import Sample
from memscale.report import Terminal, table
from memscale.sizes import batch_size_of, length_of, most_positions, with_batch_size, with_length
from memscale.units import format_bytes

__all__ = ["BatchFit", "BatchSizes", "batch_sizes"]

MOST_SAMPLES = 2**16
ATTEMPTS = 3  # at a size whose plan the simulation finds to fit


@dataclass(frozen=True)
class BatchFit:
    """A batch that fits.

    Attributes:
        batch_size: its samples.
        length: of its sequences; 1 if it has none.
        samples_per_second: predicted from the device's rates.
        plan: what makes it fit, with its simulated peak.
        config: what `wrap` makes this plan from.
    """

    batch_size: int
    length: int
    samples_per_second: float
    plan: Plan
    config: Config


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
        title = f"Batches in {format_bytes(self.room_bytes)} of {self.device} (simulated; samples/s estimated)"
        columns = ["batch", "samples", "length", "peak", "step time", "samples/s"]
        return table(title, columns, rows, terminal=terminal or Terminal.detect())

    def __str__(self) -> str:
        return self.explain()


def batch_sizes(model: nn.Module, sample: Sample, config: Config, hardware: Hardware) -> BatchSizes:
    """Look for what fits; the model is not changed.

    Raises:
        ProfileError: the model does not run on the sample, or cannot be followed on fake tensors.
    """
    with rehearsal(model):
        search = _Search(model, sample, config, hardware)
        search.look(sample)  # of a sample that does not run the user is to hear why
        largest = search.most(
            lambda size: with_batch_size(model, sample, size), batch_size_of(sample), MOST_SAMPLES
        )
        longest = None
        if length_of(sample) > 1:
            limit = max(most_positions(model), length_of(sample))
            longest = search.most(lambda size: with_length(model, sample, size), length_of(sample), limit)
        fastest = None if largest is None else search.fastest(largest.batch_size)
    return BatchSizes(hardware.device.describe(), search.room, largest, longest, fastest)


class _Search:
    def __init__(self, model: nn.Module, sample: Sample, config: Config, hardware: Hardware) -> None:
        self._model = model
        self._sample = sample
        self._config = config
        self._looking = config.replace(use_empirical_fallback=False)  # these batches have no values to run with
        self._hardware = hardware
        self.room = room_of(hardware, config)
        self._looks: dict[tuple[object, ...], Look | ProfileError] = {}

    def look(self, sample: Sample) -> Look:
        key = sample.shapes()
        if key not in self._looks:
            try:
                self._looks[key] = look_at(self._model, sample, self._looking, self._hardware)
            except ProfileError as error:
                self._looks[key] = error
        found = self._looks[key]
        if isinstance(found, ProfileError):
            raise found
        return found

    def most(self, sized: Callable[[int], Sample], start: int, limit: int) -> BatchFit | None:
        """The largest size that fits, by simulation."""
        room = usable(self.room)
        for _ in range(ATTEMPTS):
            size = largest_fitting(
                lambda size: self._least_peak(sized(size)), room, start=start, most=limit
            )
            if not size:
                return None
            fit = self._fit(sized(size), self._config)
            if fit is not None:
                return fit
            limit = size - 1
        return None

    def fastest(self, largest: int) -> BatchFit | None:
        """The batch with the most samples a second, of those up to the largest that fits."""

        @cache
        def rate(size: int) -> float:
            return self._samples_per_second(self._with(size))

        sizes = sorted({max(1, largest >> shift) for shift in range(largest.bit_length())})
        for _ in range(2):  # between the best and its neighbours
            best = max(sizes, key=rate)
            place = sizes.index(best)
            around = sizes[max(0, place - 1) : place + 2]
            sizes = sorted({*sizes, *((one + other) // 2 for one, other in zip(around, around[1:]))})
        quick = self._config.replace(memory_budget=self.room)
        for size in sorted(sizes, key=rate, reverse=True)[:ATTEMPTS]:
            fit = self._fit(self._with(size), quick)
            if fit is not None:
                return fit
        return None

    def _with(self, size: int) -> Sample:
        return with_batch_size(self._model, self._sample, size)

    def _least_peak(self, sample: Sample) -> int | None:
        try:
            return self.look(sample).least_peak_bytes
        except ProfileError:
            return None  # sequences longer than the model takes

    def _samples_per_second(self, sample: Sample) -> float:
        """Of the fastest plan that fits; 0 if none does."""
        look = self.look(sample)
        ratios = [
            point.time_ratio for point in look.plan.frontier if point.peak_bytes <= usable(self.room)
        ]
        return self._rate(sample, min(ratios)) if ratios else 0.0

    def _rate(self, sample: Sample, time_ratio: float) -> float:
        plain = plain_point(self.look(sample).profile, self._hardware)
        return batch_size_of(sample) / (plain.seconds * time_ratio)

    def _fit(self, sample: Sample, config: Config) -> BatchFit | None:
        plan = make_plan(
            self._model, sample, config.replace(use_empirical_fallback=False), self._hardware, suggest=False
        )
        if not fits(plan, self._hardware, config):
            return None
        rate = self._rate(sample, plan.predicted_time_ratio)
        return BatchFit(batch_size_of(sample), length_of(sample), rate, plan, config)
