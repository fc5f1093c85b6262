"""What overlapping the optimizer's step with backward could hide on the disk tier: `python -m benchmarks.disk_step`.

On a CPU host backward computes with every core. Of a step of parameters on disk it could therefore hide only what is no
computation: the time in which the step waits for the disk. A stack of layers whose parameters, gradients and state are
memory-mapped files is trained with one thread, and the wall time of its passes and steps is taken apart, as the kernel
accounts for the thread: computing (page faults and copies to the page cache included), waiting for a core, which is the
other processes' doing, and waiting for the disk. The ratio is a step without its waits for the disk over the step:
no overlapped step, however it is built, can be below it.

Once the page cache has what is offloaded, as where the host's memory is larger than that; and once it has nothing when
the optimizer's step begins, which is worse than any training.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import nn

from memscale.benchmarks.results import write_document
from memscale.config import Config
from memscale.execution_plan import LayerPlan, Offloading, OptimizerPlan, Plan
from memscale.executor import Executor

__all__ = ["main", "measure"]

WIDTH = 2048
BATCH = 512
BUCKET_BYTES = 64 * 2**20
SCHEDULE = Path("/proc/thread-self/schedstat")  # nanoseconds on a core, and waiting for one

Spent = tuple[float, float]  # seconds of computing, and of waiting for the disk


def _spent(call: Callable[[], object]) -> Spent:
    """Run something, and return the seconds that this thread computed and that it waited for the disk."""
    wall, ran, waited = _clocks()
    call()
    wall, ran, waited = (after - before for after, before in zip(_clocks(), (wall, ran, waited), strict=True))
    return ran, max(0.0, wall - ran - waited)


def _clocks() -> tuple[float, float, float]:
    ran, waited, _ = map(int, SCHEDULE.read_text().split())
    return time.perf_counter(), ran / 1e9, waited / 1e9


def measure(millions: int, rounds: int, folder: str, *, cached: bool = True) -> list[tuple[Spent, Spent]]:
    """Return of each training step what its passes took, and what the optimizer's step took."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(millions * 10**6 // WIDTH**2)))
    layers = (
        LayerPlan(name, (name,), ("offloading",), "benchmark", "every layer", offloading=Offloading("disk"))
        for name, _ in model.named_children()
    )
    plan = Plan(tuple(layers), optimizer=OptimizerPlan("disk", BUCKET_BYTES))
    executor = Executor(model, plan, Config(enable_logging=False, offload_dir=folder))
    executor.attach()
    assert executor.placement.on_disk, "nothing was offloaded"
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(BATCH, WIDTH)
    found = []
    for number in range(rounds + 1):
        passes = _spent(lambda: model(inputs).square().mean().backward())
        if not cached:
            file = executor.placement.store.file.fd
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        step = _spent(optimizer.step)
        optimizer.zero_grad()
        if number:  # the first step makes the state
            found.append((passes, step))
    executor.detach()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the results if asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk_step")
    parser.add_argument("--millions", type=int, default=50, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to offload to")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(arguments)
    result: dict[str, object] = {
        "schema": 1,
        "command": f"python -m benchmarks.disk_step --millions {options.millions} --rounds {options.rounds}",
        "source": "measured",
        "torch": torch.__version__,
        "threads": 1,
    }
    for name, cached in (("in the page cache", True), ("not in the page cache", False)):
        steps = measure(options.millions, options.rounds, options.folder, cached=cached)
        parts = {
            "forward and backward, computing": [passes[0] for passes, _ in steps],
            "forward and backward, waiting for the disk": [passes[1] for passes, _ in steps],
            "optimizer step, computing": [step[0] for _, step in steps],
            "optimizer step, waiting for the disk": [step[1] for _, step in steps],
        }
        ratios = sorted((sum(passes) + step[0]) / (sum(passes) + sum(step)) for passes, step in steps)
        print(f"{name}:")
        for part, each in parts.items():
            print(f"  {part:44} {median(each):8.3f} s  ({min(each):.3f} to {max(each):.3f})")
        print(
            f"  least ratio of an overlapped step: {median(ratios):.3f}  ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
        result[name] = {
            "seconds": {part: [round(value, 4) for value in each] for part, each in parts.items()},
            "least_ratio_of_an_overlapped_step": {
                "median": round(median(ratios), 3),
                "range": [round(ratios[0], 3), round(ratios[-1], 3)],
            },
        }
    if options.json:
        write_document(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
