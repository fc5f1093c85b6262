"""Optimizer steps, streamed: state waits in a cheaper place and comes up a bucket at a time.

Note [Streamed steps]
~~~~~~~~~~~~~~~~~~~~~
While ``optimizer.step()`` runs, the arithmetic is called once for each bucket of parameters (Note [Around
the arithmetic] in ``optimizer_hooks.py``, Note [One step, several calls] in ``optimizer_groups.py``). A
bucket's state is brought up before its call and taken down after it (Note [Homes of state] in
``optimizer_state.py``), state that the call made included: all of it never exists at once, from the first
step on. A parameter that needs more than a bucket is stepped in slices, where its optimizer allows it (Note [Slices]
in ``optimizer_slices.py``).

What a parameter needs in its bucket is its own bytes, its gradient's and its state's. Before it has state,
that is taken from a parameter of as many dimensions in the same group, which goes first and alone. What the
arithmetic needs in between is not counted: ``foreach`` makes temporaries as large as the bucket's
parameters.

Only the steps of torch.optim's own classes are split, and the numbers are the same to the bit: the same functions
see the same operands, fewer at a time. Others are called once, as they are, and their state is not moved
(Note [Whose arithmetic is split] in ``optimizer_kinds.py``).
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Container, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memscale.errors import ConfigError, ConfigTypeError, TierFullError
from memscale.observe.counters import WatchedState
from memscale.optimizer.buckets import Buckets
from memscale.optimizer.copies import copy_with_state, copy_without
from memscale.optimizer.groups import Member, SplitStep, members_of
from memscale.optimizer.interceptor import StepOrder, StepSubscriber
from memscale.optimizer.kinds import why_whole
from memscale.optimizer.new_state import NewState
from memscale.optimizer.slices import SlicedParameter, as_left, slices_of
from memscale.optimizer.state import PAGE, MovingState, Origins, StatePlace

__all__ = ["StatePlace", "StreamedSteps"]

_NOT_REACHED = "its step does not call that of torch.optim, or torch's wrapper of that was not found"


class StreamedSteps(StepSubscriber):
    """Keeps the optimizer state of some parameters in a place, whichever optimizer steps them.

    It lives as long as someone holds it: its owner, or an optimizer whose state is in the place. Hooks don't,
    so that a model which is dropped without :meth:`detach` is not kept alive by them.

    Args:
        parameters: whose state is kept there.
        place: where it waits between steps.
        bucket_bytes: the most that parameters, gradients and state of one bucket may take; a parameter that
            needs more has a bucket to itself, or comes in slices.
        least_bytes: state tensors smaller than this stay where they are.
        slices: whether a parameter that needs more than a bucket may be stepped in slices, see Note [Slices].
        logger: told which optimizers are stepped whole, and why.
        watched: told of what is moved.

    Attributes:
        bytes_moved: bytes of state taken up or down so far.
        buckets_run: calls of torch's arithmetic so far.
        skipped: the optimizers that are stepped whole, with the reason.

    Example:
        >>> class Elsewhere:
        ...     def down(self, tensor): return tensor.to("cpu", copy=True)
        ...     def up(self, tensor, parameter): return tensor.to(parameter.device)
        ...     def new(self, like): return torch.empty_like(like, device="cpu")
        ...     def reserve(self, like, parameter): return self.new(like)
        ...     def fill(self, home, values): home.copy_(values)
        ...     def rest(self, tensor): pass
        >>> model = nn.Linear(64, 64)
        >>> steps = StreamedSteps(model.parameters(), Elsewhere(), bucket_bytes=2**20)
        >>> steps.attach()
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
        >>> steps.bytes_moved == 2 * 64 * 64 * 4  # two moments of the weight; the bias's are too small
        True
        >>> steps.detach()
    """

    order = StepOrder.BUCKETS
    _notice = "The state of this %s stays on its device: %s."

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        place: StatePlace,
        bucket_bytes: int,
        *,
        least_bytes: int = PAGE,
        slices: bool = True,
        logger: logging.Logger | None = None,
        watched: WatchedState | None = None,
    ) -> None:
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int):
            raise ConfigTypeError(f"bucket_bytes takes a number of bytes, got {bucket_bytes!r}.")
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes={bucket_bytes}: a bucket needs at least 1 byte.")
        self.bucket_bytes = bucket_bytes
        self.buckets_run = 0
        self._slices = slices
        self.skipped: MutableMapping[Optimizer, str] = weakref.WeakKeyDictionary()
        self._logger = logger or logging.getLogger("memscale")
        self._state = MovingState(place, least_bytes, watched)
        # Not weakly: torch.utils.swap_tensors, which moves parameters, takes none that are referred to so.
        self._parameters = {id(each): each for each in parameters}
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._splits = 0  # calls of torch's arithmetic that were split
        self._splits_before: MutableMapping[Optimizer, int] = weakref.WeakKeyDictionary()

    @property
    def bytes_moved(self) -> int:
        return self._state.bytes_moved

    # ------------------------------------------------------------------ on and off

    def attach(self) -> None:
        """Stream every step from now on that one of the parameters is in."""
        self.subscribe()

    def detach(self) -> None:
        """No hooks, no changed steps; all state beside its parameters, as ordinary tensors."""
        self.unsubscribe()
        for optimizer in list(self._optimizers):
            self._bring_back(optimizer)

    def pause(self) -> None:
        """No hooks and no changed steps for now; state stays where it is until :meth:`attach` or :meth:`detach`."""
        self.unsubscribe()

    def settle(self, optimizer: Optimizer) -> None:
        """Take down what state there is now, after ``load_state_dict`` say, instead of at the next step."""
        if self._may_split(optimizer):
            for member in self._ours_of(optimizer):
                self._take_down(optimizer, member, {})

    def is_down(self, tensor: Tensor) -> bool:
        """Whether this is a state tensor that waits in the place."""
        return self._state.is_home(tensor)

    def _bring_back(self, optimizer: Optimizer) -> None:
        with torch.no_grad():
            for key, state in optimizer.state.items():
                if isinstance(key, Tensor):
                    self._state.bring_back(state, key)
        # Last: if the device has no room for it all, this can be done again when it has.
        copy_without(optimizer, self._state)
        self._optimizers.discard(optimizer)

    # ------------------------------------------------------------------ which steps

    def parameter_ids(self) -> Container[int]:
        return self._parameters

    def before_step(self, optimizer: Optimizer) -> None:
        self._splits_before[optimizer] = self._splits
        if optimizer in self._optimizers and self._why_whole(optimizer) is not None:
            self._bring_back(optimizer)  # found out late

    def around_arithmetic(self, call: Callable[[], Any], optimizer: Optimizer) -> None:
        if self._may_split(optimizer):
            self._splits += 1
            self._in_buckets(optimizer, call)
        else:
            call()

    def after_step(self, optimizer: Optimizer) -> None:
        # The step of an optimizer that wraps another comes after the other's.
        if self._splits_before.get(optimizer) != self._splits:
            return
        self._leave_whole(optimizer, self._why_whole(optimizer) or _NOT_REACHED)
        for member in self._ours_of(optimizer):
            self._stepped(member)
            self._rest(member.parameter)

    def _ours_of(self, optimizer: Optimizer) -> list[Member]:
        return [member for member in members_of(optimizer) if self.owns(member.parameter)]

    def _may_split(self, optimizer: Optimizer) -> bool:
        """Whether its arithmetic can be; it gets its state back if that was found out late."""
        reason = self._why_whole(optimizer)
        if reason is not None:
            self._leave_whole(optimizer, reason)
            return False
        self.skipped.pop(optimizer, None)
        return True

    def _why_whole(self, optimizer: Optimizer) -> str | None:
        return why_whole(optimizer)

    def _leave_whole(self, optimizer: Optimizer, reason: str) -> None:
        if self.skipped.get(optimizer) != reason:
            self.skipped[optimizer] = reason
            self._logger.warning(self._notice, type(optimizer).__name__, reason)
        if optimizer in self._optimizers:
            self._bring_back(optimizer)

    # ------------------------------------------------------------------ a step

    def _in_buckets(self, optimizer: Optimizer, call: Callable[[], Any]) -> None:
        """All of a step."""
        streamed: list[Member] = []
        others: list[Member] = []
        for member in members_of(optimizer):
            ours = self.owns(member.parameter) and member.parameter.grad is not None
            (streamed if ours else others).append(member)
        self._reserve(optimizer, streamed, others)
        try:
            buckets = Buckets(optimizer, streamed, self._state, self.bucket_bytes)
            with SplitStep(optimizer) as split:
                while True:
                    bucket = buckets.take()
                    sliced = self._sliced(optimizer, bucket, buckets.needed)
                    if sliced is not None:
                        self._run_slices(sliced, split, bucket[0], call)
                        bucket = []
                    # Whatever is not streamed is stepped once, too: with the last bucket.
                    shown = [*bucket, *others] if buckets.is_last else bucket
                    if shown or sliced is None:
                        split.show(shown)
                        self._run(optimizer, bucket, call)
                    if buckets.is_last:
                        break
            for member in others:
                if self.owns(
                    member.parameter
                ):  # no gradient now, but maybe state: loaded, or from before we came
                    self._take_down(optimizer, member, {})
        finally:
            self._state.end_reservation()

    def _reserve(self, optimizer: Optimizer, streamed: Iterable[Member], others: Iterable[Member]) -> None:
        """Take room for all state that the step will leave in the place, before a parameter is changed."""
        new = NewState(optimizer)
        try:
            for member in (*streamed, *(each for each in others if self.owns(each.parameter))):
                self._state.reserve_for(optimizer.state.get(member.parameter), member.parameter)
            for member in streamed:
                group, parameter = optimizer.param_groups[member.group], member.parameter
                for name, like in new.of(group, parameter).items():
                    for path, left in as_left(optimizer, parameter, name, like):
                        self._state.reserve(parameter, path, left)
        except TierFullError as error:
            self._state.end_reservation()
            raise TierFullError(
                f"This step of {type(optimizer).__name__} was not made, and no parameter was changed: its state "
                f"does not fit where the plan has it. {error}"
            ) from error

    def _sliced(self, optimizer: Optimizer, bucket: list[Member], needed: int) -> SlicedParameter | None:
        if not self._slices or len(bucket) != 1:
            return None
        return slices_of(optimizer, bucket[0].parameter, self._state, needed, self.bucket_bytes)

    def _run_slices(
        self, sliced: SlicedParameter, split: SplitStep, member: Member, call: Callable[[], Any]
    ) -> None:
        def step(stand_in: nn.Parameter) -> Any:
            split.show_instead(member, stand_in)
            return call()

        sliced.run(step)
        self._keep(split.optimizer)
        self._stepped(member)
        self.buckets_run += len(sliced)

    def _run(self, optimizer: Optimizer, bucket: list[Member], call: Callable[[], Any]) -> None:
        """Run the arithmetic of one bucket, with its state fetched for that long."""
        origins: list[Origins] = [{} for _ in bucket]

        def take_down() -> None:
            with self._state.watched.timed():
                for member, origin in zip(bucket, origins, strict=True):
                    self._take_down(optimizer, member, origin)

        try:
            with torch.no_grad(), self._state.watched.timed():
                for member, origin in zip(bucket, origins, strict=True):
                    self._state.up(optimizer.state.get(member.parameter), member.parameter, origin)
            call()
        except BaseException:
            # State is complete wherever it is; the first error matters more than one of the place.
            with contextlib.suppress(Exception):
                take_down()
            raise
        for member in bucket:
            self._stepped(member)
        take_down()
        self.buckets_run += 1

    def _take_down(self, optimizer: Optimizer, member: Member, origins: Origins) -> None:
        self._keep(optimizer)
        parameter = member.parameter
        with torch.no_grad():
            self._state.down(optimizer.state.get(parameter), parameter, origins)
        self._rest(parameter)

    def _stepped(self, member: Member) -> None:
        if member.parameter.grad is not None:
            self._state.watched.stepped(member.parameter)

    def _rest(self, parameter: Tensor) -> None:
        for tensor in (parameter, parameter.grad):
            if tensor is not None and tensor.layout is torch.strided:
                self._state.place.rest(tensor)

    def _keep(self, optimizer: Optimizer) -> None:
        """Note that some of an optimizer's state is in the place."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            copy_with_state(optimizer, self._state, self)
