"""The context in which a model is profiled and simulated: nothing of it is left on the model, or heard outside."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Iterator
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memscale._torch import DDP_STATIC_GRAPH_REDUCED, FAKE_TENSOR_LOGGER, disable_current_modes
from memscale._util.snapshots import RngState

__all__ = ["rehearsal"]


@contextlib.contextmanager
def rehearsal(model: nn.Module) -> Iterator[None]:
    """Profile or simulate a model inside of this: random state and gradients are restored at the end."""
    random = RngState(sorted({parameter.device.type for parameter in model.parameters()}))
    # A forward that its user has set on a module may refer to the model itself, and not to its copy.
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    with (
        disable_current_modes(),  # a FLOP counter or profiler around the training loop must not count this
        _quiet_fake_tensors(),
        _without_other_processes(model),
        _without_garbage_collection(),
        _without_compiler(),
    ):
        try:
            yield
        finally:
            random.restore()
            for parameter, gradient in gradients:
                if parameter.grad is not gradient:
                    parameter.grad = gradient


@contextlib.contextmanager
def _without_other_processes(model: nn.Module) -> Iterator[None]:
    """Keep a model that trains in several processes from communicating: the others may not rehearse now."""
    flags = {
        "require_backward_grad_sync": False,
        "require_forward_param_sync": False,
        DDP_STATIC_GRAPH_REDUCED: True,  # else backward begins the first reduction of a static graph
    }
    parallel = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    before = [(each, name, getattr(each, name)) for each in parallel for name in flags if hasattr(each, name)]
    try:
        for each, name, _ in before:
            setattr(each, name, flags[name])
        yield
    finally:
        for each, name, value in before:
            setattr(each, name, value)


def _without_compiler() -> contextlib.AbstractContextManager[object]:
    """Run compiled parts eagerly: compiling them for fake tensors takes long, and tells nothing."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
        return contextlib.nullcontext()
    return cast(contextlib.AbstractContextManager[object], torch.compiler.set_stance("force_eager"))


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep tensors in reference cycles alive, so that a prediction does not depend on when the collector runs.

    In training nobody knows either when they are released. (And collecting takes a sixth of the time of a plan.)
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextlib.contextmanager
def _quiet_fake_tensors() -> Iterator[None]:
    """Silence torch's log of a traceback for each operation that fails on fake tensors: the error itself says it."""
    log = logging.getLogger(FAKE_TENSOR_LOGGER)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
