"""Optimizer steps that are computed while backward goes on, and committed by `optimizer.step()`.

Note [Overlapped steps]
~~~~~~~~~~~~~~~~~~~~~~~
With state on the host, a step on the device waits for the link, which backward leaves idle most of the time. So when
the gradients of a bucket of parameters have been accumulated, the step of the bucket is computed while backward goes
on: its state is copied to the device, torch's arithmetic steps copies of the parameters, and the new state is copied to
spare memory on the host. Parameters that are on the host themselves are copied to the device with their gradients, and
their new values to spare memory, too. What the user sees stays as it is. ``optimizer.step()`` then *commits*:
parameters on the device take the values of their copies, and what is on the host changes places with spare memory, or
is copied from it where somebody else has a view of it. A parameter of which anything has changed since is stepped as
always, and what was computed for it is dropped (a rollback), so that the numbers are those of the plain loop.

*What is compared.* The gradient, the parameter and each tensor of its state: the same object, and the same version,
which every change in place counts up; the settings of its group; and for the sake of changes through ``.data``, which
have no version, their bits: sums of the words of every run of 4095 elements. A change of one element always changes
such a sum, one of all signs does (the number is odd), one of the order does unless it stays within runs. Sums of
what a step is computed from are taken on the device, of the copies that it reads. ``step()`` takes them again where the
tensors are: on the host that is some 0.2 ns an element for one thread, DRAM's own rate with several, which every 61st
element alone would take as well. Of state, which loops have little reason to change just there, one run of 16 is read:
all of it would take as long as copying it to the device, which overlapping is to hide. So what can pass unnoticed is a
change of a few elements of state on the host, through ``.data``, between backward and ``step()``.

*When.* First the loop is observed for ``Config.warmup_steps`` steps in which every gradient came by one backward pass
and reached ``step()`` as that had left it. There every bit of a gradient counts, so that a loop which always changes
them, by whatever way, never overlaps. After a rollback twice as many such steps are needed.

*Streams.* Copies to the device, the arithmetic and copies back are on a stream each, so that the next bucket comes
while one is computed. What is loaded for two buckets is in flight at most: the stream of copies to the device, from
whose memory it is, waits until a bucket was copied back before it takes that memory again. After backward the compute
stream waits for the arithmetic, which reads parameters and gradients.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memscale._torch import at_end_of_backward, graph_task_id, has_other_views, is_fake
from memscale.config import AsyncOffloadConfig
from memscale.errors import TierFullError
from memscale.hardware.host import process_count
from memscale.observe.counters import Meter
from memscale.optimizer.eight_bit import Moment, is_dense
from memscale.optimizer.interceptor import (
    StepOrder,
    StepSubscriber,
    has_moments,
    leaves_gradients,
    members_of,
    split_step,
    step_alone,
    why_whole,
)
from memscale.optimizer.state_stores import StateMover, lane_of
from memscale.techniques.undo_log import GradientHook
from memscale.tiers.disk import HOST
from memscale.tiers.engine import MASTERS_SHARE, Engine, Lane, PinnedMemory, Transfer

MOST_STEP_BYTES = 256 * 2**20  # bytes that the step of one parameter may need to be computed in backward
RUN_ELEMENTS = 4095  # elements whose bits are summed, an odd number: see Note [Overlapped steps]
SAMPLING_PERIOD = 16  # of so many runs of state one is compared
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
T = TypeVar("T")

ACCUMULATED = "gradients come by several backward passes for each step"
GRADIENTS_CHANGE = "gradients are changed between backward and step(), as clipping and loss scaling do"


class _Arrival(NamedTuple):
    """A gradient as backward left it."""

    key: tuple[int, int, int]  # what changes with the tensor, its version and its memory
    passes: int  # backward passes since the last step
    sums: Tensor | None  # of its bits, where the loop is observed


class _EarlyStep(NamedTuple):
    """The step of one parameter, computed before it was asked for."""

    parameter: nn.Parameter
    gradient: Tensor
    versions: tuple[int, int]
    group: dict[str, Any]
    settings: dict[str, Any]
    before: dict[str, tuple[Any, tuple[int, float]]]  # its state, with versions
    values: Tensor  # of the parameter after the step: on its device
    after: dict[str, Any]  # its state after the step: where it was before
    sums: Callable[[], list[Tensor]]  # of the bits of what it was computed from

    def is_current(self, optimizer: Optimizer, group: dict[str, Any]) -> bool:
        """Return whether it was computed from what is there now, as far as versions tell; `group` is its group now."""
        parameter, state = self.parameter, optimizer.state.get(self.parameter, {})
        return (
            parameter.grad is self.gradient
            and self.versions == (parameter._version, self.gradient._version)
            and group is self.group
            and _settings(group) == self.settings
            and {name: id(value) for name, value in state.items()}
            == {name: id(value) for name, (value, _) in self.before.items()}
            and all(_version(value) == version for value, version in self.before.values())
        )


@dataclass
class _Loop:
    """What was observed of the training loop around one optimizer."""

    needed: int  # unchanged steps in a row before steps overlap
    unchanged: int = 0

    @property
    def overlaps(self) -> bool:
        return self.unchanged >= self.needed

    def back_off(self) -> None:
        """Overlap no more until twice as many steps were unchanged."""
        self.needed, self.unchanged = 2 * max(1, self.needed), 0


class OverlappedSteps(StepSubscriber):
    """Computes the steps of parameters whose state is on the host. See Note [Overlapped steps].

    Attributes:
        obstacle: Why the last step could not have been computed in backward; None if it could.
    """

    order = StepOrder.OVERLAP

    def __init__(self, mover: StateMover, pinned: PinnedMemory, meter: Meter) -> None:
        self.obstacle: str | None = None
        self._mover = mover
        self._pinned = pinned
        self.meter = meter
        self._engine = Engine(AsyncOffloadConfig())
        self._arithmetic = Engine(AsyncOffloadConfig())  # with a stream of its own
        self._lock = threading.RLock()  # backward runs in threads of its own
        self._device = HOST
        self._computes = False
        self._warmup_steps = 0
        self._bucket_bytes = 0
        self._loops: MutableMapping[Optimizer, _Loop] = weakref.WeakKeyDictionary()
        self._hooks: dict[int, tuple[nn.Parameter, GradientHook]] = {}
        # By parameter: who last stepped it, and its group there.
        self._owners: dict[int, tuple[weakref.ref[Optimizer], dict[str, Any]]] = {}
        self._arrived: dict[int, _Arrival] = {}
        self._waiting: list[nn.Parameter] = []  # the next bucket
        self._streams: set[torch.cuda.Stream] = set()  # that computed its gradients
        self._computed: Transfer[Any] | None = None  # the last bucket of the running backward
        self._task: int | None = None
        self._early: dict[int, _EarlyStep] = {}
        self._spare: dict[tuple[int, str], Tensor] = {}  # by parameter and name of its state; "" is itself
        self._writing: deque[tuple[Transfer[None], list[Any]]] = deque()  # with what was loaded

    # ------------------------------------------------------------------ on and off

    def attach(
        self,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        bucket_bytes: int,
        warmup_steps: int,
        *,
        computes: bool,
    ) -> None:
        """Observe the loop that trains these; with `computes`, overlap their steps with backward if it allows that.

        Args:
            parameters: On the device, with state in the store; or on the host, to be stepped on the device.
            device: Where steps are computed.
            bucket_bytes: The parameters, gradients and state of one bucket.
            warmup_steps: How many steps are observed first.
            computes: Whether the plan has room for it.
        """
        self._device, self._computes = device, computes
        self._bucket_bytes, self._warmup_steps = bucket_bytes, warmup_steps
        wanted = {id(each): each for each in parameters if each.requires_grad and each.is_leaf}
        for key in self._hooks.keys() - wanted.keys():
            parameter, hook = self._hooks[key]
            hook.remove(parameter)
            del self._hooks[key]  # not before: a detach that was interrupted goes on here
        for key in wanted.keys() - self._hooks.keys():
            self._hooks[key] = wanted[key], GradientHook(wanted[key], self._gradient_arrived)
        if wanted:
            self.subscribe()

    def detach(self) -> None:
        """Observe and compute no more."""
        self.unsubscribe()
        self.drop()
        self.attach((), HOST, 0, 0, computes=False)
        for each in (self._spare, self._owners, self._arrived, self._loops):
            each.clear()

    def drop(self) -> None:
        """Drop what was computed and not committed."""
        with self._lock:
            self._finish_writing()  # first: memory that is freed may be reused at once, and copies read gradients
            self._waiting.clear()
            self.meter.steps_dropped += len(self._early)
            self._early.clear()

    def before_forward(self, *_: object) -> None:
        """Drop what a skipped step, or a backward that raised, has left: a hook before the model's forward."""
        if (self._early or self._waiting) and torch.is_grad_enabled():
            self.drop()

    @property
    def is_allowed(self) -> bool:
        """Whether the loops of all optimizers that have stepped allow their steps to overlap."""
        return bool(self._loops) and all(loop.overlaps for loop in self._loops.values())

    # ------------------------------------------------------------------ in backward

    def _gradient_arrived(self, parameter: nn.Parameter) -> None:
        key, gradient = id(parameter), parameter.grad
        if key not in self._hooks or gradient is None:
            return
        with self._lock, torch.no_grad():
            loop = self._loop_of(parameter)
            overlaps = loop is not None and loop.overlaps
            before = self._arrived.get(key)
            passes = 1 if before is None else before.passes + 1
            observed = not overlaps and not is_fake(gradient) and _is_plain(gradient)
            self._arrived[key] = _Arrival(_key(gradient), passes, _sums_of(gradient) if observed else None)
            if self._early.pop(key, None) is not None:
                self.meter.steps_dropped += 1
            if passes > 1 or not overlaps or not self._can_compute(parameter, gradient):
                return
            task = graph_task_id()
            if task != self._task:
                self._task = task
                at_end_of_backward(self._end_backward)
            self._waiting.append(parameter)
            if gradient.device.type == "cuda":
                self._streams.add(torch.cuda.current_stream(gradient.device))
            if sum(map(step_bytes, self._waiting)) >= self._bucket_bytes:
                self._flush()

    def _loop_of(self, parameter: Tensor) -> _Loop | None:
        optimizer, _ = self._owner(parameter)
        return None if optimizer is None else self._loops.get(optimizer)

    def _owner(self, parameter: Tensor) -> tuple[Optimizer | None, dict[str, Any]]:
        """Return the optimizer that last stepped a parameter, and its group."""
        reference, group = self._owners.get(id(parameter), (None, {}))
        return None if reference is None else reference(), group

    def _can_compute(self, parameter: nn.Parameter, gradient: Tensor) -> bool:
        """Return whether the step of a parameter can be computed from what is there."""
        optimizer, group = self._owner(parameter)
        if not self._computes or optimizer is None or why_whole(optimizer) is not None:
            return False
        if not leaves_gradients(optimizer):  # a gradient must be there for a step after a rollback
            return False
        state = optimizer.state.get(parameter) or {}
        copied = [value for value in state.values() if isinstance(value, Tensor) and self._is_copied(value)]
        if parameter.device == HOST:
            copied += [parameter, gradient]
        # Copies from memory that is not page-locked hold up the thread that starts them.
        is_fast = self._device.type != "cuda" or all(each.is_pinned() for each in copied)
        return (
            bool(copied)
            and parameter.dim() > 0
            and (bool(state) or not has_moments(optimizer))  # the first step makes it
            and is_fast
            and not any(value is None or isinstance(value, Moment) for value in state.values())
            and all(value.device == HOST for value in state.values() if isinstance(value, Tensor))
            and not any(isinstance(value, Tensor) for value in _settings(group).values())
            and all(map(_is_plain, (gradient, parameter, *copied)))
            and not group.get("fused")
            and not group.get("capturable")  # counters would be on the device
            and step_bytes(parameter) <= MOST_STEP_BYTES
            and process_count() == 1  # several average gradients after this
        )

    def _is_copied(self, value: Tensor) -> bool:
        """Return whether a state tensor is on the host between steps, and on the device for one."""
        return value.device == HOST and value.dim() > 0

    def _end_backward(self) -> None:
        """Compute the last bucket; what is done from now on to parameters and gradients waits until they were read."""
        self._flush()
        computed, self._computed = self._computed, None
        if computed is not None:
            computed.wait()

    def _flush(self) -> None:
        """Compute the step of the next bucket."""
        with self._lock, torch.no_grad(), self.meter.timing("optimizer state"):
            # Without a gradient: it waited since a backward that raised.
            waiting = [each for each in self._waiting if each.grad is not None]
            self._waiting.clear()
            owners = [self._owner(each) for each in waiting]
            if not waiting or any(optimizer is None for optimizer, _ in owners):
                return
            try:
                self._compute(
                    waiting, [(optimizer, group) for optimizer, group in owners if optimizer is not None]
                )
            except (torch.OutOfMemoryError, TierFullError):  # step() itself needs less room
                self._arithmetic.drain(self._device)  # before what it reads and writes is released
                self.meter.steps_dropped += len(waiting)
                for loop in map(self._loop_of, waiting):
                    if loop is not None and loop.overlaps:
                        loop.back_off()

    def _compute(
        self, parameters: Sequence[nn.Parameter], owners: Sequence[tuple[Optimizer, dict[str, Any]]]
    ) -> None:
        device, lane, engine = self._device, lane_of(self._device), self._engine
        ready = [each.record_event() for each in self._streams]  # this thread may have another
        self._streams.clear()
        states = [
            optimizer.state.get(parameter, {})
            for (optimizer, _), parameter in zip(owners, parameters, strict=True)
        ]
        spares = [self._spares_for(*each) for each in zip(parameters, states, strict=True)]
        copies: list[nn.Parameter] = []
        loaded: list[dict[str, Any]] = []
        in_flight: list[Any] = []  # arithmetic may put other tensors in the place of those that were loaded

        def load() -> None:
            while len(self._writing) > 1:
                self._writing.popleft()[0].wait()
            for state in states:
                loaded.append({name: self._load("optimizer state", value) for name, value in state.items()})
                in_flight.extend(loaded[-1].values())
            for parameter in parameters:
                if parameter.device == HOST:
                    copies.append(nn.Parameter(self._load("parameters", parameter.detach())))
                    copies[-1].grad = self._load("gradients", parameter.grad)

        def compute() -> list[list[Tensor]]:
            for event in ready:
                torch.cuda.current_stream(device).wait_event(event)
            for index, parameter in enumerate(parameters):
                if parameter.device != HOST:
                    copies.insert(index, nn.Parameter(parameter.detach().clone()))
                    copies[index].grad = parameter.grad
                    if lane is Lane.STREAM and parameter.grad is not None:
                        parameter.grad.record_stream(torch.cuda.current_stream(device))
            sums = [
                _sums_of_step(copy, copy.grad, state.values())
                for copy, state in zip(copies, loaded, strict=True)
            ]
            for group in {id(group): group for _, group in owners}.values():
                of_group = [index for index, (_, each) in enumerate(owners) if each is group]
                stepped = {copies[index]: loaded[index] for index in of_group}
                step_alone(owners[of_group[0]][0], group, list(stepped), stepped)
            return sums

        def write() -> None:
            for spare, copy, new in zip(spares, copies, loaded, strict=True):
                for name, target in spare.items():
                    target.copy_(copy.detach() if name == "" else new[name], non_blocking=True)

        arrived = engine.run(load, lane, device)
        self._computed = computed = self._arithmetic.run(compute, lane, device, after=arrived)
        written = engine.run(write, lane, device, outward=True, after=computed)
        on_host = [index for index, each in enumerate(parameters) if each.device == HOST]
        for index, (copy, new) in enumerate(zip(copies, loaded, strict=True)):
            in_flight += [*new.values(), *((copy.detach(), copy.grad) if index in on_host else ())]
            copy.grad = None
        self._writing.append((written, in_flight))
        for index, parameter in enumerate(parameters):
            gradient, (_, group) = parameter.grad, owners[index]
            assert gradient is not None, "its gradient has just arrived"
            new_values = spares[index].pop("") if index in on_host else copies[index].detach()
            self._early[id(parameter)] = _EarlyStep(
                parameter,
                gradient,
                (parameter._version, gradient._version),
                group,
                _settings(group),
                {name: (value, _version(value)) for name, value in states[index].items()},
                new_values,
                {**loaded[index], **spares[index]},
                _item_of(computed, index),
            )

    def _load(self, what: Any, value: Any) -> Any:
        """Return what is on the host on the device, and a copy of counters."""
        if not isinstance(value, Tensor):
            return value
        if not self._is_copied(value):
            return value.clone()
        self.meter.count_read(what, "host", value.nbytes)
        return value.to(self._device, non_blocking=True)

    def _spares_for(self, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Tensor]:
        """Return memory on the host for what of a parameter and its state is there, by name; "" is the parameter."""
        kept: dict[str, Any] = {"": parameter.detach(), **state} if parameter.device == HOST else state
        spares = {}
        for name, value in kept.items():
            if not isinstance(value, Tensor) or not self._is_copied(value):
                continue
            spare = self._spare.get((id(parameter), name))
            if spare is None or spare.shape != value.shape or spare.stride() != value.stride():
                if name and self._mover.is_stored(value):
                    spare = self._mover.allocate_stored(value, parameter)
                else:
                    spare = self._pinned.empty_like(value, self._device, MASTERS_SHARE)
                    spare = torch.empty_like(value) if spare is None else spare
                self._spare[id(parameter), name] = spare
            spares[name] = spare
        return spares

    def _finish_writing(self) -> None:
        while self._writing:
            self._writing.popleft()[0].finish()

    # ------------------------------------------------------------------ in step()

    def parameter_ids(self) -> Container[int]:
        return self._hooks

    def around_arithmetic(self, call: Callable[[], Any], optimizer: Optimizer) -> None:
        """Step what has no early step, and then, which cannot fail, commit those that have."""
        early = self._observe(optimizer)
        if not early:
            call()
            return
        done = {id(each.parameter) for each in early}
        others = [each for each in members_of(optimizer) if id(each.parameter) not in done]
        with split_step(optimizer) as split:
            split.show(others)
            call()  # also if there are none: subscribers see the step
        self._commit(early, optimizer)

    def _observe(self, optimizer: Optimizer) -> list[_EarlyStep]:
        """Observe the loop of an optimizer that is about to step; return the early steps to commit."""
        with self._lock, torch.no_grad():
            groups = optimizer.param_groups
            members = [each for each in members_of(optimizer) if id(each.parameter) in self._hooks]
            stepped = {id(each.parameter): (each.parameter, groups[each.group]) for each in members}
            self._owners.update({key: (weakref.ref(optimizer), group) for key, (_, group) in stepped.items()})
            loop = self._loops.setdefault(optimizer, _Loop(self._warmup_steps))
            arrivals = [(parameter, self._arrived.pop(key, None)) for key, (parameter, _) in stepped.items()]
            early = [self._early.pop(key) for key in stepped if key in self._early]
            current = [each for each in early if each.is_current(optimizer, stepped[id(each.parameter)][1])]
            current = _with_equal_sums(current)
            self.meter.steps_dropped += len(early) - len(current)
            if not current or len(current) < len(early):
                self._finish_writing()  # and release what was loaded: the step needs the room
            self.obstacle = _obstacle(arrivals)
            if self.obstacle is None and len(current) == len(early):
                loop.unchanged += 1
            elif loop.overlaps:
                loop.back_off()
            else:
                loop.unchanged = 0
            return current

    def _commit(self, steps: Iterable[_EarlyStep], optimizer: Optimizer) -> None:
        with self._lock, torch.no_grad(), self.meter.timing("optimizer state"):
            self._finish_writing()
            for step in steps:
                parameter, state = step.parameter, optimizer.state.get(step.parameter, {})
                if parameter.device == HOST:
                    self._exchange("parameters", parameter, "", parameter, step.values)
                else:
                    if parameter.device.type == "cuda":
                        step.values.record_stream(torch.cuda.current_stream(parameter.device))
                    parameter.copy_(step.values)
                for name, after in step.after.items():
                    before = state[name]
                    if not isinstance(before, Tensor):
                        state[name] = after
                    elif self._is_copied(before):
                        self._exchange("optimizer state", parameter, name, before, after)
                    else:
                        before.copy_(after)
                self.meter.steps_committed += 1

    def _exchange(self, what: Any, parameter: nn.Parameter, name: str, kept: Tensor, spare: Tensor) -> None:
        """Give a tensor on the host spare memory with new values; if there are views of its own, the values."""
        self.meter.count_written(what, "host", kept.nbytes)
        if has_other_views(kept):
            kept.copy_(spare)
            return
        memory = kept.data
        kept.data = spare
        kept.as_strided((0,), (1,)).zero_()  # counts as a change in place, which it was
        self._spare[id(parameter), name] = memory


