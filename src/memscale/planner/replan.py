"""Plan again when a batch comes that the plan was not made for: the first one, and one larger than any before.

Also, once each, when the first optimizer steps have shown that gradients are accumulated, which needs more memory, as
they are there in forward as well; and that nothing changes them before the step, which can then overlap with backward.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from memscale._torch import sharded_groups
from memscale.config import Config, ConfigFields
from memscale.errors import ProfileError
from memscale.execution_plan import Plan
from memscale.executor import Executor, hardware_of
from memscale.executor.verify import verify_plan
from memscale.hardware import Hardware
from memscale.observe.log import figures_of, log_plan, open_log, warn_if_idle
from memscale.planner.assembly import NOT_CALLED
from memscale.planner.make_plan import fits, make_plan
from memscale.planner.ranks import Planned, planning_alone, shared_plan
from memscale.planner.sharded import refuse_flattened
from memscale.profiler import Sample
from memscale.profiler.sample import MOST_PLANS, call_key, named_shapes, resized, roundings

FULL = (
    "a batch of %s is larger than planned for; %d plans were made in this run, which is the most: the largest one "
    "stays. Give wrap the largest batch as sample_input to plan once."
)


def follow_batch(executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Plan again if the batch is larger than what was planned for; called before each training forward.

    See Note [Covered batches]. A plan that was made for a larger batch is kept for smaller ones:
    moving tensors back and forth would cost more than it gains.
    """
    _follow(executor, args, kwargs)
    if executor.config.verify_correctness and executor.verified is not executor.plan and executor.batches:
        executor.verified = executor.plan  # the steps that are compared call this as well
        try:
            is_done = verify_plan(executor, args, kwargs)
        except BaseException:
            executor.verified = None  # the next batch is not trained on either
            raise
        if not is_done:
            executor.verified = None


