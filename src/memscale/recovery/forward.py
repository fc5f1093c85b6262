"""Out of memory in forward: the call is made again under a heavier plan.

What held the memory of a call that failed was its error (Note [What an error holds]): without its traceback the graph
and the activations are gone, and parameters may be moved, which torch refuses for those that a graph refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from memscale._torch import hooks_are_allowed
from memscale.checkpointing.calls import Call
from memscale.errors import RecomputeError, is_out_of_memory
from memscale.execution_plan import Plan
from memscale.executor import Executor, executor_of
from memscale.recovery.plans import explain, heavier_plans, say_recovered
from memscale.recovery.shortage import add_note, free_memory
from memscale.techniques.forward import OVERRIDE, ForwardOverride, ForwardStage, Stage

if TYPE_CHECKING:
    from memscale.recovery.guard import StepGuard

__all__ = ["RecoverStage", "planned_forward"]


class RecoverStage(ForwardStage):
    """Makes a call of a whole model again if it runs out of memory.

    Args:
        guard: Told of every call whose backward is to come.
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
        call = Call(module, args, dict(kwargs), executor.homes.device)
        try:
            output = call_next(*args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error
        else:
            return self._finished(module, call, output)
        # Not in the `except` above: as long as that runs, the frames that failed hold their tensors.
        return self._finished(module, call, _again(executor, call, failure))

    def _finished(self, module: nn.Module, call: Call, output: Any) -> Any:
        call.settle()
        output = call.through_boundary(output)
        self._guard.note(module, call)
        return output


def _again(executor: Executor, call: Call, failure: Exception) -> Any:
    tried: list[Plan] = []
    why = ""
    came_from = free_memory(executor.device, failure)
    try:
        call.take_back()
        for plan in heavier_plans(executor, call.sample):
            tried.append(plan)
            output = _tried(executor, call, plan)
            if output is not _FAILED:
                executor.batches.ceiling = plan.predicted_peak_bytes or None
                say_recovered(executor, "forward", failure)
                return output
    except RecomputeError as error:
        why = str(error)
    add_note(failure, explain(executor, "forward", call.sample, tried, why), came_from)
    raise failure


_FAILED = object()


def _tried(executor: Executor, call: Call, plan: Plan) -> Any:
    try:
        executor.replan(plan)
        executor.homes.settle_states()
        call.parameters_moved()
        return planned_forward(executor.model)(*call.sample.args, **call.sample.kwargs)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = error
    free_memory(executor.device, failure)
    call.take_back()
    return _FAILED


def planned_forward(model: nn.Module) -> Callable[..., Any]:
    """A model's forward with all techniques of its plan, inside of the one that recovers."""
    override = vars(model).get(OVERRIDE)
    return override.inside_of(Stage.RECOVER) if isinstance(override, ForwardOverride) else model.forward
