"""Homes on disk: a block's parameters are mapped tensors, whose pages are in memory only while it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memscale._torch import OUTSIDE_BACKWARD, graph_task_id
from memscale._util.trees import Tree
from memscale.offload.mapped_parameters import MappedParameters
from memscale.techniques.forward import ReplacedForward
from memscale.tiling.lazy import LazyLogits

__all__ = ["MappedForward"]


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
        if self._is_released:
            return super().__call__(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self.outside_compiler(*args, **kwargs)
        module = self.module
        return self.run(module, self._forward_of(module), args, kwargs)

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        # Not other weights that `torch.func.functional_call` has put there.
        mapped = self._mapped
        parameters = [each for each in module.parameters() if isinstance(each, nn.Parameter)]
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
