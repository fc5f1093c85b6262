"""Mixed precision: the model computes in 16 bits, its parameters and their gradients stay in 32.

The mechanism is in `memscale.precision`; see Note [Mixed precision] and Note [Loss scaling] there.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memscale.offload.homes import Homes
from memscale.precision import LossScale, LossScaling, in_full
from memscale.techniques.base import ModelSite
from memscale.techniques.forward import ForwardStage, Stage

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

__all__ = ["AutocastStage", "MixedPrecision"]

logger = logging.getLogger("memscale")

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class MixedPrecision:
    """What `Plan.precision` says, on a model."""

    def __init__(self) -> None:
        # By what lasts from one plan to the next: the scale was found by trying, and is not to be found again.
        self._scales: MutableMapping[Homes, LossScale] = weakref.WeakKeyDictionary()

    def attach(self, site: ModelSite, log: UndoLog) -> None:
        if site.plan.precision is None:
            return
        reason = _reason(site)
        if reason is not None:
            if site.logs:
                logger.warning("No mixed precision: %s.", reason)
            return
        dtype = _DTYPES[site.plan.precision.dtype]
        scaling = None
        if dtype is torch.float16:
            scale = self._scales.setdefault(site.homes, LossScale())
            scaling = LossScaling(site.model, scale, logs=site.logs)
            scaling.attach()
            log.add(_Scaling(scaling))
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


class _Scaling:
    """Loss scaling that was begun."""

    def __init__(self, scaling: LossScaling) -> None:
        self._scaling = scaling

    def undo(self) -> None:
        self._scaling.detach()


class AutocastStage(ForwardStage):
    """Lets a model compute in 16 bits, in training and in evaluation.

    Args:
        dtype: The 16-bit type.
        device_type: Where it computes.
        scaling: Told of every call, if the loss is scaled.
    """

    order = Stage.AUTOCAST
    in_evaluation = True

    def __init__(self, dtype: torch.dtype, device_type: str, scaling: LossScaling | None = None) -> None:
        self._dtype = dtype
        self._device_type = device_type
        self._scaling = scaling

    def run(
        self, module: nn.Module, call_next: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        has_its_own = torch.is_autocast_enabled(self._device_type)
        if self._scaling is not None and torch.is_grad_enabled():
            self._scaling.note_forward(ours=not has_its_own)
        if has_its_own:
            return call_next(*args, **kwargs)
        with torch.autocast(self._device_type, dtype=self._dtype, cache_enabled=False):
            output = call_next(*args, **kwargs)
        return in_full(output, self._dtype)
