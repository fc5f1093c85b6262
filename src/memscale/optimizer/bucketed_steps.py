"""Optimizer steps a bucket of parameters at a time, with state that is stored or in 8 bits in between.

Note [Bucketed steps]
~~~~~~~~~~~~~~~~~~~~~
While ``optimizer.step()`` runs, the arithmetic of torch.optim is called once for each bucket of parameters, with the
optimizer's groups cut down to these. A bucket's state is loaded before its call and saved after it
(Note [Stored state]), state that the call made included: all of it is never loaded at once, from the first step on.
Moments that are in 8 bits are dequantized for the call and quantized after it (Note [Eight bits between steps]), on
the device, so that only codes are moved.

Only the steps of torch.optim's own classes are split, and the numbers are the same to the bit: the same functions
see the same operands, fewer at a time. Others are called once, as they are, and their state is not moved
(Note [Whose arithmetic is split]).

Note [Slices]
~~~~~~~~~~~~~
An embedding can be larger than a bucket by itself: with its gradient, Adam's moments and Adam's temporaries, six
times its own bytes. Optimizers that treat every element by itself can be called for a slice of it: a parameter over
a part of the same memory, with that part of the gradient and of the state. Each slice begins with the counters
that the parameter had; those of the last are the parameter's afterwards. Slices of 8-bit moments begin where their
blocks do. Other optimizers (Adafactor looks at rows and columns, Muon at matrices) get the parameter whole.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections import ChainMap, defaultdict, deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from memscale.errors import TierFullError
from memscale.observe.counters import Meter
from memscale.optimizer.eight_bit import (
    EightBitState,
    Moment,
    Unavailable,
    find_quantizer,
    is_moment,
    moment_layout,
)
from memscale.optimizer.interceptor import Member, SplitStep, StepOrder, StepSubscriber, members_of
from memscale.optimizer.kinds import (
    ELEMENTWISE,
    MOMENTS,
    STATE_NAMES,
    NewState,
    arithmetic_of,
    has_moments,
    why_32_bits,
    why_whole,
)
from memscale.optimizer.state_stores import PAGE, Origins, StateMover, StateStore, tensors_in
from memscale.tiers.disk import DiskStore

__all__ = ["BucketedSteps", "bytes_of_gradient"]

LEAST_SLICE_BYTES = 16 * PAGE
"""Of a parameter in one slice: below that, calls cost more than memory is worth."""

_NOT_REACHED = "its step does not call that of torch.optim, or torch's wrapper of that was not found"
_ON_DEVICE = "The state of this %s stays on its device: %s."
_IN_32_BITS = "The state of this %s stays in 32 bits: %s."
_REDUCE = "__reduce_ex__"
_HOST = torch.device("cpu")

logger = logging.getLogger("memscale")
_SILENT = logging.getLogger("memscale.silent")
_SILENT.disabled = True


class BucketedSteps(StepSubscriber):
    """Keeps the optimizer state of one model in a store or in 8 bits, through all of its plans.

    It lives as long as someone holds it: its owner, or an optimizer whose state it keeps.

    Args:
        disk: The disk of the model.
        meter: Counts what is moved.

    Attributes:
        buckets_run: Calls of torch's arithmetic so far.
        skipped: The optimizers that are stepped whole, with the reason.

    Example:
        >>> from memscale.optimizer.state_stores import DiskStateStore
        >>> model = nn.Linear(64, 64)
        >>> steps = BucketedSteps(DiskStore())
        >>> steps.attach(model.parameters(), DiskStateStore(DiskStore()), bucket_bytes=2**20)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
        >>> steps.bytes_moved == 2 * 64 * 64 * 4  # two moments of the weight; the bias's are too small
        True
        >>> steps.restore()
    """

    order = StepOrder.BUCKETS

    def __init__(self, disk: DiskStore, meter: Meter | None = None) -> None:
        self._disk = disk
        self._meter = meter or Meter()
        self.buckets_run = 0
        self.skipped: MutableMapping[Optimizer, str] = weakref.WeakKeyDictionary()
        self._in_32_bits: MutableMapping[Optimizer, str] = weakref.WeakKeyDictionary()
        self._state_dict_hooks: MutableMapping[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
        self._splits = 0  # calls of torch's arithmetic that were split
        self._splits_before: MutableMapping[Optimizer, int] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._wholes: dict[int, Tensor] = {}  # the parameter of the slice that is being stepped
        self._unavailable = ""  # the reason that was last given
        self._eight_bit: EightBitState | None = None
        self._bytes_moved = 0  # under the plans before this one
        self._mover = StateMover(StateStore(disk), PAGE, self._meter)
        self._configure([], [], StateStore(disk), 1, PAGE, logs=False)

    def _configure(
        self,
        parameters: list[nn.Parameter],
        in_eight_bits: list[nn.Parameter],
        store: StateStore,
        bucket_bytes: int,
        least_bytes: int,
        *,
        logs: bool,
    ) -> None:
        self._configuration = [*map(id, parameters)], [*map(id, in_eight_bits)], store, bucket_bytes
        self._bucket_bytes = bucket_bytes
        self._logger = logger if logs else _SILENT
        # Not weakly: torch.utils.swap_tensors, which moves parameters, takes none that are referred to so.
        self._parameters = {id(each): each for each in parameters}
        eight_bit = self._eight_bit
        if eight_bit is None or [*eight_bit.parameters] != self._configuration[1]:
            self._eight_bit = self._find_eight_bit(in_eight_bits)
        self._every = ChainMap(self._parameters, self._eight_bit.parameters if self._eight_bit else {})
        self._bytes_moved += self._mover.bytes_moved
        self._mover = StateMover(store, least_bytes, self._meter)
        # Of parameters whose state is in 8 bits and not stored.
        self._unmoved = StateMover(StateStore(self._disk), least_bytes, self._meter)

    def _find_eight_bit(self, parameters: list[nn.Parameter]) -> EightBitState | None:
        if not parameters:
            return None
        try:
            return EightBitState(parameters, find_quantizer(parameters), self._logger)
        except Unavailable as reason:
            if str(reason) != self._unavailable and not self._logger.disabled:
                self._unavailable = str(reason)
                self._logger.warning("No 8-bit optimizer, the standard one goes on as it is: %s.", reason)
            return None

    @property
    def store(self) -> StateStore:
        """Where state is kept between steps."""
        return self._mover.store

    @property
    def bytes_moved(self) -> int:
        """Bytes of state loaded from or saved to the store so far."""
        return self._bytes_moved + self._mover.bytes_moved

    # ------------------------------------------------------------------ on and off

    def attach(
        self,
        parameters: Iterable[nn.Parameter],
        store: StateStore,
        bucket_bytes: int,
        *,
        eight_bit: Iterable[nn.Parameter] = (),
        least_bytes: int = PAGE,
        logs: bool = True,
    ) -> None:
        """Run steps in buckets as a plan says; what the plan before had the same stays as it is.

        Args:
            parameters: Those that are stepped in buckets, and whose state is kept in the store.
            store: Where it is kept between steps.
            bucket_bytes: The most that parameters, gradients and state of one bucket may take, in 32 bits; a parameter
                that needs more has a bucket to itself, or comes in slices.
            eight_bit: Those whose moments are kept in 8 bits; without bitsandbytes, none are.
            least_bytes: State tensors smaller than this stay where they are.
            logs: Whether optimizers that are stepped whole are named in the log.
        """
        wanted, quantized = list(parameters), list(eight_bit)
        if self._configuration != ([*map(id, wanted)], [*map(id, quantized)], store, bucket_bytes):
            same_moments = [*map(id, quantized)] == self._configuration[1]
            for optimizer in list(self._optimizers):
                self._bring_back(optimizer, keep_eight_bits=same_moments)
            self._configure(wanted, quantized, store, bucket_bytes, least_bytes, logs=logs)
        if self._every:
            self.subscribe()

    def restore(self) -> None:
        """Change no steps any more, and bring all state back beside its parameters, in 32 bits."""
        self.unsubscribe()
        for optimizer in list(self._optimizers):
            self._bring_back(optimizer)
        self._configure([], [], StateStore(self._disk), 1, PAGE, logs=False)

    def store_state(self, optimizer: Optimizer) -> None:
        """Store what state there is now, and not at the next step: the device may be short of memory."""
        if why_whole(optimizer) is None:
            for member in self._members(optimizer):
                self._save(optimizer, self._stepped(optimizer, member))

    def is_stored(self, tensor: Tensor) -> bool:
        """Return whether this is a state tensor in the store, which must be left there."""
        return self._mover.is_stored(tensor)

    def whole_of(self, parameter: Tensor) -> Tensor:
        """Return the parameter that one in a step's groups is a slice of; itself if it is none."""
        return self._wholes.get(id(parameter), parameter)

    def quantizes(self, optimizer: Optimizer, parameter: Tensor) -> bool:
        """Return whether moments of a parameter are kept in 8 bits under an optimizer."""
        eight_bit = self._eight_bit
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
                    if self._eight_bit is not None and not keep_eight_bits:
                        self._eight_bit.dequantize(state, key)
        if keep_eight_bits:
            return
        # Last: if the device has no room for it all, this can be done again when it has.
        self._optimizers.discard(optimizer)
        reduce: _Reduce = vars(optimizer)[_REDUCE]
        reduce.users.remove(self)
        if not reduce.users:
            del vars(optimizer)[_REDUCE]
        handle = self._state_dict_hooks.pop(optimizer, None)
        if handle is not None:
            handle.remove()

    def _keep(self, optimizer: Optimizer) -> None:
        """Note an optimizer some of whose state is stored or in 8 bits; copies and checkpoints get ordinary state."""
        if optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        vars(optimizer).setdefault(_REDUCE, _Reduce(optimizer)).users.append(self)
        if self._eight_bit is not None:
            hook = functools.partial(_ordinary_state_dict, self._eight_bit)
            self._state_dict_hooks[optimizer] = optimizer.register_state_dict_post_hook(hook)

    def copied(self, state: Any, parameter: Tensor) -> Any:
        """Return a parameter's state as it would be in memory and in 32 bits; the original stays as it is."""
        return self._mover.copied(state, parameter, self._eight_bit)

    # ------------------------------------------------------------------ which steps

    def parameter_ids(self) -> Container[int]:
        return self._every

    def before_step(self, optimizer: Optimizer) -> None:
        self._splits_before[optimizer] = self._splits
        is_whole = why_whole(optimizer) or (self._eight_bit is not None and why_32_bits(optimizer))
        if optimizer in self._optimizers and is_whole:
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
            self._count_step(member.parameter)
            self._release_pages(member.parameter)

    def _members(self, optimizer: Optimizer) -> list[Member]:
        return [member for member in members_of(optimizer) if id(member.parameter) in self._every]

    def _warn_32_bits(self, optimizer: Optimizer, reason: str | None) -> None:
        if self._eight_bit is None or reason is None or not has_moments(optimizer):
            return
        ids = self._eight_bit.parameters
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
        bucketed: deque[Member] = deque()
        others: list[Member] = []
        for member in members_of(optimizer):
            is_ours = id(member.parameter) in self._parameters or self.quantizes(optimizer, member.parameter)
            (bucketed if is_ours and member.parameter.grad is not None else others).append(member)
        # No gradient now, but maybe state: loaded from a checkpoint, or from before.
        idle = [member for member in others if id(member.parameter) in self._parameters]
        try:
            needs = self._reserve(optimizer, (*bucketed, *idle))
            buckets = self._buckets(optimizer, bucketed, others, needs)
            with SplitStep(optimizer) as split, contextlib.closing(buckets):
                for bucket in buckets:
                    # See Note [Two buckets]: the state of the bucket before is being saved.
                    with torch.no_grad(), self._meter.timing("optimizer state"):
                        for each in bucket.stepped:
                            each.mover.prefetch(optimizer.state.get(each.parameter), each.parameter)
                    split.show(bucket.shown)
                    self._run_bucket(optimizer, bucket.stepped, call)
            for member in idle:
                self._save(optimizer, self._stepped(optimizer, member))
        finally:
            self._mover.end_step()

    def _buckets(
        self,
        optimizer: Optimizer,
        bucketed: deque[Member],
        others: list[Member],
        needs: dict[Member, tuple[int, dict[str, Tensor]]],
    ) -> Generator[_Bucket]:
        """Yield the buckets of one step; what is to be done after one is done when the next is asked for."""
        while bucketed:
            bucket = [bucketed.popleft()]
            needed = needs[bucket[0]][0]
            while bucketed and needed + needs[bucketed[0]][0] <= self._bucket_bytes:
                bucket.append(bucketed.popleft())
                needed += needs[bucket[-1]][0]
            length = self._slice_length(optimizer, bucket[0].parameter, needed)
            if length is not None:
                yield from self._slices(optimizer, bucket[0], needs[bucket[0]][1], length)
            else:
                # Whatever is not bucketed is stepped once, too: with the last bucket.
                shown = bucket if bucketed else [*bucket, *others]
                yield _Bucket([self._stepped(optimizer, each) for each in bucket], shown)
                others = others if bucketed else []
        if others:
            yield _Bucket([], others)

    def _stepped(self, optimizer: Optimizer, member: Member) -> _Stepped:
        parameter = member.parameter
        mover = self._mover if id(parameter) in self._parameters else self._unmoved
        return _Stepped(parameter, mover, self.quantizes(optimizer, parameter), {})

    def _reserve(
        self, optimizer: Optimizer, members: Iterable[Member]
    ) -> dict[Member, tuple[int, dict[str, Tensor]]]:
        """Allocate room for all state that the step will store, before a parameter is changed.

        Returns:
            The bytes of each parameter with its gradient and its loaded state, and the state that the step will make.
        """
        new_state = NewState(optimizer)
        needs = {}
        try:
            for member in members:
                parameter, mover, quantized, _ = self._stepped(optimizer, member)
                state, gradient = optimizer.state.get(parameter), parameter.grad
                group = optimizer.param_groups[member.group]
                new = {} if gradient is None else new_state.of(group, parameter)
                mover.reserve(state, new, parameter, quantized=quantized)
                is_loaded = mover.store.takes(parameter)
                size = parameter.nbytes + bytes_of_gradient(gradient)
                size += mover.loaded_bytes(state, parameter, quantized=quantized)
                for name, like in new.items():
                    size += like.nbytes if is_loaded or (quantized and name in MOMENTS) else 0
                needs[member] = size, new
        except TierFullError as error:
            raise TierFullError(
                f"This step of {type(optimizer).__name__} was not made, and no parameter was changed: its state "
                f"does not fit where the plan has it. {error}"
            ) from error
        return needs

    def _run_bucket(self, optimizer: Optimizer, bucket: list[_Stepped], call: Callable[[], Any]) -> None:
        """Run the arithmetic of one bucket, with its state loaded for that long."""
        try:
            with torch.no_grad(), self._meter.timing("optimizer state"):
                for each in bucket:
                    state = optimizer.state.get(each.parameter)
                    each.origins.update(each.mover.load(state, each.parameter))
                    if self._eight_bit is not None:
                        with self._meter.timing("8-bit optimizer"):
                            self._eight_bit.dequantize(state, each.parameter)
            call()
        except BaseException:
            # State is complete wherever it is; the first error matters more than one of the store.
            with contextlib.suppress(Exception):
                self._save_bucket(optimizer, bucket)
            raise
        for each in bucket:
            self._count_step(each.parameter)
        self._mover.finish_writing()  # of the bucket before
        self._save_bucket(optimizer, bucket)
        self.buckets_run += 1

    def _save_bucket(self, optimizer: Optimizer, bucket: list[_Stepped]) -> None:
        with torch.no_grad(), self._meter.timing("optimizer state"):
            for each in bucket:
                if self._eight_bit is not None and each.quantized:
                    with self._meter.timing("8-bit optimizer"):
                        self._eight_bit.quantize(optimizer.state.get(each.parameter), each.parameter)
                self._save(optimizer, each)

    def _save(self, optimizer: Optimizer, stepped: _Stepped) -> None:
        """Store a parameter's state, and release the pages of what is on disk."""
        parameter = stepped.parameter
        self._keep(optimizer)
        with torch.no_grad():
            stepped.mover.save(optimizer.state.get(parameter), parameter, stepped.origins)
        self._release_pages(parameter)

    def _count_step(self, parameter: Tensor) -> None:
        """Count the step of a parameter on disk: it was read and written, and its gradient read."""
        if parameter.grad is not None and self._disk.holds(parameter):
            self._meter.up("parameters", "disk", parameter.nbytes)
            self._meter.down("parameters", "disk", parameter.nbytes)
            if self._disk.holds(parameter.grad):
                self._meter.up("gradients", "disk", parameter.grad.nbytes)

    def _release_pages(self, parameter: Tensor) -> None:
        for tensor in (parameter, parameter.grad):
            if tensor is not None and tensor.layout is torch.strided:
                self._mover.store.release_pages(tensor)

    # ------------------------------------------------------------------ slices

    def _slice_length(self, optimizer: Optimizer, parameter: Tensor, needed: int) -> int | None:
        """Return the elements of a slice that needs no more than the limit; None for what is stepped whole."""
        if needed <= self._bucket_bytes or arithmetic_of(type(optimizer)) not in ELEMENTWISE:
            return None
        failed = self._eight_bit is not None and self._eight_bit.has_failed
        if not _is_flat(parameter) or parameter.grad is None or not _is_flat(parameter.grad) or failed:
            return None
        for name, value in optimizer.state.get(parameter, {}).items():
            is_whole = not isinstance(value, Tensor) or (_is_flat(value) and value.shape == parameter.shape)
            if name in STATE_NAMES and not is_whole:
                return None
        # In whole pages, and so in whole blocks of 8-bit moments.
        share = int(parameter.nbytes * (self._bucket_bytes / needed)) // PAGE * PAGE
        length = max(LEAST_SLICE_BYTES, share) // parameter.element_size()
        return length if length < parameter.numel() else None

    def _slices(
        self, optimizer: Optimizer, member: Member, new: dict[str, Tensor], length: int
    ) -> Iterator[_Bucket]:
        """Yield the slices of one parameter, each a bucket. See Note [Slices]."""
        stepped, parameter, states = self._stepped(optimizer, member), member.parameter, optimizer.state
        mover, gradient = stepped.mover, parameter.grad
        assert gradient is not None, "a parameter without a gradient is not stepped"
        self._save(optimizer, stepped)  # state from before, or from a checkpoint
        before: dict[str, Any] = dict(states.get(parameter, {}))
        if stepped.quantized:
            new = new | {name: value for name, value in before.items() if is_moment(name, value, parameter)}
        made = {name: _allocate(name, like, stepped) for name, like in new.items()}
        counters: dict[str, Any] = {}
        for start in range(0, parameter.numel(), length):
            part = slice(start, min(start + length, parameter.numel()))
            piece = nn.Parameter(parameter.detach().view(-1)[part], requires_grad=parameter.requires_grad)
            piece.grad = gradient.detach().view(-1)[part]
            values = {name: mover.part_of(name, value, part) for name, value in before.items()}
            targets = {name: mover.part_of(name, value, part) for name, value in made.items()}
            origins = {path: tensor for path, _, tensor in tensors_in({**values, **targets})}
            if values:
                states[piece] = values
            self._wholes[id(piece)] = parameter
            try:
                stepped_piece = stepped._replace(parameter=piece, origins=origins)
                yield _Bucket([stepped_piece], [member._replace(parameter=piece)])
                kept = states.get(piece, {})
                counters = {name: value for name, value in kept.items() if name not in STATE_NAMES}
            finally:
                states.pop(piece, None)
                del self._wholes[id(piece)]
            if stepped.quantized and self._eight_bit is not None and self._eight_bit.has_failed:
                raise RuntimeError(
                    "8-bit optimizer state failed in the middle of a parameter, whose moments are lost: go on from a "
                    "checkpoint, with Config(use_8bit_optimizer=False)."
                )
        values = {**before, **made, **counters}
        if values or parameter in states:
            states[parameter] = values
        with torch.no_grad():
            parameter.view(-1)[:0].zero_()  # counts as a change in place, which it was


