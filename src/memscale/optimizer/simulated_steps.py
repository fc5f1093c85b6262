"""What an optimizer's steps allocate under a plan, allocated in a simulation in their place and order."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memscale._torch import drop_empty_hooks
from memscale.config import Config
from memscale.execution_plan import OptimizerPlan, Plan
from memscale.memory.record import Category, on_copy_stream
from memscale.memory.tracker import MemoryTracker
from memscale.optimizer.bucketed_steps import slice_bytes
from memscale.optimizer.eight_bit import moment_bytes, parameters_in_eight_bits
from memscale.optimizer.needs import OptimizerNeeds
from memscale.optimizer.overlap import MOST_STEP_BYTES, step_bytes
from memscale.optimizer.placement import DEFAULT_BUCKET_BYTES, ids_with_state_on_host, takes_all_state
from memscale.simulator.shards import SimulatedShards
from memscale.tiers.disk import PAGE

STEP_COUNT_BYTES = 4  # of the step count that an optimizer keeps for each parameter


class SimulatedSteps:
    """The steps of one optimizer over a model with gradients; state that stays is allocated in the first of them."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None,  # None for the plain model
        on_disk: Collection[nn.Parameter],
        needs: OptimizerNeeds,
        tracker: MemoryTracker,
        device: torch.device,
        config: Config,
        shards: SimulatedShards,
    ) -> None:
        self._model, self._needs, self._tracker, self._device = model, needs, tracker, device
        self._shards = shards
        self._planned = (plan and plan.optimizer) or OptimizerPlan()
        self._on_disk = set(map(id, on_disk))
        self.in_buckets = self._planned.bucket_bytes > 0 and needs.moves and device.type != "cpu"
        # Ids of the parameters on the device whose state is on the host.
        self._on_host = ids_with_state_on_host(model, plan) if plan and self.in_buckets else set[int]()
        # Under a cap on the disk, only the state of the parameters there is on it.
        on_disk_at_all = self._planned.state == "disk" and device.type == "cpu" and needs.moves
        self._all_on_disk = on_disk_at_all and takes_all_state("disk", config)
        self._has_state: set[int] = set()  # ids of the parameters whose state is there
        self._staying: dict[int, list[int]] = {}  # sizes of the state to be allocated, by the parameter's id
        self._early = _EarlySteps(needs, self._planned.bucket_bytes, device)

    @property
    def overlaps(self) -> bool:
        """Whether steps after those of the warm-up are computed in backward."""
        return self._planned.overlapped and self._needs.overlaps

    def begin(self, *, in_backward: bool) -> None:
        """Begin a step, before its forward."""
        self._early = _EarlySteps(self._needs, self._planned.bucket_bytes, self._device)
        if in_backward:
            with_masters = self._planned.host_step == "device"
            self._early.attach(self._model, self._on_host, with_masters=with_masters)

    def end_backward(self) -> None:
        """Step what has arrived and waits for its bucket to be full."""
        self._early.flush()

    def run(self) -> None:
        """Step all parameters but those that were stepped in backward."""
        model, needs, planned, device, early = (
            self._model,
            self._needs,
            self._planned,
            self._device,
            self._early.stepped,
        )
        here = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name in needs.state
            and self._shards.has_gradient(parameter)
            and parameter.device.type == device.type
        }
        moved = {id(each) for each in here.values()} if self._all_on_disk else self._on_host
        in_8_bits: set[int] = set()
        if needs.eight_bit and planned.eight_bit:
            in_8_bits = {id(each) for each in parameters_in_eight_bits(model)}
        for parameter, size in self._state_sizes(here, in_8_bits):
            stays = id(parameter) not in moved or size < PAGE  # what is smaller than a page stays
            if stays and id(parameter) not in self._has_state:
                self._staying.setdefault(id(parameter), []).append(size)
        self._has_state.update(map(id, here.values()))
        stepped = [each for each in here.values() if id(each) not in self._on_disk | early]
        if self.in_buckets:
            self._step_in_buckets(stepped, self._on_host | in_8_bits)
        for parameter in here.values():
            self._reserve_state(parameter)
        if not self.in_buckets:
            _make_temporaries([self._shards.bytes_of(each) for each in stepped], needs, device)
        if planned.host_step == "device" and needs.steps_on_device and device.type != "cpu":
            masters = [
                (parameter.nbytes, sum(each.nbytes for each in needs.state[name]))
                for name, parameter in model.named_parameters()
                if name in needs.state and parameter.grad is not None and parameter.device.type == "cpu"
                if id(parameter) not in early
            ]
            _step_masters(masters, needs, planned.bucket_bytes or DEFAULT_BUCKET_BYTES, device)
        if self._on_disk and planned.bucket_bytes:
            # A bucket of the parameters on disk with gradients and two moments, or all of them if that is less.
            trained = (
                each for each in model.parameters() if each.requires_grad and id(each) in self._on_disk
            )
            whole = sum(4 * each.nbytes for each in trained)
            torch.empty(min(planned.bucket_bytes, whole), dtype=torch.uint8, device="cpu")
        self._early.detach()

    def _state_sizes(
        self, here: dict[str, nn.Parameter], in_8_bits: Collection[int]
    ) -> Iterator[tuple[nn.Parameter, int]]:
        """Yield the bytes of each tensor of optimizer state, and of the step counts, which are on the host."""
        for name, parameter in here.items():
            if self._needs.moves and id(parameter) in self._on_disk:
                continue
            tensors = self._needs.state[name]
            for each in tensors:
                is_small = each.is_moment and id(parameter) in in_8_bits
                yield parameter, moment_bytes(each.nbytes // 4) if is_small else each.nbytes
            if self._device.type == "cpu" and tensors:
                yield parameter, STEP_COUNT_BYTES

    def _reserve_state(self, parameter: nn.Parameter) -> None:
        for size in self._staying.pop(id(parameter), ()):
            # Tensors would take a tenth of a simulation.
            self._tracker.hold(size, self._device, "optimizer state", Category.OPTIMIZER)

    def _step_in_buckets(self, here: Sequence[nn.Parameter], loaded: Collection[int]) -> None:
        """Allocate and release the loaded state and temporaries of a step, of one bucket of parameters after the other.

        What stays is reserved with its bucket, as the first step makes it: the allocator's blocks depend on the order.
        The state of one bucket is copied back while that of the next comes.
        """
        bucket_bytes = self._planned.bucket_bytes
        before: list[torch.Tensor] = []

        def step(bucket: Sequence[tuple[nn.Parameter, int, int]]) -> list[torch.Tensor]:
            state = []
            for parameter, size, tensors in bucket:
                self._reserve_state(parameter)
                state += [_allocate(size, self._device) for _ in range(tensors)]
            _make_temporaries([size for _, size, _ in bucket], self._needs, self._device)
            return state

        # Parameters, their bytes or those of a slice, and how many such tensors of state are loaded.
        bucket: list[tuple[nn.Parameter, int, int]] = []
        filled = 0
        for parameter in here:
            tensors = 2 if id(parameter) in loaded and parameter.nbytes >= PAGE else 0
            needed = (2 + tensors) * parameter.nbytes  # with its gradient
            if bucket and filled + needed > bucket_bytes:
                before, bucket, filled = step(bucket), [], 0
            if needed > bucket_bytes:  # in slices
                length = slice_bytes(parameter.nbytes, needed, bucket_bytes)
                for start in range(0, parameter.nbytes, length):
                    before = step([(parameter, min(length, parameter.nbytes - start), tensors)])
            else:
                bucket.append((parameter, parameter.nbytes, tensors))
                filled += needed
        if bucket:
            before = step(bucket)
        del before


class _EarlySteps:
    """Allocates what steps in backward take: Note [Overlapped steps]."""

    def __init__(self, needs: OptimizerNeeds, bucket_bytes: int, device: torch.device) -> None:
        self.stepped: set[int] = set()  # ids of the parameters that are stepped so
        self._needs = needs
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._hooks: list[tuple[nn.Parameter, RemovableHandle]] = []
        self._waiting: list[nn.Parameter] = []
        self._in_flight: deque[list[torch.Tensor]] = deque()  # what is loaded
        self._copies: list[torch.Tensor] = []  # of parameters on the device, until the step

    def attach(self, model: nn.Module, with_state_on_host: Collection[int], *, with_masters: bool) -> None:
        for each in model.parameters():
            is_here = each.device.type == self._device.type
            is_stepped = (id(each) in with_state_on_host and each.nbytes >= PAGE) if is_here else with_masters
            if is_stepped and each.requires_grad and step_bytes(each) <= MOST_STEP_BYTES:
                # Before it is accumulated: where a real step is measured, nothing is.
                hook = functools.partial(self._arrived, each)
                self._hooks.append((each, each.register_hook(hook)))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        for parameter, hook in self._hooks:
            hook.remove()
            drop_empty_hooks(parameter)
        self._copies.clear()
        self._in_flight.clear()

    def _arrived(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        self._waiting.append(parameter)
        if sum(map(step_bytes, self._waiting)) >= self._bucket_bytes:
            self.flush()

    @on_copy_stream()
    def flush(self) -> None:
        """Allocate what the next bucket takes."""
        waiting, self._waiting = self._waiting, []
        if waiting and len(self._in_flight) > 1:
            self._in_flight.popleft()

        def allocate(each: nn.Parameter) -> torch.Tensor:
            return torch.empty_like(each, device=self._device, requires_grad=False)

        loaded = [allocate(each) for each in waiting for _ in range(2)]  # two moments
        masters = [each for each in waiting if each.device.type != self._device.type]
        loaded += [allocate(each) for each in masters for _ in range(2)]  # itself and its gradient
        self._copies += [allocate(each) for each in waiting if each.device.type == self._device.type]
        _make_temporaries([each.nbytes for each in waiting], self._needs, self._device)
        self._in_flight.append(loaded)
        self.stepped.update(map(id, waiting))


def _step_masters(
    masters: Sequence[tuple[int, int]], needs: OptimizerNeeds, bucket_bytes: int, device: torch.device
) -> None:
    """Allocate and release what stepping masters on the device takes, given their bytes and those of their state.

    See Note [Device twins]: two buffers, as large as the largest bucket, and the temporaries of a bucket.
    """
    buckets: list[tuple[int, int]] = []  # the bytes of each, and of the parameters in it
    for nbytes, state in masters:
        needed = 2 * nbytes + state
        if needed > bucket_bytes:  # in slices
            buckets += [(bucket_bytes, nbytes * bucket_bytes // needed)] * 2
        elif buckets and buckets[-1][0] + needed <= bucket_bytes:
            buckets[-1] = (buckets[-1][0] + needed, buckets[-1][1] + nbytes)
        else:
            buckets.append((needed, nbytes))
    if buckets:
        largest, parameters = (max(sizes) for sizes in zip(*buckets, strict=True))
        sizes = [*[largest] * len(buckets[:2]), int(sum(needs.temporaries) * parameters)]
        made = [_allocate(size, device) for size in sizes if size]
        del made


def _make_temporaries(stepped: Sequence[int], needs: OptimizerNeeds, device: torch.device) -> None:
    """Allocate and release the temporaries of a step: of every parameter at once (foreach), or of one at a time."""
    of_all, of_one = needs.temporaries
    sizes = [int(of_all * nbytes) for nbytes in stepped]
    if stepped:
        sizes += [max(stepped)] * int(of_one)
    made = [_allocate(size, device) for size in sizes if size]
    del made


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
