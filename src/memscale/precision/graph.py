"""The leaves that a backward pass will reach."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["leaves_of"]


def leaves_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that gradients of these would be accumulated in.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> leaves_of([(weight * 2).sum()])[0] is weight
        True
    """
    found: dict[int, torch.Tensor] = {}
    waiting: list[Any] = []
    for tensor in tensors:
        if tensor.grad_fn is not None:
            waiting.append(tensor.grad_fn)
        elif tensor.requires_grad:
            found[id(tensor)] = tensor
    seen = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)  # of the nodes that accumulate
            if leaf is None:
                waiting.append(node)
            else:
                found[id(leaf)] = leaf
    return list(found.values())
