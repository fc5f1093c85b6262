"""Steps of masters in host memory that are made on the device, through two buffers there.

Note [Device twins]
~~~~~~~~~~~~~~~~~~~
The masters of offloaded layers, their gradients and their state are in host memory, where torch would step them on the
CPU. Instead, a bucket of them is copied to a buffer on the device. There each has a *twin*, a parameter with the same
gradient and state, which stands in its place in the optimizer's groups for one call of torch's arithmetic; then the
twin's values and state are copied into the same host memory. So the numbers are those of the plain model on the device
to the bit, whatever the CPU is, in the time of the link: for Adam 16 bytes a parameter to the device and 12 back.

There are two buffers: while one bucket is copied back, the next one comes into the other. Before a buffer is filled
again, the copies from it are over. Both are allocated on the compute stream, before anything is changed: if there is no
room for them, the masters are stepped on the CPU. When ``step()`` returns, all copies are over. If the arithmetic
raises, its bucket is not copied back, and its masters are as before the step. A large master comes in slices, as
in Note [Slices].

State that the arithmetic makes gets host memory of its own, page-locked on CUDA as far as masters may be
(Note [Page-locked memory]); so does state from a checkpoint, after its first step. What cannot be moved is stepped on
the CPU: sparse gradients, moments in 8 bits, and groups with ``fused`` or ``capturable``, whose counters would be on
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import ASGD, Optimizer

from memscale._torch import is_traceable_wrapper_subclass
from memscale.config import AsyncOffloadConfig
from memscale.observe.counters import Meter
from memscale.optimizer.bucketed_steps import slice_length
from memscale.optimizer.eight_bit import is_dense
from memscale.optimizer.interceptor import STATE_NAMES, Member, NewState, SplitStep, arithmetic_of
from memscale.optimizer.state_stores import lane_of
from memscale.tiers.disk import HOST, round_up
from memscale.tiers.engine import ALIGNMENT, MASTERS_SHARE, Engine, PinnedMemory, Transfer

_ASGD_COUNTERS = {"step", "eta", "mu"}


class _Piece(NamedTuple):
    """A master, or a slice of one, in a bucket."""

    member: Member
    part: slice | None  # of its elements; None for all
    nbytes: int = 0  # of the buffer

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor of the master that belongs to it; counters belong to all."""
        values = tensor.detach()
        return values if self.part is None or not values.dim() else values.view(-1)[self.part]

    @property
    def is_last(self) -> bool:
        return self.part is None or self.part.stop == self.member.parameter.numel()


_Twins = list[tuple[_Piece, nn.Parameter]]
_Copies = list[tuple[Tensor, Tensor]]  # to, from


