"""Compute in tiles, so that the largest tensors of a step never exist whole: logits, and those of wide layers."""

from __future__ import annotations

from memscale.tiling.head import Head
from memscale.tiling.layers import run_in_tiles
from memscale.tiling.lazy import LazyLogits, lazy_logits

__all__ = ["Head", "LazyLogits", "lazy_logits", "run_in_tiles"]
