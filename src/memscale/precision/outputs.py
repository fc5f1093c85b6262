"""What a model returns, in the precision that its caller is used to."""

from __future__ import annotations

from typing import Any

import torch

from memscale._util.trees import Tree

__all__ = ["in_full"]


def in_full(output: Any, dtype: torch.dtype) -> Any:
    """The same with every tensor of that 16-bit type in 32 bits; the very object if there is none.

    Example:
        >>> in_full((torch.ones(2, dtype=torch.bfloat16), 3), torch.bfloat16)
        (tensor([1., 1.]), 3)
    """
    tree = Tree.of(output)
    if not any(tensor.dtype is dtype for tensor in tree.tensors()):
        return output
    done: dict[int, torch.Tensor] = {}  # one that is returned twice stays one

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not dtype:
            return tensor
        if id(tensor) not in done:
            done[id(tensor)] = tensor.float()
        return done[id(tensor)]

    return tree.map(torch.Tensor, change).build()
