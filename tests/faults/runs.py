"""Trainings with a fault in each step, and what must hold after each."""

from __future__ import annotations

import contextlib
import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

import torch
from torch import Tensor

from faults.injector import Injector, spread
from faults.scenarios import Training, training

WARM_STEPS = 2  # before the first fault: state is there, steps overlap
CHUNK = 4  # faults in one training
TORN = "was made for some of its parameters"  # what the log says then

Fault = Callable[[], BaseException] | None
MakeInjector = Callable[[int | None], Injector]
Numbers = dict[str, dict[str, Tensor]]


@dataclass
class Outcome:
    """What became of the faults of one run."""

    injected: int = 0
    raised: int = 0
    torn: int = 0
    failures: list[str] = field(default_factory=list)


class Run:
    """Injects faults into a phase of training steps of a scenario."""

    def __init__(self, make: Callable[[], Training], directory: Path) -> None:
        self._make = make
        self._directory = directory
        self.outcome = Outcome()
        self._eight_bit = False
        self.reference = self._undisturbed()

    def _undisturbed(self) -> list[Numbers]:
        run = self._make()
        run.attach()
        optimizer = run.executor.plan.optimizer
        self._eight_bit = optimizer is not None and optimizer.eight_bit
        found = [run.numbers()]
        for _ in range(WARM_STEPS + CHUNK + 1):
            run.run_step()
            found.append(run.numbers())
        run.detach()
        assert self._equal(run.numbers(), found[-1])
        run.assert_detached(self._directory)
        return found

    def count(self, phase: str, make: MakeInjector) -> Injector:
        """Return an injector that has counted the points of a phase at which it can inject."""
        gc.collect()  # `detach` looks for optimizers, also for those of earlier trainings that nothing refers to
        run = self._make()
        counter = make(None)
        with self._prepared(run, phase):
            counter.run(getattr(run, phase))
        return counter

    @contextlib.contextmanager
    def _prepared(self, run: Training, phase: str) -> Iterator[None]:
        if phase != "attach":
            run.attach()
            for _ in range(WARM_STEPS):
                run.run_step()
        if phase in ("backward", "optimizer_step"):
            run.forward()
        if phase == "optimizer_step":
            run.backward()
        yield
        run.detach()

    def inject(
        self, phase: str, make: MakeInjector, points: int, tried: set[CodeType] | None = None
    ) -> Outcome:
        """Inject a fault at so many points of a phase, evenly spread.

        With `tried`, also at the first call of each function that is not in it, which is then.
        """
        counter = self.count(phase, make)
        numbers = set(spread(counter.count, points))
        if tried is not None:
            numbers |= {at for function, at in counter.first.items() if function not in tried}
            tried.update(counter.first)
        pending = sorted(numbers)
        while pending:
            chunk, pending = pending[:CHUNK], pending[CHUNK:]
            missed = self._train(phase, make, chunk)
            # In a training of its own; if it is not reached there either, the last point that is.
            again = [reached if at == chunk[0] else at for at, reached in missed.items()]
            pending = [at for at in again if at > 0] + pending
        return self.outcome

    def _train(self, phase: str, make: MakeInjector, numbers: list[int]) -> dict[int, int]:
        """Inject faults at points of a phase, in one training; return those that were not reached, with the last one.

        After a fault a phase may have fewer calls: steps do not overlap for a while, for one.
        """
        outside = phase in ("attach", "detach")
        missed: dict[int, int] = {}
        gc.collect()
        run = self._make()
        if not outside:
            run.attach()
            for _ in range(WARM_STEPS):
                run.run_step()
        for at in numbers:
            injector = make(at)
            try:
                if outside:
                    self._around(run, phase, injector)
                else:
                    self._inside(run, phase, injector)
            except Exception as error:
                self.outcome.failures.append(f"{phase} {at} at {injector.where}: {_line(error)}")
                with contextlib.suppress(Exception):
                    run.detach()
                return missed
            self.outcome.injected += injector.was_injected
            if not injector.was_injected:
                missed[at] = injector.count
            quantizer = run.executor.placement.states._eight_bit
            if quantizer is not None and quantizer.has_failed:
                run.detach()  # in 32 bits from here on: other numbers
                return missed
        if not outside:
            self._end(run, numbers, phase)
        return missed

    def _end(self, run: Training, numbers: list[int], phase: str) -> None:
        try:
            run.run_step()
            assert self._equal(run.numbers(), self.reference[run.step]), "the step after is another one"
            run.detach()
            assert self._equal(run.numbers(), self.reference[run.step]), "detach has changed numbers"
            run.assert_detached(self._directory)
        except Exception as error:
            self.outcome.failures.append(f"after {phase} {numbers}: {_line(error)}")

    def _equal(self, one: Numbers, other: Numbers) -> bool:
        return one.keys() == other.keys() and all(self._same(one[name], other[name]) for name in one)

    def _same(self, one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
        if self._eight_bit:  # state that could not be saved in 8 bits is in 32
            return torch.equal(one[""], other[""])
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    # ------------------------------------------------------------------ in a step

    def _inside(self, run: Training, phase: str, injector: Injector) -> None:
        before, after = self.reference[run.step], self.reference[run.step + 1]
        phases = ["forward", "backward", "optimizer_step"]
        for each in phases[: phases.index(phase)]:
            getattr(run, each)()
        saved = run.checkpoint()
        with _logged() as lines:
            raised = injector.run(getattr(run, phase)) is not None
        self.outcome.raised += raised
        run.assert_whole()
        now = run.numbers()
        is_torn = not self._equal(now, before) and not self._equal(now, after)
        # If all parameters were stepped and what comes after that failed, nobody knows whether the step is whole.
        is_said = any(TORN in line for line in lines)
        assert is_said >= is_torn, "the log does not say what became of the step"
        assert is_said <= (not self._equal(now, before)), "the log calls a step torn that was not made"
        if phase != "optimizer_step":
            assert self._equal(now, before), "weights or state have changed before the step"
            if injector.was_injected:
                run.optimizer.zero_grad()
                run.loss = None
                run.forward()
                run.backward()
            elif phase == "forward":
                run.backward()
            run.optimizer_step()
        elif self._equal(now, before) and not self._eight_bit:
            run.optimizer_step()
        elif not self._equal(now, after) or (self._eight_bit and raised):
            self.outcome.torn += is_torn
            for name, each in now.items():
                is_whole = self._same(each, before[name]) or self._same(each, after[name])
                assert is_whole, f"{name} is neither old nor new"
            run.resume(saved)
            run.optimizer.zero_grad()
            run.forward()
            run.backward()
            run.optimizer_step()
        run.finish_step()
        run.assert_whole()
        assert self._equal(run.numbers(), after), "the step after it is another one"

    # ------------------------------------------------------------------ around training

    def _around(self, run: Training, phase: str, injector: Injector) -> None:
        numbers = self.reference[run.step]
        run.executor = run.make()
        if phase == "attach":
            failed = injector.run(run.attach) is not None
            self.outcome.raised += failed
            if failed and not (injector.is_signal and run.executor.attached):  # it may come when all is done
                assert not run.executor.attached
                run.assert_detached(self._directory)
        else:
            run.attach()
            run.run_step()
            numbers = self.reference[run.step]
            self.outcome.raised += injector.run(run.detach) is not None
        if run.executor.attached or phase == "detach":
            run.detach()
        run.assert_whole()
        assert self._equal(run.numbers(), numbers), "numbers have changed"
        run.assert_detached(self._directory)


def _line(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:300]} ({place.line} in {place.name})"


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines()
    logger = logging.getLogger("memscale")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def run_of(name: str, directory: Path) -> Iterator[Run]:
    with training(name, directory) as make:
        yield Run(make, directory)
