"""One replaced `forward` per module, which runs an ordered list of stages around the module's own.

Note [Forward override]
~~~~~~~~~~~~~~~~~~~~~~~
A technique changes what a module computes by a `ForwardStage`. All stages of a module share one `ForwardOverride`, an
instance attribute `forward` that hides the class's method. Stages run in the order of `Stage`, inside of the module's
hooks; each decides whether and how to call the next, and the last one calls the module's own forward.

*References.* The module owns its override, and the override refers to the module weakly: a cycle would keep
the memory of a model that its user has dropped. Copied by itself, an override is the copied module's method.

*When a stage runs.* Whenever gradients are on, in `train()` and in `eval()` mode alike. With gradients off only stages
with `in_evaluation`.

*Under torch.compile.* The compiler cannot trace hooks on saved tensors, nor fetched parameters. A stage that
runs and `is_opaque` is called outside of it (a graph break), and the log says so once; others are traced through.

*Covered by others.* Others may put a forward of their own over ours (accelerate does, for autocast). As with
a bound method they take `forward.__func__`, which is a function of the module and nothing else: it looks up
the module's override under `OVERRIDE` at each call, or calls the class's forward if there is none any more.
So plans may change underneath, `detach` leaves a forward that works, and a copy of the module calls itself.
If someone closes over the override itself, it only calls the module's own forward once its stages are removed.

*Redirected calls.* To have `training_step` run inside of DDP's forward, Lightning and Fabric put a function of theirs
in the place of `forward` for one call, which first puts back what was there and then runs `training_step`. Such a call
is not one of the module's forward: it has other arguments, and to profile it would run the user's whole step. The
override must also stay as it is until it has been put back.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from memscale._torch import outside_compiler
from memscale.errors import WrapError

OVERRIDE = "_memscale_forward"
"""The attribute under which a module has its override, also where another forward covers that."""

_IS_DISPATCH = "_memscale_dispatch"
_REDIRECTING = ("lightning.", "lightning_fabric.", "pytorch_lightning.")

logger = logging.getLogger("memscale")

S = TypeVar("S", bound="ForwardStage")
Forward = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


class Stage(enum.IntEnum):
    """The places in a module's forward, outermost first."""

    PLACEHOLDER = 0  # does nothing: has the override in place before a plan needs it
    RECOVER = 1  # repeat a call that ran out of memory
    AUTOCAST = 2
    TILE_HEAD = 3  # a head with lazy logits saves nothing and fetches its parameters itself
    OFFLOAD_ACTIVATIONS = 4  # around recomputation: what that keeps is what is offloaded
    RECOMPUTE = 5
    FETCH_PARAMETERS = 6
    TILE = 7  # an MLP or another wide layer in tiles