class _Bucket(NamedTuple):
    """What one call of the arithmetic steps.

    Attributes:
        stepped: The parameters whose state is loaded for it.
        shown: All that the optimizer's groups hold in it.
    """

    stepped: list[_Stepped]
    shown: list[Member]


class _Stepped(NamedTuple):
    """A parameter, or a slice of one, in a call of the arithmetic.

    Attributes:
        parameter: The parameter.
        mover: Loads and saves its state.
        quantized: Whether its moments are kept in 8 bits.
        origins: The stored tensors of its state.
    """

    parameter: Tensor
    mover: StateMover
    quantized: bool
    origins: Origins


def _allocate(name: str, like: Tensor, stepped: _Stepped) -> Tensor | Moment:
    """Return room for a state tensor whose values come a slice at a time."""
    parameter, mover = stepped.parameter, stepped.mover
    if not stepped.quantized or name not in MOMENTS:
        return mover.allocate((name,), like, parameter)
    tensors = {
        part: mover.allocate((name, part), part_like, parameter)
        for part, part_like in moment_layout(parameter).items()
    }
    return Moment(**tensors, signed=MOMENTS[name], shape=parameter.shape, stride=parameter.stride())


def _is_flat(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_complex()


def bytes_of_gradient(gradient: Tensor | None) -> int:
    """Return the bytes of a gradient; of a sparse one, of its indices and values."""
    if gradient is None:
        return 0
    if gradient.layout is torch.sparse_coo:
        return gradient._indices().nbytes + gradient._values().nbytes
    return gradient.nbytes if gradient.layout is torch.strided else gradient.numel() * gradient.element_size()


# ---------------------------------------------------------------------- checkpoints and copies


def _ordinary_state_dict(
    eight_bit: EightBitState, optimizer: Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Put 32-bit numbers in the place of 8-bit moments.

    They are on the host, because all of them at once may be more than the device has room for.
    """
    state = dict(state_dict["state"])
    # torch numbers the parameters in the order of the groups.
    for key, member in enumerate(members_of(optimizer)):
        if any(isinstance(value, Moment) for value in state.get(key, {}).values()):
            state[key] = dict(state[key])
            with torch.no_grad():
                eight_bit.dequantize(state[key], member.parameter, _HOST)
    return {**state_dict, "state": state}


class _Reduce:
    """An optimizer's ``__reduce_ex__`` while some of its state is stored or in 8 bits.

    A deep copy or a pickle of an optimizer knows nothing of a store: it must hold ordinary state beside its
    parameters. Copying and pickling both ask the object itself for ``__reduce_ex__``; copies don't inherit it. It also
    keeps `users` alive, which alone can bring the state back: of each model whose parameters the optimizer steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # or the optimizer would be in a cycle, and live longer
        self.users: list[BucketedSteps] = []

    def __call__(self, protocol: Any) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None, "an optimizer's own attribute was called after it was gone"
        whole = type(optimizer).__reduce_ex__(optimizer, protocol)
        contents = whole[2] if isinstance(whole, tuple) and len(whole) > 2 else None
        if not isinstance(contents, dict) or not isinstance(contents.get("state"), dict):
            return whole  # a class that is copied in its own way
        contents = {key: value for key, value in contents.items() if key != _REDUCE}
        state = contents["state"]
        copy: dict[Any, Any] = defaultdict(dict) if isinstance(state, defaultdict) else {}
        with torch.no_grad():
            for key, value in state.items():
                for user in self.users if isinstance(key, Tensor) else ():
                    value = user.copied(value, key)
                copy[key] = value
        contents["state"] = copy
        return (*whole[:2], contents, *whole[3:])
