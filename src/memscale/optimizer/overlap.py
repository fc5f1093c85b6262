"""Optimizer steps that are computed while backward goes on, and committed by `optimizer.step()`.

Note [Overlapped steps]
~~~~~~~~~~~~~~~~~~~~~~~
With its state on the host, a step waits for the link, which backward leaves idle. So when the gradients of a bucket of
parameters have been accumulated, the step of the bucket is computed while backward goes on: its state is copied to the
device, torch's arithmetic steps copies of the parameters, and the new state is copied to spare memory on the host. What
the user sees stays as it is. ``optimizer.step()`` then *commits*: the parameters take the values of their copies, and
spare memory and state change places. A parameter of which anything has changed since is stepped as always, and what
was computed for it is dropped (a rollback): the numbers are those of the plain loop in any case.

*What is compared.* The gradient, the parameter and each tensor of its state: the same object, and the same version,
which every change in place counts up; the settings of its group; and norm and largest value of the gradient and the
norm of the parameter, for the sake of changes through ``.data``, which have no version.

*When.* First the loop is observed for ``Config.warmup_steps`` steps in which every gradient came by one backward pass
and reached ``step()`` as that had left it. There every bit of a gradient counts, so that a loop which always changes
them, by whatever way, never overlaps. After a rollback twice as many such steps are needed.

*Streams.* Copies to the device and the arithmetic are on the stream of copies to the device, copies of the new state on
that of copies to the host. The state of two buckets is in flight at most.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memscale._torch import at_end_of_backward, graph_task_id, is_fake, norms_and_maxima
from memscale._util.gradient_hook import GradientHook
from memscale.errors import TierFullError
from memscale.observe.counters import Meter
from memscale.optimizer.eight_bit import Moment, is_dense
from memscale.optimizer.interceptor import members_of
from memscale.optimizer.kinds import leaves_gradients, step_alone, why_whole
from memscale.optimizer.state_stores import HostStateStore, StateMover, lane_of
from memscale.tiers.engine import Lane, Transfer

LARGEST = 256 * 2**20  # bytes that the step of one parameter may need to be computed in backward
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

ACCUMULATED = "gradients come by several backward passes for each step"
CHANGED = "gradients are changed between backward and step(), as clipping and loss scaling do"


class _Arrival(NamedTuple):
    """A gradient as backward left it."""

    key: tuple[int, int, int]  # what changes with the tensor, its version and its memory
    passes: int  # backward passes since the last step
    words: Tensor | None  # the sum of its bits, where the loop is observed

    @classmethod
    def of(cls, gradient: Tensor, passes: int, *, observed: bool) -> _Arrival:
        return cls(_key(gradient), passes, _sum_of_words(gradient) if observed else None)


class EarlyStep(NamedTuple):
    """The step of one parameter, computed before it was asked for."""

    parameter: nn.Parameter
    gradient: Tensor
    versions: tuple[int, int]
    group: dict[str, Any]
    settings: dict[str, Any]
    before: dict[str, tuple[Any, int]]  # its state, with versions
    values: Tensor  # of the parameter after the step
    after: dict[str, Any]  # its state after the step, what is stored in spare memory
    bucket: _Bucket
    row: int  # of the bucket's traits

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


class _Bucket(NamedTuple):
    """What the early steps of one bucket have in common."""

    computed: Transfer[Tensor]  # of `_traits_of` its parameters
    written: Transfer[None]  # the new state to spare memory


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


class OverlappedSteps:
    """Computes the steps of parameters on a device whose state is on the host. See Note [Overlapped steps].

    Attributes:
        commits: Parameters whose early step was committed so far.
        rollbacks: Those whose early step was dropped.
        obstacle: Why steps do not overlap in this loop; None if they do, or may.
    """

    def __init__(self, mover: StateMover, meter: Meter) -> None:
        self.commits = 0
        self.rollbacks = 0
        self.obstacle: str | None = None
        self._mover = mover
        self._meter = meter
        self._lock = threading.RLock()  # backward runs in threads of its own
        self._loops: MutableMapping[Optimizer, _Loop] = weakref.WeakKeyDictionary()
        self._hooks: dict[int, tuple[nn.Parameter, GradientHook]] = {}
        self._owners: dict[
            int, tuple[weakref.ref[Optimizer], dict[str, Any]]
        ] = {}  # with the group, by parameter
        self._arrived: dict[int, _Arrival] = {}
        self._waiting: list[nn.Parameter] = []  # the next bucket
        self._early: dict[int, EarlyStep] = {}
        self._spare: dict[tuple[int, str], Tensor] = {}  # by parameter and name of the state
        self._writing: deque[tuple[Transfer[None], list[Tensor]]] = deque()  # with what is copied
        self._task: int | None = None
        self._configure(computes=False, warmup_steps=0, bucket_bytes=0)

    def _configure(self, *, computes: bool, warmup_steps: int, bucket_bytes: int) -> None:
        self._computes = computes
        self._warmup_steps = warmup_steps
        self._bucket_bytes = bucket_bytes

    # ------------------------------------------------------------------ on and off

    def attach(
        self, parameters: Iterable[nn.Parameter], bucket_bytes: int, warmup_steps: int, *, computes: bool
    ) -> None:
        """Observe the loop that trains these; with `computes`, overlap their steps with backward if it allows that."""
        self._configure(computes=computes, warmup_steps=warmup_steps, bucket_bytes=bucket_bytes)
        wanted = {id(each): each for each in parameters if each.requires_grad and each.is_leaf}
        for key in self._hooks.keys() - wanted.keys():
            parameter, hook = self._hooks.pop(key)
            hook.remove(parameter)
        for key in wanted.keys() - self._hooks.keys():
            self._hooks[key] = wanted[key], GradientHook(wanted[key], self._gradient_arrived)

    def detach(self) -> None:
        """Observe and compute no more."""
        self.attach((), 0, 0, computes=False)
        self.drop()
        self._spare.clear()
        self._owners.clear()
        self._arrived.clear()
        self._loops.clear()

    def drop(self, *_: object) -> None:
        """Drop what was computed and not committed; also a hook before the model's forward."""
        with self._lock:
            self._waiting.clear()
            self.rollbacks += len(self._early)
            self._early.clear()
            self._finish_writing()

    def before_forward(self, *_: object) -> None:
        """Drop what a skipped step has left: a hook before the model's forward."""
        if self._early and torch.is_grad_enabled():
            self.drop()

    @property
    def allows(self) -> bool:
        """Whether the loops of all optimizers seen allow their steps to overlap."""
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
            self._arrived[key] = _Arrival.of(gradient, passes, observed=not overlaps)
            if self._early.pop(key, None) is not None:
                self.rollbacks += 1
            if passes > 1 or not overlaps or not self._can_compute(parameter, gradient):
                return
            task = graph_task_id()
            if task != self._task:
                self._task = task
                at_end_of_backward(self._flush)
            self._waiting.append(parameter)
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
        stored = [
            value for value in state.values() if isinstance(value, Tensor) and self._mover.is_stored(value)
        ]
        # Copies from memory that is not page-locked hold up the thread that starts them.
        is_fast = parameter.device.type != "cuda" or all(each.is_pinned() for each in stored)
        return (
            bool(stored)
            and is_fast
            and not any(value is None or isinstance(value, Moment) for value in state.values())
            and not any(isinstance(value, Tensor) for value in _settings(group).values())
            and _is_plain(gradient)
            and _is_plain(parameter)
            and step_bytes(parameter) <= LARGEST
            and not _in_several_processes()  # which average gradients after this
        )

    def _flush(self) -> None:
        """Compute the step of the next bucket."""
        with self._lock, torch.no_grad(), self._meter.timing("optimizer state"):
            waiting, self._waiting = self._waiting, []
            if not waiting:
                return
            try:
                self._compute(waiting)
            except (torch.OutOfMemoryError, TierFullError):  # step() itself needs less room
                self.rollbacks += len(waiting)
                for loop in map(self._loop_of, waiting):
                    if loop is not None and loop.overlaps:
                        loop.back_off()

    def _compute(self, parameters: Sequence[nn.Parameter]) -> None:
        store = self._mover.store
        assert isinstance(store, HostStateStore), "state is stored on the host"
        device, lane = parameters[0].device, lane_of(parameters[0].device)
        ready = torch.cuda.current_stream(device).record_event() if lane is Lane.STREAM else None
        owners = [self._owner(each) for each in parameters]
        states = [
            optimizer.state[each]
            for (optimizer, _), each in zip(owners, parameters, strict=True)
            if optimizer
        ]
        spares = [self._spare_for(*each) for each in zip(parameters, states, strict=True)]
        loaded: list[dict[str, Any]] = []
        copies: list[nn.Parameter] = []

        def compute() -> Tensor:
            while len(self._writing) > 1:
                self._writing.popleft()[0].wait()
            for state in states:
                loaded.append({name: self._loaded(value, device) for name, value in state.items()})
            if ready is not None:
                torch.cuda.current_stream(device).wait_event(ready)
            for parameter in parameters:
                copies.append(nn.Parameter(parameter.detach().clone()))
                copies[-1].grad = parameter.grad
                if ready is not None and parameter.grad is not None:
                    parameter.grad.record_stream(torch.cuda.current_stream(device))
            for group in {id(group): group for _, group in owners}.values():
                of_group = [index for index, (_, each) in enumerate(owners) if each is group]
                optimizer = owners[of_group[0]][0]
                assert optimizer is not None, "an optimizer is alive while its bucket is stepped"
                stepped = {copies[index]: loaded[index] for index in of_group}
                step_alone(optimizer, group, list(stepped), stepped)
            for copy in copies:
                copy.grad = None
            return _traits_of(parameters)

        def write() -> None:
            for spare, new in zip(spares, loaded, strict=True):
                for name, target in spare.items():
                    target.copy_(new[name], non_blocking=True)

        computed = store.engine.run(compute, lane, device)
        written = store.engine.run(write, lane, device, outward=True, after=computed)
        self._writing.append(
            (written, [new[name] for spare, new in zip(spares, loaded, strict=True) for name in spare])
        )
        bucket = _Bucket(computed, written)
        for index, parameter in enumerate(parameters):
            gradient, (_, group) = parameter.grad, owners[index]
            assert gradient is not None, "its gradient has just arrived"
            self._early[id(parameter)] = EarlyStep(
                parameter,
                gradient,
                (parameter._version, gradient._version),
                group,
                _settings(group),
                {name: (value, _version(value)) for name, value in states[index].items()},
                copies[index].detach(),
                {**loaded[index], **spares[index]},
                bucket,
                index,
            )

    def _spare_for(self, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Tensor]:
        """Return memory on the host for the new state of a parameter."""
        spare = {}
        for name, value in state.items():
            if isinstance(value, Tensor) and self._mover.is_stored(value):
                key = id(parameter), name
                if key not in self._spare or self._spare[key].shape != value.shape:
                    self._spare[key] = self._mover.allocate_stored(value, parameter)
                spare[name] = self._spare[key]
        return spare

    def _loaded(self, value: Any, device: torch.device) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not self._mover.is_stored(value):
            return value.clone()
        self._mover.count_read(value)
        return value.to(device, non_blocking=True)

    def _finish_writing(self) -> None:
        while self._writing:
            self._writing.popleft()[0].finish()

    # ------------------------------------------------------------------ in step()

    def begin_step(self, optimizer: Optimizer) -> list[EarlyStep]:
        """Observe the loop of an optimizer that is about to step; return the early steps to commit."""
        with self._lock, torch.no_grad():
            groups = optimizer.param_groups
            members = [each for each in members_of(optimizer) if id(each.parameter) in self._hooks]
            stepped = {id(each.parameter): (each.parameter, groups[each.group]) for each in members}
            if not stepped:
                return []
            self._owners.update({key: (weakref.ref(optimizer), group) for key, (_, group) in stepped.items()})
            loop = self._loops.setdefault(optimizer, _Loop(self._warmup_steps))
            arrivals = [(parameter, self._arrived.pop(key, None)) for key, (parameter, _) in stepped.items()]
            early = [self._early.pop(key) for key in stepped if key in self._early]
            current = [each for each in early if each.is_current(optimizer, stepped[id(each.parameter)][1])]
            current = _with_equal_traits(current)
            self.rollbacks += len(early) - len(current)
            self.obstacle = _obstacle(arrivals)
            if self.obstacle is None and len(current) == len(early):
                loop.unchanged += 1
            elif loop.overlaps:
                loop.back_off()
            else:
                loop.unchanged = 0
            return current

    def commit(self, steps: Iterable[EarlyStep], optimizer: Optimizer) -> None:
        """Make these steps."""
        with self._lock, torch.no_grad(), self._meter.timing("optimizer state"):
            for step in steps:
                parameter, state = step.parameter, optimizer.state[step.parameter]
                step.bucket.computed.wait()
                if parameter.device.type == "cuda":
                    step.values.record_stream(torch.cuda.current_stream(parameter.device))
                parameter.copy_(step.values)
                for name, after in step.after.items():
                    before = state[name]
                    if isinstance(before, Tensor) and self._mover.is_stored(before):
                        self._spare[id(parameter), name] = before
                        self._mover.count_written(after)
                    if isinstance(before, Tensor) and not self._mover.is_stored(before):
                        before.copy_(after)
                    else:
                        state[name] = after
                self.commits += 1
            self._finish_writing()


