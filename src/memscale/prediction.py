"""What a plan will do before it runs: the real executor, with the very plan, on the virtual GPU.

It stands right of the plan: it decides nothing, and fills in what the engine could only estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from memscale.config import Config
from memscale.executor import Executor
from memscale.plan import Plan
from memscale.profiler.build import backward_targets, run_backward
from memscale.profiler.sample import Sample
from memscale.simulator import Simulation, simulate

ROOM = 1 << 50  # a step that does not fit has a peak too: it is what the user is told


@dataclass(frozen=True)
class Step:
    """The memory of one simulated step."""

    peak_bytes: int
    saved_bytes: int


def predict(model: nn.Module, plan: Plan, sample: Sample, *, device: str, config: Config) -> Plan:
    """The plan with the simulated figures of the plain step and of the step under the plan.

    Args:
        model: the model without techniques; it is not changed.
        plan: what the engine decided.
        sample: how the model is called.
        device: "cpu" or "vgpu".
        config: the user's settings, which the executor reads.

    Raises:
        Exception: whatever the model raises on fake tensors.
    """
    plain = _simulate(model, None, sample, device, config)
    planned = _simulate(model, plan, sample, device, config) if any(x.techniques for x in plan.layers) else plain
    return replace(
        plan,
        baseline_peak_bytes=plain.peak_bytes,
        baseline_saved_bytes=plain.saved_bytes,
        predicted_peak_bytes=planned.peak_bytes,
        predicted_saved_bytes=planned.saved_bytes,
        prediction_source="simulated",
    )


def _simulate(model: nn.Module, plan: Plan | None, sample: Sample, device: str, config: Config) -> Step:
    with simulate(ROOM, device=device) as simulation:
        twin = simulation.copy_of(model).train(model.training)
        if plan is not None:
            Executor(twin, plan, config).attach()
            simulation.tracker.reset_peak()  # a model that does not fit was never on the device as a whole
        state = [
            torch.empty_like(parameter, requires_grad=False)
            for parameter in twin.parameters()
            if parameter.requires_grad
            for _ in range(2)  # Adam's two moments, where the parameter is
        ]
        batch = Sample(simulation.batch_of(sample.args), simulation.batch_of(sample.kwargs))
        saved = _forward_and_backward(twin, batch, simulation)
        transient = _optimizer_transient(twin, device)
        after = simulation.tracker.live_bytes(simulation.device)
        del state
    return Step(max(simulation.peak_bytes, after + transient), saved)


def _forward_and_backward(twin: nn.Module, batch: Sample, simulation: Simulation) -> int:
    before = simulation.tracker.live_bytes(simulation.device)
    targets = backward_targets(twin(*batch.args, **batch.kwargs))
    saved = simulation.tracker.live_bytes(simulation.device) - before
    run_backward(targets)
    return saved


def _optimizer_transient(twin: nn.Module, device: str) -> int:
    """Adam's temporaries: of all parameters at once with foreach (accelerators), of one at a time on a CPU."""
    there = [parameter for parameter in twin.parameters() if parameter.device.type == device]
    sizes = [parameter.nbytes for parameter in there if parameter.requires_grad]
    return 2 * max(sizes, default=0) if device == "cpu" else sum(sizes)
