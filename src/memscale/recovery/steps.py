"""Recovery from out-of-memory errors in an optimizer's step: its arithmetic again, a few parameters at a time.

Note [Repeated steps]
~~~~~~~~~~~~~~~~~~~~~
``foreach`` arithmetic allocates temporaries as large as all parameters together, in the middle of a step: when they do
not fit, moments and parameters have been changed already. A step can therefore be repeated only from copies, and copies
of everything at every step would cost more than they are worth. Hence:

- Where the device has less free memory than a step may need, the step is run in buckets, each with copies of its
  operands on the host, which are kept until the step is done. A bucket that runs out of memory is restored and halved.
- Elsewhere a step runs as it is, and version counters tell what it changed. If memory runs out all the same before
  anything was changed (state is allocated first), the step is run again in buckets.
- If something was changed, the error says so: there is nothing to restore it from. This is also what happens on a
  CPU, whose free memory says little; after the first time its steps are run in buckets.

If one parameter alone does not fit, everything is restored and the error is raised. The same holds in a first step
without room for the state of all parameters: the plan is not changed in the middle of a step. A step that is not one
of torch.optim's (``optimizer/kinds.py``) is not repeated.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._torch import LightDispatchMode, a_dispatch_mode_is_active, written_tensors
from memscale.config import Config
from memscale.errors import is_out_of_memory
from memscale.executor import executor_of
from memscale.observe.log import open_log
from memscale.optimizer.buckets import Member, SplitStep, members_of
from memscale.optimizer.interceptor import StepOrder, StepSubscriber
from memscale.optimizer.kinds import why_whole
from memscale.recovery.shortage import add_note, explain, free_memory

__all__ = ["StepRecovery"]

BUCKET_BYTES = 64 * 2**20
_TEMPORARIES = 2  # bytes of temporaries that a step may need, for each byte of parameters
_NEW_STATE = 2  # the same for state that is not there yet: as for Adam
_CHANGED = "the update had begun, and parameters or moments were changed: load them from a checkpoint before going on"
_EXPLAINED = "_memscale_explained"
_NOT_OURS = "its step is not torch.optim's own"
_NO_ROOM = (
    "beside the state of those before it, one parameter alone does not fit; all is as before the step. Under a plan "
    "for less (a memory_budget, mode='aggressive') optimizer state is kept on the host"
)


class StepRecovery(StepSubscriber):
    """Repeats steps of a model's parameters that run out of memory, whichever optimizer makes them."""

    order = StepOrder.RECOVERY

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._ran_out = False
        self.subscribe()

    def undo(self) -> None:
        self.unsubscribe()

    def parameter_ids(self) -> set[int]:
        """Return the ids of the model's parameters."""
        model = self._model()
        return set() if model is None else {id(parameter) for parameter in model.parameters()}

    def before_step(self, optimizer: Optimizer) -> None:
        """Tell the model's placement of an optimizer."""
        model = self._model()
        executor = None if model is None else executor_of(model)
        if executor is not None:
            executor.placement.note_optimizer(optimizer)

    def around_step(self, step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Explain an out-of-memory error in a step that cannot be repeated."""
        try:
            return step(optimizer, *args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error) and not hasattr(error, _EXPLAINED):
                self._explain(error, why_whole(optimizer) or _NOT_OURS)
            raise

    def around_arithmetic(self, call: Callable[[], Any], optimizer: Optimizer) -> None:
        """Run the arithmetic, again in buckets if memory runs out."""
        self._watched(optimizer, call)

    # ------------------------------------------------------------------ a step

    def _watched(self, optimizer: Optimizer, call: Callable[[], Any]) -> None:
        if self._is_short(optimizer):
            self._in_buckets(optimizer, call)
            return
        versions = _Versions(optimizer)
        try:
            with versions.recorded():
                call()
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error
        self._ran_out = True
        came_from = _free(optimizer, failure)
        if not versions.restore():
            self._explain(failure, _CHANGED, came_from)
            raise failure
        self._in_buckets(optimizer, call)
        self._say(failure)

    def _in_buckets(self, optimizer: Optimizer, call: Callable[[], Any]) -> None:
        everyone = members_of(optimizer)
        stepped = [member for member in everyone if member.parameter.grad is not None]
        pending = [member for member in everyone if member.parameter.grad is None]
        if not stepped:
            call()
            return
        pending += stepped[::-1]  # taken from the end: those without a gradient go with the last bucket
        limit = BUCKET_BYTES
        done: list[_Operands] = []
        is_kept = True  # what every bucket so far had before
        with SplitStep(optimizer) as split:
            while pending:
                bucket = _take(pending, limit)
                operands = _Operands(optimizer, bucket)
                split.show(bucket)
                failure = _attempt(call)
                if failure is None:
                    if all(member.parameter.device.type != "cpu" for member in bucket):
                        done.append(operands)  # on the host, where there is room
                    else:
                        is_kept = False
                    continue
                operands.restore()
                came_from = _free(optimizer, failure)
                if len(bucket) == 1:
                    for earlier in done:
                        earlier.restore()
                    self._explain(failure, _NO_ROOM if is_kept else _CHANGED, came_from)
                    raise failure
                pending += bucket[::-1]
                limit = max(1, sum(map(_bytes_of, bucket)) // 2)

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

    # ------------------------------------------------------------------ words

    def _explain(self, error: Exception, why: str, came_from: str = "") -> None:
        model = self._model()
        executor = None if model is None else executor_of(model)
        if executor is not None:
            add_note(error, explain(executor, "the optimizer's step", None, (), why), came_from)
            setattr(error, _EXPLAINED, True)  # steps may be nested

    def _say(self, error: Exception) -> None:
        model = self._model()
        executor = None if model is None else executor_of(model)
        config = (executor.config if executor is not None else None) or Config()
        with open_log(config) as log:
            log.warning(
                "out of memory in the optimizer's step (%s): it was repeated a few parameters at a time, as later "
                "ones will be",
                str(error).partition("\n")[0][:120],
            )


def _attempt(call: Callable[[], Any]) -> Exception | None:
    """Return the error if memory ran out."""
    try:
        call()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return error
    return None


class _Versions:
    """The versions of a step's operands, which tell whether it changed anything."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._seen_writing = False
        self._parameters = [(each.parameter, each.parameter._version) for each in members_of(optimizer)]
        self._states = {
            parameter: {name: (value, _kept(value)) for name, value in optimizer.state[parameter].items()}
            for parameter, _ in self._parameters
            if parameter in optimizer.state
        }

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Run the step in this block: under a dispatch mode versions do not change, and its writes are recorded."""
        if not a_dispatch_mode_is_active():
            yield
            return
        writes = _Writes({id(parameter) for parameter, _ in self._parameters})
        try:
            with writes:
                yield
        finally:
            self._seen_writing = writes.seen

    def restore(self) -> bool:
        """Discard state that was made anew; return False if something else was changed."""
        if self._seen_writing or any(
            parameter._version != version for parameter, version in self._parameters
        ):
            return False
        for state in self._states.values():
            for value, kept in state.values():
                if isinstance(kept, int) and value._version != kept:
                    return False
        with torch.no_grad():
            for parameter, _ in self._parameters:
                _restore(self._optimizer, parameter, self._states.get(parameter))
        return True


class _Writes(LightDispatchMode):
    """Notes whether an operation writes to anything but a counter."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self.seen = False
        self._parameters = parameters

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.seen:
            written = written_tensors(func, args, kwargs or {})
            self.seen = any(each.dim() or id(each) in self._parameters for each in written)
        return result


def _kept(value: Any) -> torch.Tensor | int | None:
    """Return the value of a counter, the version of a larger tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    return value.clone() if value.dim() == 0 else value._version


class _Operands:
    """Copies on the host of what a bucket's arithmetic changes."""

    def __init__(self, optimizer: Optimizer, bucket: Iterable[Member]) -> None:
        self._optimizer = optimizer
        with torch.no_grad():
            self._parameters = [(each.parameter, _on_host(each.parameter)) for each in bucket]
            self._states = {
                parameter: {
                    name: (value, _on_host(value)) for name, value in optimizer.state[parameter].items()
                }
                for parameter, _ in self._parameters
                if parameter in optimizer.state
            }

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, copy in self._parameters:
                parameter.copy_(copy)
                _restore(self._optimizer, parameter, self._states.get(parameter))


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else None


def _restore(optimizer: Optimizer, parameter: torch.Tensor, state: dict[str, Any] | None) -> None:
    if state is None:
        optimizer.state.pop(parameter, None)
        return
    for value, copy in state.values():
        if isinstance(copy, torch.Tensor):
            value.copy_(copy)
    now = optimizer.state[parameter]
    now.clear()
    now.update({name: value for name, (value, _) in state.items()})


def _take(pending: list[Member], limit: int) -> list[Member]:
    bucket = [pending.pop()]
    total = _bytes_of(bucket[0])
    while pending and total + _bytes_of(pending[-1]) <= limit:
        total += _bytes_of(pending[-1])
        bucket.append(pending.pop())
    return bucket


def _bytes_of(member: Member) -> int:
    return member.parameter.nbytes if member.parameter.grad is not None else 0


def _free(optimizer: Optimizer, failure: Exception) -> str:
    """Free what an error's traceback holds; return where the error came from."""
    devices = {member.parameter.device for member in members_of(optimizer)}
    return "".join([free_memory(device, failure) for device in devices])


def _free_bytes(device: torch.device, wanted: int) -> int:
    """Return the memory a device can still allocate, its allocator's cache included; `wanted` if that is unknown."""
    module: Any = torch.get_device_module(device)
    if not all(hasattr(module, name) for name in ("mem_get_info", "memory_reserved", "memory_allocated")):
        return wanted
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device) - module.memory_allocated(device))
