"""Mixed precision: the model computes in 16 bits, its parameters and their gradients stay in 32.

Note [Mixed precision]
~~~~~~~~~~~~~~~~~~~~~~
The model's forward runs under torch's autocast: matrix products in 16 bits, norms, softmax and losses in 32. What
it returns is cast to 32 bits, so that a loss which the loop computes is in 32 bits as well. A recomputed layer is
recomputed under the same autocast.

*Offloaded layers.* The masters stay in 32 bits. Of a weight that autocast would cast to 16 bits anyway, the
working copy is 16-bit from the start: half the bytes on the device and on the way there, the same numbers. Its
gradient is computed in 16 bits and accumulated in 32.

*Casts are not cached.* Autocast can keep the 16-bit copies of all weights until the forward pass ends, which would
take as much memory again as recomputation saves. A weight that is used twice is cast twice.

*Precision of the loop.* If autocast is on already when the model is called, the loop (or the Trainer, or accelerate)
has a precision of its own, and MemScale's has no effect in that call.

Note [Loss scaling]
~~~~~~~~~~~~~~~~~~~
In fp16 small gradients are rounded to zero. A backward pass through a model that computed in fp16 therefore begins
with a gradient that is multiplied by a scale, a power of two, and whatever arrives at a leaf of the graph is divided
by it, in 32 bits, before it is accumulated: `p.grad`, accumulation, clipping, hooks of parameters and DDP see true
gradients.

*How.* A subscriber of `_torch.BACKWARD` collects the leaves of the graph; if parameters of the model are among them,
it puts a hook on every leaf for the duration of the pass, before the hooks that are there. What does not go through
`torch.autograd.backward` (`torch.autograd.grad`, say) is not scaled.

*Inside a backward pass* (torch's reentrant checkpointing) another one runs with gradients that are scaled already.
There, only the parameters of the model are divided: other leaves are where the outer pass goes on from.

*Overflow.* If a gradient is not finite when an optimizer is about to step, the step is skipped and the scale is
halved, as torch's `GradScaler` does. If the loop has a `GradScaler` of its own, this is noticed at its first
`scale(...)`, and nothing is scaled here from then on.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from memscale._torch import (
    BACKWARD,
    GRAD_SCALER_SCALE,
    BackwardOrder,
    FakeTensor,
    call_last_hook_first,
    in_backward,
    largest_magnitudes,
    leaves_of,
)
from memscale._util.trees import Tree
from memscale.optimizer.interceptor import (
    StepOrder,
    StepSubscriber,
    closure_of,
    evaluate_closure,
    has_own_step,
    members_of,
)
from memscale.techniques.base import ModelSite
from memscale.techniques.forward import Args, Forward, ForwardStage, Kwargs, Stage

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

logger = logging.getLogger("memscale")

_OWN_CLOSURE = (
    "fp16: %s evaluates the closure itself, so that its steps are not checked for gradients that overflowed, and made "
    "with them. Call backward() before step(), or train without mixed precision: Config(use_mixed_precision=False)."
)
_SKIPPED = (
    "fp16: gradients overflowed, so that this step of %s was not made; the scale of the loss is %g now. That is in "
    "order if it happens now and then, most of all in the first steps: later ones are skipped and counted silently."
)

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
LEAST_SCALE = 2.0**-24
LARGEST_SCALE = 2.0**120  # beyond, 32 bits overflow too


class MixedPrecision:
    """Puts autocast, and loss scaling for fp16, on a model as `Plan.precision` says."""

    def attach(self, site: ModelSite, log: UndoLog) -> None:
        if site.plan.precision is None:
            return
        reason = _reason(site)
        if reason is not None:
            if site.logs:
                logger.warning("No mixed precision: %s.", reason)
            return
        dtype: torch.dtype = getattr(torch, site.plan.precision.dtype)
        scaling = None
        if dtype is torch.float16:
            # Found by trial, and kept when the plan changes.
            scale = site.state.setdefault("loss scale", LossScale())
            scaling = LossScaling(site.model, scale, logs=site.logs)
            log.add(scaling)
            scaling.attach()
        log.add_stage(site.model, AutocastStage(dtype, site.device.type, scaling))


def _reason(site: ModelSite) -> str | None:
    if "_original_forward" in vars(site.model):
        return "accelerate has put mixed precision of its own on the model"
    kind = site.device.type
    if not torch.amp.is_autocast_available(kind):
        return f"torch has no autocast for {kind}"
    if not any(parameter.dtype is torch.float32 for parameter in site.model.parameters()):
        return "the model has no parameters in 32 bits"
    return None


class AutocastStage(ForwardStage):
    """Lets a model compute in 16 bits, in training and in evaluation; `scaling` is told of every call."""

    order = Stage.AUTOCAST
    in_evaluation = True

    def __init__(self, dtype: torch.dtype, device_type: str, scaling: LossScaling | None = None) -> None:
        self._dtype = dtype
        self._device_type = device_type
        self._scaling = scaling

    def run(self, module: nn.Module, call_next: Forward, args: Args, kwargs: Kwargs) -> Any:
        has_its_own = torch.is_autocast_enabled(self._device_type)
        if self._scaling is not None and torch.is_grad_enabled():
            self._scaling.is_wanted = not has_its_own
        if has_its_own:
            return call_next(*args, **kwargs)
        with torch.autocast(self._device_type, dtype=self._dtype, cache_enabled=False):
            output = call_next(*args, **kwargs)
        return in_full(output, self._dtype)


def in_full(output: Any, dtype: torch.dtype) -> Any:
    """Return the output with every tensor of that 16-bit type in 32 bits; the very object if there is none."""
    tree = Tree.of(output)
    if not any(tensor.dtype is dtype for tensor in tree.tensors()):
        return output
    wide: dict[int, torch.Tensor] = {}  # one that is returned twice stays one

    def change(tensor: torch.Tensor) -> torch.Tensor:
        return wide.setdefault(id(tensor), tensor.float() if tensor.dtype is dtype else tensor)

    return tree.map(torch.Tensor, change).build()


class LossScale:
    """A power of two that halves when gradients overflow, and doubles after many steps in which none did.

    The constants are those of torch's `GradScaler`.
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
    """Scales the backward passes of one model. See Note [Loss scaling]."""

    order = StepOrder.LOSS_SCALING

    def __init__(self, module: nn.Module, scale: LossScale, *, logs: bool = True) -> None:
        self.scale = scale
        self.skipped = 0  # steps that were not made
        self.is_wanted = False  # whether the last forward pass was in fp16 by MemScale's own autocast
        self._module = weakref.ref(module)
        self._logs = logs
        self._warned_of_closure = False
        self.passes = 0  # backward passes that were scaled
        self._last_backoff = self._last_growth = 0
        self._seen: MutableMapping[Optimizer, int] = weakref.WeakKeyDictionary()

    def attach(self) -> None:
        """Scale backward passes and check steps from now on."""
        BACKWARD.subscribe(_scaled_backward, self, BackwardOrder.LOSS_SCALING)
        GRAD_SCALER_SCALE.subscribe(_defer_to_loop, self)
        self.subscribe()

    def undo(self) -> None:
        """Scale and check nothing any more."""
        self.unsubscribe()
        self.stop()

    def stop(self) -> None:
        """Scale nothing any more: the loop has a `GradScaler` of its own."""
        self.is_wanted = False
        BACKWARD.unsubscribe(_scaled_backward, self)
        GRAD_SCALER_SCALE.unsubscribe(_defer_to_loop, self)

    def parameter_ids(self) -> set[int]:
        module = self._module()
        return set() if module is None else {id(parameter) for parameter in module.parameters()}

    def around_step(self, step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Skip a step whose gradients are not finite."""
        loss: Any = None
        if closure_of(*args, **kwargs) is not None:
            if has_own_step(type(optimizer)):
                if self._logs and not self._warned_of_closure:
                    self._warned_of_closure = True
                    logger.warning(_OWN_CLOSURE, type(optimizer).__name__)
                return step(optimizer, *args, **kwargs)
            loss = evaluate_closure(*args, **kwargs)  # which makes the gradients
            args, kwargs = (lambda: loss,), {}
        if self._seen.get(optimizer, 0) != self.passes:  # a pass was scaled since its last step
            self._seen[optimizer] = self.passes
            if not _is_finite(optimizer):
                self._skip(optimizer)
                return loss
            if self._last_growth != self.passes:
                self._last_growth = self.passes
                self.scale.note_step()
        return step(optimizer, *args, **kwargs)

    def _skip(self, optimizer: Optimizer) -> None:
        self.skipped += 1
        if self._last_backoff != self.passes:  # several optimizers, one overflow
            self._last_backoff = self.passes
            self.scale.back_off()
        if self._logs and self.skipped == 1:
            logger.warning(_SKIPPED, type(optimizer).__name__, self.scale.value)


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


# ---------------------------------------------------------------------- backward passes

# Of the scaled passes that are running: the scale, and the ids of the models' parameters.
_running: list[tuple[float, set[int]]] = []
_BACKWARD = inspect.signature(torch.autograd.backward)


def _defer_to_loop(
    scale: Callable[..., Any], models: list[LossScaling], scaler: GradScaler, outputs: Any
) -> Any:
    if scaler.is_enabled():
        reached = {id(leaf) for leaf in leaves_of(_as_list(outputs))}
        for model in models:
            if reached & model.parameter_ids():
                model.stop()
    return scale(scaler, outputs)


def _scaled_backward(
    backward: Callable[..., None], models: list[LossScaling], *args: Any, **kwargs: Any
) -> None:
    given = _BACKWARD.bind(*args, **kwargs).arguments
    roots = _as_list(given["tensors"])
    if any(isinstance(root, GradientEdge) for root in roots):  # the caller works on the graph itself
        return backward(*args, **kwargs)
    if in_backward():
        factor, parameters = _running[-1] if _running else (1.0, set())
        leaves = [leaf for leaf in leaves_of(roots) if id(leaf) in parameters] if parameters else []
        with _divided(leaves, factor):
            return backward(*args, **kwargs)
    # A graph of gradients is differentiated again, and gradients of inner tensors are what the caller asked for.
    inputs = [] if given.get("inputs") is None else _as_list(given["inputs"])
    of_inner = any(not tensor.is_leaf for tensor in inputs)
    is_narrow = any(root.dtype in (torch.float16, torch.bfloat16) for root in roots)
    is_special = of_inner or is_narrow or given.get("create_graph") or given.get("grad_variables") is not None
    wanted = [] if is_special else [model for model in models if model.is_wanted]
    leaves = leaves_of(roots) if wanted else []
    reached = {id(leaf) for leaf in leaves}
    scaled = [model for model in wanted if reached & model.parameter_ids()]
    if not scaled:
        return backward(*args, **kwargs)
    factor = min(model.scale.value for model in scaled)
    seeds = _seeds(roots, given.get("grad_tensors"), factor)
    for model in scaled:
        model.passes += 1  # before the pass: an optimizer may step inside of it
    _running.append((factor, set().union(*(model.parameter_ids() for model in scaled))))
    try:
        with _divided(leaves, factor):
            backward(**{**given, "tensors": roots, "grad_tensors": seeds})
    finally:
        _running.pop()
    return None


def _seeds(roots: Sequence[torch.Tensor], given: Any, factor: float) -> list[torch.Tensor]:
    """Return the scaled gradients that a pass begins with: ones, if the caller has given none."""
    seeds = []
    for root, gradient in zip(roots, [None] * len(roots) if given is None else _as_list(given), strict=True):
        if gradient is not None:
            seeds.append(gradient * factor)
        elif root.numel() == 1:
            seeds.append(torch.full_like(root, factor, requires_grad=False))
        else:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")  # torch's message
    return seeds


@contextlib.contextmanager
def _divided(leaves: Iterable[torch.Tensor], factor: float) -> Iterator[None]:
    """Divide gradients that arrive at these leaves inside the block, before any other hook sees them."""
    share = 1 / factor  # exact: a power of two
    handles: list[RemovableHandle] = []
    try:
        for leaf in leaves:
            handles.append(leaf.register_hook(lambda gradient: gradient * share))  # type: ignore[no-untyped-call]
            call_last_hook_first(leaf)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _as_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, (torch.Tensor, GradientEdge)) else list(value)
