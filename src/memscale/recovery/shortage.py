"""What to do about an out-of-memory error: free what it holds, find heavier plans, and explain it if none helps.

Note [What an error holds]
~~~~~~~~~~~~~~~~~~~~~~~~~~
The traceback of an error holds the frames of the calls that failed, with the tensors in them. Clearing the frames is
not enough: functions made inside others (as in `nn.Module.__call__`) share variables with them in closures, and with
the input of every module that was running live the graph and all activations. So the traceback is dropped before a
heavier plan is tried. Its lines are kept as text, in case the error is raised in the end.
"""

from __future__ import annotations

import gc
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from memscale._torch import disable_current_modes
from memscale.config import Config, OptimizationMode
from memscale.errors import ProfileError, is_out_of_memory
from memscale.execution_plan import Plan, Tier
from memscale.executor import Executor, hardware_of
from memscale.hardware import Hardware
from memscale.memory.record import Snapshot
from memscale.observe.log import figures_of, open_log
from memscale.planner.make_plan import make_plan
from memscale.planner.ranks import planning_alone
from memscale.profiler import Place, Sample
from memscale.profiler.recorder import backward_targets, loss_of
from memscale.units import format_bytes

HEAVIER_SHARE = 0.75  # of the predicted peak of the plan that failed
LARGEST_TENSORS = 5  # that an explanation names


