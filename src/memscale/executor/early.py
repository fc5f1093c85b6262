"""What of a model goes to disk by a plan that is not attached yet: its copies are begun early."""

from __future__ import annotations

from torch import nn

from memscale.execution_plan import Plan
from memscale.executor.newborn import find_module
from memscale.offload.mapped_parameters import can_be_mapped
from memscale.tiers.store import DiskStore

__all__ = ["copy_early"]


def copy_early(model: nn.Module, disk: DiskStore, plan: Plan) -> None:
    """Begin to copy the parameters that a plan has at home on disk. See Note [Early copies]."""
    layers = [
        layer for layer in plan.layers if layer.offloading is not None and layer.offloading.to == "disk"
    ]
    modules = [find_module(model, layer, member) for layer in layers for member in layer.members]
    bound = {id(parameter) for module in modules for parameter in module.parameters()}
    disk.copy_early(each for each in model.parameters() if id(each) in bound and can_be_mapped(each))
