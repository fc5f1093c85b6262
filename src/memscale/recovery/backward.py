"""Out of memory in backward: forward again under a heavier plan, and backward for the gradients that are missing.

Note [Backward again]
~~~~~~~~~~~~~~~~~~~~~
While a model is wrapped, ``torch.autograd.backward`` is one of ours, which ``Tensor.backward`` finds when it is
called. Before a pass it looks which calls of wrapped models the pass will come to, and notes the gradients that are
there. If memory runs out, then

- the gradients of the models' outputs are known (Note [The boundary]), unless the pass failed before it got there;
- a parameter's gradient has arrived, wholly, or not at all: autograd adds it in one operation when all of its parts
  are there. So accumulation over several steps needs no copies: the parameters that have theirs are left out.

The failed graph is freed, whoever holds on to it: the pass was not to keep it, so it is of no use any more. A loop has
its loss and its logits, and views of them, each with the whole graph behind it: they are detached. Then the calls are
made again under a heavier plan, and one backward pass brings what is missing.

A pass is not repeated if something it did would be lost: a graph that is to be kept or differentiated again, leaves
outside of the models that have not got their gradients, parameters that were changed in between.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from memscale._torch import OUTSIDE_BACKWARD, graph_task_id, leaves_of
from memscale.checkpointing.calls import Call, call_of
from memscale.errors import RecomputeError, is_out_of_memory
from memscale.execution_plan import Plan
from memscale.executor import Executor
from memscale.recovery.forward import planned_forward
from memscale.recovery.plans import explain, heavier_plans, say_recovered
from memscale.recovery.shortage import add_note, free_memory

__all__ = ["CaughtBackward", "executor_for"]

Backward = Callable[..., None]

_calls: weakref.WeakKeyDictionary[Call, weakref.ref[Executor]] = weakref.WeakKeyDictionary()


def executor_for(call: Call, executor: Executor) -> None:
    """Note whose call this is."""
    _calls[call] = weakref.ref(executor)


# ---------------------------------------------------------------------- on and off


class CaughtBackward:
    """A model whose backward passes are looked after; `torch.autograd.backward` is ours as long as there is one."""

    def __init__(self) -> None:
        _begin(self)

    def undo(self) -> None:
        _looked_after.discard(self)
        _put_back_if_unused()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _begin(self)


_looked_after: weakref.WeakSet[CaughtBackward] = weakref.WeakSet()
_exchanged: list[tuple[Backward, Backward]] = []


def _begin(one: CaughtBackward) -> None:
    _looked_after.add(one)
    weakref.finalize(one, _put_back_if_unused).atexit = False
    before = torch.autograd.backward
    # Inside of whoever changes gradients on their way: a pass that is repeated must not go through that twice.
    if not _exchanged and before.__module__ == torch.autograd.__name__:
        ours = _caught(before)
        _exchanged.append((before, ours))
        torch.autograd.backward = ours


def _put_back_if_unused() -> None:
    if not any(True for _ in _looked_after):  # not by its length, which counts one that is just being dropped
        while _exchanged:
            before, ours = _exchanged.pop()
            if torch.autograd.backward is ours:
                torch.autograd.backward = before


# ---------------------------------------------------------------------- a pass


def _caught(backward: Backward) -> Backward:
    def caught(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        def as_asked() -> None:
            backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)

        if graph_task_id() != OUTSIDE_BACKWARD:
            return as_asked()
        roots = _roots(tensors)
        one = _Pass(roots, keeps=bool(retain_graph or create_graph), inputs=inputs is not None)
        if not one.calls:
            return as_asked()
        try:
            as_asked()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error
        else:
            one.end()
            return None
        one.repeat(roots, failure, backward)
        return None

    return caught


def _roots(tensors: Any) -> list[torch.Tensor]:
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return [each for each in given if isinstance(each, torch.Tensor)]


class _Pass:
    """One backward pass, and the calls of wrapped models that it comes to. See Note [Backward again]."""

    def __init__(self, roots: Sequence[torch.Tensor], *, keeps: bool, inputs: bool) -> None:
        self._keeps = keeps
        self._inputs = inputs
        self.calls, outside = _reached(roots)
        for call in self.calls:
            call.gradients = {}  # of an earlier pass, over a graph that was kept
        self._outside = [id(leaf) for leaf in outside]
        leaves = [*outside, *(leaf for call in self.calls for leaf in _leaves_inside(call))]
        self._leaves = {id(leaf): leaf for leaf in leaves}
        self._before = self._gradients()
        self._arrived: set[int] = set()

    def end(self) -> None:
        if not self._keeps:
            for call in self.calls:
                call.release()

    def repeat(self, roots: list[torch.Tensor], failure: Exception, backward: Backward) -> None:
        executors = self._executors()
        why = self._objection(executors, roots)
        tried: list[Plan] = []
        came_from = ""
        if not why:
            self._note_arrived()
            _let_go(roots, [tensor for call in self.calls for tensor in call.sample.tensors()])
            roots.clear()
            came_from = "".join([free_memory(executor.device, failure) for executor in executors])
            if self._repeated(executors, tried, backward):
                for executor in executors:
                    executor.batches.ceiling = executor.plan.predicted_peak_bytes or None
                    say_recovered(executor, "backward", failure)
                self.end()
                return
        for executor in executors[:1]:
            sample = self.calls[0].sample
            add_note(failure, explain(executor, "backward", sample, tried, why), came_from)
        raise failure

    def _executors(self) -> list[Executor]:
        found: dict[int, Executor] = {}
        for call in self.calls:
            reference = _calls.get(call)
            executor = None if reference is None else reference()
            if executor is not None and executor.attached:
                found[id(executor)] = executor
        return list(found.values())

    def _objection(self, executors: Sequence[Executor], roots: Sequence[torch.Tensor]) -> str:
        if self._keeps or self._inputs:
            return "it was called with retain_graph, create_graph or inputs"
        if any(_calls.get(call) is None for call in self.calls) or not executors:
            return "the model was detached since its forward"
        if any(number not in call.gradients for call, number in _outputs_used(roots) if call in self.calls):
            return "it failed before it came to the model, in the loss or in what is around the model"
        if any(call.has_computed_parameters for call in self.calls):
            return "the model was called with computed weights (torch.func.functional_call), which it goes on through"
        now = self._changed()
        if any(leaf not in now for leaf in self._outside):
            return "it has gradients to bring around the model, which have not arrived"
        try:
            for call in self.calls:
                call.check_parameters()
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
                        executor.homes.settle_states()
                self._bring_missing(backward)
                return True
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
            self._note_arrived()
            for executor in executors:
                free_memory(executor.device, failure)

    def _sample_of(self, executor: Executor) -> Any:
        samples = [call.sample for call in self.calls if _calls[call]() is executor]
        return max(samples, key=lambda sample: sum(tensor.numel() for tensor in sample.tensors()))

    def _bring_missing(self, backward: Backward) -> None:
        self._before = self._gradients()  # after the plan was changed, which may have moved them
        outputs: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for call in self.calls:
            executor = _calls[call]()
            if executor is None:  # see `_objection`
                continue
            with call.as_it_was():
                output = planned_forward(executor.model)(*call.sample.args, **call.sample.kwargs)
            tensors = call.outputs_of(output)
            for number, gradient in call.gradients.items():
                if gradient is not None:
                    outputs.append(tensors[number])
                    gradients.append(gradient)
            del output, tensors
        missing = [leaf for leaf in leaves_of(outputs) if id(leaf) not in self._arrived]
        if missing:
            backward(outputs, gradients, inputs=missing)

    # Which gradients are there.

    def _gradients(self) -> dict[int, tuple[torch.Tensor | None, int]]:
        return {key: _gradient(leaf) for key, leaf in self._leaves.items()}

    def _changed(self) -> set[int]:
        return {key for key, now in self._gradients().items() if _differs(now, self._before[key])}

    def _note_arrived(self) -> None:
        self._arrived |= self._changed()


def _gradient(leaf: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    gradient = leaf.grad
    return gradient, 0 if gradient is None else gradient._version


def _differs(now: tuple[torch.Tensor | None, int], before: tuple[torch.Tensor | None, int]) -> bool:
    return now[0] is not before[0] or now[1] != before[1]


def _leaves_inside(call: Call) -> Iterable[torch.Tensor]:
    """What gets a gradient by a call: the model's parameters, and leaves below its arguments."""
    yield from (each for each in call.parameters() if each.requires_grad)
    yield from leaves_of(call.sample.tensors())


