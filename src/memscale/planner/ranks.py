"""One plan for all processes of a job: rank 0 makes it, the others wait for it.

Note [Shared plans]
~~~~~~~~~~~~~~~~~~~
The n-th plan that a rank shares is the n-th of rank 0, for the model as wrapped or for its first batch. It goes through
the store of torch.distributed, as JSON, and not by a collective operation: that would hang, or be mistaken for one of
the training loop's, where not every rank wraps the model. A rank makes its own plan if its model, settings or device
differ from those of rank 0, if rank 0 could not make one, or if there is none within `TIMEOUT`; and later, for a batch
that is larger than what rank 0 planned for, as any process does.

A real run of a model that communicates in forward waits for the other processes. So if the model can't be profiled on
fake tensors, rank 0 says so and each rank makes its own plan: they run at the same time. Later plans have no real run.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import logging
from collections.abc import Callable

from torch import nn

from memscale._torch import default_store
from memscale.config import Config
from memscale.errors import ProfileError
from memscale.execution_plan import Plan
from memscale.hardware import Hardware
from memscale.hardware.host import process_count, process_rank
from memscale.planner.assembly import NOT_CALLED
from memscale.planner.make_plan import fits
from memscale.profiler.sample import Shapes

logger = logging.getLogger("memscale")

TIMEOUT = datetime.timedelta(minutes=5)
_numbers = itertools.count()

Planned = tuple[Plan, Shapes]
"""A plan, and the batch that it was made for."""


def planning_alone(config: Config) -> Config:
    """Return the settings for a plan that the other processes of a job, if there are any, do not make now."""
    return config.replace(use_empirical_fallback=False) if process_count() > 1 else config


def shared_plan(
    model: nn.Module, config: Config, hardware: Hardware, make: Callable[[Config], Planned]
) -> Planned:
    """Return the plan that rank 0 makes; in a single process, what `make` returns. See Note [Shared plans]."""
    store = default_store() if process_count() > 1 else None
    if store is None:
        return make(config)
    key = f"memscale/plan/{next(_numbers)}"
    fingerprint = _fingerprint(model, config)
    if process_rank() == 0:
        message: dict[str, object] = {}
        try:
            found = _without_running(config, make)
            if found is None:
                message = {"together": True}
            else:
                message = {"fingerprint": fingerprint, "plan": found[0].to_json(), "shapes": found[1]}
        finally:  # without a plan, too: the others would wait for it
            store.set(key, json.dumps(message))
        return found or make(config)
    try:
        store.wait([key], TIMEOUT)
    except Exception as error:
        reason = f"rank 0 has shared none within {TIMEOUT} ({type(error).__name__}): wrap the model in every process"
    else:
        message = json.loads(store.get(key))
        if message.get("together"):
            return make(config)
        if message.get("fingerprint") == fingerprint:
            plan = Plan.from_json(str(message["plan"]))
            if fits(plan, hardware, config) or hardware.describe() == plan.device:
                shapes = {name: tuple(shape) for name, shape in message["shapes"].items()}  # type: ignore[attr-defined]
                return plan, shapes
            reason = f"that of rank 0 does not fit {hardware.describe()}"
        else:
            reason = "rank 0 made none" if not message else "rank 0 has another model or Config"
    logger.warning("rank %d makes a plan of its own: %s.", process_rank(), reason)
    return make(config)


def _without_running(config: Config, make: Callable[[Config], Planned]) -> Planned | None:
    """Return a plan that was made on fake tensors; None where a real run is needed, and allowed."""
    try:
        found = make(planning_alone(config))
    except ProfileError:
        if not config.use_empirical_fallback:
            raise
        return None
    layers = found[0].layers
    calls_layers = not layers or any(layer.rule != NOT_CALLED for layer in layers)
    return found if calls_layers or not config.use_empirical_fallback else None


def _fingerprint(model: nn.Module, config: Config) -> str:
    """Return what a plan for one model has in common with that for an equal one in another process."""
    tensors = [(name, tuple(each.shape), str(each.dtype)) for name, each in model.named_parameters()]
    settings = config.replace(enable_logging=True, log_file=None, observability_port=None, offload_dir=None)
    text = repr((type(model).__qualname__, tensors, settings))
    return hashlib.sha256(text.encode()).hexdigest()
