"""The closure of a step that is run in several calls: evaluated once, before the first.

Only then it is known which parameters have gradients, because it is the closure that makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from memscale.errors import WrapError

__all__ = ["Answer", "answered", "takes_a_closure_at_most"]


class Answer:
    """A closure that was evaluated already: every bucket's call gets the same loss."""

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        self.times = 0
        self._kind = type(optimizer).__name__
        with torch.enable_grad():  # as optimizers do; hooks and steps run without
            self._loss = closure()

    def __call__(self) -> Any:
        self.times += 1
        if self.times > 1:
            raise WrapError(
                f"{self._kind} evaluates its closure more than once in a step, which can't be done for a few "
                "of its parameters at a time. To leave its state on the device, call before training: "
                "memscale.offload.optimizer_kinds.register_coupled("
                f"{self._kind}, 'it evaluates its closure again')"
            )
        return self._loss


def takes_a_closure_at_most(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = [*args[1:], *kwargs.values()]
    return (
        len(given) <= 1
        and kwargs.keys() <= {"closure"}
        and all(each is None or callable(each) for each in given)
    )


def answered(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Answer | None, tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step with the closure evaluated, which is also when the gradients come to be."""
    closure = kwargs["closure"] if kwargs else (*args, None)[1]
    if closure is None:
        return None, args, kwargs
    answer = Answer(optimizer, closure)
    return answer, (optimizer, *([] if kwargs else [answer])), {"closure": answer} if kwargs else {}
