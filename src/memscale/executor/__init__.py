"""Puts a plan on a model, and takes it off again."""

from __future__ import annotations

from memscale.executor.early import copy_early
from memscale.executor.executor import (
    EXECUTOR,
    Executor,
    Guard,
    TrainingBatch,
    disk_of,
    executor_of,
    refuse_nested,
)

__all__ = [
    "EXECUTOR",
    "Executor",
    "Guard",
    "TrainingBatch",
    "copy_early",
    "disk_of",
    "executor_of",
    "refuse_nested",
]