def _reached(roots: Sequence[torch.Tensor]) -> tuple[list[Call], list[torch.Tensor]]:
    """The calls whose boundaries a pass from these comes to first, and the leaves that it comes to around them."""
    calls: dict[int, Call] = {}
    leaves: dict[int, torch.Tensor] = {
        id(each): each for each in roots if each.requires_grad and each.is_leaf
    }
    waiting = [each.grad_fn for each in roots if each.grad_fn is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        found = call_of(node)
        if found is not None:
            calls[id(found[0])] = found[0]
            continue
        leaf = getattr(node, "variable", None)  # of the nodes that accumulate
        if leaf is not None:
            leaves[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(calls.values()), list(leaves.values())


def _outputs_used(roots: Sequence[torch.Tensor]) -> list[tuple[Call, int]]:
    """The outputs of calls that a pass from these comes to, by way of other calls too."""
    return [found for found in map(call_of, _nodes_of(roots)) if found is not None]


def _let_go(roots: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> None:
    """Detach every tensor that has the failed graph behind it; what the models were called with stays."""
    failed = _nodes_of(roots) - _nodes_of(arguments)
    held = [
        each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.grad_fn in failed
    ]
    views = [each for each in held if each._is_view()]
    for each in held:
        if not each._is_view():
            each.detach_()
    # A view refuses that, and is exchanged for one without history. What was made last comes first: if an operation
    # after a view has saved it, that is gone by then. What is still saved is the graph's own, and goes with it.
    failed.clear()
    for each in sorted(views, key=_when_made, reverse=True):
        if _use_count(each) == 1 and not weakref.getweakrefcount(each):
            torch.utils.swap_tensors(each, each.detach())  # type: ignore[no-untyped-call]


def _when_made(tensor: torch.Tensor) -> int:
    node: Any = tensor.grad_fn
    return int(node._sequence_nr())


def _use_count(tensor: Any) -> int:
    # Private in torch (tried on 2.13), which asks this itself before it exchanges tensors.
    return int(tensor._use_count())


def _nodes_of(tensors: Iterable[torch.Tensor]) -> set[Any]:
    found = {each.grad_fn for each in tensors if each.grad_fn is not None}
    waiting: list[Any] = list(found)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                waiting.append(node)
    return found