def _obstacle(arrivals: Iterable[tuple[Tensor, _Arrival | None]]) -> str | None:
    """Return why the steps of these parameters cannot be computed in backward; None if they can."""
    sums: dict[torch.device, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for parameter, arrival in arrivals:
        gradient = parameter.grad
        if gradient is None:
            continue
        if arrival is None or arrival.key != _key(gradient):
            return CHANGED
        if arrival.passes > 1:
            return ACCUMULATED
        now = None if arrival.words is None else _sum_of_words(gradient)
        if arrival.words is not None and now is not None:
            sums[now.device].append((arrival.words, now))
    for pairs in sums.values():
        before, after = (torch.stack(each) for each in zip(*pairs, strict=True))
        if not torch.equal(before, after):
            return CHANGED
    return None


def _with_equal_traits(steps: Sequence[EarlyStep]) -> list[EarlyStep]:
    """Return the steps whose gradient and parameter still have the traits that the step was computed from."""
    if not steps or is_fake(steps[0].parameter):
        return list(steps)
    now = _traits_of([each.parameter for each in steps])
    then = torch.stack([each.bucket.computed.wait()[each.row] for each in steps])
    words = _WORDS[now.element_size()]  # as bits: NaN is equal to itself
    are_equal = (now.view(words) == then.view(words)).all(dim=1).tolist()
    return [step for step, is_equal in zip(steps, are_equal, strict=True) if is_equal]


def _traits_of(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a row for each parameter: norm and largest value of its gradient, norm of itself."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    norms, maxima = norms_and_maxima(gradients)
    return torch.stack([norms, maxima, norms_and_maxima([each.detach() for each in parameters])[0]], dim=1)


def _sum_of_words(tensor: Tensor) -> Tensor | None:
    """Return the sum of a tensor's bits, as integers of the size of its elements."""
    if is_fake(tensor) or not _is_plain(tensor):
        return None
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(_WORDS[tensor.element_size()]).sum()


def _key(tensor: Tensor) -> tuple[int, int, int]:
    return id(tensor), tensor._version, tensor.untyped_storage()._cdata if _is_plain(tensor) else 0


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided and is_dense(tensor) and not tensor.is_complex() and tensor.numel() > 0
    )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def step_bytes(parameter: Tensor) -> int:
    """Return what the step of a parameter needs: itself, its gradient and two moments."""
    return 4 * parameter.nbytes


def _in_several_processes() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
