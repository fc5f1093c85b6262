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
always, and what was computed for it is dropped (a rollback): the numbers are those of the plain loop in any case.

*What is compared.* The gradient, the parameter and each tensor of its state: the same object, and the same version,
which every change in place counts up; the settings of its group; and for the sake of changes through ``.data``, which
have no version, traits of parameter and gradient: on the device norms and the largest value of the gradient, on the
host every 61st element.

*When.* First the loop is observed for ``Config.warmup_steps`` steps in which every gradient came by one backward pass
and reached ``step()`` as that had left it. There every bit of a gradient counts, so that a loop which always changes
them, by whatever way, never overlaps. After a rollback twice as many such steps are needed.

*Streams.* Copies to the device and the arithmetic are on the stream of copies to the device, copies back on that of
copies to the host. What is loaded for two buckets is in flight at most. After backward the compute stream waits for the
arithmetic, which reads parameters and gradients.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memscale._torch import at_end_of_backward, graph_task_id, has_other_views, is_fake, norms_and_maxima
from memscale._util.gradient_hook import GradientHook
from memscale.config import AsyncOffloadConfig
from memscale.errors import TierFullError
from memscale.observe.counters import Meter
from memscale.optimizer.eight_bit import Moment, is_dense
from memscale.optimizer.interceptor import SplitStep, StepOrder, StepSubscriber, members_of
from memscale.optimizer.kinds import has_moments, leaves_gradients, step_alone, why_whole
from memscale.optimizer.state_stores import StateMover, lane_of
from memscale.tiers.engine import MASTERS_SHARE, Engine, Lane, PinnedMemory, Transfer

LARGEST = 256 * 2**20  # bytes that the step of one parameter may need to be computed in backward
SAMPLED = 61  # of so many elements on the host one is compared
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HOST = torch.device("cpu")

ACCUMULATED = "gradients come by several backward passes for each step"
CHANGED = "gradients are changed between backward and step(), as clipping and loss scaling do"


class _Arrival(NamedTuple):
    """A gradient as backward left it."""

    key: tuple[int, int, int]  # what changes with the tensor, its version and its memory
    passes: int  # backward passes since the last step
    words: Tensor | None  # the sum of its bits, where the loop is observed


