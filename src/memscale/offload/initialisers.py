"""How modules initialise themselves: the methods that a constructor has called, or that users have for it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["constructor_of", "initialiser_of_modules", "is_pretrained", "method_without_arguments"]


def constructor_of(module: nn.Module) -> Callable[[], object] | None:
    """What a module's constructor has called to draw its numbers."""
    for name in ("reset_parameters", "_reset_parameters"):
        method = method_without_arguments(module, name)
        if method is not None:
            return method
    pytorch_utils = sys.modules.get("transformers.pytorch_utils")
    if pytorch_utils is not None and type(module) is pytorch_utils.Conv1D:
        return lambda: _construct_conv1d(module)
    return None


def _construct_conv1d(module: Any) -> None:
    nn.init.normal_(module.weight, std=0.02)
    nn.init.zeros_(module.bias)


def method_without_arguments(module: nn.Module, name: str) -> Callable[[], object] | None:
    """A method of that name that can be called without arguments."""
    method = getattr(module, name, None)
    return method if callable(method) and _required_arguments(method) == 0 else None


def initialiser_of_modules(module: nn.Module) -> Callable[[nn.Module], object] | None:
    """A method to be applied to each module inside, by the name that the models of transformers made common."""
    if is_pretrained(module):
        return None
    method = getattr(module, "_init_weights", None)
    return method if callable(method) and _required_arguments(method) == 1 else None


def _required_arguments(function: Callable[..., object]) -> int | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in
        return None
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(each.default is each.empty and each.kind not in several for each in parameters)


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a model of transformers."""
    modeling_utils = sys.modules.get(
        "transformers.modeling_utils"
    )  # not there: then no model is of transformers
    return modeling_utils is not None and isinstance(module, modeling_utils.PreTrainedModel)
