"""Out of memory in forward and backward: repeat them under a heavier plan.

A forward pass is repeated with the random state and buffers that it found.

Note [Backward again]
~~~~~~~~~~~~~~~~~~~~~
If memory runs out in a call of `torch.autograd.backward` that reaches calls of a wrapped model, the gradients of the
model's outputs are known (Note [Gradients of a model's outputs]), unless the pass failed before it got there. A
parameter's gradient has been accumulated completely or not at all: autograd adds it in one operation when all of its
parts have arrived. So nothing has to be undone: the repetition leaves out the parameters that have theirs.

Then what the failed graph has saved is freed; the loop may still hold its loss and logits. The calls are repeated
under a heavier plan, and one backward pass brings the missing gradients. A pass is not repeated if that could give
other numbers, or if something would be lost (`_Pass._objection`); then the next step has the heavier plan.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memscale._torch import (
    BACKWARD,
    BackwardOrder,
    graph_nodes,
    hooks_are_allowed,
    in_backward,
    leaves_of,
    release_saved_tensors,
)
from memscale._util.processes import process_count
from memscale.checkpointing.model_call import GraphHandle, ModelCall, reached_outputs
from memscale.errors import RecomputeError
from memscale.execution_plan import Plan
from memscale.executor import Executor, executor_of
from memscale.recovery.shortage import attempt, explain, free_memory, heavier_plans, log_recovery
from memscale.recovery.steps import StepRecovery
from memscale.techniques.forward import Args, Forward, ForwardStage, Kwargs, Stage, override_of
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

_BACKWARD = inspect.signature(torch.autograd.backward)
_FREED = (
    "Trying to backward through a graph a second time whose first backward pass ran out of memory and was repeated by "
    "MemScale with another graph. Specify retain_graph=True if you need to backward through it again."
)


class StepGuard:
    """Guards forward, backward and the optimizer steps of one model. See `memscale.recovery`."""

    def __init__(self) -> None:
        # The calls of the model whose graphs are alive.
        self.calls: weakref.WeakKeyDictionary[GraphHandle, ModelCall] = weakref.WeakKeyDictionary()
        self._model: weakref.ref[nn.Module] | None = None

    @property
    def awaits_backward(self) -> bool:
        """Whether a call of the model has a graph that no backward pass has come to."""
        return any(call.awaits_backward for call in list(self.calls.values()))

    def begin(self, model: nn.Module, log: UndoLog) -> None:
        self._model = weakref.ref(model)
        log.add(self)
        BACKWARD.subscribe(_guarded_backward, self, BackwardOrder.RECOVERY)
        executor = executor_of(model)
        assert executor is not None, "it is being attached"
        steps = StepRecovery(model, executor)
        log.add(steps)
        steps.subscribe()

    def undo(self) -> None:
        BACKWARD.unsubscribe(_guarded_backward, self)

    def cover(self, model: nn.Module, log: UndoLog) -> None:
        """Guard forward passes, outside of all techniques that are on the model."""
        if not isinstance(model, torch.jit.ScriptModule):  # its forward cannot be replaced
            is_opaque = any(stage.is_opaque for _, stage in log.stages())
            log.add_stage(model, _RecoverStage(self, is_opaque=is_opaque))

    def executor(self) -> Executor | None:
        """Return the model's executor, if its plan is attached."""
        model = None if self._model is None else self._model()
        executor = None if model is None else executor_of(model)
        return executor if executor is not None and executor.attached else None


class _RecoverStage(ForwardStage):
    """Repeats a call of a whole model if it runs out of memory; not a compiled one, if nothing inside `is_opaque`."""

    order = Stage.RECOVER

    def __init__(self, guard: StepGuard, *, is_opaque: bool) -> None:
        self._guard = guard
        self.is_opaque = is_opaque

    def run(self, module: nn.Module, call_next: Forward, args: Args, kwargs: Kwargs) -> Any:
        executor = executor_of(module)
        if executor is None or not hooks_are_allowed() or cast(Any, torch.jit).is_tracing():
            return call_next(*args, **kwargs)
        call = ModelCall(module, args, kwargs, executor.placement.device)
        output, failure = attempt(lambda: call_next(*args, **kwargs))
        if failure is not None:
            output = _repeat_forward(executor, call, failure)
        self._guard.calls[call.finish_forward(output)] = call
        call.on_backward = executor.meter.backward_pass
        return output