def _follow(executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if bool(sharded_groups(executor.model)) != executor.is_sharded:
        if not _can_replan(executor):
            return
        executor.release_parameters("FSDP2 has sharded it")
    batches = executor.batches
    key = call_key(args, kwargs)
    observed = _observed_loop(executor)
    # Not while it is frozen for a part of the loop, as in a GAN: that plan would be one without gradients, and stay.
    if observed is not None and _can_replan(executor) and not executor.is_partly_frozen:
        executor.config = executor.config.replace(**observed[1])
        _follow_loop(executor, Sample(args, kwargs), observed[0])
    if batches.knows(key):
        return
    sample = Sample(args, kwargs)
    shapes = named_shapes(executor.model, sample)
    if not batches.covers(shapes):
        refuse_flattened(executor.model)
        if not _can_replan(executor):
            return  # the next batch like this one will come here again
        if batches.is_full:
            if not batches.said_full:
                batches.said_full = True
                with open_log(executor.config) as log:
                    log.warning(FULL, sample.describe(), MOST_PLANS)
        else:
            with executor.meter.planning():
                _replan(executor, sample)
                if not batches.covers(shapes):  # the first plan is rank 0's, whose batch may be smaller
                    _replan(executor, sample)
    batches.note(key)


def _can_replan(executor: Executor) -> bool:
    """Return whether no graph was recorded under the plan, nor weights given that it must not move."""
    # Other weights than parameters are those of torch.func.functional_call.
    weights = executor.model.parameters()
    return not executor.awaits_backward and all(isinstance(each, nn.Parameter) for each in weights)


def _observed_loop(executor: Executor) -> tuple[str, ConfigFields] | None:
    """Return what was seen of the training loop that the plan was made without, in words and as settings."""
    accumulated, config = executor.accumulation.batches_per_step, executor.config
    is_set = "gradient_accumulation_steps" in config.explicit_fields
    if accumulated is not None and accumulated > 1 and not is_set:
        words = f"gradients of {accumulated} batches are accumulated for each optimizer step"
        return words, {"gradient_accumulation_steps": accumulated}
    optimizer, overlap = executor.plan.optimizer, executor.placement.states.overlap
    if config.overlap_optimizer is None and optimizer is not None and overlap.is_allowed:
        return "nothing changes gradients between backward and optimizer.step()", {"overlap_optimizer": True}
    return None


def _follow_loop(executor: Executor, sample: Sample, observed: str) -> None:
    """Plan again, for the largest batch so far, with the settings that follow from what was observed."""
    model, batches = executor.model, executor.batches
    shapes = named_shapes(model, sample)
    planned = batches.largest_like(shapes)
    if planned is None or batches.is_full:
        return
    config, hardware = _settings(executor)
    config = planning_alone(config)
    if planned != shapes:  # a batch without values can be profiled on fake tensors only
        config = config.replace(use_empirical_fallback=False)
    with open_log(config) as log, executor.meter.planning():
        try:
            with executor.suspended():
                sample = resized(model, sample, planned)
                plan = make_plan(model, sample, config, hardware, optimizer=executor.optimizer)
        except ProfileError as error:
            log.warning("the plan stays as it is, though %s: %s", observed, str(error))
            return
        batches.add(planned)
        _replace_plan(executor, plan, log, observed)


def _settings(executor: Executor) -> tuple[Config, Hardware]:
    """Return what to plan with: the settings, within what has not run out of memory, and the device as it is now."""
    config, ceiling = executor.config, executor.batches.ceiling
    # The model may have moved since it was wrapped.
    hardware = hardware_of(executor.model, config.offload_dir)
    if ceiling is not None:
        budget = config.memory_budget_bytes
        config = config.replace(memory_budget=ceiling if budget is None else min(budget, ceiling))
    return config, hardware


def _replace_plan(executor: Executor, plan: Plan, log: logging.Logger, why: str) -> None:
    was_idle = executor.plan.does_nothing
    executor.replan(plan)
    log.info(
        "%s: planned anew (%s) for %s: %s%s",
        why,
        plan.mode,
        plan.batch,
        figures_of(plan),
        "".join(f"; {note}" for note in plan.notes),
    )
    if not was_idle:
        warn_if_idle(log, plan, executor.config)


def _replan(executor: Executor, sample: Sample) -> None:
    batches = executor.batches
    config, hardware = _settings(executor)
    is_first = not batches
    with open_log(config) as log:
        model = executor.model

        def make(settings: Config) -> Planned:
            plan, planned = _plan_for(executor, sample, settings, hardware)
            return plan, named_shapes(model, planned)

        try:
            if is_first:
                plan, planned = shared_plan(model, config, hardware, make)
            else:
                plan, planned = make(planning_alone(config))
        except ProfileError as error:
            batches.give_up(named_shapes(executor.model, sample))
            which = "the first batch" if is_first else f"a batch of {sample.describe()}"
            # As text: a handler that keeps records would keep the frames of the error, and all that they hold.
            log.warning("%s could not be profiled, the plan stays as it is: %s", which, str(error))
            return
        batches.add(planned)
        if is_first:
            executor.replan(plan)
            log_plan(log, plan, config, hardware, "planned from the first training batch")
        # For a batch that needs more memory; an estimate is taken to be.
        elif (
            plan.prediction_source == "estimated"
            or plan.baseline_peak_bytes > executor.plan.baseline_peak_bytes
        ):
            _replace_plan(executor, plan, log, f"a batch of {sample.describe()} is larger than planned for")


def _plan_for(executor: Executor, sample: Sample, config: Config, hardware: Hardware) -> tuple[Plan, Sample]:
    """Return a plan, and what it was made for: the batch, or a larger one."""
    model = executor.model
    shapes = named_shapes(model, sample)
    *larger, _ = roundings(shapes, executor.batches.varying(shapes))
    with executor.suspended():
        # A batch without values can be profiled on fake tensors only.
        for rounded in larger if config.use_static_profiling else ():
            instead = resized(model, sample, rounded)
            try:
                on_fake_tensors = config.replace(use_empirical_fallback=False)
                plan = make_plan(
                    model, instead, on_fake_tensors, hardware, suggest=False, optimizer=executor.optimizer
                )
            except ProfileError:
                continue  # the model may not take as much; if the batch itself fails, that is raised below
            # Where no layer is called on fake tensors, a real run may show more.
            knows_layers = any(layer.rule != NOT_CALLED for layer in plan.layers)
            if knows_layers and fits(plan, hardware, config):
                return plan, instead
        return make_plan(model, sample, config, hardware, optimizer=executor.optimizer), sample