class _EarlyStep(NamedTuple):
    """The step of one parameter, computed before it was asked for."""

    parameter: nn.Parameter
    gradient: Tensor
    versions: tuple[int, int]
    group: dict[str, Any]
    settings: dict[str, Any]
    before: dict[str, tuple[Any, int]]  # its state, with versions
    values: Tensor  # of the parameter after the step: on its device
    after: dict[str, Any]  # its state after the step: where it was before
    traits: Callable[[], Tensor]  # of parameter and gradient, when the step was computed

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
        self._meter = meter
        self._engine = Engine(AsyncOffloadConfig())
        self._lock = threading.RLock()  # backward runs in threads of its own
        self._device = _HOST
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
        self._writing: deque[tuple[Transfer[None], list[Tensor]]] = deque()  # with what was loaded

    @property
    def commits(self) -> int:
        """Parameters whose early step was committed so far."""
        return self._meter.steps_committed

    @property
    def rollbacks(self) -> int:
        """Those whose early step was dropped."""
        return self._meter.steps_dropped

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
            parameter, hook = self._hooks.pop(key)
            hook.remove(parameter)
        for key in wanted.keys() - self._hooks.keys():
            self._hooks[key] = wanted[key], GradientHook(wanted[key], self._gradient_arrived)
        if wanted:
            self.subscribe()

    def detach(self) -> None:
        """Observe and compute no more."""
        self.unsubscribe()
        self.drop()
        self.attach((), _HOST, 0, 0, computes=False)
        for each in (self._spare, self._owners, self._arrived, self._loops):
            each.clear()

    def drop(self) -> None:
        """Drop what was computed and not committed."""
        with self._lock:
            self._waiting.clear()
            self._meter.steps_dropped += len(self._early)
            self._early.clear()
            self._finish_writing()

    def before_forward(self, *_: object) -> None:
        """Drop what a skipped step has left: a hook before the model's forward."""
        if self._early and torch.is_grad_enabled():
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
            self._arrived[key] = _Arrival(
                _key(gradient), passes, None if overlaps else _sum_of_words(gradient)
            )
            if self._early.pop(key, None) is not None:
                self._meter.steps_dropped += 1
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
        if parameter.device == _HOST:
            copied += [parameter, gradient]
        # Copies from memory that is not page-locked hold up the thread that starts them.
        is_fast = self._device.type != "cuda" or all(each.is_pinned() for each in copied)
        return (
            bool(copied)
            and parameter.dim() > 0
            and (bool(state) or not has_moments(optimizer))  # the first step makes it
            and is_fast
            and not any(value is None or isinstance(value, Moment) for value in state.values())
            and all(value.device == _HOST for value in state.values() if isinstance(value, Tensor))
            and not any(isinstance(value, Tensor) for value in _settings(group).values())
            and all(map(_is_plain, (gradient, parameter, *copied)))
            and not group.get("fused")
            and not group.get("capturable")  # counters would be on the device
            and step_bytes(parameter) <= LARGEST
            and not _in_several_processes()  # which average gradients after this
        )

    def _is_copied(self, value: Tensor) -> bool:
        """Return whether a state tensor is on the host between steps, and on the device for one."""
        return value.device == _HOST and value.dim() > 0

    def _end_backward(self) -> None:
        """Compute the last bucket; what is done from now on to parameters and gradients waits until they were read."""
        self._flush()
        computed, self._computed = self._computed, None
        if computed is not None:
            computed.wait()

    def _flush(self) -> None:
        """Compute the step of the next bucket."""
        with self._lock, torch.no_grad(), self._meter.timing("optimizer state"):
            waiting, self._waiting = self._waiting, []
            owners = [self._owner(each) for each in waiting]
            if not waiting or any(optimizer is None for optimizer, _ in owners):
                return
            try:
                self._compute(
                    waiting, [(optimizer, group) for optimizer, group in owners if optimizer is not None]
                )
            except (torch.OutOfMemoryError, TierFullError):  # step() itself needs less room
                self._meter.steps_dropped += len(waiting)
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

        def compute() -> Tensor | None:
            while len(self._writing) > 1:
                self._writing.popleft()[0].wait()
            for state in states:
                loaded.append({name: self._load("optimizer state", value) for name, value in state.items()})
            for parameter in parameters:
                if parameter.device == _HOST:
                    copies.append(nn.Parameter(self._load("parameters", parameter.detach())))
                    copies[-1].grad = self._load("gradients", parameter.grad)
            for event in ready:
                torch.cuda.current_stream(device).wait_event(event)
            here = [each for each in parameters if each.device != _HOST]
            # Before the arithmetic: of what is changed while it runs, they are others.
            traits = None if not here or is_fake(here[0]) else _traits_of(here)
            for index, parameter in enumerate(parameters):
                if parameter.device != _HOST:
                    copies.insert(index, nn.Parameter(parameter.detach().clone()))
                    copies[index].grad = parameter.grad
                    if lane is Lane.STREAM and parameter.grad is not None:
                        parameter.grad.record_stream(torch.cuda.current_stream(device))
            for group in {id(group): group for _, group in owners}.values():
                of_group = [index for index, (_, each) in enumerate(owners) if each is group]
                stepped = {copies[index]: loaded[index] for index in of_group}
                step_alone(owners[of_group[0]][0], group, list(stepped), stepped)
            for copy in copies:
                copy.grad = None
            return traits

        def write() -> None:
            for spare, copy, new in zip(spares, copies, loaded, strict=True):
                for name, target in spare.items():
                    target.copy_(copy.detach() if name == "" else new[name], non_blocking=True)

        self._computed = computed = engine.run(compute, lane, device)
        written = engine.run(write, lane, device, outward=True, after=computed)
        on_host = [index for index, each in enumerate(parameters) if each.device == _HOST]
        values = [
            value for new in loaded for value in new.values() if isinstance(value, Tensor) and value.dim()
        ]
        self._writing.append((written, [*values, *(copies[index].detach() for index in on_host)]))
        rows = iter(range(len(parameters)))
        for index, parameter in enumerate(parameters):
            gradient, (_, group) = parameter.grad, owners[index]
            assert gradient is not None, "its gradient has just arrived"
            if index in on_host:
                new_values, traits = spares[index].pop(""), _known(_sample_of(parameter))
            else:
                new_values, traits = copies[index].detach(), _row_of(computed, next(rows))
            self._early[id(parameter)] = _EarlyStep(
                parameter,
                gradient,
                (parameter._version, gradient._version),
                group,
                _settings(group),
                {name: (value, _version(value)) for name, value in states[index].items()},
                new_values,
                {**loaded[index], **spares[index]},
                traits,
            )

    def _load(self, what: Any, value: Any) -> Any:
        """Return what is on the host on the device, and a copy of counters."""
        if not isinstance(value, Tensor):
            return value
        if not self._is_copied(value):
            return value.clone()
        self._meter.count_read(what, "host", value.nbytes)
        return value.to(self._device, non_blocking=True)

    def _spares_for(self, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Tensor]:
        """Return memory on the host for what of a parameter and its state is there, by name; "" is the parameter."""
        kept: dict[str, Any] = {"": parameter.detach(), **state} if parameter.device == _HOST else state
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
        with SplitStep(optimizer) as split:
            split.show(others)
            if others:
                call()
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
            current = _with_equal_traits(current)
            self._meter.steps_dropped += len(early) - len(current)
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
        with self._lock, torch.no_grad(), self._meter.timing("optimizer state"):
            self._finish_writing()
            for step in steps:
                parameter, state = step.parameter, optimizer.state.get(step.parameter, {})
                if parameter.device == _HOST:
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
                self._meter.steps_committed += 1

    def _exchange(self, what: Any, parameter: nn.Parameter, name: str, kept: Tensor, spare: Tensor) -> None:
        """Give a tensor on the host spare memory with new values; if there are views of its own, the values."""
        self._meter.count_written(what, "host", kept.nbytes)
        if has_other_views(kept):
            kept.copy_(spare)
            return
        memory = kept.data
        kept.data = spare
        kept.as_strided((0,), (1,)).zero_()  # counts as a change in place, which it was
        self._spare[id(parameter), name] = memory


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


