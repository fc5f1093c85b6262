"""What hooks cost where nothing is to be done: `python -m benchmarks.hook_overhead`.

A small model that the plan leaves as it is, trained plain and wrapped, step by step in turns in one process, so that
whatever else the machine does falls on both alike. What is compared is the time of one processor: hooks run in the
training thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles

import torch
from torch import nn

from memscale.api import plan, wrap
from memscale.benchmarks.models import find_model, quiet_transformers
from memscale.benchmarks.results import write_document
from memscale.config import Config

__all__ = ["main"]

UNLIMITED = Config(enable_logging=False, memory_budget="1TB")  # the fastest plan is to do nothing


def _seconds(model: str, batch: int, seq: int, rounds: int) -> tuple[list[float], list[float]]:
    """Of each step without MemScale and with it."""
    case = find_model(model)
    inputs = case.inputs(batch, seq)
    runs = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        built = case.build().train()
        if wrapped:
            decided = plan(built, inputs, UNLIMITED)
            if any(layer.techniques for layer in decided.layers):
                raise SystemExit(f"The plan is not to do nothing: {decided}")
            wrap(built, UNLIMITED, inputs)
        runs.append((built, torch.optim.AdamW(built.parameters(), lr=1e-4), inputs))
    seconds: tuple[list[float], list[float]] = ([], [])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with quiet_transformers():
        for number in range(rounds + 5):
            order = (0, 1) if number % 2 else (1, 0)
            for which in order:
                spent = _step(*runs[which])
                if number >= 5:  # the first rounds warm up
                    seconds[which].append(spent)
    torch.set_num_threads(threads)
    return seconds


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor]) -> float:
    start = time.process_time()
    model(**inputs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - start


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hook_overhead")
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40, help="pairs of timed steps, two or more")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(arguments)
    plain, wrapped = _seconds(options.model, options.batch, options.seq, options.rounds)
    quarters = zip(quantiles(wrapped, n=4), quantiles(plain, n=4), strict=True)
    low, middle, high = (ours / theirs for ours, theirs in quarters)
    print(
        f"step time, wrapped with nothing to do over plain: {middle:.4f}, by the medians of {len(plain)} steps "
        f"each (measured; by their quartiles {low:.4f} and {high:.4f})"
    )
    if options.json:
        result = {
            "schema": 1,
            "command": f"python -m benchmarks.hook_overhead --model {options.model} "
            f"--batch {options.batch} --seq {options.seq} --rounds {options.rounds}",
            "source": "measured",
            "torch": torch.__version__,
            "time_ratio_median": round(middle, 5),
            "time_ratio_quartiles": [round(low, 5), round(high, 5)],
        }
        write_document(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
