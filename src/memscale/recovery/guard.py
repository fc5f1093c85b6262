"""Survive an out-of-memory error inside a step: repeat it with the same numbers.

Forward and backward are repeated under a heavier plan, forward with the random state and buffers that it found; of an
optimizer's step the arithmetic is repeated, a few parameters at a time.

Note [Backward again]
~~~~~~~~~~~~~~~~~~~~~
If memory runs out in a call of `torch.autograd.backward` that reaches calls of a wrapped model, the gradients of the
model's outputs are known (Note [Gradients of a model's outputs]), unless the pass failed before it got there. A
parameter's gradient has been accumulated completely or not at all: autograd adds it in one operation when all of its
parts have arrived. So nothing has to be undone: the repetition leaves out the parameters that have theirs.

Then what the failed graph has saved is freed; the loop may still hold its loss and logits. The calls are repeated
under a heavier plan, and one backward pass brings the missing gradients. A pass is not repeated if that could give
other numbers, or if something would be lost (`_Pass._objection`); then the next step has the heavier plan.

Note [Repeated steps]
~~~~~~~~~~~~~~~~~~~~~
``foreach`` arithmetic allocates temporaries as large as all parameters together, in the middle of a step, when
parameters have been changed already. A step can be repeated only from copies, which are too expensive at every step:

- Where the device has less free memory than a step may need, the step is run in buckets, each with copies of its
  operands on the host, which are kept until the step is done. A bucket that runs out of memory is restored and halved.
- Elsewhere a step runs as it is, and version counters tell what it changed. If memory runs out before anything was
  changed (state is allocated first), the step is run again in buckets.
- If something was changed, the error says so: there is nothing to restore it from. So it is on a CPU, whose free
  memory says little; after the first time its steps are run in buckets.

If one parameter alone does not fit, or in a first step the state of all parameters, everything is restored and the
error is raised. A step that is not one of torch.optim's (``optimizer/interceptor.py``) is not repeated.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memscale._torch import (
    BACKWARD,
    BackwardOrder,
    LightDispatchMode,
    a_dispatch_mode_is_active,
    graph_nodes,
    hooks_are_allowed,
    in_backward,
    leaves_of,
    release_saved_tensors,
    written_tensors,
)
from memscale.checkpointing.model_call import GraphHandle, ModelCall, reached_outputs
from memscale.config import Config
from memscale.errors import RecomputeError, is_out_of_memory
from memscale.execution_plan import Plan
from memscale.executor import Executor, executor_of
from memscale.executor.executor import UNSEEN_STEPS
from memscale.hardware.host import process_count
from memscale.observe.log import open_log
from memscale.optimizer.interceptor import (
    Member,
    StepInterceptor,
    StepOrder,
    StepSubscriber,
    arithmetic_of,
    members_of,
    split_step,
    why_whole,
)
from memscale.recovery.shortage import attempt, explain, free_memory, heavier_plans, log_recovery
from memscale.techniques.forward import Args, Forward, ForwardStage, Kwargs, Stage, override_of
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

_BACKWARD = inspect.signature(torch.autograd.backward)
_FREED = (
    "Trying to backward through a graph a second time whose first backward pass ran out of memory and was repeated by "
    "MemScale with another graph. Specify retain_graph=True if you need to backward through it again."
)

BUCKET_BYTES = 64 * 2**20
_TEMPORARIES = 2  # bytes of temporaries that a step may need, for each byte of parameters
_NEW_STATE = 2  # the same for state that is not there yet: as for Adam
_CHANGED = "the update had begun, and parameters or moments were changed: load them from a checkpoint before going on"
_EXPLAINED = "_memscale_explained"
_NOT_OURS = "its step is not torch.optim's own"
_AROUND = "memory ran out where state is moved for the step, outside of torch's arithmetic"
_REPEATED = (
    "out of memory in the optimizer's step (%s): repeated in buckets of parameters, as later ones will be"
)
_NO_ROOM = (
    "beside the state of those before it, one parameter alone does not fit; all is as before the step. Under a plan "
    "for less (a memory_budget, mode='aggressive') optimizer state is kept on the host"
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
    return forward(*call.args, **call.kwargs)


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
                call.check_inputs()
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


# The optimizer's step --------------------------------------------------------------------------------


class StepRecovery(StepSubscriber):
    """Repeats steps of a model's parameters that run out of memory, whichever optimizer makes them."""

    order = StepOrder.RECOVERY

    def __init__(self, model: nn.Module, executor: Executor) -> None:
        self._model = weakref.ref(model)
        self._optimizers = executor.placement.optimizers
        self._accumulation = executor.accumulation
        self._ran_out = False

    def _executor(self) -> Executor | None:
        model = self._model()
        return None if model is None else executor_of(model)

    def parameter_ids(self) -> set[int]:
        model = self._model()
        return set() if model is None else {id(parameter) for parameter in model.parameters()}

    def before_step(self, optimizer: Optimizer) -> None:
        """Tell the model's placement of an optimizer."""
        self._optimizers.add(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        self._accumulation.end_step()
        if self._accumulation.steps == UNSEEN_STEPS and not self._accumulation.was_called:
            executor = self._executor()
            if executor is not None:
                executor.warn_unseen()

    def around_step(self, step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Explain an out-of-memory error in a step that cannot be repeated."""
        try:
            return step(optimizer, *args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error) and not hasattr(error, _EXPLAINED):
                by_torch = arithmetic_of(type(optimizer)) is type(optimizer)
                self._explain(error, why_whole(optimizer) or (_AROUND if by_torch else _NOT_OURS))
            raise

    def around_arithmetic(self, call: Callable[[], Any], optimizer: Optimizer) -> None:
        """Run the arithmetic, again in buckets if memory runs out."""
        if self._is_short(optimizer):
            self._in_buckets(optimizer, call)
            return
        members = members_of(optimizer)
        before = _Snapshot(optimizer, members, _version_or_counter)
        # Under a dispatch mode versions do not change.
        writes = _Writes(members) if a_dispatch_mode_is_active() else None
        failure: Exception | None = None
        with writes or contextlib.nullcontext():
            try:
                call()
            except Exception as error:  # handled below: here its frames hold their tensors
                if not is_out_of_memory(error):
                    raise
                failure = error
        if failure is None:
            return
        self._ran_out = True
        origin = _free_memory(optimizer, failure)
        if before.is_outdated() or (writes is not None and writes.seen):
            self._explain(failure, _CHANGED, origin)
            raise failure
        before.restore()
        self._in_buckets(optimizer, call)
        executor = self._executor()
        with open_log((executor and executor.config) or Config()) as log:
            log.warning(_REPEATED, str(failure).partition("\n")[0][:120])

    def _in_buckets(self, optimizer: Optimizer, call: Callable[[], Any]) -> None:
        # Taken from the end: those without a gradient go with the last bucket.
        pending = sorted(members_of(optimizer), key=lambda member: member.parameter.grad is None)[::-1]
        limit = BUCKET_BYTES
        done: list[_Snapshot] = []
        is_kept = not StepInterceptor.instance.has_begun(optimizer)  # what every bucket so far had before
        with split_step(optimizer) as split:
            while pending:
                bucket = [pending.pop()]
                size = _stepped_bytes(bucket[0])
                while pending and size + _stepped_bytes(pending[-1]) <= limit:
                    size += _stepped_bytes(pending[-1])
                    bucket.append(pending.pop())
                operands = _Snapshot(optimizer, bucket, _on_host)
                split.show(bucket)
                failure = attempt(call)[1]
                if failure is None:
                    if all(member.parameter.device.type != "cpu" for member in bucket):
                        done.append(operands)  # on the host, where there is room
                    else:
                        is_kept = False
                    continue
                operands.restore()
                origin = _free_memory(optimizer, failure)
                if len(bucket) == 1:
                    for earlier in done:
                        earlier.restore()
                    self._explain(failure, _NO_ROOM if is_kept else _CHANGED, origin)
                    raise failure
                pending += bucket[::-1]
                limit = max(1, size // 2)

    def _is_short(self, optimizer: Optimizer) -> bool:
        """Return whether a device may lack the memory for a step's temporaries and new state."""
        if self._ran_out:
            return True
        needed: dict[torch.device, int] = {}
        for member in members_of(optimizer):
            parameter = member.parameter
            if parameter.grad is not None and parameter.device.type not in ("cpu", "meta"):
                times = _TEMPORARIES + (0 if optimizer.state.get(parameter) else _NEW_STATE)
                needed[parameter.device] = needed.get(parameter.device, 0) + times * parameter.nbytes
        return any(_free_bytes(device, size) < size for device, size in needed.items())

    def _explain(self, error: Exception, why: str, origin: str = "") -> None:
        executor = self._executor()
        if executor is not None:
            explain(error, executor, "the optimizer's step", None, (), why, origin=origin)
            setattr(error, _EXPLAINED, True)  # steps may be nested


class _Snapshot:
    """What a step changes: parameters and their state, each with what `keep` makes of it to restore it by."""

    def __init__(self, optimizer: Optimizer, members: Iterable[Member], keep: Callable[[Any], Any]) -> None:
        self._optimizer = optimizer
        with torch.no_grad():
            self._parameters = {each.parameter: keep(each.parameter) for each in members}
            self._states = {
                parameter: {name: (value, keep(value)) for name, value in optimizer.state[parameter].items()}
                for parameter in self._parameters
                if parameter in optimizer.state
            }

    def is_outdated(self) -> bool:
        """Return whether a tensor of which the version was kept has changed."""
        tensors = [*self._parameters.items()]
        for state in self._states.values():
            tensors += state.values()
        return any(isinstance(kept, int) and value._version != kept for value, kept in tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Write kept tensors back, and discard new state."""
        for parameter, copy in self._parameters.items():
            if isinstance(copy, torch.Tensor):
                parameter.copy_(copy)
            state = self._states.get(parameter)
            if state is None:
                self._optimizer.state.pop(parameter, None)
                continue
            for value, kept in state.values():
                if isinstance(kept, torch.Tensor):
                    value.copy_(kept)
            now = self._optimizer.state[parameter]
            now.clear()
            now.update({name: value for name, (value, _) in state.items()})


def _version_or_counter(value: Any) -> torch.Tensor | int | None:
    """Return the value of a counter, the version of a larger tensor or a parameter."""
    if not isinstance(value, torch.Tensor):
        return None
    return value.clone() if value.dim() == 0 and not isinstance(value, nn.Parameter) else value._version


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else None


class _Writes(LightDispatchMode):
    """Notes whether an operation writes to anything but a counter."""

    def __init__(self, members: Iterable[Member]) -> None:
        super().__init__()
        self.seen = False
        self._parameters = {id(each.parameter) for each in members}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.seen:
            written = written_tensors(func, args, kwargs or {})
            self.seen = any(each.dim() or id(each) in self._parameters for each in written)
        return result


def _stepped_bytes(member: Member) -> int:
    return member.parameter.nbytes if member.parameter.grad is not None else 0


def _free_memory(optimizer: Optimizer, failure: Exception) -> str:
    """Free what an error's traceback holds; return where the error came from."""
    devices = {member.parameter.device for member in members_of(optimizer)}
    return "".join([free_memory(device, failure) for device in devices])


def _free_bytes(device: torch.device, wanted: int) -> int:
    """Return what a device can still allocate, with its allocator's cache; `wanted` if that is unknown."""
    module: Any = torch.get_device_module(device)
    if not all(hasattr(module, name) for name in ("mem_get_info", "memory_reserved", "memory_allocated")):
        return wanted
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device) - module.memory_allocated(device))
