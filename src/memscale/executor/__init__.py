"""Attach plans to models, and detach them."""

from __future__ import annotations

from memscale.executor.executor import Executor, executor_of, hardware_of, refuse_nested
from memscale.techniques.base import EXECUTOR

__all__ = ["EXECUTOR", "Executor", "executor_of", "hardware_of", "refuse_nested"]
