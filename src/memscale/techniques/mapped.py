"""Offloading on a CPU host: parameters are at home on disk, and in memory only while their block computes; and what
a block leaves for backward waits there as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memscale.offload.mapped_activations import StoredActivations
from memscale.offload.mapped_parameters import MappedParameters
from memscale.offload.shared import async_settings
from memscale.recompute._torch_private import OUTSIDE_BACKWARD, graph_task_id, hooks_are_allowed
from memscale.recompute.trees import Tree
from memscale.techniques.base import Scene
from memscale.techniques.forwards import ReplacedForward
from memscale.tiling.lazy import LazyLogits

if TYPE_CHECKING:
    from memscale.executor.record import Record

__all__ = ["ActivationsOnDisk", "MappedForward", "StoringForward"]


class MappedForward(ReplacedForward):
    """The forward of a block whose parameters are mapped. See Note [Homes on disk].

    Args:
        module: The module that this goes on.
        mapped: The parameters of the model that are at home on disk.
        recomputed: Whether it runs inside a recomputed region.
    """

    def __init__(self, module: nn.Module, mapped: MappedParameters, *, recomputed: bool) -> None:
        super().__init__(module)
        self._mapped = mapped
        self._recomputed = recomputed

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        # In evaluation too: the parameters are at home then as well.
        module = self.module
        forward = self._forward_of(module)
        if self._is_released or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        return self.run(module, forward, args, kwargs)

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        mapped, parameters = self._mapped, list(module.parameters())
        mapped.watch(parameters)
        mapped.begin(parameters)
        try:
            output = forward(*args, **kwargs)
        finally:
            mapped.end(parameters)
        if not self._recomputed and torch.is_grad_enabled() and graph_task_id() == OUTSIDE_BACKWARD:
            _before_backward(output, mapped, parameters)
        return output


def _before_backward(output: object, mapped: MappedParameters, parameters: Sequence[nn.Parameter]) -> None:
    """Note when backward gets to a block: nothing else tells of one that is not run again."""

    def begin(gradient: torch.Tensor) -> None:
        mapped.begin(parameters)

    for tensor in Tree.of(output).tensors():
        if isinstance(tensor, LazyLogits):
            tensor = tensor.hidden  # they get no gradient themselves
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(begin)  # type: ignore[no-untyped-call]


class ActivationsOnDisk:
    """Puts on disk what blocks leave for backward, where the plan says so and the model trains on the CPU.

    It goes on after all blocks have theirs, and so around their recomputation: what that keeps, the inputs, is what
    is stored.
    """

    def attach(self, scene: Scene, record: Record) -> None:
        if scene.device.type != "cpu" or async_settings(scene.plan, scene.config) is not None:
            return  # then `Transfers` does it
        activations = StoredActivations(scene.homes.store)
        for layer in scene.plan.layers:
            if layer.offloading is None or not layer.offloading.activations:
                continue
            names: Sequence[str] = layer.members
            if len(names) > 1 and "checkpointing" in layer.techniques:
                names = [names[0].rpartition(".")[0]]  # its slices are run, and recomputed, by the container
            for name in names:
                module = scene.model.get_submodule(name)
                if not isinstance(vars(module).get("forward"), StoringForward):
                    record.set_attribute(module, "forward", StoringForward(module, activations), name=name)


class StoringForward(ReplacedForward):
    """The forward of a block whose saved tensors go to disk.

    Args:
        module: The module that this goes on.
        activations: Where they go.
    """

    def __init__(self, module: nn.Module, activations: StoredActivations) -> None:
        super().__init__(module)
        self._activations = activations

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if not hooks_are_allowed():
            return forward(*args, **kwargs)
        parameters = {each.untyped_storage().data_ptr() for each in module.parameters() if _has_memory(each)}
        pack = functools.partial(self._activations.pack, never=parameters)
        with saved_tensors_hooks(pack, self._activations.unpack):
            return forward(*args, **kwargs)


def _has_memory(tensor: torch.Tensor) -> bool:
    return type(tensor) is nn.Parameter and tensor.layout is torch.strided and not tensor.is_meta
