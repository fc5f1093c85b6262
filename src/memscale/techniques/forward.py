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

*When it is in use.* Whenever gradients are on, in `train()` and in `eval()` mode alike: a model that is trained
with its batch norm and dropout off saves as much for backward as any. With gradients off the call goes on to what
was there before.

*Under torch.compile.* The compiler cannot look through hooks on saved tensors, nor fetch parameters. An override that
is in use and `is_opaque` runs outside of it (a graph break), and the log says so once a model; others are traced
through.

*When it is covered.* Others may put their own forward over ours (accelerate does, for autocast). As with a bound
method they take `forward.__func__`, which is a function of the module and nothing else: it finds the module's
override at each call under `OWN`, or calls the class's forward if there is none any more. So plans may change
underneath, `detach` leaves a forward that works, and a copy of the module calls itself. Whoever closes over the
override itself has no such luck: to take ours away would break theirs, so it is released and passes calls on.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memscale._torch import outside_compiler
from memscale.errors import WrapError

__all__ = ["OWN", "ReplacedForward", "is_covered", "top_forward"]

OWN = "_memscale_forward"
"""The attribute under which a module has its outermost override, also where another forward covers that."""

_IS_DISPATCH = "_memscale_dispatch"

logger = logging.getLogger("memscale")

_compiled: weakref.WeakSet[nn.Module] = (
    weakref.WeakSet()
)  # models of which it was said that they are compiled


def is_covered(module: nn.Module) -> bool:
    """Return whether a module's `forward` is someone else's that goes on to the module's override."""
    forward = vars(module).get("forward")
    while forward is not None and not isinstance(forward, ReplacedForward):
        if getattr(forward, _IS_DISPATCH, False):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def top_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the instance forward that a new override goes around; None if the class's is in use."""
    return vars(module).get(OWN if is_covered(module) else "forward")


class ReplacedForward:
    """What stands in for a module's `forward`. See Note [A replaced forward].

    Args:
        module: The module that this goes on.

    Subclasses say in `run` what a call in training does.

    Attributes:
        is_opaque: Whether a compiler must not trace through it.
    """

    __name__ = "forward"
    is_opaque = True

    _model: weakref.ref[nn.Module] | None = None
    _is_released = False
    _successor: Callable[..., Any] | None = None

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._before = top_forward(module)

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
        if torch.is_grad_enabled() and not self._is_released and not torch.compiler.is_exporting():
            if not torch.compiler.is_compiling():
                return self.run(module, self._forward_of(module), args, kwargs)
            if self.is_opaque:
                return self.outside_compiler(*args, **kwargs)
        if self._before is not None:
            return self._before(*args, **kwargs)
        # Not as a bound method: after a graph break the compiler would look that up on the module, and find this.
        return type(module).forward(module, *args, **kwargs)

    @outside_compiler
    def outside_compiler(self, *args: Any, **kwargs: Any) -> Any:
        """Make a call from inside of compiled code without the compiler."""
        model = None if self._model is None else self._model()
        model = self.module if model is None else model
        config = getattr(vars(model).get("_memscale_executor"), "config", None)
        if model not in _compiled and (config is None or config.enable_logging):
            _compiled.add(model)
            logger.warning(
                "torch.compile came to a layer of %s that MemScale has changed (%s): it runs without the compiler, "
                "with the techniques of its plan. To have it compiled instead, call memscale.detach(model) first.",
                type(model).__name__,
                type(self.module).__name__,
            )
        return self(*args, **kwargs)

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
    def __func__(self) -> Callable[..., Any]:
        """The function that a bound method would have. See Note [A replaced forward], *When it is covered*.

        There is none if the module had an instance forward before (after `detach` it would not be found), nor of
        an override of another method.
        """
        module, innermost = self.module, self
        while isinstance(innermost._before, ReplacedForward):
            innermost = innermost._before
        if innermost._before is not None or vars(module).get("forward") is not self:
            raise AttributeError("__func__")
        return _dispatch_for(type(module))

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What was there before; `inspect.signature` finds the module's own arguments through it."""
        return self._forward_of(self.module)

    def belongs_to(self, model: nn.Module) -> None:
        """Say which model this is a part of."""
        self._model = weakref.ref(model)

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

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": self._module(), "_model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model = self._model  # may be here before the state, where the pickle begins at this very object
        module = state["_module"]
        vars(self).update(state, _module=_gone if module is None else weakref.ref(module), _model=model)


def _gone() -> None:
    """Stand in for the reference to a module that the user has replaced."""


def _dispatch_for(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return a function that calls the override of the module that it is given, with the signature of its class."""

    def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        own = vars(module).get(OWN)
        if own is None or own is vars(module).get("forward"):  # the latter: it is called from inside of that
            return type(module).forward(module, *args, **kwargs)
        return own(*args, **kwargs)

    setattr(forward, _IS_DISPATCH, True)
    with contextlib.suppress(TypeError, ValueError):  # a builtin has no signature
        forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return forward
