"""The one interceptor of `optimizer.step()`, its subscribers, steps in several calls, and what torch's classes allow.

Whatever has to happen around a step subscribes here (`StepOrder`). A subscriber is asked which optimizers it is
concerned with, and may act at four points of a step:

    pre-hooks ─ before_step
      around_step          the whole step, whoever wrote it: it may be skipped
        around_arithmetic  torch's own arithmetic, also when a user's step calls it by `super().step()`
    post-hooks ─ after_step

So a user's step runs once, and only the arithmetic of torch.optim's own classes can be split into several calls. How
calls get here: Note [Inside optimizer.step] in ``_torch.py``.

Note [Whose arithmetic is split]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The classes in :data:`ONE_BY_ONE` treat every parameter by itself: its new value depends on its gradient, its own
state and its group's settings, and they count nothing for a group or the optimizer. Calling their ``step`` for some
parameters, and then for the others, gives the same bits as one call for all.

Any other ``step`` may scale by the norm of all gradients, count its calls or update a moving average of the model, and
no inspection or trial run would show all of that. So code that is not torch's is called once per step, with all
parameters, and its state stays where it makes it. If it calls torch's own (``super().step()``, or the step of an
optimizer that it wraps), then that call is split, and nothing around it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import CellType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from memscale._torch import (
    HAS_WARNED_OF_CAPTURABLE,
    arithmetic_cell,
    disable_current_modes,
    outside_compiler,
    step_cell,
)
from memscale._util.interrupts import interrupts_deferred

logger = logging.getLogger("memscale")


class StepOrder(enum.IntEnum):
    """The subscribers of a step, the outermost first."""

    LOSS_SCALING = 0  # decides whether a step is made
    OVERLAP = 1  # commits what was computed in backward, and calls the arithmetic for the rest
    BUCKETS = 2  # calls the arithmetic once for each bucket, with the bucket's state loaded and in 32 bits
    PLACEMENT = 3  # chooses the implementation for the parameters of one call
    RECOVERY = 4  # repeats one call


class StepSubscriber:
    """Base class of what happens around optimizer steps. Each method does nothing unless it is overridden.

    The interceptor refers to subscribers weakly: a model that is dropped without `detach` is collected.
    """

    order: ClassVar[StepOrder]

    def subscribe(self) -> None:
        """Be called around steps from now on."""
        StepInterceptor.instance.add(self)

    def unsubscribe(self) -> None:
        """Be called no more."""
        StepInterceptor.instance.remove(self)

    undo = unsubscribe  # as an entry of the undo log

    def parameter_ids(self) -> Container[int]:
        """Return the ids of the parameters whose steps matter."""
        raise NotImplementedError

    def concerns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps any of these parameters."""
        ids = self.parameter_ids()
        return any(id(each) in ids for group in optimizer.param_groups for each in group["params"])

    def before_step(self, optimizer: Optimizer) -> None:
        """Act before a step, and before the hooks of this optimizer."""

    def around_step(self, step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Make a step, or not, by `step(optimizer, *args, **kwargs)`."""
        return step(optimizer, *args, **kwargs)

    def around_arithmetic(self, call: Callable[[], Any], optimizer: Optimizer) -> None:
        """Run the arithmetic of torch.optim by calling `call()`, for whatever `optimizer.param_groups` holds then.

        Gradients are there: a closure has been evaluated. It is called only where the arithmetic can be split.
        """
        call()

    def after_step(self, optimizer: Optimizer) -> None:
        """Act after a step that did not raise."""


class StepInterceptor:
    """Calls the subscribers around the steps of all optimizers of the process.

    While there are any, it has one pre-hook and one post-hook for all optimizers, and stands in the closure cells of
    those optimizer classes that a subscriber is concerned with.

    Example:
        >>> class Twice(StepSubscriber):
        ...     order = StepOrder.RECOVERY
        ...     def concerns(self, optimizer): return True
        ...     def around_arithmetic(self, call, optimizer): call(); call()
        >>> weight = torch.nn.Parameter(torch.tensor(1.0))
        >>> weight.grad = torch.tensor(0.25)
        >>> twice = Twice()
        >>> twice.subscribe()
        >>> torch.optim.SGD([weight], lr=1.0).step()
        >>> twice.unsubscribe()
        >>> weight.item()
        0.5
    """

    instance: ClassVar[StepInterceptor]

    def __init__(self) -> None:
        self._subscribers: tuple[weakref.ref[StepSubscriber], ...] = ()  # outermost first
        self._handles: list[RemovableHandle] = []
        self._replaced: dict[int, tuple[CellType, Callable[..., Any]]] = {}
        self._intercepted: MutableMapping[type[Optimizer], object] = weakref.WeakKeyDictionary()  # steps
        self._calls_made: MutableMapping[Optimizer, int] = weakref.WeakKeyDictionary()  # of the running step

    def add(self, subscriber: StepSubscriber) -> None:
        """Call a subscriber; of those with the same order the last one is outermost."""
        others = [each for each in self._alive() if each is not subscriber]
        ordered = sorted([subscriber, *others], key=lambda each: each.order)
        self._subscribers = tuple(weakref.ref(each) for each in ordered)
        if not self._handles:
            self._handles.append(register_optimizer_step_pre_hook(self._before_step))
            self._handles.append(register_optimizer_step_post_hook(self._after_step))

    def remove(self, subscriber: StepSubscriber) -> None:
        """Call a subscriber no more; after the last one torch is as it was.

        Of subscribers that were collected this happens with the next call: torch's hooks must not change in the
        middle of a step, where the garbage collector may run.
        """
        self._subscribers = tuple(weakref.ref(each) for each in self._alive() if each is not subscriber)
        if not self._subscribers:
            while self._handles:
                self._handles.pop().remove()
            for cell, original in self._replaced.values():
                cell.cell_contents = original
            self._replaced.clear()
            self._intercepted.clear()

    def _alive(self) -> list[StepSubscriber]:
        return [each for reference in self._subscribers if (each := reference()) is not None]

    def _concerned(self, optimizer: Optimizer) -> list[StepSubscriber]:
        return [each for each in self._alive() if each.concerns(optimizer)]

    @outside_compiler
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        concerned, kind = self._concerned(optimizer), type(optimizer)
        if concerned and self._intercepted.get(kind) is not kind.step:
            owner = arithmetic_of(kind)
            self._replace(step_cell(kind), self._run_step)
            self._replace(arithmetic_cell(vars(owner)["step"]) if owner else None, self._run_arithmetic)
            self._intercepted[kind] = kind.step
        for subscriber in concerned:
            subscriber.before_step(optimizer)

    @outside_compiler
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for subscriber in self._concerned(optimizer):
            subscriber.after_step(optimizer)

    def _replace(self, cell: CellType | None, run: Callable[..., Any]) -> None:
        if cell is None or id(cell) in self._replaced:
            return
        original = cell.cell_contents

        @outside_compiler
        @functools.wraps(original)
        def intercepted(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return run(original, optimizer, *args, **kwargs)

        self._replaced[id(cell)] = cell, original
        cell.cell_contents = intercepted

    def _run_step(self, step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        for subscriber in reversed(self._concerned(optimizer)):
            step = functools.partial(subscriber.around_step, step)
        return step(optimizer, *args, **kwargs)

    def _run_arithmetic(
        self, step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._concerned(optimizer) or why_whole(optimizer) is not None:
            return step(optimizer, *args, **kwargs)
        loss = evaluate_closure(*args, **kwargs)
        if closure_of(*args, **kwargs) is not None:
            # Its forward pass may have attached the model's first plan, with other subscribers.
            for subscriber in self._concerned(optimizer):
                subscriber.before_step(optimizer)
        call = functools.partial(step, optimizer)
        concerned = self._concerned(optimizer)
        for subscriber in reversed(concerned):
            if subscriber.order is StepOrder.RECOVERY:  # which undoes what fails inside of it
                call = functools.partial(subscriber.around_arithmetic, call, optimizer)
        call = functools.partial(self._count_call, call, optimizer)
        for subscriber in reversed(concerned):
            if subscriber.order is not StepOrder.RECOVERY:
                call = functools.partial(subscriber.around_arithmetic, call, optimizer)
        self._calls_made[optimizer] = 0
        is_made = False
        try:
            with interrupts_deferred():  # a step is made wholly or not at all
                call()
                is_made = True  # what comes now is the deferred interrupt
        except BaseException as error:
            if self.has_begun(optimizer) and not is_made:
                logger.error(
                    "This step of %s was made for some of its parameters when it failed (%s): load a checkpoint before "
                    "you go on.",
                    type(optimizer).__name__,
                    type(error).__name__,
                )
            raise
        finally:
            self._calls_made.pop(optimizer, None)
        return loss

    def _count_call(self, call: Callable[[], Any], optimizer: Optimizer) -> None:
        call()
        self._calls_made[optimizer] += 1

    def has_begun(self, optimizer: Optimizer) -> bool:
        """Return whether the running step of an optimizer has been made for some of its parameters."""
        return self._calls_made.get(optimizer, 0) > 0


StepInterceptor.instance = StepInterceptor()


def closure_of(*args: Any, **kwargs: Any) -> Callable[[], Any] | None:
    """Return the closure among the arguments of a step, the optimizer left out."""
    closure: Callable[[], Any] | None = kwargs["closure"] if "closure" in kwargs else (*args, None)[0]
    return closure


def evaluate_closure(*args: Any, **kwargs: Any) -> Any:
    """Evaluate the closure of such a step, which makes the gradients; return its loss."""
    closure = closure_of(*args, **kwargs)
    if closure is None:
        return None
    with torch.enable_grad():  # as optimizers do; hooks and steps run without
        return closure()


# ---------------------------------------------------------------------- a step in several calls


class Member(NamedTuple):
    """A parameter and its position in the optimizer."""

    group: int
    position: int
    parameter: Tensor


def members_of(optimizer: Optimizer) -> list[Member]:
    """Return all parameters of an optimizer, in its order."""
    return [
        Member(index, position, parameter)
        for index, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    ]


class SplitStep:
    """One step of an optimizer, in several calls; see `split_step`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.groups = list(optimizer.param_groups)
        # The lists of a group that have one entry for each parameter.
        self.lists = [
            {key: group[key] for key in ("params", "param_names") if isinstance(group.get(key), list)}
            for group in self.groups
        ]

    def show(self, members: Iterable[Member]) -> None:
        """Cut the groups down to these members, for the next call; groups that have none are left out.

        A member may have another tensor than the optimizer has in its position: that is shown instead.
        """
        shown: dict[int, list[Member]] = defaultdict(list)
        for member in sorted(members, key=lambda member: member[:2]):
            shown[member.group].append(member)
        self._optimizer.param_groups[:] = [self.groups[index] for index in shown]
        for index, chosen in shown.items():
            for key, values in self.lists[index].items():
                self.groups[index][key] = [values[each.position] for each in chosen]
            self.groups[index]["params"] = [each.parameter for each in chosen]


@contextlib.contextmanager
def split_step(optimizer: Optimizer) -> Iterator[SplitStep]:
    """Make a step in several calls; the groups are whole again when the block ends, also by an error."""
    split = SplitStep(optimizer)
    try:
        yield split
    finally:  # not in a method, whose call could fail
        for group, lists in zip(split.groups, split.lists, strict=True):
            group.update(lists)
        optimizer.param_groups[:] = split.groups


# ---------------------------------------------------------------------- the classes of torch.optim

_ADAMS = (optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam)
_OTHERS = (optim.ASGD, optim.Adadelta, optim.Adagrad, optim.RMSprop, optim.Rprop, optim.SGD)

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset((*_ADAMS, *_OTHERS))
"""The classes that treat every element of a parameter by itself: they can step a slice of it."""

ONE_BY_ONE: tuple[type[Optimizer], ...] = (*_ADAMS, *_OTHERS, optim.Adafactor, optim.Muon, optim.SparseAdam)
"""All classes of torch.optim but LBFGS, whose direction and step length come from all parameters together."""

FUSED_ON_CPU = frozenset({optim.Adam, optim.SGD, optim.Adagrad})
"""Those that have a fused implementation for parameters on a CPU; AdamW's arithmetic is Adam's."""

FOREACH_DIFFERS = frozenset({optim.ASGD, optim.NAdam, optim.RAdam})
"""Those whose ``foreach`` implementation rounds differently from the loop over parameters."""

FOREACH_DIFFERS_IN_16_BITS = FOREACH_DIFFERS | {optim.Adagrad}  # it stores the quotient's numerator

_LEAVES_GRADIENTS = frozenset({optim.Adam, optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD})
"""Those whose ``foreach`` implementation computes nothing in the memory of gradients, nesterov left out."""

MOMENTS: Mapping[str, bool] = {
    "exp_avg": True,
    "exp_avg_sq": False,
    "max_exp_avg_sq": False,
    "momentum_buffer": True,
    "square_avg": False,
    "sum": False,
}
"""The names of state that can be kept in 8 bits, and whether it has a sign."""

STATE_NAMES = frozenset(MOMENTS) | frozenset(
    ("acc_delta", "ax", "col_var", "exp_inf", "grad_avg", "prev", "row_var", "step_size", "variance")
)
"""The names of all state that these classes keep, counters left out."""

# The classes that bitsandbytes has 8-bit versions of; AdamW's arithmetic is Adam's.
_EIGHT_BIT = (optim.Adam, optim.SGD, optim.RMSprop, optim.Adagrad)

_OWNERS = {inspect.unwrap(vars(kind)["step"]): kind for kind in ONE_BY_ONE if "step" in vars(kind)}


def arithmetic_of(kind: type[Optimizer]) -> type[Optimizer] | None:
    """Return the class of torch.optim whose step this class has, or can call by ``super()``; None if there is none."""
    for each in kind.__mro__:
        owner = _OWNERS.get(inspect.unwrap(vars(each)["step"])) if "step" in vars(each) else None
        if owner is not None:
            # torch's steps call this one for each group: overridden, it is somebody else's code.
            own, torchs = (inspect.unwrap(getattr(each, "_init_group", len)) for each in (kind, owner))
            return owner if own is torchs else None
    return None


def has_own_step(kind: type[Optimizer]) -> bool:
    """Return whether a class has a step that is not torch's own, whatever that calls."""
    owner = arithmetic_of(kind)
    return owner is None or inspect.unwrap(kind.step) is not inspect.unwrap(owner.step)


def why_whole(optimizer: Optimizer) -> str | None:
    """Return why this optimizer's arithmetic is not split, or None if it can be."""
    kind = type(optimizer)
    if arithmetic_of(kind) is None:
        if isinstance(optimizer, optim.LBFGS):
            return "its direction and step length come from all parameters together"
        return (
            "its step is not one of torch.optim's, which are known to treat parameters one by one, so that it is "
            "called once, with all of them"
        )
    if vars(optimizer).get("param_groups") is not optimizer.param_groups:
        return "its param_groups are another object's"
    if any(group.get("differentiable") for group in (optimizer.defaults, *optimizer.param_groups)):
        return "differentiable=True: gradients flow through its state"
    return None


def leaves_gradients(optimizer: Optimizer) -> bool:
    """Return whether a step of this optimizer leaves gradients as they are."""
    nesterov = any(group.get("nesterov") for group in optimizer.param_groups)
    return arithmetic_of(type(optimizer)) in _LEAVES_GRADIENTS and not nesterov


def is_fused_on_cpu(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether a group's parameters on a CPU can be stepped by torch's fused implementation, unless told so."""
    return (
        arithmetic_of(type(optimizer)) in FUSED_ON_CPU
        and not isinstance(group["lr"], Tensor)
        and group.get("foreach", False) is None
        and group.get("fused", False) is None
        and not group.get("capturable")
    )


def has_moments(optimizer: Optimizer) -> bool:
    """Return whether an optimizer keeps moments at all: SGD without momentum has no state."""
    return not isinstance(optimizer, optim.SGD) or any(
        group.get("momentum") for group in optimizer.param_groups
    )


def why_32_bits(optimizer: Optimizer) -> str | None:
    """Return why the moments of this optimizer stay in 32 bits, or None if they can be kept in 8."""
    if type(optimizer).__module__.startswith("bitsandbytes"):
        return "it keeps its state as it was told to itself"
    whole = why_whole(optimizer)
    if whole is None and arithmetic_of(type(optimizer)) not in _EIGHT_BIT:
        return "only Adam, AdamW, SGD, RMSprop, Adagrad and what derives from them are known to bear 8 bits"
    if any(group.get("centered") for group in optimizer.param_groups):
        return "centered=True takes the root of a difference, which coarse numbers would make negative"
    return whole


_LENGTHS = (2, 3, 5, 7, 11, 13, 17, 19)  # of a small parameter's dimensions: no two are equal
_IMPLEMENTATION = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}


class NewState:
    """Says which state tensors a step is about to make, before there are any.

    It asks the optimizer's own arithmetic, which steps one small parameter of as many dimensions with the group's
    settings (``amsgrad``, ``momentum``, ``centered``, ...), and scales the state of that to the real one.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[Any, dict[str, tuple[tuple[bool, ...], torch.dtype]]] = {}

    def of(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """Return the tensors that a step makes for this parameter, by name, on the meta device; counters are left out.

        A gradient that the parameter does not have is taken to be dense.
        """
        state = self._optimizer.state.get(parameter)
        if state and all(value is not None for value in state.values()):
            return {}
        # Of more than 8 dimensions, the others stay as they are.
        small = (*map(min, parameter.shape, _LENGTHS), *parameter.shape[len(_LENGTHS) :])
        sparse = parameter.grad is not None and parameter.grad.layout is torch.sparse_coo
        key = (id(group), small, parameter.dtype, sparse)
        if key not in self._known:
            ones = torch.ones(small, dtype=parameter.dtype, device="cpu")
            self._known[key] = self._state_of_small(group, ones, sparse)
        layout = {}
        for name, (kept, dtype) in self._known[key].items():
            if state and state.get(name) is not None:
                continue
            if all(kept):
                layout[name] = torch.empty_like(parameter, dtype=dtype, device="meta")
            else:  # Adafactor's rows and columns
                shape = [size if is_kept else 1 for size, is_kept in zip(parameter.shape, kept, strict=True)]
                layout[name] = torch.empty(shape, dtype=dtype, device="meta")
        return layout

    def _state_of_small(
        self, group: dict[str, Any], small: Tensor, sparse: bool
    ) -> dict[str, tuple[tuple[bool, ...], torch.dtype]]:
        """Step a small parameter; for each state tensor, which of the parameter's dimensions it has."""
        parameter = nn.Parameter(small)
        parameter.grad = small.to_sparse(1) if sparse else small.clone()
        settings = {**group, **{name: value for name, value in _IMPLEMENTATION.items() if name in group}}
        with disable_current_modes():
            state = step_alone(self._optimizer, settings, [parameter])
        return {
            name: (tuple(map(int.__eq__, value.shape, small.shape)), value.dtype)
            for name, value in state[parameter].items()
            if isinstance(value, Tensor) and value.dim()
        }


def step_alone(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameters: Sequence[nn.Parameter],
    state: dict[Any, Any] | None = None,
) -> dict[Any, Any]:
    """Step other parameters by an optimizer's arithmetic, with one of its groups' settings, and no hooks.

    Return their state, which another call can go on from. The optimizer is not changed.
    """
    owner = arithmetic_of(type(optimizer))
    assert owner is not None, "the arithmetic is not torch's"
    # Not by its __init__, by which torch wraps the step of the class: hooks of a subclass would run twice.
    other = owner.__new__(owner)
    settings = {name: 0.01 if isinstance(value, Tensor) else value for name, value in group.items()}
    setattr(other, HAS_WARNED_OF_CAPTURABLE, True)
    vars(other).update(
        defaults=dict(optimizer.defaults),
        state=defaultdict(dict) if state is None else state,
        param_groups=[{**settings, "params": list(parameters)}],
    )
    if owner is torch.optim.Adagrad and state is None:  # whose state is made when the optimizer is
        for parameter in parameters:
            new = torch.zeros_like(parameter, requires_grad=False)
            other.state[parameter] = {"step": torch.tensor(0.0, device="cpu"), "sum": new}
    with torch.no_grad():
        inspect.unwrap(owner.step)(other)
    made: dict[Any, Any] = other.state
    return made