def attempt(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return a function's result, or the error if memory ran out."""
    # The caller handles the error outside of an `except`: in one, the frames that failed hold their tensors.
    try:
        return function(), None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, error


def free_memory(device: torch.device, error: BaseException) -> str:
    """Free what a failed call holds, and the allocator's cache; drop the error's traceback, and return it as text."""
    # See Note [What an error holds].
    # Without the lines of how torch and MemScale call modules.
    module_calls, package = Path(torch.nn.modules.module.__file__), Path(__file__).parents[1]
    raised = error.__traceback__
    lines = [
        line
        for frame, line in zip(traceback.extract_tb(raised), traceback.format_tb(raised), strict=True)
        if Path(frame.filename) != module_calls and package not in Path(frame.filename).parents
    ]
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            each.__traceback__ = None
            pending += [each.__context__, each.__cause__]
    gc.collect()
    if device.type != "cpu":
        empty_cache = getattr(torch.get_device_module(device), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()
    return "".join(lines).rstrip()


def heavier_plans(executor: Executor, sample: Sample) -> Iterator[Plan]:
    """Yield plans that need less memory than the attached one: three quarters of it, then the least possible.

    Precision, tiling and the optimizer's bits stay as they are: a repeated step must give the same numbers. While the
    graph of an earlier call waits for its backward, so do the parameters it refers to. If the attached plan is the
    heaviest already, yield it once more: what was in the way may have been freed.
    """
    config = planning_alone(executor.config)
    placement = _placement(executor.plan) if executor.awaits_backward else None
    if placement == {}:
        config = config.replace(enable_offloading=False)
    hardware = hardware_of(executor.model, config.offload_dir)
    same_numbers = config.replace(
        use_mixed_precision=config.use_mixed_precision,
        use_8bit_optimizer=config.use_8bit_optimizer,
        enable_tiling=config.enable_tiling or (config.auto_policy and _is_tiled(executor.plan)),
        auto_policy=False,
    )
    least = same_numbers.replace(mode=OptimizationMode.AGGRESSIVE, memory_budget=None)
    first = executor.plan
    tried = [first]
    budget = int(HEAVIER_SHARE * first.predicted_peak_bytes)
    for settings in (*((same_numbers.replace(memory_budget=budget),) if budget else ()), least):
        plan = _plan(executor, sample, settings, hardware)
        if plan is None or plan.predicted_peak_bytes >= (first.predicted_peak_bytes or math.inf):
            continue
        if placement is not None and _placement(plan) != placement:
            continue
        if _numerics(plan) == _numerics(first) and all(plan.actions != each.actions for each in tried):
            tried.append(plan)
            yield plan
    if len(tried) == 1:
        yield first


def _plan(executor: Executor, sample: Sample, config: Config, hardware: Hardware) -> Plan | None:
    def plan() -> Plan:
        with executor.meter.planning(), executor.suspended() as model:
            return make_plan(model, sample, config, hardware, optimizer=executor.optimizer)

    try:
        return cast("Plan | None", attempt(plan)[0])
    except ProfileError:
        return None  # it ran once, and out of memory: there is nothing to plan by


def _placement(plan: Plan) -> dict[str, Tier]:
    """Return the layers whose parameters are not on the device, each with its tier."""
    offloaded = (layer for layer in plan.layers if "offloading" in layer.techniques)
    tiers = {layer.name: "host" if layer.offloading is None else layer.offloading.to for layer in offloaded}
    return {name: tier for name, tier in tiers.items() if tier != "device"}


def _is_tiled(plan: Plan) -> bool:
    return plan.loss is not None or any(layer.tiling is not None for layer in plan.layers)


def _numerics(plan: Plan) -> tuple[object, ...]:
    """Return what decides about the numbers of a step. A plan may lack what the Config asks for."""
    return plan.precision and plan.precision.dtype, plan.optimizer is not None and plan.optimizer.eight_bit


def log_recovery(executor: Executor, where: str, error: BaseException) -> None:
    """Log by which plan a step was repeated, whose peak is the limit for the plans of later batches."""
    plan = executor.plan
    executor.batches.ceiling = plan.predicted_peak_bytes or None
    with open_log(executor.config) as log:
        log.warning(
            "out of memory in %s (%s): the step was repeated with a heavier plan: %s",
            where,
            str(error).strip().partition("\n")[0][:120],
            figures_of(plan),
        )


def explain(
    error: BaseException,
    executor: Executor,
    where: str,  # the part of the step
    sample: Sample | None,
    tried: Sequence[Plan],  # the plans that the step was repeated with
    objection: str = "",  # why it was not repeated
    consequence: str = "",  # what was done about it
    origin: str = "",  # the text of the error's traceback
) -> None:
    """Add to an out-of-memory error, which is raised in the end, what to know of it."""
    plan = executor.plan
    lines = [
        f"MemScale: out of memory in {where}" + (f"; it was not repeated: {objection}" if objection else ""),
        f"  the plan: {plan}",
        f"  its predicted peak: {format_bytes(plan.predicted_peak_bytes)} ({plan.prediction_source}), "
        f"for {plan.batch or 'an unknown batch'} on {plan.device or 'an unknown device'}",
    ]
    if consequence:
        lines.insert(1, f"  {consequence}")
    if tried:
        peaks = ", ".join(format_bytes(each.predicted_peak_bytes) for each in tried)
        lines.append(f"  plans tried in this step, by predicted peak: {peaks}")
    peak = None if sample is None else _simulated_peak(executor, sample)
    if peak is not None:
        parts = ", ".join(f"{category} {format_bytes(size)}" for category, size in peak.by_category)
        lines.append(f"  at its peak forward and backward hold (simulated): {parts}")
        for top in peak.top:
            lines.append(f"    {format_bytes(top.nbytes)} {top.category}: {top.description}")
    lines.append(
        "  What helps: a smaller batch, a shorter sequence, another mode; see memscale.plan(model, batch)."
    )
    if origin:
        lines.append(f"  Where it came from:\n{origin}")
    note = "\n".join(lines)
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # before Python 3.11
        error.args = (f"{error}\n{note}", *error.args[1:])


def _simulated_peak(executor: Executor, sample: Sample) -> Snapshot | None:
    config = executor.config.replace(enable_logging=False)
    try:
        hardware = hardware_of(executor.model, config.offload_dir)
        with (
            executor.suspended() as model,
            disable_current_modes(),
            Place.of(hardware.device).simulate() as simulation,
        ):
            twin = simulation.copy_of(model).train(model.training)
            Executor(twin, executor.plan, config).attach()
            simulation.tracker.reset_peak()
            batch = Sample(*simulation.batch_of((sample.args, sample.kwargs)))
            targets = backward_targets(twin(*batch.args, **batch.kwargs))
            if targets:
                torch.autograd.backward(loss_of(targets))
            return simulation.tracker.at_peak(simulation.device, top=LARGEST_TENSORS)
    except Exception:
        return None  # a model that cannot be simulated: the error that is being explained matters more
