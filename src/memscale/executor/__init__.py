"""Puts a plan on a model, and takes it off again."""

from __future__ import annotations

from memscale.executor.executor import EXECUTOR, Executor, executor_of, refuse_nested

__all__ = ["EXECUTOR", "Executor", "executor_of", "refuse_nested"]
