"""Who catches out-of-memory errors of a wrapped model's steps."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memscale.checkpointing.calls import Call
from memscale.executor import executor_of
from memscale.recovery.backward import CaughtBackward, executor_for
from memscale.recovery.forward import RecoverStage
from memscale.recovery.steps import CaughtSteps

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

__all__ = ["StepGuard"]


class StepGuard:
    """Goes around forward, backward and the optimizer's steps of one model. See `memscale.recovery`."""

    def __init__(self) -> None:
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()

    @property
    def awaits_backward(self) -> bool:
        return any(call.awaits_backward for call in self._calls)

    def begin(self, model: nn.Module, log: UndoLog) -> None:
        log.add(CaughtBackward())
        log.add(CaughtSteps(model))

    def cover(self, model: nn.Module, log: UndoLog) -> None:
        if not isinstance(model, torch.jit.ScriptModule):  # its forward cannot be replaced
            is_opaque = any(stage.is_opaque for _, stage in log.stages())
            log.add_stage(model, RecoverStage(self, is_opaque=is_opaque))

    def note(self, model: nn.Module, call: Call) -> None:
        """A call was made, and its backward is to come."""
        executor = executor_of(model)
        if executor is not None:
            executor_for(call, executor)
            call.on_backward = executor.meter.backward_pass
            self._calls.add(call)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # no graph is copied
