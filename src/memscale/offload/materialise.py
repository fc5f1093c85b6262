"""Models that were built on the meta device get their weights: layer by layer, straight at home.

Note [Models larger than memory]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A model that is built under ``torch.device("meta")`` has shapes and no memory, so that it may be larger than all there
is. When its plan is attached, its tensors are given memory a layer at a time: values from the safetensors files that
the user named (``loading.py``), or else by the model's own initialisation (``own_initialisation.py``). A layer that
has its values goes where the plan wants it, to disk, to the host, or to the device, before the next one gets memory.
So there is at most one layer in memory beside what stays there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from memscale.offload.loading import fill_pending
from memscale.offload.materialised import Materialised, has_meta_tensors, tie_on_meta
from memscale.offload.own_initialisation import OwnInitialisation, Settle

__all__ = ["materialise"]


def materialise(model: nn.Module, settle: Settle, layers: Sequence[nn.Module] = ()) -> Materialised:
    """Give all tensors of a model that are on the meta device memory and values.

    Args:
        model: The model.
        settle: Takes each parameter to its place as soon as it has its values; until then it is in host memory. It
            may be called more than once for one.
        layers: Modules that are initialised as a whole before they are settled; others are settled one by one.

    Returns:
        What was done, so that it can be undone.

    Raises:
        WrapError: A tensor has no initialisation; it is named. The model is as it was.
        WeightsError: A file that the weights were to come from can't be read any more. The model is as it was.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        >>> settled = []
        >>> made = materialise(model, settled.append)
        >>> len(settled), model(torch.ones(1, 4)).shape
        (4, torch.Size([1, 1]))
    """
    tie_on_meta(model)
    made = Materialised(model)
    with _without_weak_references(model):
        try:
            fill_pending(model, made, settle)
            if has_meta_tensors(model):
                OwnInitialisation(model, made, settle, layers).run()
        except BaseException:
            made.undo()
            raise
    return made


@contextlib.contextmanager
def _without_weak_references(model: nn.Module) -> Iterator[None]:
    """Inside the block recurrent layers do not refer to their weights weakly: such a tensor can't be exchanged."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in recurrent:
            module._init_flat_weights()