def _communication(executor: Executor) -> str:
    """Return why a step that communicates must not be repeated by one process; nothing where none is known to."""
    is_parallel = any(isinstance(each, DistributedDataParallel) for each in executor.model.modules())
    if executor.is_sharded or (is_parallel and process_count() > 1):
        engine = "FSDP2" if executor.is_sharded else "DistributedDataParallel"
        return f"{engine} communicates in it, with processes that would not repeat it"
    return ""


def _use(executor: Executor, plan: Plan) -> None:
    executor.replan(plan)
    executor.placement.store_states()


def _planned_forward(executor: Executor, call: ModelCall) -> Any:
    """Repeat a call with all techniques of the attached plan, inside of the stage that recovers."""
    override = override_of(executor.model)
    forward = executor.model.forward if override is None else override.inside_of(Stage.RECOVER)
    return forward(*call.sample.args, **call.sample.kwargs)


def _repeat_forward(executor: Executor, call: ModelCall, failure: Exception) -> Any:
    tried: list[Plan] = []
    objection = _communication(executor)

    def run() -> Any:
        _use(executor, tried[-1])
        call.conditions.flags.parameters_moved()
        return _planned_forward(executor, call)

    origin = free_memory(executor.device, failure)
    try:
        call.restore_state()
        for plan in heavier_plans(executor, call.sample) if not objection else ():
            tried.append(plan)
            output, again = attempt(run)
            if again is None:
                log_recovery(executor, "forward", failure)
                return output
            free_memory(executor.device, again)
            call.restore_state()
    except RecomputeError as error:
        objection = str(error)
    explain(failure, executor, "forward", call.sample, tried, objection, origin=origin)
    raise failure


def _guarded_backward(
    backward: Callable[..., None], guards: Sequence[StepGuard], *args: Any, **kwargs: Any
) -> None:
    run = functools.partial(backward, *args, **kwargs)
    if in_backward():
        return run()
    given = _BACKWARD.bind(*args, **kwargs).arguments
    tensors = [given["tensors"]] if isinstance(given["tensors"], torch.Tensor) else given["tensors"]
    roots = [each for each in tensors if isinstance(each, torch.Tensor)]
    is_special = (
        any(given.get(name) for name in ("retain_graph", "create_graph")) or given.get("inputs") is not None
    )
    guarded = _Pass(roots, guards, is_special=is_special)
    if not guarded.calls:
        return run()
    _, failure = attempt(run)
    if failure is None:
        guarded.finish()
    else:
        guarded.repeat(failure, backward)
    return None


