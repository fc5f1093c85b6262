"""A hook on a parameter that can be taken off without a trace."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn


class GradientHook:
    """Calls a method when a parameter's gradient was accumulated, until `remove`.

    It refers to the method's object weakly: a parameter of a model that was dropped would else be in a cycle.
    """

    changes_parameter = False  # unlike an optimizer that steps here: see `ModuleFlags.check_parameters`

    def __init__(self, parameter: nn.Parameter, method: Callable[[nn.Parameter], None]) -> None:
        self._method = weakref.WeakMethod(method)
        self._handle = parameter.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]

    def __call__(self, parameter: nn.Parameter) -> None:
        method = self._method()
        if method is not None:
            method(parameter)

    def remove(self, parameter: nn.Parameter) -> None:
        """Call it no more."""
        self._handle.remove()
        if not parameter._post_accumulate_grad_hooks:
            parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # as it was