def _obstacle(arrivals: Iterable[tuple[Tensor, _Arrival | None]]) -> str | None:
    """Return why the steps of these parameters cannot be computed in backward; None if they can."""
    then: list[list[Tensor]] = []
    now: list[list[Tensor]] = []
    for parameter, arrival in arrivals:
        gradient = parameter.grad
        if gradient is None:
            continue
        if arrival is None or arrival.key != _key(gradient):
            return GRADIENTS_CHANGE
        if arrival.passes > 1:
            return ACCUMULATED
        if arrival.sums is not None:
            then.append([arrival.sums])
            now.append([_sums_of(gradient)])
    return None if all(map(torch.equal, _on_host(then), _on_host(now))) else GRADIENTS_CHANGE


# ---------------------------------------------------------------------- sums of bits, see Note [Overlapped steps]


def _with_equal_sums(steps: Sequence[_EarlyStep]) -> list[_EarlyStep]:
    """Return the steps for which parameter, gradient and state still have the bits that they were computed from."""
    if steps and is_fake(steps[0].parameter):  # in a simulation, where nothing has values
        return list(steps)
    now = [
        _sums_of_step(each.parameter, each.gradient, [value for value, _ in each.before.values()])
        for each in steps
    ]
    pairs = zip(_on_host(now), _on_host([each.sums() for each in steps]), strict=True)
    return [each for each, pair in zip(steps, pairs, strict=True) if torch.equal(*pair)]


