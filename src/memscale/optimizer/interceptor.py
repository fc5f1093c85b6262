"""The one interceptor of `optimizer.step()`, its subscribers, and steps in several calls.

Whatever has to happen around a step subscribes here (`StepOrder`). A subscriber is asked which optimizers it is
concerned with, and may act at four points of a step:

    pre-hooks ─ before_step
      around_step          the whole step, whoever wrote it: it may be skipped
        around_arithmetic  torch's own arithmetic, also when a user's step calls it by `super().step()`
    post-hooks ─ after_step

So a user's step runs once, and only the arithmetic of torch.optim's own classes can be split into several calls. How
calls get here: Note [Inside optimizer.step] in ``_torch.py``.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, MutableMapping
from types import CellType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from memscale._torch import arithmetic_cell, outside_compiler, step_cell
from memscale._util.interrupts import interrupts_deferred
from memscale.optimizer.kinds import arithmetic_of, why_whole

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