# ---------------------------------------------------------------------- traits, see Note [Overlapped steps]


def _with_equal_traits(steps: Sequence[_EarlyStep]) -> list[_EarlyStep]:
    """Return the steps whose gradient and parameter still have the traits that the step was computed from."""
    if steps and is_fake(steps[0].parameter):  # in a simulation, where nothing has values
        return list(steps)
    equal = {id(each.parameter): True for each in steps}
    on_device = [each for each in steps if each.parameter.device != _HOST]
    if on_device:
        now, then = (
            _traits_of([each.parameter for each in on_device]),
            torch.stack([each.traits() for each in on_device]),
        )
        words = _WORDS[now.element_size()]  # as bits: NaN is equal to itself
        rows = (now.view(words) == then.view(words)).all(dim=1).tolist()
        equal |= {id(each.parameter): row for each, row in zip(on_device, rows, strict=True)}
    for each in steps:
        if each.parameter.device == _HOST:
            equal[id(each.parameter)] = torch.equal(_sample_of(each.parameter), each.traits())
    return [each for each in steps if equal[id(each.parameter)]]


def _traits_of(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a row for each parameter on a device: norm and largest value of its gradient, norm of itself."""
    norms, maxima = norms_and_maxima([each.grad for each in parameters if each.grad is not None])
    return torch.stack([norms, maxima, norms_and_maxima([each.detach() for each in parameters])[0]], dim=1)


def _sample_of(parameter: nn.Parameter) -> Tensor:
    """Return every 61st element of a parameter on the host and of its gradient, as integers."""
    assert parameter.grad is not None, "it was there when its step was computed"
    samples = [_words_of(each)[::SAMPLED] for each in (parameter.detach(), parameter.grad)]
    return torch.cat(samples)


def _row_of(traits: Transfer[Tensor | None], row: int) -> Callable[[], Tensor]:
    def get() -> Tensor:
        rows = traits.wait()
        assert rows is not None, "parameters on the device have traits"
        return rows[row]

    return get


def _known(traits: Tensor) -> Callable[[], Tensor]:
    return lambda: traits


def _words_of(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(_WORDS[tensor.element_size()])


def _sum_of_words(tensor: Tensor) -> Tensor | None:
    """Return the sum of a tensor's bits, as integers of the size of its elements."""
    return None if is_fake(tensor) or not _is_plain(tensor) else _words_of(tensor).sum()


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
