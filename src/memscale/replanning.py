"""Plans that follow the batch: a plan made without one is made anew from the first training batch."""

from __future__ import annotations

from typing import Any

from memscale.config import Config
from memscale.errors import ProfileError
from memscale.executor import Executor
from memscale.hardware import detect
from memscale.planning import make_plan
from memscale.profiler import Sample
from memscale.report.log import speaking
from memscale.report.wrapped import say_plan


def plan_from_first_batch(executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Called before the first training forward: plan anew from the shapes really seen, then step back."""
    executor.on_training_batch = None
    model, config = executor.model, executor.config or Config()
    # The model may have moved since it was wrapped: what counts is where it trains.
    hardware = detect(executor.device, offload_dir=config.offload_dir)
    with speaking(config) as log:
        try:
            with executor.suspended():
                plan = make_plan(model, Sample(args, kwargs), config, hardware)
        except ProfileError as error:
            log.warning("the first batch could not be profiled, the plan stays as it is: %s", error)
            return
        executor.replan(plan)
        say_plan(log, plan, hardware, "planned anew from the first training batch")