class ForwardStage:
    """One stage of a module's forward; subclasses say in `run` what it does."""

    order: ClassVar[Stage] = Stage.PLACEHOLDER
    in_evaluation: ClassVar[bool] = False  # whether it runs with gradients off as well
    is_opaque: bool = True  # whether a compiler must not trace through it

    def run(self, module: nn.Module, call_next: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Compute `module`'s forward; `call_next` runs the stages inside of this one."""
        return call_next(*args, **kwargs)


class CompileNotice:
    """Logs once, if enabled, that a compiler has been kept out of a layer; shared by all overrides of a model."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._pending = enabled

    def log(self, module: nn.Module) -> None:
        """Name the first module that is called from compiled code."""
        if self._pending:
            self._pending = False
            logger.warning(
                "torch.compile came to a layer that MemScale has changed (%s): it runs without the compiler, with the "
                "techniques of its plan, and so do the others. To have them compiled instead, call "
                "memscale.detach(model) first.",
                type(module).__name__,
            )


class ForwardOverride:
    """Replaces a module's `forward`, or another of its methods. See Note [Forward override]."""

    __name__ = "forward"

    def __init__(
        self, module: nn.Module, method: str = "forward", notice: CompileNotice | None = None
    ) -> None:
        self._module = weakref.ref(module)
        self._method = method
        self._notice = notice or CompileNotice()
        covered = method == "forward" and is_covered(module)
        # The instance attribute that it replaces; None if that is the class's method.
        self.inner: Callable[..., Any] | None = None if covered else vars(module).get(method)
        self.stages: tuple[ForwardStage, ...] = ()  # outermost first
        self._redirect: ForwardOverride | None = None

    def add(self, stage: ForwardStage) -> None:
        """Add a stage; of two with the same order, the later one is outside."""
        self.stages = tuple(sorted((stage, *self.stages), key=lambda each: each.order))

    def remove(self, stage: ForwardStage) -> None:
        """Remove a stage, also for calls that are under way and for recomputations to come."""
        self.stages = tuple(each for each in self.stages if each is not stage)

    def find(self, kind: type[S]) -> S | None:
        """Return the outermost stage of a class; None if there is none."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    def inside_of(self, order: Stage) -> Callable[..., Any]:
        """Return a function that runs only the stages inside of a place."""
        inside = tuple(each for each in self.stages if each.order > order)
        return functools.partial(self._run, self.module, inside)

    def only(self, order: Stage) -> Callable[..., Any]:
        """Return a function that runs only the stages of one place."""
        return functools.partial(
            self._run, self.module, tuple(each for each in self.stages if each.order == order)
        )

    def redirect_next_call(self, override: ForwardOverride | None) -> None:
        """Let another override make the next call, which has looked up this one before the plan changed."""
        self._redirect = None if override is self else override

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._redirect is not None:
            override, self._redirect = self._redirect, None
            return override(*args, **kwargs)
        return self._run(self.module, self.stages, *args, **kwargs)

    def _run(self, module: nn.Module, stages: tuple[ForwardStage, ...], /, *args: Any, **kwargs: Any) -> Any:
        # The compiler gives up on a frame that leaves it inside of a loop, so the call is not made in one.
        in_training = torch.is_grad_enabled() and not torch.compiler.is_exporting()
        running = [stage for stage in stages if in_training or stage.in_evaluation]
        if torch.compiler.is_compiling():
            if any(stage.is_opaque for stage in running):
                return self._outside_compiler(module, stages, *args, **kwargs)
        else:
            running = [stage for stage in running if stage in self.stages]
            if running:
                # With the module, which a recomputation may need after its user has dropped it.
                rest = stages[stages.index(running[0]) + 1 :]
                return running[0].run(module, functools.partial(self._run, module, rest), args, kwargs)
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        # Not as a bound method: after a graph break the compiler would look that up on the module, and find this.
        return getattr(type(module), self._method)(module, *args, **kwargs)

    @outside_compiler
    def _outside_compiler(
        self, module: nn.Module, stages: tuple[ForwardStage, ...], /, *args: Any, **kwargs: Any
    ) -> Any:
        self._notice.log(module)
        return self._run(module, stages, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, self._method)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise WrapError(
                "The forward of a wrapped module was called after the module itself was dropped. Keep the "
                "module, and call it rather than its forward."
            )
        return module

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function that a bound method would have. See Note [Forward override], *Covered by others*.

        There is none if the module had an instance forward before (after `detach` it would not be found), nor for
        another method.
        """
        module = self.module
        if self.inner is not None or vars(module).get("forward") is not self:
            raise AttributeError("__func__")
        return _dispatch_for(type(module))

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own method; `inspect.signature` finds its arguments through this."""
        module = self.module
        if self.inner is not None:
            return self.inner
        method: Callable[..., Any] = getattr(type(module), self._method).__get__(module)
        return method


def override_of(module: nn.Module, method: str = "forward") -> ForwardOverride | None:
    """Return the override that calls of a module's method reach; None if it has none."""
    attributes = vars(module)
    found = attributes.get(OVERRIDE if method == "forward" and is_covered(module) else method)
    return found if isinstance(found, ForwardOverride) else None


def is_covered(module: nn.Module) -> bool:
    """Return whether a module's `forward` is someone else's that looks up the module's override."""
    forward = vars(module).get("forward")
    while forward is not None and not isinstance(forward, ForwardOverride):
        if getattr(forward, _IS_DISPATCH, False):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def is_redirected(module: nn.Module) -> bool:
    """Return whether a call of a module runs another of its methods. See *Redirected calls* above."""
    forward = vars(module).get("forward")
    return isinstance(forward, types.FunctionType) and str(forward.__module__).startswith(_REDIRECTING)


def _dispatch_for(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return a function that calls the override of the module that it is given, with the signature of its class."""

    def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        override = vars(module).get(OVERRIDE)
        # The second: that is what called this.
        if override is None or override is vars(module).get("forward"):
            return type(module).forward(module, *args, **kwargs)
        return override(*args, **kwargs)

    setattr(forward, _IS_DISPATCH, True)
    with contextlib.suppress(TypeError, ValueError):  # a builtin has no signature
        forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return forward
