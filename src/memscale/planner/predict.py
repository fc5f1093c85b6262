"""Predict what a plan needs: the real executor attaches it to a copy of the model on the virtual GPU.

Where fake tensors cannot follow the model, a real step of the model itself is measured instead, and undone.

Note [The step that is predicted]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The second step of training or a later one, with the optimizer that was given, else with AdamW: its state is there,
libraries have taken their workspaces, no gradient is left over when forward begins, and the outputs are let go of
before backward. The first step is run, and the allocator is asked for the same again (Note [Replaying a step] in
`memory/record.py`). What `wrap` keeps to repeat a step from (`ModelCall`) is there too, until backward ends. Where
gradients are accumulated, the step has two batches, of which the second finds the gradients of the first. Where steps
overlap with backward, those of the warm-up, which do not, come first: they must fit as well, and the allocator's blocks
are as they leave them.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memscale._torch import DDP_WITHOUT_COMMUNICATION, FAKE_TENSOR_LOGGER, disable_current_modes, pytree
from memscale._util.snapshots import RngState
from memscale.checkpointing.model_call import ModelCall, reached_outputs
from memscale.checkpointing.technique import without_own_checkpointing
from memscale.config import Config
from memscale.execution_plan import (
    MemoryHolder,
    MemoryPhase,
    Plan,
    PredictionSource,
    StepMemory,
)
from memscale.executor import Executor
from memscale.executor.verify import backward_without_hooks
from memscale.memory.allocator import CachingAllocator
from memscale.memory.record import StepUse
from memscale.memory.tracker import MemoryTracker
from memscale.optimizer.needs import OptimizerNeeds, adamw_needs, needs_of
from memscale.optimizer.simulated_steps import SimulatedSteps
from memscale.profiler.recorder import backward_targets, loss_of
from memscale.profiler.run import Place, untouched
from memscale.profiler.sample import Sample
from memscale.simulator.device import DeviceTracker, workspace_bytes
from memscale.simulator.shards import SimulatedShards

PLAIN_NOT_SIMULATED = "the plain step was not simulated"  # how a note of a plan begins
# The fields of a plan that a simulation or a measurement fills in.
_FIGURES = (
    *("baseline_peak_bytes", "baseline_saved_bytes", "baseline_memory", "prediction_source", "peak_at"),
    *("predicted_peak_bytes", "predicted_saved_bytes", "predicted_memory"),
    *("predicted_reserved_bytes", "predicted_capacity_bytes"),
)
REPLAYS = 2  # of the first step's allocations: the third step finds the allocator as the second left it


@dataclass(frozen=True)
class Step:
    """The memory of one step. See Note [The step that is predicted]."""

    peak_bytes: int
    saved_bytes: int
    peak_at: str = ""  # as `Plan.peak_at`
    memory: StepMemory | None = None  # None where it was not simulated
    reserved_bytes: int = 0  # as `Plan.predicted_reserved_bytes`; 0 for a plain step
    capacity_bytes: int = 0  # as `Plan.predicted_capacity_bytes`; 0 for a plain step


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


def with_plain_step(
    model: nn.Module, plan: Plan, sample: Sample, place: Place, config: Config, optimizer: Optimizer
) -> Plan:
    """Return a simulated plan with its plain step simulated as well, which `make_plan` leaves out for deep models."""
    if plan.baseline_memory is not None or plan.prediction_source != "simulated":
        return plan
    with rehearsal(model):
        plain = _simulated(model, None, sample, place, config, needs_of(optimizer, model, place))
    notes = tuple(note for note in plan.notes if not note.startswith(PLAIN_NOT_SIMULATED))
    return _with_plain_step(replace(plan, notes=notes), plain)


def plain_step(model: nn.Module, sample: Sample, place: Place, config: Config, optimizer: Optimizer) -> Step:
    """Simulate the step without techniques, with what torch's allocator must reserve for it."""
    with rehearsal(model):
        return _simulated(model, Plan(layers=()), sample, place, config, needs_of(optimizer, model, place))


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
    batch = sample.copy().on(device)
    with untouched(model):
        tracker.watch(model)
        for tensor in pytree.tree_leaves((batch.args, batch.kwargs, batch.beside)):
            if isinstance(tensor, torch.Tensor):
                tracker.watch(tensor)
        executor.attach()
        try:
            with tracker:
                backward = backward_without_hooks(model, executor)
                planned = _step(model, batch, tracker, device, executor, backward, config, optimizer)
        finally:
            executor.detach()
    return _filled_in(plan, plain, planned, "measured")


def with_figures_of(plan: Plan, other: Plan) -> Plan:
    """Return the plan with the figures of another one that does the same."""
    return replace(plan, **{name: getattr(other, name) for name in _FIGURES})


def plain_step_of(plan: Plan) -> Step:
    return Step(plan.baseline_peak_bytes, plan.baseline_saved_bytes, memory=plan.baseline_memory)


def _filled_in(plan: Plan, plain: Step, planned: Step, source: PredictionSource) -> Plan:
    return replace(
        _with_plain_step(plan, plain),
        predicted_peak_bytes=planned.peak_bytes,
        predicted_saved_bytes=planned.saved_bytes,
        predicted_reserved_bytes=planned.reserved_bytes,
        predicted_capacity_bytes=planned.capacity_bytes,
        prediction_source=source,
        peak_at=planned.peak_at,
        predicted_memory=planned.memory,
    )


