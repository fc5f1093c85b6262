"""Moves of a wrapped model: `.to()`, `.cuda()`, `.half()` and the like, which all go through `nn.Module._apply`.

A move to the device that the model trains on already, as accelerate and the Trainer make, leaves offloaded parameters
on their tier: the card may have no room for them. A move to another device takes everything along, as without
MemScale. The plan was for the old device, so nothing is attached until the next training batch makes a new one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from memscale.execution_plan import Plan
from memscale.profiler.sample import PlannedBatches

if TYPE_CHECKING:
    from memscale.executor.executor import Executor

__all__ = ["Moves"]

Convert = Callable[[torch.Tensor], torch.Tensor]


class Moves:
    """A wrapped model's `_apply`.

    Args:
        executor: The model's executor.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = weakref.ref(executor)

    def __call__(self, convert: Convert, recurse: bool = True) -> nn.Module:
        executor = self._executor()
        assert executor is not None, "an attribute of a model that is gone was called"
        model, device = executor.model, executor.device
        apply: Callable[..., nn.Module] = type(model)._apply
        target = convert(torch.empty(0, device=device)).device
        if target != device:
            with executor.moving_to(target):
                return apply(model, convert, recurse)
        placement = executor.placement
        masters = {id(each) for each in (*placement.host_masters(), *placement.on_disk)}
        hidden = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in masters
        ]
        for module, name, _ in hidden:
            module._parameters[name] = None
        try:
            apply(model, convert, recurse)
        finally:
            for module, name, parameter in hidden:
                module._parameters[name] = parameter
        if placement.convert_masters(convert):
            executor.batches = PlannedBatches()  # of another type they need other memory
        return model


def without_techniques(plan: Plan, reason: str) -> Plan:
    """Return a plan for the same layers that does nothing until the next training batch makes another."""
    why = f"nothing until the next training batch makes a new plan: {reason}"
    layers = tuple(
        replace(
            layer, techniques=(), rule="moved", reason=why, checkpointing=None, offloading=None, tiling=None
        )
        for layer in plan.layers
    )
    return replace(plan, layers=layers, precision=None, loss=None, optimizer=None, notes=(*plan.notes, why))
