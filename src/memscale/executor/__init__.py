"""Attach plans to models, and detach them."""

from __future__ import annotations

from memscale.executor.executor import ONE_DEVICE, Executor, executor_of, hardware_of, refuse_nested
from memscale.techniques.base import EXECUTOR

__all__ = ["EXECUTOR", "ONE_DEVICE", "Executor", "executor_of", "hardware_of", "refuse_nested"]
