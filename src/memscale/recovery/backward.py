"""Out of memory in backward: repeat forward under a heavier plan, then backward for the missing gradients.

Note [Backward again]
~~~~~~~~~~~~~~~~~~~~~
Every call of `torch.autograd.backward` is looked at: which calls of wrapped models does the pass reach, and which
gradients are there before it begins? If memory runs out,

- the gradients of the models' outputs are known (Note [Gradients of a model's outputs]), unless the pass failed before
  it got there;
- a parameter's gradient has been accumulated completely or not at all: autograd adds it in one operation when all of
  its parts have arrived. So nothing has to be undone, gradient accumulation over several steps included: the
  repetition leaves out the parameters that have theirs.

Then what the failed graph has saved is freed, as it is when a pass is through: the loop may hold its loss, its logits
and views of them, which stay as they are, with a graph that cannot be used any more. The calls are repeated under a
heavier plan, and one backward pass brings what is missing.

A pass is not repeated if that could give other numbers, or if something would be lost (`_Pass._objection`). Then the
error is raised, and says that the next step has the heavier plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch

from memscale._torch import in_backward, leaves_of, release_saved_tensors
from memscale.checkpointing.model_call import ModelCall, ReachedOutput, reached_outputs
from memscale.errors import RecomputeError, is_out_of_memory
from memscale.execution_plan import Plan
from memscale.executor import Executor
from memscale.recovery.shortage import (
    add_note,
    explain,
    free_memory,
    heavier_plans,
    log_recovery,
    planned_forward,
)
from memscale.units import format_bytes

__all__ = ["guarded_backward"]

Backward = Callable[..., None]

_FREED = (
    "Trying to backward through a graph a second time whose first backward pass ran out of memory and was repeated by "
    "MemScale with another graph. Specify retain_graph=True if you need to backward through it again."
)


class GuardedModel(Protocol):
    """A model whose backward passes are guarded."""

    @property
    def calls(self) -> Collection[ModelCall]:
        """Its calls whose graphs are alive."""

    def executor(self) -> Executor | None:
        """Return its executor, if its plan is attached."""


def guarded_backward(
    backward: Backward,
    models: Sequence[GuardedModel],
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    def run() -> None:
        backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)

    if in_backward():
        return run()
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    roots = [each for each in given if isinstance(each, torch.Tensor)]
    is_special = bool(retain_graph or create_graph) or inputs is not None
    guarded = _Pass(roots, models, is_special=is_special)
    if not guarded.calls:
        return run()
    try:
        run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = error
    else:
        guarded.finish()
        return None
    # Not in the `except` above: as long as that runs, the frames that failed hold their tensors.
    guarded.repeat(failure, backward)
    return None


class _Pass:
    """One backward pass, and the calls of wrapped models that it reaches. See Note [Backward again]."""

    def __init__(
        self, roots: Sequence[torch.Tensor], models: Sequence[GuardedModel], *, is_special: bool
    ) -> None:
        self._roots = roots
        self._is_special = is_special  # it keeps its graph, or brings gradients to some tensors only
        self._reached, outside = reached_outputs(roots)
        self.calls = list({id(each.call): each.call for each in self._reached}.values())
        for call in self.calls:
            call.gradients = {}  # of an earlier pass, over a graph that was kept
        self._executors: dict[ModelCall, Executor] = {}
        for model in models:
            executor = model.executor()
            if executor is not None:
                self._executors.update((call, executor) for call in self.calls if call in model.calls)
        self._outside = {id(leaf) for leaf in outside}
        leaves = [*outside, *(leaf for call in self.calls for leaf in _leaves_of_call(call))]
        self._leaves = {id(leaf): leaf for leaf in leaves}
        self._before = self._gradients()
        self._arrived: set[int] = set()

    def finish(self) -> None:
        if not self._is_special:
            for call in self.calls:
                call.release()

    def repeat(self, failure: Exception, backward: Backward) -> None:
        """Bring the missing gradients under a heavier plan, or raise the error with an explanation."""
        executors = list({id(each): each for each in self._executors.values()}.values())
        if not executors:
            raise failure
        objection = self._objection()
        tried: list[Plan] = []
        self._note_arrived()
        if not self._is_special:
            release_saved_tensors(self._roots, _FREED)
        origin = "".join([free_memory(each.device, failure) for each in executors])
        if not objection and self._repeated(executors, tried, backward):
            for executor in executors:
                executor.batches.ceiling = executor.plan.predicted_peak_bytes or None
                log_recovery(executor, "backward", failure)
            self.finish()
            return
        consequence = self._prepare_next_step(executors) if objection else ""
        sample = self.calls[0].sample
        note = explain(executors[0], "backward", sample, tried, objection, consequence)
        self.finish()
        add_note(failure, note, origin)
        raise failure

    def _objection(self) -> str:
        """Return why the pass must not be repeated, or nothing."""
        if self._is_special:
            return "it was called with retain_graph, create_graph or inputs"
        if len(self._executors) < len(self.calls):
            return "the model was detached since its forward"
        if not all(each.indices for each in self._reached):
            return "the loss was computed outside of the model from its tiled logits, and cannot be computed again"
        if any(index not in each.call.gradients for each in self._reached for index in each.indices):
            return "it failed before it came to the model, in the loss or in what is around the model"
        if _are_nested(self._reached):
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

    def _repeated(self, executors: Sequence[Executor], tried: list[Plan], backward: Backward) -> bool:
        ladders = [heavier_plans(executor, self._sample_of(executor)) for executor in executors]
        while True:
            plans = [next(ladder, None) for ladder in ladders]
            if not any(plans):
                return False
            tried += [plan for plan in plans if plan is not None]
            try:
                for executor, plan in zip(executors, plans, strict=True):
                    if plan is not None:
                        executor.replan(plan)
                        executor.placement.store_states()
                self._bring_missing(backward)
                return True
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
            self._note_arrived()
            for executor in executors:
                free_memory(executor.device, failure)

    def _bring_missing(self, backward: Backward) -> None:
        self._before = self._gradients()  # after the plan was changed, which may have moved them
        outputs: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for call, executor in self._executors.items():
            with call.replay():
                output = planned_forward(executor.model)(*call.sample.args, **call.sample.kwargs)
            for index, tensor in enumerate(call.outputs_of(output)):
                gradient = call.gradients.get(index)
                if gradient is not None:
                    outputs.append(tensor)
                    gradients.append(gradient)
            del output
        missing = [leaf for leaf in leaves_of(outputs) if id(leaf) not in self._arrived]
        if missing:
            backward(outputs, gradients, inputs=missing)

    def _prepare_next_step(self, executors: Sequence[Executor]) -> str:
        """Attach a heavier plan; return what to know of it."""
        peaks = []
        for call in self.calls:
            call.awaits_backward = (
                self._is_special
            )  # a graph that is kept needs its parameters where they are
        for executor in executors:
            failed = executor.plan
            plan = next(heavier_plans(executor, self._sample_of(executor)), failed)
            if plan is failed:
                continue
            try:
                executor.replan(plan)
                executor.placement.store_states()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                continue  # the error that is being handled matters more
            executor.batches.ceiling = plan.predicted_peak_bytes or None
            peaks.append(plan.predicted_peak_bytes)
        if not peaks:
            return "there is no heavier plan for the next step"
        return f"the next step runs under a heavier plan, peak {', '.join(map(format_bytes, peaks))}"

    def _sample_of(self, executor: Executor) -> Any:
        samples = [call.sample for call, each in self._executors.items() if each is executor]
        return max(samples, key=lambda sample: sum(tensor.numel() for tensor in sample.tensors()))

    # Which gradients have arrived.

    def _gradients(self) -> dict[int, tuple[torch.Tensor | None, int]]:
        return {key: _gradient(leaf) for key, leaf in self._leaves.items()}

    def _changed(self) -> set[int]:
        now = self._gradients()
        return {
            key
            for key, (gradient, version) in self._before.items()
            if now[key][0] is not gradient or now[key][1] != version
        }

    def _note_arrived(self) -> None:
        self._arrived |= self._changed()


def _gradient(leaf: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    return leaf.grad, 0 if leaf.grad is None else leaf.grad._version


def _leaves_of_call(call: ModelCall) -> Iterable[torch.Tensor]:
    """Yield what gets a gradient by a call: the model's parameters, and arguments that are leaves."""
    for tensor in (*call.conditions.flags.parameters(), *call.sample.tensors()):
        if tensor.requires_grad and tensor.is_leaf:
            yield tensor


def _are_nested(reached: Sequence[ReachedOutput]) -> bool:
    """Return whether one output is behind another: then its gradient is not from outside alone."""
    nodes = {each.node for each in reached}
    pending: list[Any] = list(nodes)
    seen: set[Any] = set()
    while pending:
        for node, _ in pending.pop().next_functions:
            if node in nodes:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                pending.append(node)
    return False
