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
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memscale._util.trees import Tree
from memscale.precision.loss_scaling import LossScale, LossScaling
from memscale.techniques.base import ModelSite
from memscale.techniques.forward import Args, Forward, ForwardStage, Kwargs, Stage

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

logger = logging.getLogger("memscale")


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
    if isinstance(site.model, torch.jit.ScriptModule):
        return "the model is a scripted module, whose forward cannot be replaced"
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
