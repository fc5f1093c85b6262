"""The guard of a wrapped model's steps, and out of memory in forward: the call is repeated under a heavier plan.

What held the memory of a call that failed was its error (Note [What an error holds]): without its traceback the graph
and the activations are freed, and parameters may be moved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from memscale._torch import BACKWARD, BackwardOrder, hooks_are_allowed
from memscale.checkpointing.model_call import GraphHandle, ModelCall
from memscale.errors import RecomputeError, is_out_of_memory
from memscale.execution_plan import Plan
from memscale.executor import Executor, executor_of
from memscale.recovery.backward import guarded_backward
from memscale.recovery.shortage import (
    add_note,
    explain,
    free_memory,
    heavier_plans,
    log_recovery,
    planned_forward,
)
from memscale.recovery.steps import StepRecovery
from memscale.techniques.forward import ForwardStage, Stage

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

__all__ = ["RecoverStage", "StepGuard"]

_FAILED = object()


class StepGuard:
    """Guards forward, backward and the optimizer steps of one model. See `memscale.recovery`."""

    def __init__(self) -> None:
        self._calls: weakref.WeakKeyDictionary[GraphHandle, ModelCall] = weakref.WeakKeyDictionary()
        self._model: weakref.ref[nn.Module] | None = None

    @property
    def calls(self) -> list[ModelCall]:
        """The calls of the model whose graphs are alive."""
        return list(self._calls.values())

    def add_call(self, call: ModelCall, handle: GraphHandle) -> None:
        """Keep a call for as long as its graph is alive."""
        self._calls[handle] = call

    @property
    def awaits_backward(self) -> bool:
        """Whether a call of the model has a graph that no backward pass has come to."""
        return any(call.awaits_backward for call in self.calls)

    def begin(self, model: nn.Module, log: UndoLog) -> None:
        """Guard backward passes and optimizer steps."""
        self._model = weakref.ref(model)
        log.add(_GuardedBackward(self))
        log.add(StepRecovery(model))

    def cover(self, model: nn.Module, log: UndoLog) -> None:
        """Guard forward passes, outside of all techniques that are on the model."""
        if not isinstance(model, torch.jit.ScriptModule):  # its forward cannot be replaced
            is_opaque = any(stage.is_opaque for _, stage in log.stages())
            log.add_stage(model, RecoverStage(self, is_opaque=is_opaque))

    def executor(self) -> Executor | None:
        """Return the model's executor, if its plan is attached."""
        model = None if self._model is None else self._model()
        executor = None if model is None else executor_of(model)
        return executor if executor is not None and executor.attached else None


class _GuardedBackward:
    """The subscription of a guard to backward passes, as a change that can be undone."""

    def __init__(self, guard: StepGuard) -> None:
        self._guard = guard
        BACKWARD.subscribe(guarded_backward, guard, BackwardOrder.RECOVERY)

    def undo(self) -> None:
        BACKWARD.unsubscribe(guarded_backward, self._guard)


class RecoverStage(ForwardStage):
    """Repeats a call of a whole model if it runs out of memory.

    Args:
        guard: Told of every call.
        is_opaque: Whether there is anything inside that a compiler must not trace through. If there is not, a compiled
            model is compiled as ever, and an out-of-memory error in it is raised.
    """

    order = Stage.RECOVER

    def __init__(self, guard: StepGuard, *, is_opaque: bool = True) -> None:
        self._guard = guard
        self.is_opaque = is_opaque

    def run(
        self, module: nn.Module, call_next: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        executor = executor_of(module)
        if executor is None or not hooks_are_allowed() or cast(Any, torch.jit).is_tracing():
            return call_next(*args, **kwargs)
        call = ModelCall(module, args, kwargs, executor.placement.device)
        failure: Exception | None = None
        try:
            output = call_next(*args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error
        # Not in the `except` above: as long as that runs, the frames that failed hold their tensors.
        if failure is not None:
            output = _repeat(executor, call, failure)
        self._guard.add_call(call, call.finish_forward(output))
        call.on_backward = executor.meter.backward_pass
        return output


def _repeat(executor: Executor, call: ModelCall, failure: Exception) -> Any:
    tried: list[Plan] = []
    objection = ""
    origin = free_memory(executor.device, failure)
    try:
        call.restore_state()
        for plan in heavier_plans(executor, call.sample):
            tried.append(plan)
            output = _run_under(executor, call, plan)
            if output is not _FAILED:
                executor.batches.ceiling = plan.predicted_peak_bytes or None
                log_recovery(executor, "forward", failure)
                return output
    except RecomputeError as error:
        objection = str(error)
    add_note(failure, explain(executor, "forward", call.sample, tried, objection), origin)
    raise failure


def _run_under(executor: Executor, call: ModelCall, plan: Plan) -> Any:
    """Return the output of a call under another plan, or `_FAILED` if it runs out of memory again."""
    try:
        executor.replan(plan)
        executor.placement.store_states()
        call.conditions.flags.parameters_moved()
        return planned_forward(executor.model)(*call.sample.args, **call.sample.kwargs)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = error
    free_memory(executor.device, failure)
    call.restore_state()
    return _FAILED
