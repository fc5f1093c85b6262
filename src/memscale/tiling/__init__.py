"""Compute in tiles, so that the largest tensors of a step never exist whole.

`lazy_logits` stand in for the output of a head until a loss asks for it, and that loss is computed some tokens at a
time; `run_in_tiles` calls a position-wise layer some positions at a time. The plan says which head, which layers and
how many rows a tile has.
"""

from __future__ import annotations

from memscale.tiling.head import Head
from memscale.tiling.layers import run_in_tiles
from memscale.tiling.lazy import LazyLogits, lazy_logits

__all__ = ["Head", "LazyLogits", "lazy_logits", "run_in_tiles"]
