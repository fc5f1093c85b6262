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


class FirstBatch:
    """Called before each training forward; plans anew before the first one, from the shapes really seen."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._done = False

    def __call__(self, executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._done:
            return
        self._done = True
        model = executor.model
        # The model may have moved since it was wrapped: what counts is where it trains.
        device = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), None)
        hardware = detect(device, offload_dir=self._config.offload_dir)
        with speaking(self._config) as log:
            try:
                with executor.suspended():
                    plan = make_plan(model, Sample(args, kwargs), self._config, hardware)
            except ProfileError as error:
                log.warning("the first batch could not be profiled, the plan stays as it is: %s", error)
                return
            executor.replan(plan)
            say_plan(log, plan, hardware, "planned anew from the first training batch")
