"""Fit PyTorch training into the memory you have.

    model = memscale.wrap(model)

profiles the model, decides per layer which memory techniques to use, and attaches them; the training loop stays as
it is, and ``memscale.detach(model)`` takes every trace away.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memscale.version import __version__

if TYPE_CHECKING:
    from memscale.api import detach, find_batch_size, optimize, plan, wrap
    from memscale.config import AsyncOffloadConfig, Config, OptimizationMode
    from memscale.diagnosis import Finding, SelfTest, doctor, selftest
    from memscale.errors import MemScaleError
    from memscale.execution_plan import Plan
    from memscale.hardware.calibrate import calibrate
    from memscale.memory.tracker import MemoryTracker
    from memscale.offload.loading import load_safetensors
    from memscale.planner.batch_size import BatchSizes
    from memscale.report.exporters import log_scalars
    from memscale.simulator import simulate

# Where each public name lives. They are imported on first use, so that `import memscale` costs next to nothing.
_MODULES = {
    "AsyncOffloadConfig": "memscale.config",
    "BatchSizes": "memscale.planner.batch_size",
    "Config": "memscale.config",
    "Finding": "memscale.diagnosis",
    "MemScaleError": "memscale.errors",
    "MemoryTracker": "memscale.memory.tracker",
    "OptimizationMode": "memscale.config",
    "Plan": "memscale.execution_plan",
    "SelfTest": "memscale.diagnosis",
    "calibrate": "memscale.hardware.calibrate",
    "detach": "memscale.api",
    "doctor": "memscale.diagnosis",
    "find_batch_size": "memscale.api",
    "load_safetensors": "memscale.offload.loading",
    "log_scalars": "memscale.report.exporters",
    "optimize": "memscale.api",
    "plan": "memscale.api",
    "selftest": "memscale.diagnosis",
    "simulate": "memscale.simulator",
    "wrap": "memscale.api",
}

__all__ = [
    "AsyncOffloadConfig",
    "BatchSizes",
    "Config",
    "Finding",
    "MemScaleError",
    "MemoryTracker",
    "OptimizationMode",
    "Plan",
    "SelfTest",
    "__version__",
    "calibrate",
    "detach",
    "doctor",
    "find_batch_size",
    "load_safetensors",
    "log_scalars",
    "optimize",
    "plan",
    "selftest",
    "simulate",
    "wrap",
]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'memscale' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
