"""What a step of parameters on the host costs: `python -m benchmarks.host_step`.

AdamW steps 100 million parameters: plain CPU tensors by torch's loop (its default) and by its fused implementation, and
the host masters of a model whose layers are offloaded by MemScale from an accelerator (the executing virtual GPU). The
three are timed in turns in one process, and a ratio is taken in each round: whatever else the machine does falls on all
of them alike.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import nn

from memscale.benchmarks.results import write_document
from memscale.config import Config
from memscale.execution_plan import LayerPlan, Offloading, Plan
from memscale.executor import Executor
from memscale.testing import executing

__all__ = ["main"]

WIDTH = 2048
CONFIG = Config(enable_logging=False)


def _model(millions: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(millions * 10**6 // WIDTH**2)))


def _plan(model: nn.Sequential) -> Plan:
    offloading = Offloading("host", activations=False)
    return Plan(
        tuple(
            LayerPlan(name, (name,), ("offloading",), "benchmark", "every layer", offloading=offloading)
            for name, _ in model.named_children()
        )
    )


def _optimizer(parameters: Iterable[nn.Parameter], fused: bool | None = None) -> torch.optim.Optimizer:
    every = list(parameters)
    for parameter in every:
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.AdamW(every, fused=fused)


def _seconds(optimizer: torch.optim.Optimizer) -> float:
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


def measure(millions: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step, by how it was made."""
    with executing("16GiB") as gpu:
        offloaded = _model(millions).to(gpu.device)
        executor = Executor(offloaded, _plan(offloaded), CONFIG)
        executor.attach()
        assert all(each.device.type == "cpu" for each in offloaded.parameters()), "nothing was offloaded"
        optimizers = {
            "loop": _optimizer(_model(millions).parameters()),
            "fused": _optimizer(_model(millions).parameters(), fused=True),
            "offloaded": _optimizer(offloaded.parameters()),
        }
        seconds: dict[str, list[float]] = {name: [] for name in optimizers}
        for number in range(rounds + 1):
            for name, optimizer in optimizers.items():
                spent = _seconds(optimizer)
                if number:  # the first round makes the state
                    seconds[name].append(spent)
        executor.detach()
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the results if asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_step")
    parser.add_argument("--millions", type=int, default=100, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(arguments)
    seconds = measure(options.millions, options.rounds)
    ratios = {
        name: sorted(one / other for one, other in zip(seconds[name], seconds["offloaded"], strict=True))
        for name in ("loop", "fused")
    }
    for name, each in seconds.items():
        print(f"{name:10} {median(each):8.3f} s  ({min(each):.3f} to {max(each):.3f})")
    for name, each in ratios.items():
        print(f"{name} / offloaded: {median(each):.2f}  ({each[0]:.2f} to {each[-1]:.2f})")
    if options.json:
        result = {
            "schema": 1,
            "command": f"python -m benchmarks.host_step --millions {options.millions} --rounds {options.rounds}",
            "source": "measured",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "seconds": {name: [round(value, 4) for value in each] for name, each in seconds.items()},
            "ratio_to_offloaded": {
                name: {"median": round(median(each), 2), "range": [round(each[0], 2), round(each[-1], 2)]}
                for name, each in ratios.items()
            },
        }
        write_document(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
