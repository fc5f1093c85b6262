"""A parameter's memory, exchanged for another: it stays the same object."""

from __future__ import annotations

import torch
from torch import nn

from memscale._torch import FakeTensor, allows_shallow_copy

__all__ = ["exchange_data", "swap_keeping_hooks"]


def exchange_data(parameter: nn.Parameter, new: torch.Tensor) -> None:
    """Give a parameter the memory of another tensor. Its gradient must be None, or fit that.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> weight = layer.weight
        >>> exchange_data(weight, torch.zeros(2, 2))
        >>> layer.weight is weight, float(weight.sum())
        (True, 0.0)
    """
    with torch.no_grad():
        if _can_be_set(parameter, new):
            parameter.data = new
        else:
            old = nn.Parameter(new, parameter.requires_grad)
            swap_keeping_hooks(parameter, old)
            if not isinstance(old, FakeTensor):
                # The graph of the last loss, which a loop holds though it is through with it, refers to `old`.
                old.data = old.data.new_empty(0)


def swap_keeping_hooks(parameter: nn.Parameter, new: nn.Parameter) -> None:
    """Exchange two parameters as `torch.utils.swap_tensors` does; the first keeps the hooks on its gradient.

    They belong to what is swapped: an optimizer that steps inside backward would never be called again.
    """
    new._backward_hooks = parameter._backward_hooks
    new._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]


def _can_be_set(parameter: nn.Parameter, new: torch.Tensor) -> bool:
    """Whether ``.data =`` can do it, as ``Module.to`` decides it; fake and wrapped tensors are swapped whole."""
    plain = type(new) is torch.Tensor and not isinstance(parameter, FakeTensor)
    return plain and type(parameter.data) is torch.Tensor and allows_shallow_copy(parameter, new)
