"""Optimizer steps a bucket of parameters at a time, with state that is stored or in 8 bits in between.

Note [Bucketed steps]
~~~~~~~~~~~~~~~~~~~~~
While ``optimizer.step()`` runs, the arithmetic of torch.optim is called once for each bucket of parameters
(``buckets.py``). A bucket's state is loaded before its call and saved after it (Note [Stored state]), state that the
call made included: all of it is never loaded at once, from the first step on. Moments that are in 8 bits are
dequantized for the call and quantized after it (Note [Eight bits between steps]), on the device, so that only codes
are moved. A parameter that needs more than a bucket is stepped in slices where its optimizer allows it.

Only the steps of torch.optim's own classes are split, and the numbers are the same to the bit: the same functions
see the same operands, fewer at a time. Others are called once, as they are, and their state is not moved
(Note [Whose arithmetic is split]).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections import ChainMap, defaultdict
from collections.abc import Callable, Container, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from memscale.errors import ConfigError, ConfigTypeError, TierFullError
from memscale.observe.counters import WatchedState
from memscale.optimizer.buckets import Buckets, Member, SlicedParameter, SplitStep, members_of, slice_length
from memscale.optimizer.eight_bit import EightBitState, Moment, is_moment, stored_layout
from memscale.optimizer.interceptor import StepOrder, StepSubscriber
from memscale.optimizer.kinds import NewState, has_moments, why_32_bits, why_whole
from memscale.optimizer.state_stores import PAGE, Origins, StateMover, StateStore

__all__ = ["BucketedSteps"]

_NOT_REACHED = "its step does not call that of torch.optim, or torch's wrapper of that was not found"
_ON_DEVICE = "The state of this %s stays on its device: %s."
_IN_32_BITS = "The state of this %s stays in 32 bits: %s."
_REDUCE = "__reduce_ex__"
_HOST = torch.device("cpu")


class BucketedSteps(StepSubscriber):
    """Keeps the optimizer state of some parameters in a store or in 8 bits, whichever optimizer steps them.

    It lives as long as someone holds it: its owner, or an optimizer whose state it keeps.

    Args:
        parameters: Those whose state is kept in the store.
        store: Where it is kept between steps.
        bucket_bytes: The most that parameters, gradients and state of one bucket may take; a parameter that needs
            more has a bucket to itself, or comes in slices.
        least_bytes: State tensors smaller than this stay where they are.
        logger: Told which optimizers are stepped whole, and why.
        watched: Counts what is moved.
        eight_bit: Quantizes the moments of its parameters, which may be others; None if all are in 32 bits.
        quantizing: Times that.

    Attributes:
        buckets_run: Calls of torch's arithmetic so far.
        skipped: The optimizers that are stepped whole, with the reason.

    Example:
        >>> from memscale.optimizer.state_stores import HostStateStore
        >>> from memscale.tiers.disk import DiskStore
        >>> model = nn.Linear(64, 64)
        >>> steps = BucketedSteps(model.parameters(), HostStateStore(DiskStore()), bucket_bytes=2**20)
        >>> steps.attach()
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
        >>> steps.bytes_moved == 2 * 64 * 64 * 4  # two moments of the weight; the bias's are too small
        True
        >>> _ = steps.detach()
    """

    order = StepOrder.BUCKETS

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        store: StateStore,
        bucket_bytes: int,
        *,
        least_bytes: int = PAGE,
        logger: logging.Logger | None = None,
        watched: WatchedState | None = None,
        eight_bit: EightBitState | None = None,
        quantizing: WatchedState | None = None,
    ) -> None:
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int):
            raise ConfigTypeError(f"bucket_bytes takes a number of bytes, got {bucket_bytes!r}.")
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes={bucket_bytes}: a bucket needs at least 1 byte.")
        self.bucket_bytes = bucket_bytes
        self.eight_bit = eight_bit
        self.buckets_run = 0
        self.skipped: MutableMapping[Optimizer, str] = weakref.WeakKeyDictionary()
        self._in_32_bits: MutableMapping[Optimizer, str] = weakref.WeakKeyDictionary()
        self._logger = logger or logging.getLogger("memscale")
        self._quantizing = quantizing or WatchedState()
        self._mover = StateMover(store, least_bytes, watched)
        self._unmoved = StateMover(
            store, sys.maxsize
        )  # for parameters whose state is in 8 bits and not stored
        # Not weakly: torch.utils.swap_tensors, which moves parameters, takes none that are referred to so.
        self._parameters = {id(each): each for each in parameters}
        self._every = ChainMap(self._parameters, {} if eight_bit is None else eight_bit.parameters)
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._saving: MutableMapping[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
        self._splits = 0  # calls of torch's arithmetic that were split
        self._splits_before: MutableMapping[Optimizer, int] = weakref.WeakKeyDictionary()

    @property
    def bytes_moved(self) -> int:
        """Bytes of state loaded from or saved to the store so far."""
        return self._mover.bytes_moved

    # ------------------------------------------------------------------ on and off

    def attach(self) -> None:
        """Run every step in buckets from now on that one of the parameters is in."""
        self.subscribe()

    def pause(self) -> None:
        """Change no steps for now; state stays where it is until :meth:`attach` or :meth:`detach`."""
        self.unsubscribe()

    def detach(self, *, keep_eight_bits: bool = False) -> list[Optimizer]:
        """Change no steps any more, and bring all state back beside its parameters, as ordinary tensors.

        Args:
            keep_eight_bits: Whether moments stay in 8 bits, for another that is about to :meth:`adopt` them.

        Returns:
            The optimizers.
        """
        self.unsubscribe()
        optimizers = list(self._optimizers)
        for optimizer in optimizers:
            self._bring_back(optimizer, keep_eight_bits=keep_eight_bits)
        return optimizers

    def adopt(self, optimizer: Optimizer) -> None:
        """Take over an optimizer whose moments are in 8 bits."""
        self._keep(optimizer)

    def store_state(self, optimizer: Optimizer) -> None:
        """Store what state there is now, after ``load_state_dict`` say, instead of at the next step."""
        if why_whole(optimizer) is None:
            for member in self._members(optimizer):
                self._save(optimizer, member, {})

    def is_stored(self, tensor: Tensor) -> bool:
        """Return whether this is a state tensor in the store."""
        return self._mover.is_stored(tensor)

    def quantizes(self, optimizer: Optimizer, parameter: Tensor) -> bool:
        """Return whether moments of a parameter are kept in 8 bits under an optimizer."""
        eight_bit = self.eight_bit
        return (
            eight_bit is not None
            and id(parameter) in eight_bit.parameters
            and has_moments(optimizer)
            and why_32_bits(optimizer) is None
        )

    def _bring_back(self, optimizer: Optimizer, *, keep_eight_bits: bool = False) -> None:
        with torch.no_grad():
            for key, state in optimizer.state.items():
                if isinstance(key, Tensor):
                    self._mover.bring_back(state, key)
                    if self.eight_bit is not None and not keep_eight_bits:
                        self.eight_bit.dequantize(state, key)
        # Last: if the device has no room for it all, this can be done again when it has.
        _remove_reduce(optimizer, self)
        self._optimizers.discard(optimizer)
        handle = self._saving.pop(optimizer, None)
        if handle is not None:
            handle.remove()

    def _keep(self, optimizer: Optimizer) -> None:
        """Note an optimizer some of whose state is stored or in 8 bits; copies and checkpoints get ordinary state."""
        if optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        vars(optimizer)[_REDUCE] = _Reduce(optimizer, self, vars(optimizer).get(_REDUCE))
        if self.eight_bit is not None:
            hook = _OrdinaryStateDict(self.eight_bit)
            self._saving[optimizer] = optimizer.register_state_dict_post_hook(hook)

    def copied(self, state: Any, parameter: Tensor) -> Any:
        """Return a parameter's state as it would be in memory and in 32 bits; the original stays as it is."""
        state = self._mover.copied(state, parameter)
        return state if self.eight_bit is None else self.eight_bit.ordinary(state, parameter)

    # ------------------------------------------------------------------ which steps

    def parameter_ids(self) -> Container[int]:
        return self._every

    def before_step(self, optimizer: Optimizer) -> None:
        self._splits_before[optimizer] = self._splits
        if optimizer in self._optimizers and self._why_ordinary(optimizer) is not None:
            self._bring_back(optimizer)  # its settings were changed

    def around_arithmetic(self, call: Callable[[], Any], optimizer: Optimizer) -> None:
        self._splits += 1
        self.skipped.pop(optimizer, None)
        self._warn_32_bits(optimizer, why_32_bits(optimizer))
        self._run_in_buckets(optimizer, call)

    def after_step(self, optimizer: Optimizer) -> None:
        # The step of an optimizer that wraps another comes after the other's.
        if self._splits_before.get(optimizer) != self._splits:
            return
        self._warn_32_bits(optimizer, why_32_bits(optimizer) or _NOT_REACHED)
        members = self._members(optimizer)
        if any(id(member.parameter) in self._parameters for member in members):
            reason = why_whole(optimizer) or _NOT_REACHED
            self._warn_once(self.skipped, optimizer, _ON_DEVICE, reason)
        if optimizer in self._optimizers:
            self._bring_back(optimizer)
        for member in members:
            self._count_step(member)
            self._release_pages(member.parameter)

    def _members(self, optimizer: Optimizer) -> list[Member]:
        return [member for member in members_of(optimizer) if id(member.parameter) in self._every]

    def _why_ordinary(self, optimizer: Optimizer) -> str | None:
        return why_whole(optimizer) or (None if self.eight_bit is None else why_32_bits(optimizer))

    def _warn_32_bits(self, optimizer: Optimizer, reason: str | None) -> None:
        if self.eight_bit is None or reason is None or not has_moments(optimizer):
            return
        ids = self.eight_bit.parameters
        if any(id(member.parameter) in ids for member in members_of(optimizer)):
            self._warn_once(self._in_32_bits, optimizer, _IN_32_BITS, reason)

    def _warn_once(
        self, told: MutableMapping[Optimizer, str], optimizer: Optimizer, message: str, reason: str
    ) -> None:
        if told.get(optimizer) != reason:
            told[optimizer] = reason
            self._logger.warning(message, type(optimizer).__name__, reason)

    # ------------------------------------------------------------------ a step

    def _run_in_buckets(self, optimizer: Optimizer, call: Callable[[], Any]) -> None:
        bucketed: list[Member] = []
        others: list[Member] = []
        for member in members_of(optimizer):
            is_ours = id(member.parameter) in self._parameters or self.quantizes(optimizer, member.parameter)
            (bucketed if is_ours and member.parameter.grad is not None else others).append(member)
        # No gradient now, but maybe state: loaded from a checkpoint, or from before.
        idle = [member for member in others if id(member.parameter) in self._parameters]
        self._reserve(optimizer, bucketed, idle)
        try:
            buckets = Buckets(
                optimizer, bucketed, lambda each: self._state_bytes(optimizer, each), self.bucket_bytes
            )
            with SplitStep(optimizer) as split:
                while True:
                    bucket = buckets.next_bucket()
                    sliced = self._sliced(optimizer, bucket, buckets.needed)
                    if sliced is not None:
                        self._run_slices(sliced, split, bucket[0], call)
                        bucket = []
                    # Whatever is not bucketed is stepped once, too: with the last bucket.
                    shown = [*bucket, *others] if buckets.is_last else bucket
                    if shown or sliced is None:
                        split.show(shown)
                        self._run_bucket(optimizer, bucket, call)
                    if buckets.is_last:
                        break
            for member in idle:
                self._save(optimizer, member, {})
        finally:
            self._mover.end_reservation()

    def _reserve(self, optimizer: Optimizer, bucketed: list[Member], idle: list[Member]) -> None:
        """Allocate room for all state that the step will store, before a parameter is changed."""
        new = NewState(optimizer)
        stored = [member for member in bucketed if id(member.parameter) in self._parameters]
        try:
            for member in (*stored, *idle):
                self._mover.reserve_for(optimizer.state.get(member.parameter), member.parameter)
            for member in stored:
                group, parameter = optimizer.param_groups[member.group], member.parameter
                quantized = self.quantizes(optimizer, parameter)
                for name, like in new.of(group, parameter).items():
                    for path, part in stored_layout(name, like, quantized=quantized):
                        self._mover.reserve(parameter, path, part)
        except TierFullError as error:
            self._mover.end_reservation()
            raise TierFullError(
                f"This step of {type(optimizer).__name__} was not made, and no parameter was changed: its state "
                f"does not fit where the plan has it. {error}"
            ) from error

    def _state_bytes(self, optimizer: Optimizer, member: Member) -> int:
        """Return the bytes of a parameter's state while it is loaded."""
        parameter, mover = member.parameter, self._mover_of(member.parameter)
        state = optimizer.state.get(parameter)
        if not isinstance(state, dict) or not self.quantizes(optimizer, parameter):
            return mover.bytes_of(state, parameter)
        total = 0
        for name, value in state.items():
            if isinstance(value, Moment):
                total += value.dequantized_bytes
            else:
                is_quantized = is_moment(name, value, parameter)
                total += value.nbytes if is_quantized else mover.bytes_of(value, parameter)
        return total

    def _sliced(self, optimizer: Optimizer, bucket: list[Member], needed: int) -> SlicedParameter | None:
        if len(bucket) != 1:
            return None
        parameter = bucket[0].parameter
        eight_bit = self.eight_bit if self.quantizes(optimizer, parameter) else None
        if eight_bit is not None and eight_bit.has_failed:
            return None
        length = slice_length(optimizer, parameter, needed, self.bucket_bytes)
        if length is None:
            return None
        return SlicedParameter(optimizer, parameter, self._mover_of(parameter), length, eight_bit)

    def _run_slices(
        self, sliced: SlicedParameter, split: SplitStep, member: Member, call: Callable[[], Any]
    ) -> None:
        def step(stand_in: nn.Parameter) -> None:
            split.show_instead(member, stand_in)
            call()

        self._keep(split.optimizer)
        sliced.run(step)
        self._count_step(member)
        self.buckets_run += len(sliced)

    def _run_bucket(self, optimizer: Optimizer, bucket: list[Member], call: Callable[[], Any]) -> None:
        """Run the arithmetic of one bucket, with its state loaded for that long."""
        origins: list[Origins] = [{} for _ in bucket]
        try:
            for member, origin in zip(bucket, origins, strict=True):
                self._load(optimizer, member, origin)
            call()
        except BaseException:
            # State is complete wherever it is; the first error matters more than one of the store.
            with contextlib.suppress(Exception):
                self._save_bucket(optimizer, bucket, origins)
            raise
        for member in bucket:
            self._count_step(member)
        self._save_bucket(optimizer, bucket, origins)
        self.buckets_run += 1

    def _load(self, optimizer: Optimizer, member: Member, origins: Origins) -> None:
        parameter, state = member.parameter, optimizer.state.get(member.parameter)
        with torch.no_grad():
            with self._mover.watched.timed():
                self._mover_of(parameter).load(state, parameter, origins)
            if self.eight_bit is not None:
                with self._quantizing.timed():
                    self.eight_bit.dequantize(state, parameter)

    def _save_bucket(self, optimizer: Optimizer, bucket: list[Member], origins: list[Origins]) -> None:
        for member, origin in zip(bucket, origins, strict=True):
            if self.eight_bit is not None and self.quantizes(optimizer, member.parameter):
                self._keep(optimizer)
                with torch.no_grad(), self._quantizing.timed():
                    self.eight_bit.quantize(optimizer.state.get(member.parameter), member.parameter)
            with self._mover.watched.timed():
                self._save(optimizer, member, origin)

    def _save(self, optimizer: Optimizer, member: Member, origins: Origins) -> None:
        """Store a parameter's state, and release the pages of what is on disk."""
        parameter = member.parameter
        self._keep(optimizer)
        with torch.no_grad():
            self._mover_of(parameter).save(optimizer.state.get(parameter), parameter, origins)
        self._release_pages(parameter)

    def _mover_of(self, parameter: Tensor) -> StateMover:
        return self._mover if id(parameter) in self._parameters else self._unmoved

    def _count_step(self, member: Member) -> None:
        if member.parameter.grad is not None:
            self._mover.watched.stepped(member.parameter)

    def _release_pages(self, parameter: Tensor) -> None:
        for tensor in (parameter, parameter.grad):
            if tensor is not None and tensor.layout is torch.strided:
                self._mover.store.release_pages(tensor)


