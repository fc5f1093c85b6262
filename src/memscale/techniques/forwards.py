"""A module's `forward`, replaced: the part that every technique which does so has in common.

Note [A replaced forward]
~~~~~~~~~~~~~~~~~~~~~~~~~
A technique goes on a module as an instance attribute `forward` that stands before the class's. The module
keeps its class, its name, its parameters and its hooks, which run outside of the technique, once a call.

*References.* The module owns its forward, and the forward refers to the module weakly: otherwise each wrapped
module would be a cycle, and a model that its user has dropped would hold its memory until the garbage
collector comes by. In `deepcopy` and pickle the reference is an ordinary one, so that a copy of the module
has a forward that refers to the copy. Of the model around it a forward knows only while its executor says so
(`belongs_to`): a copy of one block must not drag the whole model along.

*When it is in use.* In training: gradients are on, and the module or the model is in training mode. The
module alone does not decide, as a part that is kept in `eval()` while the rest trains saves as much for
backward as any. A model that is in `eval()` when it is wrapped may be trained so: then what gives the same numbers
(recomputation) is in use whenever gradients are on. In all other cases the call goes on to what was there before, after
a look at two flags.

*When it is covered.* Others may put their own forward over ours (accelerate does, for autocast). To take ours
away would then break theirs, so it is released instead: from then on it only passes calls on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memscale.errors import WrapError

__all__ = ["ReplacedForward"]


class ReplacedForward:
    """What stands in for a module's `forward`. See Note [A replaced forward].

    Args:
        module: The module that this goes on.

    Subclasses say in `run` what a call in training does.
    """

    __name__ = "forward"

    # Whether it changes no numbers, and so may be in use in `eval()` as well.
    same_numbers = False
    _in_evaluation = False

    _model: weakref.ref[nn.Module] | None = None
    _is_released = False
    _successor: Callable[..., Any] | None = None

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._before: Callable[..., Any] | None = vars(module).get("forward")

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """A call in training; `forward` is what was there before."""
        raise NotImplementedError

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._successor is not None:
            successor, self._successor = self._successor, None
            return successor(*args, **kwargs)
        module = self.module
        forward = self._forward_of(module)
        # The compiler plans its own memory, and cannot look through hooks on saved tensors.
        if torch.is_grad_enabled() and self._is_in_use(module) and not torch.compiler.is_compiling():
            return self.run(module, forward, args, kwargs)
        return forward(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The module that this is on."""
        module = self._module()
        if module is None:
            raise WrapError(
                "The forward of a wrapped module was called after the module itself was dropped. Keep the "
                "module, and call it rather than its forward."
            )
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What was there before; `inspect.signature` finds the module's own arguments through it."""
        return self._forward_of(self.module)

    def belongs_to(self, model: nn.Module) -> None:
        """Say which model this is a part of."""
        self._model = weakref.ref(model)
        if "training" in vars(model):  # a copy that is being made may have nothing yet
            self._in_evaluation = self.same_numbers and not model.training

    def release(self) -> None:
        """Be of no effect from now on."""
        self._is_released = True

    def pass_on(self, successor: Callable[..., Any]) -> None:
        """Let the next call go to another forward: it was looked up here before the plan changed."""
        self._successor = successor

    def _forward_of(self, module: nn.Module) -> Callable[..., Any]:
        if self._before is not None:
            return self._before
        forward: Callable[..., Any] = type(module).forward.__get__(module)
        return forward

    def _is_in_use(self, module: nn.Module) -> bool:
        if self._is_released:
            return False
        if module.training or self._in_evaluation:
            return True
        model = None if self._model is None else self._model()
        return model is not None and model.training

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": self._module(), "_model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model = self._model  # may be here before the state, where the pickle begins at this very object
        vars(self).update(state, _module=weakref.ref(state["_module"]), _model=model)
