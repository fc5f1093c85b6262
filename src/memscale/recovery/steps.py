"""Recovery from out-of-memory errors in an optimizer's step: its arithmetic again, a few parameters at a time.

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
error is raised. A step that is not one of torch.optim's (``optimizer/kinds.py``) is not repeated.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._torch import LightDispatchMode, a_dispatch_mode_is_active, written_tensors
from memscale.config import Config
from memscale.errors import is_out_of_memory
from memscale.executor import Executor, executor_of
from memscale.executor.executor import UNSEEN_STEPS
from memscale.observe.log import open_log
from memscale.optimizer.interceptor import (
    Member,
    SplitStep,
    StepInterceptor,
    StepOrder,
    StepSubscriber,
    members_of,
)
from memscale.optimizer.kinds import arithmetic_of, why_whole
from memscale.recovery.shortage import explain, free_memory

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
        with writes or contextlib.nullcontext():
            failure = _attempt(call)
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
        with SplitStep(optimizer) as split:
            while pending:
                bucket = [pending.pop()]
                size = _stepped_bytes(bucket[0])
                while pending and size + _stepped_bytes(pending[-1]) <= limit:
                    size += _stepped_bytes(pending[-1])
                    bucket.append(pending.pop())
                operands = _Snapshot(optimizer, bucket, _on_host)
                split.show(bucket)
                failure = _attempt(call)
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


def _attempt(call: Callable[[], Any]) -> Exception | None:
    """Make a call; return the error if memory ran out. See Note [What an error holds]."""
    try:
        call()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return error
    return None


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
