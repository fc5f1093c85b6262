"""Predict what a plan needs: the real executor attaches it to a copy of the model on the virtual GPU.

Where fake tensors cannot follow the model, a real step of the model itself is measured instead, and undone.

Note [The step that is predicted]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The second step of training or a later one, with the optimizer that was given, else with AdamW: its state is there,
libraries have taken their workspaces, no gradient is left over when forward begins, and the outputs are let go of
before backward. The first step is run, and the allocator is asked for the same again (Note [Replaying a step] in
`memory/record.py`). What `wrap` keeps to repeat a step from (`ModelCall`) is there too, until backward ends. Where
gradients are accumulated, the step has two batches, of which the second finds the gradients of the first.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memscale._torch import DDP_STATIC_GRAPH_REDUCED, FAKE_TENSOR_LOGGER, disable_current_modes, pytree
from memscale._util.gradient_hook import GradientHook
from memscale._util.snapshots import RngState
from memscale.checkpointing.model_call import ModelCall, reached_outputs
from memscale.config import Config
from memscale.execution_plan import OptimizerPlan, Plan, PredictionSource
from memscale.executor import Executor
from memscale.memory.allocator import CachingAllocator
from memscale.memory.tracker import MemoryTracker
from memscale.optimizer.bucketed_steps import slice_bytes
from memscale.optimizer.eight_bit import moment_bytes, parameters_in_eight_bits
from memscale.optimizer.needs import OptimizerNeeds, StateTensor
from memscale.optimizer.overlap import LARGEST, step_bytes
from memscale.optimizer.placement import DEFAULT_BUCKET_BYTES, ids_with_state_on_host, takes_all_state
from memscale.optimizer.state_stores import PAGE
from memscale.planner.cost_model import adamw_temporaries
from memscale.profiler.recorder import backward_targets, loss_of
from memscale.profiler.run import Place, is_reentrant, untouched
from memscale.profiler.sample import Sample
from memscale.simulator.device import DeviceTracker, workspace_bytes

STEP_COUNT_BYTES = 4  # of the step count that an optimizer keeps for each parameter
REPLAYS = 2  # of the first step's allocations: the third step finds the allocator as the second left it


@dataclass(frozen=True)
class Step:
    """The memory of one step. See Note [The step that is predicted]."""

    peak_bytes: int
    saved_bytes: int
    peak_at: str = ""  # as `Plan.peak_at`


def predict(
    model: nn.Module,
    plan: Plan,
    sample: Sample,
    place: Place,
    config: Config,
    plain: Step | None = None,
    optimizer: OptimizerNeeds | None = None,
) -> Plan:
    """Return the plan with the simulated figures of the plain step and of the step under the plan.

    The model is without techniques, and not changed; `plain` is the plain step, if it is known already. Without
    `optimizer` it is AdamW. Whatever the model raises on fake tensors is raised.
    """
    plain = plain or _simulated(model, None, sample, place, config, optimizer)
    planned = _simulated(model, plan, sample, place, config, optimizer)
    return _filled_in(plan, plain, planned, "simulated")


def measure(
    model: nn.Module,
    plan: Plan,
    sample: Sample,
    place: Place,
    config: Config,
    *,
    plain: Step,
    optimizer: OptimizerNeeds | None = None,
) -> Plan:
    """Return the plan with the figures of a real step, after which the model is as before.

    The arguments are those of `predict`; `plain` is as the empirical profile saw it.
    """
    device = next(model.parameters()).device
    tracker = MemoryTracker()
    if device.type != "cpu":  # count as the simulator of such a device does: workspaces are no tensors
        workspace = workspace_bytes(place.capability)
        tracker = DeviceTracker(workspace_bytes=workspace, allocators={device.type: CachingAllocator})
    executor = Executor(model, plan, _quiet(config))
    batch = sample.on(device)
    with untouched(model):
        tracker.watch(model)
        for tensor in pytree.tree_leaves((batch.args, batch.kwargs, batch.beside)):
            if isinstance(tensor, torch.Tensor):
                tracker.watch(tensor)
        executor.attach()
        try:
            with tracker:
                backward = _backward_without_hooks(model, executor)
                planned = _step(model, batch, tracker, device, executor, backward, config, optimizer)
        finally:
            executor.detach()
    return _filled_in(plan, plain, planned, "measured")


def _backward_without_hooks(model: nn.Module, executor: Executor) -> Callable[[torch.Tensor], object]:
    """Return a backward that accumulates nothing, so that the user's hooks on gradients do not run.

    Gradients of parameters on disk are copied there one by one, as they would be if they were accumulated.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    on_disk = {id(parameter) for parameter in executor.placement.on_disk}

    def copy_to_disk(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        copy = executor.placement.store.copy_of(gradient)
        executor.placement.release_pages(parameter)
        return copy

    def backward(loss: torch.Tensor) -> None:
        if is_reentrant(loss):
            torch.autograd.backward(loss)  # with no hooks but ours: see `gradients_of`
            return
        with contextlib.ExitStack() as stack:
            for parameter in trained:
                if id(parameter) in on_disk:
                    hook = functools.partial(copy_to_disk, parameter)
                    stack.callback(parameter.register_hook(hook).remove)  # type: ignore[no-untyped-call]
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient

    return backward


def with_figures_of(plan: Plan, other: Plan) -> Plan:
    """Return the plan with the figures of another one that does the same."""
    plain = Step(other.baseline_peak_bytes, other.baseline_saved_bytes)
    planned = Step(other.predicted_peak_bytes, other.predicted_saved_bytes, other.peak_at)
    return _filled_in(plan, plain, planned, other.prediction_source)


def _filled_in(plan: Plan, plain: Step, planned: Step, source: PredictionSource) -> Plan:
    return replace(
        plan,
        baseline_peak_bytes=plain.peak_bytes,
        baseline_saved_bytes=plain.saved_bytes,
        predicted_peak_bytes=planned.peak_bytes,
        predicted_saved_bytes=planned.saved_bytes,
        prediction_source=source,
        peak_at=planned.peak_at,
    )


def _simulated(
    model: nn.Module,
    plan: Plan | None,
    sample: Sample,
    place: Place,
    config: Config,
    optimizer: OptimizerNeeds | None,
) -> Step:
    with place.simulate() as simulation:
        twin = simulation.copy_of(model).train(model.training)
        executor = None
        if plan is not None:
            executor = Executor(twin, plan, _quiet(config))
            executor.attach()
        batch = sample.mapped(simulation.batch_of)
        device, backward = simulation.device, torch.autograd.backward
        return _step(twin, batch, simulation.tracker, device, executor, backward, config, optimizer)


def _step(
    model: nn.Module,
    batch: Sample,
    tracker: MemoryTracker,
    device: torch.device,
    executor: Executor | None,
    backward: Callable[[torch.Tensor], object],
    config: Config,
    optimizer: OptimizerNeeds | None,
) -> Step:
    """See Note [The step that is predicted]."""
    on_disk: set[int] = set()
    planned = OptimizerPlan()
    if executor is not None:
        on_disk = {id(each) for each in executor.placement.on_disk}
        planned = executor.plan.optimizer or planned
    needs = optimizer or _adamw(model, device)
    in_buckets = planned.bucket_bytes > 0 and needs.moves and device.type != "cpu"
    on_host = ids_with_state_on_host(model, executor.plan) if executor is not None and in_buckets else set()
    early = _EarlySteps(needs, planned.bucket_bytes, device)
    if planned.overlapped and needs.overlaps:
        early.attach(model, on_host, with_masters=planned.host_step == "device")
    tracker.reset_peak()
    with tracker.logging(device) as log:
        for number in range(min(2, config.gradient_accumulation_steps)):
            targets: list[torch.Tensor] = []  # those of the batch before are let go of
            call = ModelCall(model, batch.args, batch.kwargs, device)
            output = model(*batch.args, **batch.kwargs)
            call.finish_forward(output)
            targets = backward_targets(output)
            del output
            if number == 0:
                saved_at = len(log)
            after_forward = after_loss = len(log)
            if targets:
                loss = loss_of(targets)
                reached_outputs([loss])
                after_loss = len(log)
                backward(loss)
                del loss
            early.flush()
            call.release()
        after_backward = len(log)
        here = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name in needs.state and parameter.grad is not None and parameter.device.type == device.type
        }
        # Under a cap on the disk, only the state of the parameters there is on it.
        all_on_disk = planned.state == "disk" and device.type == "cpu" and takes_all_state("disk", config)
        below = {id(each) for each in here.values()} if all_on_disk and needs.moves else on_host
        in_8_bits: set[int] = set()
        if needs.eight_bit and planned.eight_bit:
            in_8_bits = {id(each) for each in parameters_in_eight_bits(model)}
        staying: dict[int, list[int]] = {}  # state that is there between steps, by the parameter's id
        for parameter, size in _state_sizes(here, needs, on_disk, in_8_bits, device):
            if id(parameter) not in below or size < PAGE:  # what is smaller than a page stays
                staying.setdefault(id(parameter), []).append(size)

        def reserve_state(parameter: nn.Parameter) -> None:
            for size in staying.pop(id(parameter), ()):
                tracker.reserve(size, device, "optimizer state")  # tensors would take a tenth of a simulation

        stepped = [
            each for each in here.values() if id(each) not in on_disk and id(each) not in early.stepped
        ]
        if in_buckets:
            _step_in_buckets(stepped, needs, planned.bucket_bytes, on_host | in_8_bits, reserve_state)
        for parameter in here.values():
            reserve_state(parameter)
        if not in_buckets:
            _make_temporaries(stepped, needs)
        if planned.host_step == "device" and needs.steps_on_device and device.type != "cpu":
            masters = [
                (parameter.nbytes, sum(each.nbytes for each in needs.state[name]))
                for name, parameter in model.named_parameters()
                if name in needs.state and parameter.grad is not None and parameter.device.type == "cpu"
                if id(parameter) not in early.stepped
            ]
            _step_masters(masters, needs, planned.bucket_bytes or DEFAULT_BUCKET_BYTES, device)
        if on_disk and planned.bucket_bytes:
            # A bucket of the parameters on disk with gradients and two moments, or all of them if that is less.
            trained = (each for each in model.parameters() if each.requires_grad and id(each) in on_disk)
            whole = sum(4 * each.nbytes for each in trained)
            torch.empty(min(planned.bucket_bytes, whole), dtype=torch.uint8)
        early.detach()
        for parameter in model.parameters():
            parameter.grad = None
    # Without state to come, the first step may need as much as the later ones: the allocator's blocks are new.
    first = tracker.peak_bytes(device) if in_buckets else 0
    replays = [tracker.replay(log, (saved_at,)) for _ in range(REPLAYS)]
    phases = {"forward": after_forward, "loss": after_loss, "backward": after_backward}
    peak_event = max(replays, key=lambda each: each.peak_bytes).peak_event
    phase = next((phase for phase, end in phases.items() if peak_event < end), "optimizer step")
    peak_at = _with_layer(phase, log.events[peak_event][0].module, executor) if log.events else ""
    return Step(
        max(first, *(each.peak_bytes for each in replays)), replays[-1].above_start[saved_at], peak_at
    )