class DeviceSteps:
    """Steps host masters of one model on its device, `bucket_bytes` of them with gradients and state at a time."""

    def __init__(self, device: torch.device, bucket_bytes: int, pinned: PinnedMemory, meter: Meter) -> None:
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._pinned = pinned
        self._meter = meter
        self._engine = Engine(AsyncOffloadConfig())
        self._lane = lane_of(device)
        self._made: dict[str, Any] = {}  # the state after the step of a master that is stepped in slices
        self.buckets_run = 0

    def can_step(self, optimizer: Optimizer, member: Member) -> bool:
        """Return whether a master on the host can be stepped on the device."""
        group, parameter = optimizer.param_groups[member.group], member.parameter
        state = optimizer.state.get(parameter, {})
        moved = [value for name, value in state.items() if name in STATE_NAMES and value is not None]
        return not (group.get("fused") or group.get("capturable")) and all(
            isinstance(each, Tensor)
            and each.device == HOST
            and each.layout is torch.strided
            and is_dense(each)
            and not is_traceable_wrapper_subclass(each)
            for each in (parameter, parameter.grad, *moved)
        )

    def run(
        self, optimizer: Optimizer, members: Sequence[Member], split: SplitStep, call: Callable[[], Any]
    ) -> bool:
        """Step masters that it takes, in calls of the arithmetic for their twins.

        Returns:
            False if the device has no room for the buffers. Then nothing was changed.
        """
        buckets = self._buckets(optimizer, members)
        size = max(sum(piece.nbytes for piece in bucket) for bucket in buckets)
        try:
            buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in buckets[:2]]
        except torch.OutOfMemoryError:
            return False
        # Their memory may still be in use by what was computed before.
        ready = self._engine.run(lambda: None, self._lane, self._device, outward=True)
        copying: tuple[Transfer[None], object] | None = None  # back to the host, with what is copied
        twins: _Twins = []
        try:
            for number, bucket in enumerate(buckets):
                twins = []
                with torch.no_grad(), self._meter.timing("optimizer state"):
                    self._copy_to_device(optimizer, bucket, buffers[number % 2], ready, twins)
                split.show(piece.member._replace(parameter=twin) for piece, twin in twins)
                call()
                with torch.no_grad(), self._meter.timing("optimizer state"):
                    if copying is not None:
                        copying[0].finish()
                    copying = self._copy_to_host(optimizer, twins)
                self.buckets_run += 1
        finally:
            for _, twin in twins:
                optimizer.state.pop(twin, None)
            self._made = {}
            self._engine.drain(self._device)
            if copying is not None:
                copying[0].finish()
        return True

    def _buckets(self, optimizer: Optimizer, members: Sequence[Member]) -> list[list[_Piece]]:
        new_state, buckets, filled = NewState(optimizer), list[list[_Piece]](), 0
        for member in members:
            group, parameter = optimizer.param_groups[member.group], member.parameter
            new = sum(each.nbytes for each in new_state.of(group, parameter).values())
            gradient = parameter.grad
            assert gradient is not None, "a parameter without a gradient is not stepped"
            copied = [parameter, gradient, *_moved_state(optimizer, parameter).values()]
            needed = sum(each.nbytes for each in copied) + new
            length, count = slice_length(optimizer, parameter, needed, self._bucket_bytes), parameter.numel()
            for start in (0,) if length is None else range(0, count, length):
                piece = _Piece(member, None if length is None else slice(start, min(start + length, count)))
                nbytes = sum(round_up(piece.of(each).nbytes, ALIGNMENT) for each in copied)
                if not buckets or length is not None or filled + needed > self._bucket_bytes:
                    buckets.append([])
                    filled = 0
                buckets[-1].append(piece._replace(nbytes=nbytes))
                filled += needed
        return buckets

    def _copy_to_device(
        self,
        optimizer: Optimizer,
        bucket: Sequence[_Piece],
        buffer: Tensor,
        ready: Transfer[None],
        twins: _Twins,
    ) -> None:
        """Add a bucket's twins to `twins`, in a buffer, where what is computed from now on will find their values."""
        copies: _Copies = []
        used = 0

        def on_device(source: Tensor) -> Tensor:
            nonlocal used
            memory = buffer[used : used + source.nbytes].view(source.dtype)
            used += round_up(source.nbytes, ALIGNMENT)
            copies.append((memory.as_strided(source.shape, source.stride()), source))
            return copies[-1][0]

        for piece in bucket:
            parameter = piece.member.parameter
            assert parameter.grad is not None, "a parameter without a gradient is not stepped"
            twin = nn.Parameter(on_device(piece.of(parameter)), parameter.requires_grad)
            twin.grad = on_device(piece.of(parameter.grad))
            twins.append((piece, twin))
            self._meter.count_read("parameters", "host", twin.nbytes)
            self._meter.count_read("gradients", "host", twin.nbytes)
            if parameter not in optimizer.state:
                continue
            moved, state = _moved_state(optimizer, parameter), dict(optimizer.state[parameter])
            for name, value in state.items():
                if name in moved:
                    state[name] = on_device(piece.of(value))
                    self._meter.count_read("optimizer state", "host", state[name].nbytes)
                elif isinstance(value, Tensor) and value.dim() == 0:
                    state[name] = value.clone()  # if the step fails, or another slice is to come
            optimizer.state[twin] = state
        self._engine.run(lambda: _copy(copies), self._lane, self._device, after=ready).wait()

    def _copy_to_host(self, optimizer: Optimizer, twins: _Twins) -> tuple[Transfer[None], object]:
        """Begin to copy the values and state of twins back; return the transfer, and what it reads."""
        copies: _Copies = []
        for piece, twin in twins:
            parameter = piece.member.parameter
            copies.append((piece.of(parameter), twin.detach()))
            self._meter.count_written("parameters", "host", twin.nbytes)
            had_state, state = twin in optimizer.state, optimizer.state.pop(twin, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.device != HOST:
                    if not value.dim() and not piece.is_last:
                        continue  # each slice begins with the counters that the master had
                    self._made[name] = self._host_memory(optimizer, name, value, piece)
                    copies.append((piece.of(self._made[name]), value))
                    self._meter.count_written("optimizer state", "host", value.nbytes)
                else:
                    self._made[name] = value
            if piece.is_last:
                if had_state:
                    optimizer.state[parameter] = self._made
                self._made = {}
        transfer = self._engine.run(lambda: _copy(copies), self._lane, self._device, outward=True)
        return transfer, copies

    def _host_memory(self, optimizer: Optimizer, name: str, value: Tensor, piece: _Piece) -> Tensor:
        """Return where state of a master is kept between steps: where it was, unless it can be page-locked now."""
        made = self._made.get(name)
        if isinstance(made, Tensor):
            return made  # of the slice before
        parameter, like = piece.member.parameter, value
        if piece.part is not None and value.dim():
            like = torch.empty_like(parameter, dtype=value.dtype, device="meta")
        kept = optimizer.state.get(parameter, {}).get(name)
        if not isinstance(kept, Tensor) or (kept.shape, kept.dtype) != (like.shape, like.dtype):
            kept = None
        elif self._device.type != "cuda" or kept.is_pinned():
            return kept
        memory = self._pinned.empty_like(like, self._device, MASTERS_SHARE)
        if memory is None:
            memory = torch.empty_like(like, device=HOST) if kept is None else kept
        return memory


def _moved_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the state that is on the device for a step; of ASGD, counters are beside parameters as well."""
    state = optimizer.state.get(parameter, {})
    names = STATE_NAMES | _ASGD_COUNTERS if arithmetic_of(type(optimizer)) is ASGD else STATE_NAMES
    return {name: value for name, value in state.items() if name in names and isinstance(value, Tensor)}


def _copy(copies: _Copies) -> None:
    for to, source in copies:
        to.copy_(source, non_blocking=True)
