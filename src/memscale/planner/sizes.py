"""The same call with more or fewer samples, or with longer or shorter sequences.

Note [Which dimensions are which]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The first dimension of the first tensor is the number of samples; every tensor that begins with the same number has
as many. Sequences are what ``Sample.positions_and_tokens`` finds: token ids ``[samples, length]``, or features
``[samples, length, width]``. With them go the dimensions of that size in tensors of integers and booleans (labels,
masks), the second one in features, and the last two in masks of four dimensions.
"""

from __future__ import annotations

from torch import Tensor, nn

from memscale.profiler.sample import Sample, named_tensors, resized

__all__ = ["batch_size_of", "length_of", "most_positions", "with_batch_size", "with_length"]

MOST_POSITIONS = 2**20


def batch_size_of(sample: Sample) -> int:
    """How many samples a call has.

    >>> import torch
    >>> batch_size_of(Sample((torch.ones(8, 128),), {}))
    8
    """
    return next((tensor.shape[0] for tensor in sample.tensors() if tensor.dim()), 1)


def length_of(sample: Sample) -> int:
    """How long a call's sequences are; 1 if it has none."""
    return sample.positions_and_tokens()[0]


def with_batch_size(model: nn.Module, sample: Sample, size: int) -> Sample:
    """The same call with so many samples, which have no values."""
    before = batch_size_of(sample)
    shapes = {
        name: (size, *tensor.shape[1:]) if tensor.dim() and tensor.shape[0] == before else tuple(tensor.shape)
        for name, tensor in named_tensors(model, sample)
    }
    return resized(model, sample, shapes)


def with_length(model: nn.Module, sample: Sample, length: int) -> Sample:
    """The same call with sequences of that length, which have no values."""
    before = length_of(sample)
    shapes = {}
    for name, tensor in named_tensors(model, sample):
        changed = _sequence_dimensions(tensor, before)
        shapes[name] = tuple(length if index in changed else size for index, size in enumerate(tensor.shape))
    return resized(model, sample, shapes)


def _sequence_dimensions(tensor: Tensor, length: int) -> set[int]:
    of_that_size = {index for index, size in enumerate(tensor.shape) if index and size == length}
    if not tensor.is_floating_point():
        return of_that_size
    return of_that_size & ({2, 3} if tensor.dim() == 4 else {1})


def most_positions(model: nn.Module) -> int:
    """How long a model says that its sequences may be."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else MOST_POSITIONS