def _with_layer(phase: str, module: str, executor: Executor | None) -> str:
    """Return a phase with, in forward and backward, the layer of the plan that a module is in, or the module."""
    if executor is None or not module or phase in ("loss", "optimizer step"):
        return phase
    layers = {member: layer.name for layer in executor.plan.layers for member in layer.members}
    inside = [member for member in layers if f"{module}.".startswith(f"{member}.")]
    return f"{phase} of {layers[max(inside, key=len)] if inside else module}"


# The optimizer ------------------------------------------------------------------------------------------


def _adamw(model: nn.Module, device: torch.device) -> OptimizerNeeds:
    """Return what AdamW needs over all parameters that are trained."""
    return OptimizerNeeds(
        kind="AdamW",
        state={
            name: (StateTensor(parameter.nbytes, parameter.dtype is torch.float32),) * 2
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        },
        temporaries=adamw_temporaries(device.type),
        moves=True,
        eight_bit=True,
    )


def _state_sizes(
    here: dict[str, nn.Parameter],
    needs: OptimizerNeeds,
    on_disk: Collection[int],
    in_eight_bits: Collection[int],
    device: torch.device,
) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield the bytes of each tensor of optimizer state, and of the step counts, which are on the host."""
    for name, parameter in here.items():
        if needs.moves and id(parameter) in on_disk:
            continue
        tensors = needs.state[name]
        for each in tensors:
            is_small = each.is_moment and id(parameter) in in_eight_bits
            yield parameter, moment_bytes(each.nbytes // 4) if is_small else each.nbytes
        if device.type == "cpu" and tensors:
            yield parameter, STEP_COUNT_BYTES


def _step_in_buckets(
    here: Sequence[nn.Parameter],
    needs: OptimizerNeeds,
    bucket_bytes: int,
    loaded: Collection[int],
    reserve_state: Callable[[nn.Parameter], None],
) -> None:
    """Allocate and release the loaded state and temporaries of a step, of one bucket of parameters after the other.

    What stays is reserved with its bucket, as the first step makes it: the allocator's blocks depend on the order. The
    state of one bucket is copied back while that of the next comes.
    """
    of_all, of_one = needs.temporaries
    before: list[torch.Tensor] = []

    def step(bucket: Sequence[tuple[nn.Parameter, int, int]]) -> list[torch.Tensor]:
        def allocate(nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=here[0].device)

        state = []
        for parameter, size, tensors in bucket:
            reserve_state(parameter)
            state += [allocate(size) for _ in range(tensors)]
        temporaries = [int(of_all * size) for _, size, _ in bucket]
        temporaries += [max(size for _, size, _ in bucket)] * int(of_one)
        made = [allocate(size) for size in temporaries if size]
        del made
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
        self._hooks: list[tuple[nn.Parameter, GradientHook]] = []
        self._waiting: list[nn.Parameter] = []
        self._in_flight: deque[list[torch.Tensor]] = deque()  # what is loaded
        self._copies: list[torch.Tensor] = []  # of parameters on the device, until the step

    def attach(self, model: nn.Module, with_state_on_host: Collection[int], *, with_masters: bool) -> None:
        for each in model.parameters():
            is_here = each.device.type == self._device.type
            is_stepped = (id(each) in with_state_on_host and each.nbytes >= PAGE) if is_here else with_masters
            if is_stepped and each.requires_grad and step_bytes(each) <= LARGEST:
                self._hooks.append((each, GradientHook(each, self._arrived)))

    def detach(self) -> None:
        for parameter, hook in self._hooks:
            hook.remove(parameter)
        self._copies.clear()
        self._in_flight.clear()

    def _arrived(self, parameter: nn.Parameter) -> None:
        self._waiting.append(parameter)
        if sum(map(step_bytes, self._waiting)) >= self._bucket_bytes:
            self.flush()

    def flush(self) -> None:
        """Allocate what the next bucket takes."""
        waiting, self._waiting = self._waiting, []
        if len(self._in_flight) > 1:
            self._in_flight.popleft()

        def allocate(each: nn.Parameter) -> torch.Tensor:
            return torch.empty_like(each, device=self._device, requires_grad=False)

        loaded = [allocate(each) for each in waiting for _ in range(2)]  # two moments
        masters = [each for each in waiting if each.device.type != self._device.type]
        pairs = [(allocate(each), allocate(each)) for each in masters]  # itself and its gradient
        loaded += [values for values, _ in pairs]
        gradients = [gradient for _, gradient in pairs]
        self._copies += [allocate(each) for each in waiting if each.device.type == self._device.type]
        of_all, of_one = self._needs.temporaries
        sizes = [int(of_all * each.nbytes) for each in waiting]
        sizes += [max(each.nbytes for each in waiting)] * int(of_one) if waiting else []
        made = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes if size]
        del pairs, gradients, made
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
        made = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes if size]
        del made


def _make_temporaries(here: Sequence[nn.Parameter], needs: OptimizerNeeds) -> None:
    """Allocate and release the temporaries of a step: of every parameter at once (foreach), or of one at a time."""
    of_all, of_one = needs.temporaries
    sizes = [int(of_all * each.nbytes) for each in here]
    if here:
        sizes += [max(each.nbytes for each in here)] * int(of_one)
    made = [torch.empty(size, dtype=torch.uint8, device=here[0].device) for size in sizes if size]
    del made


def _quiet(config: Config) -> Config:
    return config.replace(enable_logging=False)  # the plan is logged once, when it is attached


# The context in which a model is profiled and simulated -------------------------------------------------


@contextlib.contextmanager
def rehearsal(model: nn.Module) -> Iterator[None]:
    """Profile or simulate a model inside of this: random state and gradients are restored at the end.

    The garbage collector is off, so that a prediction does not depend on when it runs; in training nobody knows either
    when tensors in reference cycles are released.
    """
    random = RngState(sorted({parameter.device.type for parameter in model.parameters()}))
    # A forward that its user has set on a module may refer to the model itself, and not to its copy.
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    collects = gc.isenabled()
    log = logging.getLogger(
        FAKE_TENSOR_LOGGER
    )  # of a traceback for each operation that fails on fake tensors
    logs_nothing = log.disabled
    with contextlib.ExitStack() as stack:
        # A FLOP counter or profiler around the training loop must not count this.
        stack.enter_context(disable_current_modes())
        stack.enter_context(_without_other_processes(model))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes a second
            # Compiling for fake tensors takes long, and tells nothing.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            gc.disable()
            log.disabled = True
            yield
        finally:
            log.disabled = logs_nothing
            if collects:
                gc.enable()
            random.restore()
            for parameter, gradient in gradients:
                if parameter.grad is not gradient:
                    parameter.grad = gradient


@contextlib.contextmanager
def _without_other_processes(model: nn.Module) -> Iterator[None]:
    """Keep a model that trains in several processes from communicating: the others may not rehearse now."""
    flags = {
        "require_backward_grad_sync": False,
        "require_forward_param_sync": False,
        DDP_STATIC_GRAPH_REDUCED: True,  # else backward begins the first reduction of a static graph
    }
    parallel = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    before = [(each, name, getattr(each, name)) for each in parallel for name in flags if hasattr(each, name)]
    try:
        for each, name, _ in before:
            setattr(each, name, flags[name])
        yield
    finally:
        for each, name, value in before:
            setattr(each, name, value)
