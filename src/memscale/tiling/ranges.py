"""How rows are cut into tiles."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memscale._torch import FakeTensor

__all__ = ["tiles_of"]


def tiles_of(tensor: torch.Tensor, dim: int, rows: int) -> Iterator[slice]:
    """The tiles of a tensor along one dimension: each of so many rows, the last of what is left.

    Of a fake tensor only the first two and the last: there is nothing to compute, and to a simulation of memory the
    others are like the second, which finds what the first has left.

    Example:
        >>> [(tile.start, tile.stop) for tile in tiles_of(torch.ones(7), 0, 3)]
        [(0, 3), (3, 6), (6, 7)]
    """
    size = tensor.shape[dim]
    starts = range(0, size, rows)
    chosen = [*starts[:2], starts[-1]] if isinstance(tensor, FakeTensor) and len(starts) > 3 else starts
    for start in chosen:
        yield slice(start, min(start + rows, size))
