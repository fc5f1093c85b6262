"""The memory tracker of a virtual GPU: its tensors, the workspaces of cuBLAS, and temporaries of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from memscale.memory.tracker import MemoryTracker


def op_name(func: Any) -> str:
    """Return the name without namespace and overload: "add" of aten::add.Tensor."""
    return str(getattr(func, "_opname", ""))  # higher-order operators have no such name


class DeviceTracker(MemoryTracker):  # type: ignore[no-untyped-call]  # its `__init_subclass__`
    """Track the memory of one virtual device and its host."""

    def __init__(self, *, workspace_bytes: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self._workspace_bytes = workspace_bytes
        self._workspaces: set[bool] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._workspace_bytes:
            self.temporary_bytes = 0
            name = op_name(func)
            if name in MATMULS:
                self._reserve_workspace(result)
            elif name in TEMPORARIES and args[0].device.type != "cpu":
                self._allocate_temporaries(name, args)
        return result

    def _allocate_temporaries(self, name: str, args: tuple[Any, ...]) -> None:
        """Allocate and free what the kernel needs besides its results."""
        sizes = [size for size in TEMPORARIES[name](*args) if size]
        what = f"a temporary of {name}"
        self.temporary_bytes = sum(sizes)
        for release in [self.hold(size, args[0].device, what) for size in sizes]:
            release()

    def _reserve_workspace(self, result: torch.Tensor) -> None:
        # One workspace per handle and one handle per thread: that of the training loop, and that of backward. (Tensors
        # of a simulation inside this block are not tracked.)
        if self._in_backward in self._workspaces or result.device.type == "cpu":
            return
        if result.untyped_storage()._cdata in self._live:
            self.reserve(self._workspace_bytes, result.device, "cuBLAS workspace")
            self._workspaces.add(self._in_backward)


CUBLAS_WORKSPACE = 8_519_680  # torch's default, ":4096:2:16:8"
CUBLAS_WORKSPACE_HOPPER = 32 * 2**20
HOPPER = (9, 0)
PAGE = 4096
MATMULS = {"mm", "addmm", "bmm", "baddbmm"}


def workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the workspace of a cuBLAS handle on a card of this compute capability."""
    return CUBLAS_WORKSPACE_HOPPER if capability >= HOPPER else CUBLAS_WORKSPACE


def _softmax_backward(grad: torch.Tensor, output: torch.Tensor, *_: Any) -> tuple[int, ...]:
    # The product of gradient and output is a tensor of its own.
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
    # Two sums for each sample and channel, the scale of each, and two numbers for each group.
    width = max(4, values.element_size())
    of_groups = (width * samples * groups,) * 2
    if pixels == 1:
        return of_groups
    return (width * samples * channels,) * (2 if weight is None else 3) + of_groups


# By operation: the bytes that its CUDA kernel allocates besides its results and frees before it returns
# (aten/src/ATen/native/cuda/SoftMax.cu and group_norm_kernel.cu of torch 2.13).
TEMPORARIES: dict[str, Callable[..., tuple[int, ...]]] = {
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "native_group_norm_backward": _group_norm_backward,
}


def lstm_workspace_bytes(steps: int, samples: int, inputs: int, hidden: int) -> int:
    """Return the bytes that oneDNN's LSTM layer saves for backward on the CPU: gates, states and their gradients.

    As measured with torch 2.13 in 32 bits; each part is rounded up to whole pages.
    """
    states = 2 * (steps + 1) * samples
    parts = [steps * samples * _padded(4 * hidden), steps * samples * _padded(hidden)]
    parts += [states * _padded(max(inputs, hidden))] * 3 + [states * hidden] * 2
    return sum(-(-4 * part // PAGE) * PAGE for part in parts)


def _padded(width: int) -> int:
    """Return the length of a row in oneDNN's buffers: whole cache lines, and one more where rows would collide."""
    padded = -(-width // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded
