"""Exact recomputation: run a function now, forget what it would save, run it again in backward.

`run_region` is the mechanism; `KeepPolicy` says what to keep nevertheless. Neither decides anything: which
modules become regions, and which of them are chained, is for the plan to say.
"""

from __future__ import annotations

from memscale.checkpointing.keep import KeepPolicy
from memscale.checkpointing.region import run_region

__all__ = ["KeepPolicy", "run_region"]
