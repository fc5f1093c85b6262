"""Train for long, with batches of many shapes, evaluation and plans made anew: what a process holds stays flat.

    python -m properties.soak --steps 2000 --cycles 200

Run it with `tests` on PYTHONPATH, or as `make soak`. One half of the steps, and of the cycles of wrap, training and
detach, is on the CPU with layers on disk; the other half on the executing virtual GPU with layers on the host. It
prints lines of what the process holds. The exit code is 1 if there are more live tensors, file handles, threads or
temporary files in the last line of a part than in the first one, or more resident memory by more than `RSS_GROWTH`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import random
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from unittest.mock import patch

import torch

import memscale
from memscale import Config
from memscale.memory import record
from memscale.planner.cache import plans_made
from memscale.testing import executing
from support.families import FAMILIES
from support.steps import plan_of

FAMILY = FAMILIES["gpt2"]
RUNS = (
    10  # of the steps: in each the model is wrapped for a small batch, and planned for anew as batches grow
)
LARGEST = (4, 24)  # samples and tokens
STEPS_PER_EVALUATION = 20
LINES = 20  # of each part
RSS_GROWTH = 16 * 2**20  # what glibc keeps of freed blocks wanders; on the virtual GPU 4 MiB in 10 plans
HISTORY = 1000  # of the virtual GPU's timeline, which grows to this length
LOSSLESS = {"use_mixed_precision": False, "use_8bit_optimizer": False, "enable_tiling": False}


@dataclass(frozen=True)
class Held:
    """What the process holds, after a garbage collection."""

    tensors: int
    rss_bytes: int
    handles: int
    threads: int
    files: int

    @classmethod
    def now(cls, directory: str) -> Held:
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        files = sum(len(names) for _, _, names in os.walk(directory))
        tensors = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
        return cls(tensors, resident, len(os.listdir("/proc/self/fd")), threading.active_count(), files)

    def __str__(self) -> str:
        rss = f"{self.rss_bytes / 2**20:.0f} MiB resident"
        return f"{self.tensors} tensors, {rss}, {self.handles} handles, {self.threads} threads, {self.files} files"

    def grown_since(self, before: Held) -> list[str]:
        """The names of what there is more of."""
        allowed = {"rss_bytes": RSS_GROWTH}
        names = [field.name for field in fields(self)]
        return [each for each in names if getattr(self, each) - getattr(before, each) > allowed.get(each, 0)]


class Soak:
    """Both parts, on one device.

    Args:
        device: Where the model trains.
        directory: Where layers on disk and temporary files are.
        steps: Training steps of the first part.
        cycles: Of wrap, a step and detach, of the second part.
        runs: Of the first part, see `RUNS`.
    """

    def __init__(self, device: torch.device, directory: str, steps: int, cycles: int, runs: int) -> None:
        self.device, self.directory, self.steps, self.cycles = device, directory, steps, cycles
        self.runs = runs
        self.draw = random.Random(7)
        self.model = FAMILY.build().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.plans = 0
        self.offloaded = 0  # the most bytes that a plan had below the device
        self.grown: list[str] = []

    def run(self) -> list[str]:
        """Return what was held more at the end of a part than at its beginning, in words; nothing if all is well."""
        self._part("steps", self.steps, self._many_steps)
        self._part("cycles", self.cycles, self._many_cycles)
        assert self.offloaded > 0, "nothing was offloaded"
        return self.grown

    def _part(self, what: str, count: int, run: Callable[[], Iterator[int]]) -> None:
        held: list[Held] = []
        for done in run():
            if done % max(1, count // LINES) == 0:
                held.append(Held.now(self.directory))
                print(f"{self.device.type}: {done:5} {what}, {self.plans} plans: {held[-1]}", flush=True)
        self.grown += [
            f"{name} on {self.device.type} in {what}: {held[0]} became {held[-1]}"
            for name in held[-1].grown_since(held[0])
        ]

    def _many_steps(self) -> Iterator[int]:
        """Yield in the middle and at the end of each run, too, where the plan is that of the largest batch."""
        per_run = self.steps // self.runs
        for done in range(1, self.steps + 1):
            if done % per_run == 1:
                self._wrap("aggressive", async_offload=True)
            size, length = self.draw.randint(1, LARGEST[0]), self.draw.randint(4, LARGEST[1])
            self._step(*(LARGEST if done % per_run == 2 else (size, length)))
            if done % STEPS_PER_EVALUATION == 0:
                self._evaluate()
            yield done
            if done % per_run == 0:
                memscale.detach(self.model)

    def _many_cycles(self) -> Iterator[int]:
        for done in range(1, self.cycles + 1):
            self._wrap(self.draw.choice(["balanced", "aggressive"]), async_offload=self.draw.random() < 0.5)
            self._step(2, 8)
            memscale.detach(self.model)
            yield done

    def _wrap(self, mode: str, async_offload: bool) -> None:
        plans_made.clear()
        config = Config(
            mode=mode,
            force_optimize=True,
            async_offload=async_offload,
            offload_dir=self.directory,
            enable_logging=False,
            **LOSSLESS,
        )
        memscale.wrap(self.model, config, FAMILY.batch(self.device, 1, 4), optimizer=self.optimizer)
        self.plans += 1

    def _step(self, size: int, length: int) -> None:
        before = plan_of(self.model)
        loss = FAMILY.loss(self.model, FAMILY.batch(self.device, size, length))
        plan = plan_of(self.model)
        self.plans += plan is not before
        self.offloaded = max(self.offloaded, plan.host_bytes + plan.disk_bytes)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            FAMILY.loss(self.model, FAMILY.batch(self.device, 3, 10))
        self.model.train()


def soak(steps: int, cycles: int, runs: int = RUNS) -> list[str]:
    """Run one half on each device; return what has grown."""
    grown = []
    for on_gpu in (False, True):
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="memscale-soak-"))
            stack.enter_context(patch.object(tempfile, "tempdir", directory))
            stack.enter_context(patch.object(record, "HISTORY", HISTORY))
            device = stack.enter_context(executing("1GiB")).device if on_gpu else torch.device("cpu")
            grown += Soak(device, directory, steps // 2, cycles // 2, runs).run()
    return grown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="training steps (default 2000)")
    parser.add_argument("--cycles", type=int, default=200, help="of wrap and detach (default 200)")
    options = parser.parse_args()
    if options.steps < 4 * RUNS or options.cycles < 2:
        parser.error(f"it takes {4 * RUNS} steps and 2 cycles at least")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("memscale").setLevel(logging.CRITICAL)
    grown = soak(options.steps, options.cycles)
    print("\n".join(grown) or "flat: tensors, resident memory, handles, threads, files")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
