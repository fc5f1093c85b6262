"""Models that were built on the meta device get their weights: layer by layer, straight at home.

Note [Models larger than memory]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A model that is built under ``torch.device("meta")`` has shapes and no memory, so that it may be larger than all there
is. When its plan is attached, its tensors are given memory a layer at a time: values from the safetensors files that
the user named (``loading.py``), or else by the model's own initialisation (``own_initialisation.py``). A layer that
has its values goes where the plan wants it, to disk, to the host, or to the device, before the next one gets memory.
So there is at most one layer in memory beside what stays there.

Values from files are read at once. A model's own initialisation, which takes longer than all else, waits until someone
needs the values: Note [Awaited values] in ``awaited.py``. Until then its tensors have their places (``place``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from memscale.offload.loading import fill_pending
from memscale.offload.materialised import Materialised, has_meta_tensors, is_on_meta, tie_on_meta
from memscale.offload.own_initialisation import MemoryOf, OwnInitialisation, Settle

__all__ = ["materialise", "place", "rehearse"]


def materialise(
    model: nn.Module,
    settle: Settle,
    layers: Sequence[nn.Module] = (),
    memory_of: MemoryOf | None = None,
) -> Materialised:
    """Give all tensors of a model that are on the meta device memory and values.

    Args:
        model: The model.
        settle: Takes each parameter to its place as soon as it has its values; until then it is in host memory. It
            may be called more than once for one.
        layers: Modules that are initialised as a whole before they are settled; others are settled one by one.
        memory_of: Host memory for a tensor that the model initialises itself; its own if it is not given.

    Returns:
        What was done, so that it can be undone.

    Raises:
        WrapError: A tensor has no initialisation; it is named. The model is as it was.
        WeightsError: A file that the weights were to come from can't be read any more. The model is as it was.

    Example:
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
                OwnInitialisation(model, made, settle, layers, memory_of=memory_of).run()
        except BaseException:
            made.undo()
            raise
    return made


def rehearse(model: nn.Module) -> None:
    """Initialise a model on the meta device without memory and values.

    Raises:
        WrapError: A tensor has no initialisation; it is named. The model is as it was.
        Exception: Whatever an initialisation raises that needs values.
    """
    made, random = Materialised(model), torch.get_rng_state()
    with _without_weak_references(model):
        try:
            OwnInitialisation(model, made, lambda parameter: None, device=torch.device("meta")).run()
        finally:
            made.undo()
            torch.set_rng_state(random)


def place(model: nn.Module, memory_of: MemoryOf) -> Materialised:
    """Give all tensors of a model that are on the meta device memory, and no values.

    Args:
        model: The model.
        memory_of: What a tensor gets.

    Returns:
        What was done, so that it can be undone.

    Raises:
        WrapError: A tensor is of a kind that has no plain memory. The model is as it was.
    """
    made = Materialised(model)
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers()) if is_on_meta(each)}
    with _without_weak_references(model):
        try:
            for tensor in tensors.values():
                made.give(tensor, memory_of(tensor))
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
