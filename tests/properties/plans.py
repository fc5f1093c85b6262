"""What holds of the plans of random cases: they are made again alike, read back alike, keep to budgets, and predict.

The models are those of the cases, wider and with larger batches, so that a tensor too many shows in the peak.
"""

from __future__ import annotations

import gc
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

import memscale
from memscale import Config, MemoryTracker, MemScaleError, Plan
from memscale.planner.cache import plans_made
from memscale.profiler.recorder import backward_targets, loss_of
from memscale.testing import executing
from properties.check import CAPACITY, Outcome, cheaper_planning, config_of, line
from properties.generator import Case, StepSpec
from properties.loops import Training

EVERY = 8  # of the cases of a search, one in so many has its plans checked as well
WIDTH, BATCH, LENGTH = 64, 16, 16
STEP = StepSpec(batch=BATCH, length=LENGTH)
STEPS = 4
BUDGETS = 4  # of the frontier, from the loosest to the tightest
# Whether a layer runs is drawn, or follows from values: what a simulated step does is not what the next one does. And
# results that saved-tensor hooks of their author hold are in a cycle with their graph: recomputed, they wait for `gc`.
UNPREDICTABLE = {"layer_drop", "branch", "routed", "packed"}


def check_plans(case: Case) -> Outcome:
    """Check the plans of a case, and what four steps of training need under the loosest and the tightest one."""
    loop = replace(case.loop, in_backward=False, schedule=False)
    case = replace(case, model=replace(case.model, width=WIDTH), loop=loop)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="memscale-case-") as directory,
            cheaper_planning(),
            _device(case) as (device, tracker),
        ):
            found = list(_differences(case, device, tracker, config_of(case, directory)))
    except MemScaleError as error:
        return Outcome("refused", line(error), traceback.format_exc())
    except Exception as error:
        return Outcome("crashed", line(error), traceback.format_exc())
    finally:
        gc.collect()
    return Outcome("mispredicted", found[0], "\n".join(found)) if found else Outcome("equal")


@contextmanager
def _device(case: Case) -> Iterator[tuple[torch.device, MemoryTracker | None]]:
    if case.device == "cpu":
        yield torch.device("cpu"), None
        return
    with executing(CAPACITY, seed=case.seed) as gpu:
        yield gpu.device, gpu.tracker


def _differences(
    case: Case, device: torch.device, tracker: MemoryTracker | None, config: Config
) -> Iterator[str]:
    def plan(config: Config) -> Plan:
        plans_made.clear()
        training = Training(case, device)
        return memscale.plan(training.model, _sample(training), config, optimizer=training.optimizer)

    first = plan(config)
    if plan(config).to_json() != first.to_json():
        yield "the same plan made twice differs"
    plans = [first]
    # The loosest budget first: what fits a tight one fits a loose one, so that it is no slower.
    points = sorted({point.budget_bytes for point in first.frontier}, reverse=True)
    chosen = {points[index * (len(points) - 1) // (BUDGETS - 1)] for index in range(BUDGETS if points else 0)}
    budgets = sorted(chosen, reverse=True)
    configs = [config.replace(memory_budget=budget) for budget in budgets]
    plans += map(plan, configs)
    for each in plans:
        if Plan.from_json(each.to_json()) != each:
            yield "a plan read back from its JSON differs"
    # With force_optimize a budget that nothing is needed for gives the smallest plan.
    asked = [each for each in plans[1:] if not any("force_optimize" in note for note in each.notes)]
    ratios = [each.predicted_time_ratio for each in asked]
    if ratios != sorted(ratios):
        yield f"a looser budget gives a slower plan: {budgets} bytes, time ratios {ratios}"
    for index in {0, len(configs) - 1} if configs else (-1,):
        training = Training(case, device)
        given = configs[index] if configs else config
        memscale.wrap(training.model, given, _sample(training), optimizer=training.optimizer)
        if training.model._memscale_executor.plan.to_json() != plans[index + 1].to_json():
            yield "the plan that is attached is not the one that was planned"
        peak, most = _peak(training, device, tracker), _most(training)
        memscale.detach(training.model)
        if peak > most and not case.kinds() & UNPREDICTABLE:
            yield f"steps need {peak} bytes, and at most {most} were predicted"


def _sample(training: Training) -> Any:
    args, kwargs = training.call(0, 0, STEP)
    return kwargs or args


def _most(training: Training) -> int:
    plan = training.model._memscale_executor.plan
    return plan.predicted_peak_bytes + plan.allowance_bytes


def _peak(training: Training, device: torch.device, tracker: MemoryTracker | None) -> int:
    """The most that steps after the first need. The loss is as the planner takes it: nothing is known of the user's."""
    args, kwargs = training.call(0, 0, STEP)
    if tracker is None:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        with MemoryTracker(training.model, *leaves) as tracker:
            return _peak_of_steps(training, args, kwargs, tracker, device)
    return _peak_of_steps(training, args, kwargs, tracker, device)


def _peak_of_steps(
    training: Training, args: Any, kwargs: Any, tracker: MemoryTracker, device: torch.device
) -> int:
    for step in range(STEPS):
        if step == 1:
            tracker.reset_peak()
        targets = backward_targets(training.model(*args, **kwargs))
        if targets:
            loss = loss_of(targets)
            del targets
            loss.backward()
            del loss
        training.optimizer.step()
        training.optimizer.zero_grad()
    return tracker.peak_bytes(device)
