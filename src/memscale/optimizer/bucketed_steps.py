"""Optimizer steps a bucket of parameters at a time, with state that is stored or in 8 bits in between.

Note [Bucketed steps]
~~~~~~~~~~~~~~~~~~~~~
In ``optimizer.step()`` the arithmetic of torch.optim is called once for each bucket of parameters, with the optimizer's
groups cut down to these. A bucket's state is loaded before its call and saved after it (Note [Stored state]), new
state included. Moments in 8 bits are dequantized for the call and quantized after it (Note [Eight bits between
steps]), on the device, so that only codes are moved. The numbers are the same to the bit: the same functions see the
same operands, fewer at a time. Which steps are split: Note [Whose arithmetic is split].

Note [Slices]
~~~~~~~~~~~~~
An embedding can be larger than a bucket by itself. Optimizers that treat every element by itself can be called for a
slice of it: a parameter over a part of the same memory, with that part of the gradient and of the state. Each slice
begins with the counters that the parameter had; those of the last are the parameter's afterwards. Slices of 8-bit
moments begin where their blocks do. Other optimizers (Adafactor, Muon) get the parameter whole.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import ChainMap, deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from memscale.errors import TierFullError
from memscale.memory.tracker import parts_of
from memscale.observe.counters import Meter
from memscale.optimizer.eight_bit import (
    EightBitState,
    Moment,
    Unavailable,
    find_quantizer,
    is_moment,
    stored_layout,
)
from memscale.optimizer.interceptor import (
    ELEMENTWISE,
    MOMENTS,
    STATE_NAMES,
    Member,
    NewState,
    StepOrder,
    StepSubscriber,
    arithmetic_of,
    has_moments,
    members_of,
    split_step,
    why_32_bits,
    why_whole,
)
from memscale.optimizer.overlap import OverlappedSteps
from memscale.optimizer.state_stores import StateMover, StateStore, Stepped, tensors_in
from memscale.tiers.disk import HOST, PAGE, DiskStore
from memscale.tiers.engine import PinnedMemory

LEAST_SLICE_BYTES = 16 * PAGE
"""Of a parameter in one slice: below that, calls cost more than memory is worth."""

_NOT_REACHED = "its step does not call that of torch.optim, or torch's wrapper of that was not found"
_ON_DEVICE = "The state of this %s stays on its device: %s."
_IN_32_BITS = "The state of this %s stays in 32 bits: %s."
# What one call of the arithmetic steps: the parameters whose state is loaded, and all that the groups hold.
_Bucket = tuple[list[Stepped], list[Member]]
_GET_STATE = "__getstate__"

logger = logging.getLogger("memscale")
_SILENT = logging.getLogger("memscale.silent")
_SILENT.disabled = True


class BucketedSteps(StepSubscriber):
    """Keeps the optimizer state of one model in a store or in 8 bits, through all of its plans."""

    order = StepOrder.BUCKETS

    def __init__(self, disk: DiskStore, meter: Meter, pinned: PinnedMemory) -> None:
        self._disk = disk
        self._meter = meter
        self.buckets_run = 0  # calls of torch's arithmetic
        # The optimizers that are stepped whole, and those with moments in 32 bits, with the reason.
        self.skipped: MutableMapping[Optimizer, str] = weakref.WeakKeyDictionary()
        self._in_32_bits: MutableMapping[Optimizer, str] = weakref.WeakKeyDictionary()
        self._state_dict_hooks: MutableMapping[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
        self._splits = 0  # calls of torch's arithmetic that were split
        self._splits_before: MutableMapping[Optimizer, int] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # some of whose state is ours
        self._wholes: dict[int, Tensor] = {}  # the parameter of the slice that is being stepped
        self._eight_bit: EightBitState | None = None
        self._mover = StateMover(StateStore(disk), meter)
        self.overlap = OverlappedSteps(self._mover, pinned, meter)
        self._configuration: tuple[list[int], list[int], set[int], StateStore, int]
        self._configuration = ([], [], set(), self._mover.store, 1)
        self._configure([], [], set(), self._mover.store, 1, logs=False)

    def _configure(
        self,
        parameters: list[nn.Parameter],
        in_eight_bits: list[nn.Parameter],
        beside: set[int],
        store: StateStore,
        bucket_bytes: int,
        *,
        logs: bool,
    ) -> None:
        self._beside = beside
        self._bucket_bytes = bucket_bytes
        self._logger = logger if logs else _SILENT
        # Not weakly: torch.utils.swap_tensors, which moves parameters, takes none that are referred to so.
        self._parameters = {id(each): each for each in parameters}
        moments = [*map(id, in_eight_bits)]
        if moments != self._configuration[1]:
            self._eight_bit = None
            try:
                if in_eight_bits:
                    self._eight_bit = EightBitState(
                        in_eight_bits, find_quantizer(in_eight_bits), self._logger
                    )
            except Unavailable as reason:
                self._logger.warning("No 8-bit optimizer, the standard one goes on as it is: %s.", reason)
        self._configuration = [*map(id, parameters)], moments, beside, store, bucket_bytes
        self._every = ChainMap(self._parameters, self._eight_bit.parameters if self._eight_bit else {})
        self._mover.store = store

    @property
    def store(self) -> StateStore:
        """Where state is kept between steps."""
        return self._mover.store

    @property
    def bytes_moved(self) -> int:
        """Bytes of state loaded from or saved to the store so far."""
        return self._mover.bytes_moved

    # ------------------------------------------------------------------ on and off

    def attach(
        self,
        parameters: Iterable[nn.Parameter],
        store: StateStore,
        bucket_bytes: int,
        *,
        eight_bit: Iterable[nn.Parameter] = (),
        beside: Iterable[nn.Parameter] = (),
        logs: bool = True,
    ) -> None:
        """Run steps in buckets as a plan says; what the plan before had the same stays as it is.

        Args:
            parameters: Those that are stepped in buckets, and whose state is kept in the store.
            store: Where it is kept between steps.
            bucket_bytes: The most that parameters, gradients and state of one bucket may take, in 32 bits; a parameter
                that needs more has a bucket to itself, or comes in slices.
            eight_bit: Those whose moments are kept in 8 bits; without bitsandbytes, none are.
            beside: Those of `parameters` whose state is not kept in the store, but beside them.
            logs: Whether to name optimizers that are stepped whole in the log.
        """
        wanted, quantized, apart = list(parameters), list(eight_bit), {id(each) for each in beside}
        configuration = [*map(id, wanted)], [*map(id, quantized)], apart, store, bucket_bytes
        if self._configuration != configuration:
            same_moments = [*map(id, quantized)] == self._configuration[1]
            self.overlap.detach()
            for optimizer in list(self._optimizers):
                self._bring_back(optimizer, keep_eight_bits=same_moments)
            self._configure(wanted, quantized, apart, store, bucket_bytes, logs=logs)
        if self._every:
            self.subscribe()

    def restore(self) -> None:
        """Change no steps any more, and bring all state back beside its parameters, in 32 bits."""
        self.unsubscribe()
        self.overlap.detach()
        for optimizer in list(self._optimizers):
            self._bring_back(optimizer)
        self._configure([], [], set(), StateStore(self._disk), 1, logs=False)

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

    def _keep(self, optimizer: Optimizer) -> None:
        """Note an optimizer some of whose state is stored or in 8 bits; copies and checkpoints get ordinary state."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            vars(optimizer).setdefault(_GET_STATE, _GetState(optimizer)).users.append(self)
            handle = optimizer.register_state_dict_post_hook(self._in_32_bits_on_host)
            self._state_dict_hooks[optimizer] = handle

    def _bring_back(self, optimizer: Optimizer, *, keep_eight_bits: bool = False) -> None:
        with torch.no_grad():
            for key, state in optimizer.state.items():
                if isinstance(key, Tensor) and isinstance(state, dict):
                    self._mover.bring_back(state, key)
                    if self._eight_bit is not None and not keep_eight_bits:
                        self._eight_bit.dequantize(state, key)
        if keep_eight_bits:
            return
        # Last: if the device has no room for it all, this can be done again when it has.
        self._optimizers.discard(optimizer)
        users: list[BucketedSteps] = vars(optimizer)[_GET_STATE].users
        users.remove(self)
        if not users:
            del vars(optimizer)[_GET_STATE]
        self._state_dict_hooks.pop(optimizer).remove()

    def copied(self, state: Any, parameter: Tensor) -> Any:
        """Return a parameter's state as it would be in memory and in 32 bits; the original stays as it is."""
        if not isinstance(state, dict):
            return state
        copy = {name: value.copied() if isinstance(value, Moment) else value for name, value in state.items()}
        for path, holder, tensor in tensors_in(copy):
            if self.is_stored(tensor):
                holder[path[-1]] = self.store.load(tensor, parameter)
        if self._eight_bit is not None:
            self._eight_bit.dequantize(copy, parameter)
        return copy

    def _in_32_bits_on_host(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Put 32-bit numbers in the place of a checkpoint's 8-bit moments.

        They are on the host, because all of them at once may be more than the device has room for.
        """
        state = dict(state_dict["state"])
        # torch numbers the parameters in the order of the groups.
        for key, member in enumerate(members_of(optimizer)):
            has_moments_in_8_bits = any(isinstance(value, Moment) for value in state.get(key, {}).values())
            if self._eight_bit is not None and has_moments_in_8_bits:
                state[key] = dict(state[key])
                with torch.no_grad():
                    self._eight_bit.dequantize(state[key], member.parameter, HOST)
        return {**state_dict, "state": state}

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
        new_state = NewState(optimizer)
        bucketed: deque[Stepped] = deque()
        idle: list[Stepped] = []
        others: list[Member] = []
        try:
            # Room for all state that the step will store, before a parameter is changed.
            for member in members_of(optimizer):
                each, is_ours = self._stepped(optimizer, member), id(member.parameter) in self._parameters
                if member.parameter.grad is not None and (is_ours or each.quantized):
                    new = new_state.of(optimizer.param_groups[member.group], member.parameter)
                    bucketed.append(self._reserve(optimizer, each._replace(new=new)))
                else:
                    others.append(member)
                    if is_ours:  # no gradient now, but maybe state: loaded from a checkpoint, or from before
                        idle.append(self._reserve(optimizer, each))
            buckets = self._buckets(optimizer, bucketed, others)
            with split_step(optimizer) as split, contextlib.closing(buckets):
                for bucket, shown in buckets:
                    # See Note [Two buckets]: the state of the bucket before is being saved.
                    with torch.no_grad(), self._meter.timing("optimizer state"):
                        for each in bucket:
                            self._mover.prefetch(optimizer.state.get(each.parameter), each.parameter)
                    split.show(shown)
                    self._run_bucket(optimizer, bucket, call)
            for each in idle:
                self._save(optimizer, each)
        finally:
            self._mover.end_step()

    def _stepped(self, optimizer: Optimizer, member: Member) -> Stepped:
        parameter = member.parameter
        is_kept = id(parameter) in self._parameters and id(parameter) not in self._beside
        stored = is_kept and self.store.accepts(parameter)
        return Stepped(member, stored, self.quantizes(optimizer, parameter), {})

    def _reserve(self, optimizer: Optimizer, each: Stepped) -> Stepped:
        """Allocate room for what of a parameter's state the step will store, and count the bytes that it needs."""
        parameter = each.parameter
        try:
            loaded = self._mover.reserve(optimizer.state.get(parameter), each)
        except TierFullError as error:
            raise TierFullError(
                f"This step of {type(optimizer).__name__} was not made, and no parameter was changed: its state "
                f"does not fit where the plan has it. {error}"
            ) from error
        return each._replace(nbytes=parameter.nbytes + bytes_of_gradient(parameter.grad) + loaded)

    def _buckets(
        self, optimizer: Optimizer, bucketed: deque[Stepped], others: list[Member]
    ) -> Generator[_Bucket]:
        """Yield the buckets of one step; what is to be done after one is done when the next is asked for."""
        while bucketed:
            bucket = [bucketed.popleft()]
            needed = bucket[0].nbytes
            while bucketed and needed + bucketed[0].nbytes <= self._bucket_bytes:
                bucket.append(bucketed.popleft())
                needed += bucket[-1].nbytes
            length = self._slice_length(optimizer, bucket[0].parameter, needed)
            if length is not None:
                yield from self._slices(optimizer, bucket[0], length)
            else:
                yield bucket, [each.member for each in bucket]
        # After the state of the last bucket is released: host masters may be stepped on the device.
        if others:
            self._mover.finish_writing()
            yield [], others

    def _run_bucket(self, optimizer: Optimizer, bucket: list[Stepped], call: Callable[[], Any]) -> None:
        """Run the arithmetic of one bucket, with its state loaded for that long."""
        try:
            with torch.no_grad(), self._meter.timing("optimizer state"):
                for each in bucket:
                    state = optimizer.state.get(each.parameter)
                    self._mover.load(state, each)
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

    def _save_bucket(self, optimizer: Optimizer, bucket: list[Stepped]) -> None:
        with torch.no_grad(), self._meter.timing("optimizer state"):
            for each in bucket:
                if self._eight_bit is not None and each.quantized:
                    with self._meter.timing("8-bit optimizer"):
                        self._eight_bit.quantize(optimizer.state.get(each.parameter), each.parameter)
                self._save(optimizer, each)

    def _save(self, optimizer: Optimizer, stepped: Stepped) -> None:
        """Store a parameter's state, and release the pages of what is on disk."""
        if stepped.stored or stepped.quantized:
            self._keep(optimizer)
        with torch.no_grad():
            self._mover.save(optimizer.state.get(stepped.parameter), stepped)
        self._release_pages(stepped.parameter)

    def _count_step(self, parameter: Tensor) -> None:
        """Count the step of a parameter on disk: it was read and written, and its gradient read."""
        if parameter.grad is not None and self._disk.holds(parameter):
            self._meter.count_read("parameters", "disk", parameter.nbytes)
            self._meter.count_written("parameters", "disk", parameter.nbytes)
            if self._disk.holds(parameter.grad):
                self._meter.count_read("gradients", "disk", parameter.grad.nbytes)

    def _release_pages(self, parameter: Tensor) -> None:
        for tensor in (parameter, parameter.grad):
            if tensor is not None and tensor.layout is torch.strided:
                self.store.release_pages(tensor)

    # ------------------------------------------------------------------ slices

    def _slice_length(self, optimizer: Optimizer, parameter: Tensor, needed: int) -> int | None:
        if self._eight_bit is not None and self._eight_bit.has_failed:
            return None
        return slice_length(optimizer, parameter, needed, self._bucket_bytes)

    def _slices(self, optimizer: Optimizer, stepped: Stepped, length: int) -> Iterator[_Bucket]:
        """Yield the slices of one parameter, each a bucket. See Note [Slices]."""
        parameter, states, mover = stepped.parameter, optimizer.state, self._mover
        new, gradient = dict(stepped.new), parameter.grad
        assert gradient is not None, "a parameter without a gradient is not stepped"
        self._save(optimizer, stepped)  # state from before, or from a checkpoint
        before: dict[str, Any] = dict(states.get(parameter, {}))
        if stepped.quantized:
            new |= {name: value for name, value in before.items() if is_moment(name, value, parameter)}
        made = {name: self._allocate(name, like, stepped) for name, like in new.items()}
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
                member = stepped.member._replace(parameter=piece)
                yield [stepped._replace(member=member, origins=origins)], [member]
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

    def _allocate(self, name: str, like: Tensor, stepped: Stepped) -> Tensor | Moment:
        """Return room for a state tensor whose values come a slice at a time."""
        parameter = stepped.parameter
        tensors = {
            path[-1]: self._mover.allocate(path, part, stepped)
            for path, part in stored_layout(name, like, quantized=stepped.quantized)
        }
        if name in tensors:
            return tensors[name]
        return Moment(**tensors, signed=MOMENTS[name], shape=parameter.shape, stride=parameter.stride())


def slice_length(optimizer: Optimizer, parameter: Tensor, needed: int, limit: int) -> int | None:
    """Return the elements of a slice of a parameter, which needs so many bytes, within a limit; None for all of it.

    See Note [Slices].
    """
    if needed <= limit or arithmetic_of(type(optimizer)) not in ELEMENTWISE:
        return None
    if not _is_flat(parameter) or parameter.grad is None or not _is_flat(parameter.grad):
        return None
    for name, value in optimizer.state.get(parameter, {}).items():
        is_whole = not isinstance(value, Tensor) or (_is_flat(value) and value.shape == parameter.shape)
        if name in STATE_NAMES and not is_whole:
            return None
    length = slice_bytes(parameter.nbytes, needed, limit) // parameter.element_size()
    return length if length < parameter.numel() else None


def slice_bytes(nbytes: int, needed: int, bucket_bytes: int) -> int:
    """Return the bytes of one slice of a parameter of `nbytes`, which needs more with all that belongs to it."""
    # In whole pages, and so in whole blocks of 8-bit moments.
    return max(LEAST_SLICE_BYTES, int(nbytes * (bucket_bytes / needed)) // PAGE * PAGE)


def _is_flat(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_complex()


def bytes_of_gradient(gradient: Tensor | None) -> int:
    """Return the bytes of a gradient; of a sparse one, of its parts."""
    if gradient is None:
        return 0
    if type(gradient) is Tensor and gradient.layout is torch.strided:
        return gradient.nbytes
    return sum(part.nbytes for part in parts_of(gradient) or [gradient])


class _GetState:
    """An optimizer's ``__getstate__`` while some of its state is stored or in 8 bits.

    A deep copy or a pickle of an optimizer knows nothing of a store: it must hold ordinary state beside its
    parameters. Both ask the object itself for ``__getstate__``. This one also keeps `users` alive, which alone can
    bring the state back: of each model whose parameters the optimizer steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # or the optimizer would be in a cycle, and live longer
        self.users: list[BucketedSteps] = []

    def __call__(self) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None, "an optimizer's own attribute was called after it was gone"
        contents: Any = type(optimizer).__getstate__(optimizer)
        if not isinstance(contents, dict) or not isinstance(contents.get("state"), dict):
            return contents  # a class that is copied in its own way
        state = contents["state"].copy()
        with torch.no_grad():
            for key in state:
                for user in self.users if isinstance(key, Tensor) else ():
                    state[key] = user.copied(state[key], key)
        contents = {name: value for name, value in contents.items() if name != _GET_STATE}
        return {**contents, "state": state}
