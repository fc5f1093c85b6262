"""MemScale against the switch that transformers has: `python -m benchmarks.against_transformers`.

Trains one GPT-2 on this CPU with `model.gradient_checkpointing_enable()` and with `memscale.wrap` in a mode that
only recomputes, and compares peak memory (each in a fresh process) and step time (step by step in turns, in one
process, so that whatever else the machine does falls on both alike).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import nn

from memscale.api import wrap
from memscale.benchmarks.models import find_model, quiet_transformers
from memscale.benchmarks.results import write_document
from memscale.config import Config
from memscale.memory.process import measure_in_fresh_process
from memscale.units import format_bytes

__all__ = ["main", "peak_steps"]

WAYS = ("plain", "transformers", "conservative")


def _prepared(model: str, way: str, batch: int, seq: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    case = find_model(model)
    torch.manual_seed(0)
    built = case.build().train()
    inputs = case.inputs(batch, seq)
    if way == "transformers":
        switch_on: Any = built.gradient_checkpointing_enable
        switch_on({"use_reentrant": False})
    elif way != "plain":
        wrap(built, Config(mode=way, enable_logging=False), inputs)
    return built, inputs


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor]) -> float:
    start = time.perf_counter()
    loss = model(**inputs).loss
    loss.backward()
    del loss
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def peak_steps(model: str, way: str, batch: int, seq: int, steps: int) -> list[float]:
    """What a fresh process runs to show its peak; returns the losses."""
    built, inputs = _prepared(model, way, batch, seq)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4)
    losses = []
    with quiet_transformers():
        for _ in range(steps):
            loss = built(**inputs).loss
            loss.backward()
            losses.append(float(loss.detach()))
            del loss
            optimizer.step()
            optimizer.zero_grad()
    return losses


def time_ratios(model: str, batch: int, seq: int, rounds: int) -> list[float]:
    """Step time of MemScale over that of transformers, pair by pair."""
    runs = []
    for way in WAYS[1:]:
        built, inputs = _prepared(model, way, batch, seq)
        runs.append((built, torch.optim.AdamW(built.parameters(), lr=1e-4), inputs))
    ratios = []
    with quiet_transformers():
        for number in range(rounds + 1):
            order = (0, 1) if number % 2 else (1, 0)
            seconds = {which: _step(*runs[which]) for which in order}
            if number:  # the first round warms up
                ratios.append(seconds[1] / seconds[0])
    return ratios


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_transformers")
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of timed steps")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(arguments)
    os.environ["MEMSCALE_CALIBRATION"] = "none"  # plans that are the same on every machine
    size = (options.model, options.batch, options.seq)
    peaks, losses = {}, {}
    for way in WAYS:
        measured = measure_in_fresh_process(
            peak_steps,
            options.model,
            way,
            options.batch,
            options.seq,
            2,
            imports=find_model(options.model).modules,
        )
        peaks[way], losses[way] = measured.peak_above_import_bytes, measured.result
        print(f"{way}: peak {format_bytes(peaks[way])} above import (measured)", flush=True)
    ratios = time_ratios(*size, options.rounds)
    low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    print(
        f"step time, conservative over transformers: {middle:.3f} (measured in {len(ratios)} pairs of steps, "
        f"middle half {low:.3f} to {high:.3f})"
    )
    result = {
        "schema": 1,
        "command": f"python -m benchmarks.against_transformers --model {options.model} "
        f"--batch {options.batch} --seq {options.seq} --rounds {options.rounds}",
        "source": "measured",
        "torch": torch.__version__,
        "peak_bytes": peaks,
        "losses_equal": losses["plain"] == losses["conservative"],
        "time_ratio_median": round(middle, 4),
        "time_ratio_quartiles": [round(low, 4), round(high, 4)],
        "time_ratios": [round(ratio, 4) for ratio in ratios],
    }
    if options.json:
        write_document(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