class _Pass:
    """One backward pass, and the calls of a wrapped model that it reaches. See Note [Backward again]."""

    def __init__(
        self, roots: Sequence[torch.Tensor], guards: Sequence[StepGuard], *, is_special: bool
    ) -> None:
        self._roots = roots
        self._is_special = is_special  # it keeps its graph, or brings gradients to some tensors only
        self._reached, outside = reached_outputs(roots)
        self.calls = list({id(each.call): each.call for each in self._reached}.values())
        for call in self.calls:
            call.gradients = {}  # of an earlier pass, over a graph that was kept
        owners = (guard for guard in guards if any(call in guard.calls.values() for call in self.calls))
        self._guard = next(owners, None)
        self._outside = {id(leaf) for leaf in outside}
        leaves = [*outside]
        for call in self.calls:
            leaves += (*call.conditions.flags.parameters(), *call.sample.tensors())
        self._leaves = {id(leaf): leaf for leaf in leaves if leaf.requires_grad and leaf.is_leaf}
        self._before = self._gradients()
        self._arrived: set[int] = set()

    def finish(self) -> None:
        if not self._is_special:
            for call in self.calls:
                call.release()

    def repeat(self, failure: Exception, backward: Callable[..., None]) -> None:
        """Bring the missing gradients under a heavier plan, or raise the error with an explanation."""
        executor = None if self._guard is None else self._guard.executor()
        if executor is None:
            raise failure
        objection, consequence = self._objection(), ""
        tried: list[Plan] = []
        self._arrived |= self._changed()
        if not self._is_special:
            release_saved_tensors(self._roots, _FREED)
        origin = free_memory(executor.device, failure)
        sample = max(
            (call.sample for call in self.calls), key=lambda each: sum(map(torch.numel, each.tensors()))
        )

        def run() -> None:
            _use(executor, tried[-1])
            self._bring_missing(executor, backward)

        if objection:
            for call in self.calls:  # a graph that is kept needs its parameters where they are
                call.awaits_backward = self._is_special
            consequence = "there is no heavier plan for the next step"
            failed = executor.plan
            plan = next(heavier_plans(executor, sample), failed)
            if plan is not failed and attempt(lambda: _use(executor, plan))[1] is None:
                executor.batches.ceiling = plan.predicted_peak_bytes or None
                peak = format_bytes(plan.predicted_peak_bytes)
                consequence = f"the next step runs under a heavier plan, peak {peak}"
        else:
            for plan in heavier_plans(executor, sample):
                tried.append(plan)
                _, again = attempt(run)
                if again is None:
                    log_recovery(executor, "backward", failure)
                    self.finish()
                    return
                self._arrived |= self._changed()
                free_memory(executor.device, again)
        explain(failure, executor, "backward", sample, tried, objection, consequence, origin)
        self.finish()
        raise failure

    def _objection(self) -> str:
        """Return why the pass must not be repeated; nothing if it may be."""
        assert self._guard is not None
        executor = self._guard.executor()
        if executor is not None and (objection := _communication(executor)):
            return objection
        if self._is_special:
            return "it was called with retain_graph, create_graph or inputs"
        if not all(call in self._guard.calls.values() for call in self.calls):
            return (
                "it goes through several wrapped models, or through one that was detached since its forward"
            )
        if not all(each.indices for each in self._reached):
            return "the loss was computed outside of the model from its tiled logits, and cannot be computed again"
        if any(index not in each.call.gradients for each in self._reached for index in each.indices):
            return "it failed before it came to the model, in the loss or in what is around the model"
        nodes = {each.node for each in self._reached}
        if any(each in nodes for node in graph_nodes(nodes) for each, _ in node.next_functions):
            return "the loss uses several outputs of the model of which one was computed from another"
        if any(call.conditions.flags.any_was_computed for call in self.calls):
            return "the model was called with computed weights (torch.func.functional_call)"
        if any(tensor.grad_fn is not None for call in self.calls for tensor in call.sample.tensors()):
            return "the model's inputs were computed from something that has gradients, too"
        if not self._outside <= self._changed():
            return "it has gradients to bring around the model, which have not arrived"
        try:
            for call in self.calls:
                call.conditions.flags.check_parameters()
        except RecomputeError as error:
            return str(error)
        return ""

    def _bring_missing(self, executor: Executor, backward: Callable[..., None]) -> None:
        self._before = self._gradients()  # after the plan was changed, which may have moved them
        outputs: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for call in self.calls:
            with call.replay():
                output = _planned_forward(executor, call)
            for index, tensor in enumerate(call.outputs_of(output)):
                gradient = call.gradients.get(index)
                if gradient is not None:
                    outputs.append(tensor)
                    gradients.append(gradient)
            del output
        missing = [leaf for leaf in leaves_of(outputs) if id(leaf) not in self._arrived]
        if missing:
            backward(outputs, gradients, inputs=missing)

    def _gradients(self) -> dict[int, tuple[torch.Tensor | None, int]]:
        return {
            key: (leaf.grad, 0 if leaf.grad is None else leaf.grad._version)
            for key, leaf in self._leaves.items()
        }

    def _changed(self) -> set[int]:
        """Return the ids of the leaves whose gradients have arrived."""
        now = self._gradients()
        return {
            key
            for key, (gradient, version) in self._before.items()
            if now[key][0] is not gradient or now[key][1] != version
        }
