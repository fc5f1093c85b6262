"""Memory that kernels and libraries take from the device, which no tensor of a step shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CUBLAS_WORKSPACE = 8_519_680  # torch's default, ":4096:2:16:8"
CUBLAS_WORKSPACE_HOPPER = 32 * 2**20
HOPPER = (9, 0)
PAGE = 4096
MATMULS = {"mm", "addmm", "bmm", "baddbmm"}


def workspace_bytes(capability: tuple[int, int]) -> int:
    """What torch gives each cuBLAS handle on a card of this compute capability."""
    return CUBLAS_WORKSPACE_HOPPER if capability >= HOPPER else CUBLAS_WORKSPACE


def _softmax_backward(grad: torch.Tensor, output: torch.Tensor, *_: Any) -> tuple[int, ...]:
    """Softmax multiplies gradient and output into a tensor of its own before its kernel runs."""
    return (grad.nbytes, 0 if output.is_contiguous() else output.nbytes)


def _log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, *_: Any) -> tuple[int, ...]:
    return tuple(each.nbytes for each in (grad, output) if not each.is_contiguous())


def _group_norm_backward(
    grad: torch.Tensor,
    values: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    samples: int,
    channels: int,
    pixels: int,
    groups: int,
    *_: Any,
) -> tuple[int, ...]:
    """Two sums for each sample and channel, the scale of each, and two numbers for each group."""
    width = max(4, values.element_size())
    of_groups = (width * samples * groups,) * 2
    if pixels == 1:
        return of_groups
    return (width * samples * channels,) * (2 if weight is None else 3) + of_groups


# By the operation: the bytes of what its CUDA kernel allocates beside its results, and frees before it returns
# (aten/src/ATen/native/cuda/SoftMax.cu and group_norm_kernel.cu of torch 2.13).
TEMPORARIES: dict[str, Callable[..., tuple[int, ...]]] = {
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "native_group_norm_backward": _group_norm_backward,
}


def lstm_workspace_bytes(steps: int, samples: int, inputs: int, hidden: int) -> int:
    """Return the bytes that oneDNN's LSTM layer on the CPU keeps for backward: gates, states and their gradients.

    As measured of torch 2.13 in 32 bits; each part takes whole pages.
    """
    states = 2 * (steps + 1) * samples
    parts = [steps * samples * _padded(4 * hidden), steps * samples * _padded(hidden)]
    parts += [states * _padded(max(inputs, hidden))] * 3 + [states * hidden] * 2
    return sum(-(-4 * part // PAGE) * PAGE for part in parts)


def _padded(width: int) -> int:
    """A row's length in oneDNN's buffers: whole cache lines, and one more where rows would collide in the cache."""
    padded = -(-width // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded
