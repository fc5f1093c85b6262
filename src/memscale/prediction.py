"""What a plan will do before it runs: the real executor, with the very plan, on the virtual GPU.

It stands right of the plan: it decides nothing, and fills in what the engine could only estimate. Where fake
tensors cannot follow the model, the same is done for real, guarded, on the model itself.

Note [The step that is predicted]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The second step of training or a later one, with Adam: its two moments are there, libraries have taken their
workspaces, no gradient is left over when forward begins, and the outputs are let go of before backward.

What `wrap` keeps to repeat a step from (`memscale.recovery.calls`) is there too, until backward ends: copies of buffers
that forward changes, and the gradients of the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from memscale.config import Config
from memscale.eight_bit import moment_bytes, parameters_in_eight_bits
from memscale.execution_plan import Plan, PredictionSource
from memscale.executor import Executor
from memscale.memory.allocator import CachingAllocator
from memscale.memory.tracker import MemoryTracker
from memscale.profiler.build import backward_targets, loss_of
from memscale.profiler.empirical import gradients_of, untouched
from memscale.profiler.place import Place
from memscale.profiler.sample import Sample
from memscale.simulator import Simulation

COUNT_BYTES = 4


@dataclass(frozen=True)
class Step:
    """The memory of one step. See Note [The step that is predicted]."""

    peak_bytes: int
    saved_bytes: int


def predict(
    model: nn.Module, plan: Plan, sample: Sample, place: Place, config: Config, plain: Step | None = None
) -> Plan:
    """The plan with the simulated figures of the plain step and of the step under the plan.

    Args:
        model: the model without techniques; it is not changed.
        plan: what the engine decided.
        sample: how the model is called.
        place: the device to simulate.
        config: the user's settings, which the executor reads.
        plain: the plain step, if it is known already.

    Raises:
        Exception: whatever the model raises on fake tensors.
    """
    plain = plain or _simulated(model, None, sample, place)
    planned = _simulated(model, plan, sample, place, _quiet(config))
    return _filled_in(plan, plain, planned, "simulated")


def measure(
    model: nn.Module, plan: Plan, sample: Sample, *, plain: Step, optimizer_transient: int, config: Config
) -> Plan:
    """The plan with the figures of a real step under the plan, guarded as the empirical profile is.

    Args:
        model: the model without techniques; it is as before afterwards.
        plan: what the engine decided.
        sample: how the model is called.
        plain: the plain step, as the empirical profile saw it.
        optimizer_transient: what Adam needs while it steps.
        config: the user's settings, which the executor reads.
    """
    device = next(model.parameters()).device
    allocators = {} if device.type == "cpu" else {device.type: CachingAllocator}
    executor = Executor(model, plan, _quiet(config))
    batch = sample.on(device)
    with untouched(model):
        tracker = MemoryTracker(model, *batch.tensors(), allocators=allocators)
        executor.attach()
        try:
            with tracker:
                step = _step(model, batch, tracker, device, gradients_of(model))
        finally:
            executor.detach()
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    moments = 2 * trained
    stepping = tracker.live_bytes(device) + trained + optimizer_transient
    planned = Step(max(step.peak_bytes, stepping) + moments, step.saved_bytes)
    return _filled_in(plan, plain, planned, "measured")


def _filled_in(plan: Plan, plain: Step, planned: Step, source: PredictionSource) -> Plan:
    return replace(
        plan,
        baseline_peak_bytes=plain.peak_bytes,
        baseline_saved_bytes=plain.saved_bytes,
        predicted_peak_bytes=planned.peak_bytes,
        predicted_saved_bytes=planned.saved_bytes,
        prediction_source=source,
    )


def _simulated(
    model: nn.Module, plan: Plan | None, sample: Sample, place: Place, config: Config | None = None
) -> Step:
    with place.simulate() as simulation:
        twin = simulation.copy_of(model).train(model.training)
        away: set[int] = set()
        if plan is not None:
            executor = Executor(twin, plan, config)
            executor.attach()
            away = {id(parameter) for parameter in executor.homes.on_disk}
            simulation.tracker.reset_peak()  # a model that does not fit was never on the device as a whole
        here = [each for each in twin.parameters() if each.device.type == place.kind and id(each) not in away]
        _add_adam_state(here, plan, twin, simulation)
        batch = Sample(simulation.batch_of(sample.args), simulation.batch_of(sample.kwargs))
        step = _step(twin, batch, simulation.tracker, simulation.device, torch.autograd.backward)
        _adam_temporaries(here, place.kind)
        if away and plan is not None and plan.optimizer is not None:
            torch.empty(
                plan.optimizer.bucket_bytes, dtype=torch.uint8
            )  # what is stepped at a time, on its way
    return Step(max(step.peak_bytes, simulation.peak_bytes), step.saved_bytes)


def _step(
    model: nn.Module,
    batch: Sample,
    tracker: MemoryTracker,
    device: torch.device,
    backward: Callable[[torch.Tensor], object],
) -> Step:
    from memscale.recovery.calls import Call  # which plans anew, and so imports this module

    before = tracker.live_bytes(device) - tracker.workspace_bytes(device)
    call = Call(model, batch.args, batch.kwargs, device)
    output = model(*batch.args, **batch.kwargs)
    call.settle()
    targets = backward_targets(call.through_boundary(output))
    del output
    saved = tracker.live_bytes(device) - tracker.workspace_bytes(device) - before
    # In a first step the workspace of backward is not there yet; in the one that is predicted it is.
    forward_peak = tracker.peak_bytes(device) - tracker.workspace_bytes(device)
    if targets:
        backward(loss_of(targets))
    call.release()
    return Step(max(tracker.peak_bytes(device), forward_peak + tracker.workspace_bytes(device)), saved)


# ---------------------------------------------------------------------- Adam


def _add_adam_state(
    here: Sequence[nn.Parameter], plan: Plan | None, twin: nn.Module, simulation: Simulation
) -> None:
    """Adam's moments, of the parameters that are on the device, and the counts of steps, which are on the host."""
    device = simulation.device
    eight_bit = plan is not None and plan.optimizer is not None and plan.optimizer.eight_bit
    small = {id(each) for each in parameters_in_eight_bits(twin)} if eight_bit else set()
    for parameter in here:
        if parameter.requires_grad:
            sizes = [parameter.nbytes] * 2
            if id(parameter) in small:
                sizes = [moment_bytes(parameter.numel())] * 2
            sizes += [COUNT_BYTES] * (device.type == "cpu")
            for size in sizes:  # without tensors: they would take a tenth of a simulation
                simulation.tracker.reserve(size, device, "Adam's state")


def _adam_temporaries(here: Sequence[nn.Parameter], device: str) -> None:
    """What Adam's step makes: one temporary of every parameter at once (foreach), or two of one on a CPU."""
    there = [each for each in here if each.grad is not None]
    if device == "cpu" and there:
        there = [max(there, key=lambda parameter: parameter.nbytes)] * 2
    made = [torch.empty_like(each, requires_grad=False) for each in there]
    del made


def _quiet(config: Config) -> Config:
    return config.replace(enable_logging=False)  # the user hears of the plan once, when it is attached
