"""The closure of a step that is run in several calls: evaluated once, before the first.

Only then it is known which parameters have gradients, because it is the closure that makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["closure_of", "evaluated"]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among the arguments of a step of torch.optim, whose first is the optimizer."""
    closure: Callable[[], Any] | None = kwargs["closure"] if "closure" in kwargs else (*args, None)[1]
    return closure


def evaluated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the loss that the closure of such a step has, None without one; gradients are there afterwards."""
    closure = closure_of(args, kwargs)
    if closure is None:
        return None
    with torch.enable_grad():  # as optimizers do; hooks and steps run without
        return closure()