def _with_plain_step(plan: Plan, plain: Step) -> Plan:
    return replace(
        plan,
        baseline_peak_bytes=plain.peak_bytes,
        baseline_saved_bytes=plain.saved_bytes,
        baseline_memory=plain.memory,
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
        shards = SimulatedShards(model, twin, simulation.tracker, device)
        return _step(twin, batch, simulation.tracker, device, executor, backward, config, optimizer, shards)


def _step(
    model: nn.Module,
    batch: Sample,
    tracker: MemoryTracker,
    device: torch.device,
    executor: Executor | None,
    backward: Callable[[torch.Tensor], object],
    config: Config,
    optimizer: OptimizerNeeds | None,
    shards: SimulatedShards | None = None,
) -> Step:
    """See Note [The step that is predicted]."""
    shards = shards or SimulatedShards(nn.Module(), model, tracker, device)  # of none
    plan = None if executor is None else executor.plan
    on_disk = () if executor is None else executor.placement.on_disk
    needs = optimizer or adamw_needs(model, device.type)
    steps = SimulatedSteps(model, plan, on_disk, needs, tracker, device, config, shards)
    tracker.reset_peak()
    peaks = []
    for in_backward in (False, True) if steps.overlaps else (False,):
        steps.begin(in_backward=in_backward)
        with tracker.logging(device) as log:
            for number in range(min(2, config.gradient_accumulation_steps)):
                targets: list[torch.Tensor] = []  # those of the batch before are let go of
                given = batch.again()
                call = ModelCall(model, given.args, given.kwargs, device)
                output = model(*given.args, **given.kwargs)
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
                shards.end_backward()
                steps.end_backward()
                call.release()
            after_backward = len(log)
            steps.run()
            shards.drop_gradients()
            for parameter in model.parameters():
                parameter.grad = None
        # Without state to come, the first step may need as much as the later ones: the allocator's blocks are new.
        peaks += [tracker.peak_bytes(device)] if steps.in_buckets else []
        replays = [tracker.replay(log, saved_at) for _ in range(REPLAYS)]
        peaks += [each.peak_bytes for each in replays]
    phases = {"forward": after_forward, "loss": after_loss, "backward": after_backward}
    peak_event = max(replays, key=lambda each: each.peak_bytes).peak_event
    phase = next((phase for phase, end in phases.items() if peak_event < end), "optimizer step")
    peak_at = _with_layer(phase, log.events[peak_event][0].module, executor) if log.events else ""
    peak = max(peaks)
    reserved = capacity = peak if executor is not None else 0
    if executor is not None and device.type != "cpu":
        reserved = log.reserved_bytes(REPLAYS) or peak
        capacity = log.least_capacity(REPLAYS, peak, reserved)
    return Step(
        peak,
        replays[-1].above_start,
        peak_at,
        _memory_of(tracker.use_of(log), phases),
        reserved,
        capacity,
    )


def _memory_of(use: StepUse, phases: Mapping[str, int]) -> StepMemory:
    """Return the memory over a step, with where each phase begins; `phases` has the event at which each ends."""
    begins = [("forward", 0)]
    for (_, end), name in zip(phases.items(), ("loss", "backward", "optimizer step"), strict=True):
        begins.append((name, next((part for part, last in enumerate(use.ends) if last > end), len(use.ends))))
    return StepMemory(
        categories=tuple(map(str, use.categories)),
        samples=use.samples,
        phases=tuple(MemoryPhase(name, begin) for name, begin in begins),
        peak=use.peak,
        largest=tuple(
            MemoryHolder(each.description, str(each.category), each.nbytes) for each in use.largest
        ),
    )


def _with_layer(phase: str, module: str, executor: Executor | None) -> str:
    """Return a phase with, in forward and backward, the layer of the plan that a module is in, or the module."""
    if executor is None or not module or phase in ("loss", "optimizer step"):
        return phase
    layers = {member: layer.name for layer in executor.plan.layers for member in layer.members}
    inside = [member for member in layers if f"{module}.".startswith(f"{member}.")]
    return f"{phase} of {layers[max(inside, key=len)] if inside else module}"


def _quiet(config: Config) -> Config:
    return config.replace(enable_logging=False)  # the plan is logged once, when it is attached


# The context in which a model is profiled and simulated -------------------------------------------------


@contextlib.contextmanager
def rehearsal(model: nn.Module, config: Config | None = None) -> Iterator[None]:
    """Profile or simulate a model inside of this: random state and gradients are restored at the end.

    With the `config` of a plan, checkpointing of its own is off if plans replace that: Note [Own checkpointing].

    The garbage collector is off, so that a prediction does not depend on when it runs; in training nobody knows either
    when tensors in reference cycles are released.
    """
    random = RngState({parameter.device for parameter in model.parameters()})
    # A forward that its user has set on a module may refer to the model itself, and not to its copy.
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    collects = gc.isenabled()
    # Of a traceback for each operation that fails on fake tensors.
    log = logging.getLogger(FAKE_TENSOR_LOGGER)
    logs_nothing = log.disabled
    with contextlib.ExitStack() as stack:
        # A FLOP counter or profiler around the training loop must not count this.
        stack.enter_context(disable_current_modes())
        stack.enter_context(_without_other_processes(model))
        if config is not None and config.enable_checkpointing:
            stack.enter_context(without_own_checkpointing(model))
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
    flags = DDP_WITHOUT_COMMUNICATION
    parallel = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    before = [(each, name, getattr(each, name)) for each in parallel for name in flags if hasattr(each, name)]
    try:
        for each, name, _ in before:
            setattr(each, name, flags[name])
        yield
    finally:
        for each, name, value in before:
            setattr(each, name, value)
