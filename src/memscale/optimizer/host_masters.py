"""Steps of parameters whose masters are on the host below an accelerator: room for their state, and the same bits.

torch steps parameters that are on an accelerator by its ``foreach`` implementation, and those on a CPU, or some of
each, by its loop over them. The two round differently in the classes of :data:`FOREACH_DIFFERS` (``tests/offload/
test_same_implementation.py`` compares all). For these the step is asked to run as it would on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from memscale._torch import takes_foreach
from memscale.errors import TierFullError
from memscale.optimizer.buckets import bytes_of_gradient
from memscale.optimizer.kinds import arithmetic_of, why_whole
from memscale.optimizer.new_state import NewState
from memscale.optimizer.slices import as_left
from memscale.units import format_bytes

__all__ = ["FOREACH_DIFFERS", "as_on_the_device", "check_room"]

FOREACH_DIFFERS = frozenset({optim.ASGD, optim.NAdam, optim.RAdam})


@contextlib.contextmanager
def as_on_the_device(optimizer: Optimizer, masters: set[int], device: torch.device) -> Iterator[None]:
    """Step the groups that masters are in by the implementation that the device would have had by default.

    Args:
        optimizer: One whose arithmetic is torch.optim's.
        masters: The ids of parameters that are on the host instead of on the device.
        device: The device.
    """
    changed = []
    if arithmetic_of(type(optimizer)) in FOREACH_DIFFERS:
        for group in optimizer.param_groups:
            parameters = group["params"]
            if group["foreach"] is None and any(id(each) in masters for each in parameters):
                kinds = {device.type if id(each) in masters else each.device.type for each in parameters}
                if takes_foreach(kinds, {type(each) for each in parameters}):
                    changed.append(group)
    try:
        for group in changed:
            group["foreach"] = True
        yield
    finally:
        for group in changed:
            group["foreach"] = None


def check_room(optimizer: Optimizer, masters: Sequence[Tensor], capacity: int) -> None:
    """Raise if the state that a step is about to make for masters exceeds the cap on host memory with them.

    Raises:
        TierFullError: It does. Nothing was changed.
    """
    if why_whole(optimizer) is not None:
        return  # what state it makes is not known
    with_gradient = {id(each) for each in masters if each.grad is not None}
    # Before a closure is evaluated there are none.
    ids = with_gradient or {id(each) for each in masters if each.requires_grad}
    new, layout = 0, NewState(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in ids:
                for name, like in layout.of(group, parameter).items():
                    new += sum(left.nbytes for _, left in as_left(optimizer, parameter, name, like))
    if not new:
        return
    used = sum(
        each.nbytes + (each.nbytes if id(each) in ids else bytes_of_gradient(each.grad)) for each in masters
    )
    used += sum(_state_bytes(optimizer.state.get(each)) for each in masters)
    if used + new > capacity:
        raise TierFullError(
            f"This step of {type(optimizer).__name__} was not made, and no parameter was changed: its state needs "
            f"{format_bytes(new)} of host memory beside {format_bytes(used)} of parameters and gradients, and the cap "
            f"is {format_bytes(capacity)}. Raise Config(max_cpu_offload_gb=...), or give the optimizer to "
            "memscale.wrap(model, optimizer=optimizer), so that the plan reckons with its state."
        )


def _state_bytes(state: Any) -> int:
    values = state.values() if isinstance(state, dict) else ()
    return sum(
        _state_bytes(value) if isinstance(value, dict) else value.nbytes
        for value in values
        if isinstance(value, (Tensor, dict))
    )
