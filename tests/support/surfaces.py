"""Tools for the tests of integrations: train plain and wrapped, compare, and record a row of docs/integrations.md."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from memscale import MemoryTracker
from memscale.executor import executor_of
from memscale.memory.record import Category

MATRIX = "MEMSCALE_MATRIX"  # the environment variable with the file that rows are added to, if there is one


@dataclass(frozen=True)
class Run:
    """One training: what it computed, what it held, and the techniques that were used."""

    losses: list[float]
    activation_bytes: int  # the most that forward held for backward
    peak_bytes: int  # the most of all, parameters and optimizer state included
    techniques: tuple[str, ...] = ()
    batch: str = ""


@dataclass(frozen=True)
class Row:
    """A row of the matrix in docs/integrations.md: bytes are plain and wrapped, None where they are not measured."""

    surface: str
    setting: str
    techniques: tuple[str, ...]
    held_bytes: tuple[int, int] | None
    peak_bytes: tuple[int, int] | None


def trained(model: nn.Module, train: Callable[[], list[float]]) -> Run:
    """Train and measure the most that activations took at once, and all tensors."""
    with MemoryTracker(model) as tracker:
        losses = train()
    held = max(dict(tracker.timeline("cpu").series)[Category.ACTIVATIONS])
    executor = executor_of(model)
    if executor is None:
        return Run(losses, held, tracker.peak_bytes())
    plan = executor.plan
    used = {name for layer in plan.layers for name in layer.techniques}
    return Run(losses, held, tracker.peak_bytes(), tuple(sorted(used)), plan.batch)


def assert_gains(
    surface: str, setting: str, plain: Run, wrapped: Run, *, needs: str = "checkpointing"
) -> None:
    """The same losses to the bit, a plan from a batch with that technique, and less memory; it is recorded."""
    assert len(plain.losses) > 1
    assert wrapped.losses == plain.losses
    assert needs in wrapped.techniques
    assert wrapped.batch not in ("", "not seen yet")
    assert wrapped.activation_bytes < plain.activation_bytes
    assert wrapped.peak_bytes < plain.peak_bytes
    held = plain.activation_bytes, wrapped.activation_bytes
    record(Row(surface, setting, wrapped.techniques, held, (plain.peak_bytes, wrapped.peak_bytes)))


def record(row: Row) -> None:
    """Add a row to the file that the environment names."""
    if os.environ.get(MATRIX):
        with Path(os.environ[MATRIX]).open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def history(trainer: Any, *names: str) -> list[float]:
    """Values of these names in a Trainer's log, in order."""
    return [
        entry[name] for entry in trainer.state.log_history for name in names or ("loss",) if name in entry
    ]
