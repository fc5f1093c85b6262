"""What to do when a plan has run out of memory: the next heavier ones, and what to say when there is none left."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from memscale._torch import disable_current_modes
from memscale.config import Config, OptimizationMode
from memscale.errors import ProfileError, is_out_of_memory
from memscale.execution_plan import Plan, Tier
from memscale.executor import Executor
from memscale.hardware import Hardware, detect
from memscale.memory.record import Snapshot
from memscale.observe.log import open_log
from memscale.planner.make_plan import make_plan
from memscale.profiler import Place, Sample
from memscale.profiler.build import backward_targets, loss_of
from memscale.recovery.dump import dump_out_of_memory
from memscale.units import format_bytes

__all__ = ["explain", "heavier_plans", "say_recovered"]

LESS = 0.75  # of what the plan that failed was to need
LARGEST = 5


def heavier_plans(executor: Executor, sample: Sample) -> Iterator[Plan]:
    """Plans that need less than the one that is on: three quarters of it, then the least there is.

    Precision, tiling and the optimizer's bits stay as they are: a repeated step must give the same numbers. If the
    plan that is on is the heaviest already, it is tried once more: what was in the way may have been freed.

    While the graph of an earlier call waits for its backward, parameters stay where they are: that graph has them as
    they were, and brings their gradients there.
    """
    config = executor.config or Config()
    stays = _homes(executor.plan) if executor.awaits_backward else None
    if stays == {}:
        config = config.replace(enable_offloading=False)
    hardware = detect(executor.device, offload_dir=config.offload_dir)
    same_numbers = config.replace(
        use_mixed_precision=config.use_mixed_precision,
        use_8bit_optimizer=config.use_8bit_optimizer,
        enable_tiling=config.enable_tiling,
    )
    least = same_numbers.replace(mode=OptimizationMode.AGGRESSIVE, memory_budget=None)
    first = executor.plan
    tried = [first]
    budget = int(LESS * first.predicted_peak_bytes)
    for settings in (*((same_numbers.replace(memory_budget=budget),) if budget else ()), least):
        plan = _plan(executor, sample, settings, hardware)
        if plan is None or plan.predicted_peak_bytes >= (first.predicted_peak_bytes or math.inf):
            continue
        if stays is not None and _homes(plan) != stays:
            continue
        if _numerics(plan) != _numerics(first):
            continue
        if all(_doings(plan) != _doings(each) for each in tried):
            tried.append(plan)
            yield plan
    if len(tried) == 1:
        yield first


def _plan(executor: Executor, sample: Sample, config: Config, hardware: Hardware) -> Plan | None:
    try:
        with executor.meter.planning(), executor.suspended() as model:
            return make_plan(model, sample, config, hardware, optimizer=executor.optimizer)
    except ProfileError:
        return None  # it ran once, and out of memory: there is nothing to plan by
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


def _homes(plan: Plan) -> dict[str, Tier]:
    """The layers whose parameters are at home, and where."""
    at_home = (layer for layer in plan.layers if "offloading" in layer.techniques)
    tiers = {layer.name: "host" if layer.offloading is None else layer.offloading.to for layer in at_home}
    return {name: tier for name, tier in tiers.items() if tier != "device"}


def _numerics(plan: Plan) -> tuple[object, ...]:
    """Return what decides about the numbers of a step. A plan may lack what the Config asks for."""
    return plan.precision and plan.precision.dtype, plan.optimizer is not None and plan.optimizer.eight_bit


def _doings(plan: Plan) -> tuple[object, ...]:
    """What a plan does, without what it says of it."""
    layers = tuple(
        (layer.name, layer.techniques, layer.checkpointing, layer.offloading, layer.tiling)
        for layer in plan.layers
    )
    return layers, plan.precision, plan.optimizer, plan.loss


def say_recovered(executor: Executor, where: str, error: BaseException) -> None:
    """One line: what happened, and by which plan the step went on."""
    plan = executor.plan
    with open_log(executor.config or Config()) as log:
        log.warning(
            "out of memory in %s (%s): the step was repeated with a heavier plan, peak %s, step time × %.2f (%s)",
            where,
            _first_line(error),
            format_bytes(plan.predicted_peak_bytes),
            plan.predicted_time_ratio,
            plan.prediction_source,
        )


def explain(
    executor: Executor, where: str, sample: Sample | None, tried: Sequence[Plan], why: str = ""
) -> str:
    """What to know of an out-of-memory error that could not be helped."""
    plan = executor.plan
    lines = [
        f"MemScale: out of memory in {where}" + (f"; it was not repeated: {why}" if why else ""),
        f"  the plan: {plan}",
        f"  its predicted peak: {format_bytes(plan.predicted_peak_bytes)} ({plan.prediction_source}), "
        f"for {plan.batch or 'an unknown batch'} on {plan.device or 'an unknown device'}",
    ]
    if tried:
        peaks = ", ".join(format_bytes(each.predicted_peak_bytes) for each in tried)
        lines.append(f"  plans tried in this step, by predicted peak: {peaks}")
    peak = None if sample is None else _simulated_peak(executor, sample)
    if peak is not None:
        parts = ", ".join(f"{category} {format_bytes(size)}" for category, size in peak.by_category)
        lines.append(f"  at its peak forward and backward hold (simulated): {parts}")
        for top in peak.top:
            lines.append(f"    {format_bytes(top.nbytes)} {top.category}: {top.description}")
    lines.append(f"  {dump_out_of_memory(executor, where, tried, why, peak)}")
    lines.append(
        "  What helps: a smaller batch, a shorter sequence, another mode; see memscale.plan(model, batch)."
    )
    return "\n".join(lines)


def _simulated_peak(executor: Executor, sample: Sample) -> Snapshot | None:
    config = (executor.config or Config()).replace(enable_logging=False)
    try:
        hardware = detect(executor.device, offload_dir=config.offload_dir)
        with (
            executor.suspended() as model,
            disable_current_modes(),
            Place.of(hardware.device).simulate() as simulation,
        ):
            twin = simulation.copy_of(model).train(model.training)
            Executor(twin, executor.plan, config).attach()
            simulation.tracker.reset_peak()
            batch = Sample(simulation.batch_of(sample.args), simulation.batch_of(sample.kwargs))
            targets = backward_targets(twin(*batch.args, **batch.kwargs))
            if targets:
                torch.autograd.backward(loss_of(targets))
            return simulation.tracker.at_peak(simulation.device, top=LARGEST)
    except Exception:
        return None  # a model that cannot be simulated: the error that is being explained matters more


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
