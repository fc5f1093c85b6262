"""Loss scaling without a change to the training loop.

Note [Loss scaling]
~~~~~~~~~~~~~~~~~~~
In fp16 small gradients are rounded to zero. A backward pass through a model that computed in fp16 therefore begins
with a gradient that is multiplied by a scale, a power of two, and whatever arrives at a leaf of the graph is divided
by it, in 32 bits, before it is accumulated. The loop sees nothing of it: `p.grad`, accumulation, clipping, hooks of
parameters and DDP see true gradients, those of other parts of the loss included, because the whole pass is scaled and
all of its leaves are divided.

*How.* A subscriber of `_torch.BACKWARD` (``backward.py``) collects the leaves of the graph; if parameters of the model
are among them, it puts a hook on every leaf for the duration of the pass, before the hooks that are there. A pass
that does not go through `torch.autograd.backward` (`torch.autograd.grad`, say) is not scaled, which is right too.

*Inside a backward pass* (torch's reentrant checkpointing) another one runs with gradients that are scaled already.
There, only the parameters of the model are divided: other leaves are where the outer pass goes on from.

*Overflow.* If a gradient is not finite when an optimizer is about to step, the step is skipped and the scale is
halved, as torch's `GradScaler` does. If the loop has a `GradScaler` of its own, this is noticed at its first
`scale(...)`, and nothing is scaled here from then on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._torch import FakeTensor, largest_magnitudes
from memscale.optimizer.interceptor import (
    StepOrder,
    StepSubscriber,
    closure_of,
    evaluate_closure,
    members_of,
)
from memscale.optimizer.kinds import has_own_step
from memscale.precision.backward import start_scaling, stop_scaling

__all__ = ["LossScale", "LossScaling"]

logger = logging.getLogger("memscale")


FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
LEAST_SCALE = 2.0**-24
LARGEST_SCALE = 2.0**120  # beyond, 32 bits overflow too


class LossScale:
    """A power of two that halves when gradients overflow, and doubles after many steps in which none did.

    The constants are those of torch's `GradScaler`.

    Example:
        >>> scale = LossScale()
        >>> scale.back_off()
        >>> scale.value
        32768.0
    """

    def __init__(self) -> None:
        self.value = FIRST_SCALE
        self._steps_since_change = 0

    def back_off(self) -> None:
        """Halve the scale: a step was skipped."""
        self.value = max(self.value / 2, LEAST_SCALE)
        self._steps_since_change = 0

    def note_step(self) -> None:
        """Count a step that was made."""
        self._steps_since_change += 1
        if self._steps_since_change == GROWTH_INTERVAL:
            self._steps_since_change = 0
            if self.value < LARGEST_SCALE:
                self.value *= 2


class LossScaling(StepSubscriber):
    """Scales the backward passes of one model. See Note [Loss scaling].

    Args:
        module: The model; it is not kept alive.
        scale: The scale to begin with.
        logs: Whether to log, once, that a step was not made.

    Attributes:
        scale: The scale.
        skipped: How many steps were not made.
    """

    order = StepOrder.LOSS_SCALING

    def __init__(self, module: nn.Module, scale: LossScale, *, logs: bool = True) -> None:
        self.scale = scale
        self.skipped = 0
        self._module = weakref.ref(module)
        self._logs = logs
        self._computed = False  # whether the last forward was in fp16 by MemScale's own autocast
        self._is_attached = False
        self._warned_of_closure = False
        self._passes = 0
        self._last_backoff = self._last_growth = 0
        self._seen: MutableMapping[Optimizer, int] = weakref.WeakKeyDictionary()

    def attach(self) -> None:
        """Scale backward passes and check steps from now on."""
        self._is_attached = True
        start_scaling(self)
        self.subscribe()

    def undo(self) -> None:
        """Scale and check nothing any more."""
        self._is_attached = False
        self.unsubscribe()
        stop_scaling(self)

    def note_forward(self, *, ours: bool) -> None:
        """Note that the model is called, in MemScale's precision or in the loop's own."""
        self._computed = ours

    def defer_to_loop(self) -> None:
        """Stop scaling: the loop has a `GradScaler` of its own."""
        self._computed = False
        stop_scaling(self)

    @property
    def factor(self) -> float:
        """The scale of a backward pass that begins now; 1 if it is not to be scaled."""
        return self.scale.value if self._computed else 1

    def parameter_ids(self) -> set[int]:
        """Return the ids of the model's parameters."""
        module = self._module()
        return set() if module is None else {id(parameter) for parameter in module.parameters()}

    def note_pass(self) -> None:
        """Note that a scaled backward pass begins."""
        self._passes += 1

    # ------------------------------------------------------------------ steps

    def around_step(self, step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Skip a step whose gradients are not finite."""
        loss: Any = None
        if closure_of(*args, **kwargs) is not None:
            if has_own_step(type(optimizer)):
                self._warn_of_closure(optimizer)
                return step(optimizer, *args, **kwargs)
            loss = evaluate_closure(*args, **kwargs)  # which makes the gradients
            args, kwargs = (lambda: loss,), {}
        if self._is_new_to(optimizer):
            if not _is_finite(optimizer):
                self._skip(optimizer)
                return loss
            if self._last_growth != self._passes:
                self._last_growth = self._passes
                self.scale.note_step()
        return step(optimizer, *args, **kwargs)

    def _warn_of_closure(self, optimizer: Optimizer) -> None:
        """Warn, once, that a step which evaluates its closure by itself is not checked."""
        if self._logs and not self._warned_of_closure:
            self._warned_of_closure = True
            logger.warning(
                "fp16: %s evaluates the closure itself, so that its steps are not checked for gradients that "
                "overflowed, and made with them. Call backward() before step(), or train without mixed precision: "
                "Config(use_mixed_precision=False).",
                type(optimizer).__name__,
            )

    def _is_new_to(self, optimizer: Optimizer) -> bool:
        """Return whether a backward pass is or was scaled since the last step of an optimizer."""
        if self._seen.get(optimizer, 0) == self._passes:
            return False
        self._seen[optimizer] = self._passes
        return True

    def _skip(self, optimizer: Optimizer) -> None:
        self.skipped += 1
        if self._last_backoff != self._passes:  # several optimizers, one overflow
            self._last_backoff = self._passes
            self.scale.back_off()
        if self._logs and self.skipped == 1:
            logger.warning(
                "fp16: gradients overflowed, so that this step of %s was not made; the scale of the loss is "
                "%g now. That is in order if it happens now and then, the more so in the first steps: they are "
                "made, and counted, without further notice.",
                type(optimizer).__name__,
                self.scale.value,
            )

    # ------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        return {
            "module": self._module(),
            "scale": self.scale,
            "skipped": self.skipped,
            "logs": self._logs,
            "attached": self._is_attached,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["module"], state["scale"], logs=state["logs"])  # type: ignore[misc]
        self.skipped = state["skipped"]
        if state["attached"]:
            self.attach()


def _is_finite(optimizer: Optimizer) -> bool:
    """Return whether all gradients of an optimizer are finite; fake ones are."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for member in members_of(optimizer):
        gradient = member.parameter.grad
        if gradient is None or isinstance(gradient, FakeTensor):
            continue
        if gradient.layout is not torch.strided:
            gradient = gradient.coalesce().values()
        if gradient.numel():
            by_device.setdefault(gradient.device, []).append(gradient.detach())
    for gradients in by_device.values():
        # The largest of each, which is a number for each: no copy of anything.
        norms = largest_magnitudes(gradients)
        if not torch.stack([norm.float() for norm in norms]).isfinite().all():
            return False
    return True