class _OrdinaryStateDict:
    """A hook by which ``state_dict`` holds 32-bit numbers instead of 8-bit moments.

    They are on the host, because all of them at once may be more than the device has room for.
    """

    def __init__(self, eight_bit: EightBitState) -> None:
        self._eight_bit = eight_bit

    def __call__(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        # torch numbers the parameters in the order of the groups.
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with torch.no_grad():
            state = {
                key: self._eight_bit.ordinary(value, parameters[key], _HOST)
                if isinstance(key, int)
                else value
                for key, value in state_dict["state"].items()
            }
        return {**state_dict, "state": state}


class _Reduce:
    """An optimizer's ``__reduce_ex__`` while some of its state is stored or in 8 bits.

    A deep copy or a pickle of an optimizer knows nothing of a store: it must hold ordinary state beside its
    parameters. Copying and pickling both ask the object itself for ``__reduce_ex__``, so that one attribute of the
    instance is enough; copies don't inherit it. It also keeps `steps` alive, which alone can bring the state back.
    """

    def __init__(
        self, optimizer: Optimizer, steps: BucketedSteps, inner: Callable[[Any], Any] | None
    ) -> None:
        self._optimizer = weakref.ref(optimizer)  # or the optimizer would be in a cycle, and live longer
        self.steps = steps
        self.inner = inner  # of another model whose parameters the same optimizer steps

    def __call__(self, protocol: Any) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None, "an optimizer's own attribute was called after it was gone"
        whole = self.inner(protocol) if self.inner else type(optimizer).__reduce_ex__(optimizer, protocol)
        contents = whole[2] if isinstance(whole, tuple) and len(whole) > 2 else None
        if not isinstance(contents, dict) or not isinstance(contents.get("state"), dict):
            return whole  # a class that is copied in its own way
        contents = {key: value for key, value in contents.items() if key != _REDUCE}
        contents["state"] = self._ordinary(contents["state"])
        return (*whole[:2], contents, *whole[3:])

    def _ordinary(self, state: dict[Any, Any]) -> dict[Any, Any]:
        copy: dict[Any, Any] = defaultdict(dict) if isinstance(state, defaultdict) else {}
        with torch.no_grad():
            for key, value in state.items():
                copy[key] = self.steps.copied(value, key) if isinstance(key, Tensor) else value
        return copy


def _remove_reduce(optimizer: Optimizer, steps: BucketedSteps) -> None:
    """Remove the `_Reduce` of these steps, also from under another's."""
    outer, own = None, vars(optimizer).get(_REDUCE)
    while isinstance(own, _Reduce) and own.steps is not steps:
        outer, own = own, own.inner
    if not isinstance(own, _Reduce):
        return
    if outer is not None:
        outer.inner = own.inner
    elif own.inner is not None:
        vars(optimizer)[_REDUCE] = own.inner
    else:
        del vars(optimizer)[_REDUCE]
