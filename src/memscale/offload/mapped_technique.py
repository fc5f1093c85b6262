"""Homes on disk: a block's parameters are mapped tensors, whose pages are in memory only while it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memscale._torch import OUTSIDE_BACKWARD, graph_task_id
from memscale._util.trees import Tree
from memscale.offload.mapped_parameters import MappedParameters
from memscale.techniques.forward import ForwardStage, Stage

__all__ = ["MappedStage"]


class MappedStage(ForwardStage):
    """Holds the mapped parameters of a block in memory while it computes. See Note [Homes on disk].

    Args:
        mapped: The parameters of the model that are at home on disk.
        recomputed: Whether it runs inside a recomputed region.
    """

    order = Stage.MAP_PARAMETERS
    in_evaluation = True  # the parameters are at home then as well

    def __init__(self, mapped: MappedParameters, *, recomputed: bool) -> None:
        self._mapped = mapped
        self._recomputed = recomputed

    def run(
        self, module: nn.Module, call_next: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        # Not other weights that `torch.func.functional_call` has put there.
        mapped = self._mapped
        parameters = [each for each in module.parameters() if isinstance(each, nn.Parameter)]
        mapped.watch(parameters)
        mapped.begin(parameters)
        try:
            output = call_next(*args, **kwargs)
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
        tensor = getattr(tensor, "hidden", tensor)  # lazy logits get no gradient themselves
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(begin)
