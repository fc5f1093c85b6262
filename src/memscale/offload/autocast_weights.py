"""Which parameters autocast makes 16-bit copies of, so that a working copy can be 16-bit from the start."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

__all__ = ["autocast_dtype", "cast_by_autocast"]

# transformers' GPT-2 has a linear layer of its own, by this name.
_LINEAR_BY_NAME = frozenset({"Conv1D"})


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return what autocast computes in on a device, here and now; None if it is off."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cast_by_autocast(owners: Iterable[tuple[nn.Module, str, torch.Tensor]]) -> set[int]:
    """Return the ids of the parameters that every one of their modules uses in products of matrices only.

    Other parameters (norms, embeddings, positions that are added) are used in 32 bits, or in a way that can't be
    known from here; and a parameter that an embedding has too is the embedding's.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> [id(layer.weight)] == [*cast_by_autocast([(layer, "weight", layer.weight)])]
        True
    """
    cast: set[int] = set()
    kept: set[int] = set()
    for module, name, parameter in owners:
        matrix = parameter.dim() >= 2 and parameter.dtype is torch.float32 and _multiplies(module, name)
        (cast if matrix else kept).add(id(parameter))
    return cast - kept


def _multiplies(module: nn.Module, name: str) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return name.endswith("proj_weight")
    linear = isinstance(module, (nn.Linear, _ConvNd)) or type(module).__name__ in _LINEAR_BY_NAME
    return linear and name == "weight"
