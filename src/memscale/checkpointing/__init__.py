"""Exact recomputation: run a function, drop what it would save, and run it again in backward (`run_region`)."""

from __future__ import annotations

from memscale.checkpointing.region import run_region

__all__ = ["run_region"]