def _sums_of_step(parameter: Tensor, gradient: Tensor | None, state: Iterable[Any]) -> list[Tensor]:
    """Return sums of the bits of what a step is computed from, but counters."""
    assert gradient is not None, "it was there when its step was computed"
    if is_fake(parameter):
        return []
    state = [value for value in state if isinstance(value, Tensor) and value.dim() > 0]
    return [_sums_of(parameter), _sums_of(gradient), *(_sums_of(each, SAMPLING_PERIOD) for each in state)]


def _sums_of(tensor: Tensor, sampled: int = 1) -> Tensor:
    """Return the first word of a tensor and sums of the words of its runs, of so many one; of other layouts none."""
    if not _is_plain(tensor):  # it was exchanged for another
        return tensor.new_empty(0, dtype=torch.int64)
    words = tensor.detach().as_strided((tensor.numel(),), (1,)).view(_WORDS[tensor.element_size()])
    whole = words.numel() // RUN_ELEMENTS * RUN_ELEMENTS
    runs = words[:whole].view(-1, RUN_ELEMENTS)[:: sampled if whole > sampled * RUN_ELEMENTS else 1]
    # In their own type, modulo its range: a sum of larger ones would first make such of all words.
    rest = words[whole:].sum(0, keepdim=True, dtype=words.dtype)
    return torch.cat([words[:1], runs.sum(1, dtype=words.dtype), rest]).long()


def _on_host(rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return each row of tensors as one on the host; all that is on the device comes by one copy."""
    there = [each for row in rows for each in row if each.device != HOST]
    copied = iter(torch.cat(there).cpu().split_with_sizes([each.numel() for each in there]) if there else ())
    return [torch.cat([each if each.device == HOST else next(copied) for each in row]) for row in rows]


def _item_of(transfer: Transfer[list[T]], index: int) -> Callable[[], T]:
    return lambda: transfer.wait()[index]


def _key(tensor: Tensor) -> tuple[int, int, int]:
    return id(tensor), tensor._version, tensor.untyped_storage()._cdata if _is_plain(tensor) else 0


def _version(value: Any) -> tuple[int, float]:
    """Return the version of a tensor; with a counter on the host its value, which `.data` may change."""
    if not isinstance(value, Tensor):
        return 0, 0.0
    is_known = value.dim() == 0 and value.device == HOST and not is_fake(value)
    return value._version, value.item() if is_known else 0.0


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided and is_dense(tensor) and not tensor.is_complex() and tensor.numel() > 0
    )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def step_bytes(parameter: Tensor) -> int:
    """Return what the step of a parameter needs: itself, its gradient and two moments."""
    return 4 * parameter.nbytes
