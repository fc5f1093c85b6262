"""Which source files one call passes through: a measure of how much a reader has to hold.

    python -m benchmarks.trace_files

traces, with ``sys.setprofile``, the forward of one disk-offloaded, checkpointed block, and one ``optimizer.step()``
whose state is on disk. It prints the files of ``src/memscale`` that were entered, with the calls into each, and how
often one call led from a file into another.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import memscale
from memscale import Config
from memscale.execution_plan import Checkpointing, LayerPlan, Offloading, OptimizerPlan, Plan
from memscale.executor import Executor
from memscale.recovery import StepGuard

PACKAGE = Path(memscale.__file__).parent
WIDTH, BLOCKS, ROWS = 64, 3, 16


@dataclass
class Trace:
    """The calls into each file, and the changes of file between two calls that follow each other."""

    calls: Counter[str] = field(default_factory=Counter)
    changes: int = 0
    last: str | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Trace the block, in this thread."""
        before = sys.getprofile()
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _on_event(self, frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or PACKAGE not in path.parents:
            return
        name = str(path.relative_to(PACKAGE))
        self.calls[name] += 1
        self.changes += name != self.last
        self.last = name

    def __str__(self) -> str:
        lines = [f"{len(self.calls)} files, {sum(self.calls.values())} calls, {self.changes} changes of file"]
        return "\n".join([*lines, *(f"  {count:5}  {name}" for name, count in sorted(self.calls.items()))])


class Block(nn.Module):
    """Its weights take whole pages, so that they can be kept on disk."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks in a row; the call of the middle one can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.trace: Trace | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            is_traced = self.trace is not None and index == BLOCKS // 2
            with self.trace.running() if is_traced else contextlib.nullcontext():
                x = block(x)
        return x.sum()


def plan() -> Plan:
    """Return a plan with every block checkpointed and on disk, and the optimizer's state on disk."""
    layers = tuple(
        LayerPlan(
            name=f"blocks.{index}",
            members=(f"blocks.{index}",),
            techniques=("offloading", "checkpointing"),
            rule="trace",
            reason="every block",
            offloading=Offloading("disk"),
            checkpointing=Checkpointing(),
        )
        for index in range(BLOCKS)
    )
    return Plan(layers, optimizer=OptimizerPlan("disk", bucket_bytes=2**20))


def trace(directory: str) -> dict[str, Trace]:
    """Train two steps, and trace the second: in the first one files and state are made."""
    model = Model()
    config = Config(offload_dir=directory, enable_logging=False)
    executor = Executor(model, plan(), config, guard=StepGuard())  # as `wrap` attaches it
    executor.attach()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(ROWS, WIDTH)
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.trace, step = Trace(), Trace()
    model(batch).backward()
    with step.running():
        optimizer.step()
    report = executor.report()
    assert min(report.bytes_read, report.recomputations) > 0, "the plan did nothing"
    executor.detach()
    return {
        "forward of a disk-offloaded, checkpointed block": model.trace,
        "optimizer.step() with state on disk": step,
    }


def main() -> int:
    """Print the traces."""
    with tempfile.TemporaryDirectory() as directory:
        for name, found in trace(directory).items():
            print(f"{name}: {found}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
