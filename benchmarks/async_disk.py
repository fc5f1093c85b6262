"""Transfers beside the computation against transfers in its way: `python -m benchmarks.async_disk`.

Trains a stack of layers on this CPU with its activations on the disk tier, once with the asynchronous engine and once
without, step by step in turns in one process, so that whatever else the machine does falls on both alike. The width
of the layers is the one at which transfers and computation take about the same time here: with much less of either
there is nothing to hide, or nowhere to hide it. Computation leaves one core to the threads that move tensors.

Bytes go to the disk itself: each write waits until the disk has it, and nothing stays in the page cache, as when
there is more to offload than the host has memory. With ``--cached`` they stop there, and a transfer is a copy from
memory to memory, which needs a core of its own to run beside anything.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import nn

from memscale.benchmarks.results import write_document
from memscale.config import AsyncOffloadConfig, Config
from memscale.execution_plan import LayerPlan, Offloading, Plan
from memscale.executor import Executor
from memscale.tiers import disk
from memscale.units import format_bytes

__all__ = ["Measured", "main", "measure"]

WIDTHS = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Measured:
    """What came out of one run.

    Attributes:
        width: Of the layers.
        bytes_per_step: What goes to the disk in a step, and comes back.
        transfer_share: Time that transfers add to a synchronous step, over the time that it computes.
        ratios: Synchronous step time over asynchronous, pair by pair.
        equal: Whether both came to the same parameters, bit for bit.
    """

    width: int
    bytes_per_step: int
    transfer_share: float
    ratios: tuple[float, ...]
    equal: bool


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def _stack(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(_Layer(width) for _ in range(layers))).train()


@contextlib.contextmanager
def _past_the_page_cache() -> Iterator[None]:
    """Disk tiers wait for the disk, in both directions."""

    def write_from(fd: int, tensor: torch.Tensor, offset: int) -> None:
        plain_write_from(fd, tensor, offset)
        os.fdatasync(fd)
        os.posix_fadvise(fd, offset, tensor.nbytes, os.POSIX_FADV_DONTNEED)

    plain_write_from, disk.write_from = disk.write_from, write_from
    try:
        yield
    finally:
        disk.write_from = plain_write_from


@contextlib.contextmanager
def _offloaded(model: nn.Sequential, config: Config) -> Iterator[Executor]:
    settings = Offloading("device", activations=True)
    layers = (
        LayerPlan(name, (name,), ("offloading",), "benchmark", "", offloading=settings)
        for name, _ in model.named_children()
    )
    executor = Executor(model, Plan(tuple(layers)), config)
    executor.attach()
    try:
        yield executor
    finally:
        executor.detach()


def _step(model: nn.Module, x: torch.Tensor) -> float:
    start = time.perf_counter()
    model(x).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=1e-3)
            parameter.grad = None
    return time.perf_counter() - start


def measure(
    *,
    layers: int,
    elements: int,
    rounds: int,
    width: int | None = None,
    directory: str | None = None,
    settings: AsyncOffloadConfig | None = None,
) -> Measured:
    """Run both in turns.

    Args:
        layers: How many the model has.
        elements: Of the tensor between two layers: samples times width.
        rounds: Pairs of timed steps.
        width: Of the layers; None for the one of `WIDTHS` that balances transfers and computation best.
        directory: Where the disk tier is.
        settings: Of the asynchronous engine.
    """
    off = Config(enable_logging=False, async_offload=False, offload_dir=directory)
    on = off.replace(async_offload=True, async_config=settings)
    if width is None:
        width = min(WIDTHS, key=lambda each: abs(_transfer_share(layers, elements, each, off) - 1))
    share = _transfer_share(layers, elements, width, off)
    x = torch.randn(elements // width, width)
    models = _stack(layers, width), _stack(layers, width)
    ratios = []
    with _offloaded(models[0], off) as executor, _offloaded(models[1], on):
        with torch.enable_grad():
            loss = models[0](x).sum()
        stored = executor.bytes_on_disk
        del loss
        for number in range(rounds + 2):
            order = (0, 1) if number % 2 else (1, 0)
            seconds = {which: _step(models[which], x) for which in order}
            if number > 1:  # the first ones warm up: files grow, threads start
                ratios.append(seconds[0] / seconds[1])
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    equal = all(torch.equal(one, other) for one, other in pairs)
    return Measured(width, stored, share, tuple(ratios), equal)


def _transfer_share(layers: int, elements: int, width: int, config: Config) -> float:
    x = torch.randn(elements // width, width)
    plain, offloaded = _stack(layers, width), _stack(layers, width)
    with _offloaded(offloaded, config):
        for model in (plain, offloaded):
            _step(model, x)
        pairs = [(_step(plain, x), _step(offloaded, x)) for _ in range(3)]
    return median(slow / fast for fast, slow in pairs) - 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_disk")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--elements", type=int, default=4 * 2**20, help="of the tensor between two layers")
    parser.add_argument("--width", type=int, help="of the layers (default: the one that balances best)")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of timed steps")
    parser.add_argument("--repeats", type=int, default=3, help="how often all of it is run")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="that compute")
    parser.add_argument("--workers", type=int, default=AsyncOffloadConfig().workers, help="that move tensors")
    parser.add_argument("--depth", type=int, default=AsyncOffloadConfig().prefetch_depth)
    parser.add_argument("--cached", action="store_true", help="stop at the page cache")
    parser.add_argument("--dir", help="where the disk tier is")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    settings = AsyncOffloadConfig(prefetch_depth=options.depth, workers=options.workers)
    runs: list[Measured] = []
    for number in range(options.repeats):
        with contextlib.nullcontext() if options.cached else _past_the_page_cache():
            run = measure(
                layers=options.layers,
                elements=options.elements,
                rounds=options.rounds,
                width=options.width or (runs[0].width if runs else None),
                directory=options.dir,
                settings=settings,
            )
        runs.append(run)
        print(
            f"run {number + 1}: width {run.width}, {format_bytes(run.bytes_per_step)} down and up a step, transfers "
            f"take {run.transfer_share:.2f} of the time that computing takes; asynchronous is "
            f"{median(run.ratios):.2f}x as fast{'' if run.equal else ', AND COMES TO OTHER NUMBERS'} (measured)",
            flush=True,
        )
    ratios = [ratio for run in runs for ratio in run.ratios]
    low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    print(
        f"synchronous over asynchronous step time: {middle:.2f} (measured in {len(ratios)} pairs of steps, middle "
        f"half {low:.2f} to {high:.2f}, all {min(ratios):.2f} to {max(ratios):.2f})"
    )
    if options.json:
        named = ("layers", "elements", "rounds", "repeats", "threads", "workers", "depth")
        given = "".join(f" --{name} {getattr(options, name)}" for name in named)
        given += f" --width {runs[0].width}" + " --cached" * options.cached
        result = {
            "schema": 1,
            "command": f"python -m benchmarks.async_disk{given}",
            "source": "measured",
            "torch": torch.__version__,
            "page_cache": options.cached,
            "threads": options.threads,
            "workers": options.workers,
            "prefetch_depth": options.depth,
            "width": runs[0].width,
            "bytes_per_step": runs[0].bytes_per_step,
            "transfer_share": [round(run.transfer_share, 3) for run in runs],
            "numbers_equal": all(run.equal for run in runs),
            "speedup_median": round(middle, 4),
            "speedup_quartiles": [round(low, 4), round(high, 4)],
            "speedups": [round(ratio, 4) for ratio in ratios],
        }
        write_document(options.json, result)
    return 0 if all(run.equal for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
