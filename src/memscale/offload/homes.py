"""Where a tensor of the model lives, and moving it there without its owner noticing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


def relocate(parameter: nn.Parameter, device: torch.device) -> None:
    """Move a parameter and its gradient; it stays the same object, for the optimizer and everyone else."""
    if parameter.device == device:
        return
    gradient = parameter.grad
    parameter.grad = None
    with torch.no_grad():
        moved = parameter.detach().to(device)
        if _exchanges_data(parameter, moved):
            parameter.data = moved
        else:
            torch.utils.swap_tensors(parameter, nn.Parameter(moved, parameter.requires_grad))
        if gradient is not None:
            parameter.grad = gradient.to(device)


def relocate_buffer(module: nn.Module, name: str, device: torch.device) -> None:
    """Move a buffer; its owner gets the moved one."""
    buffer = module._buffers[name]
    if buffer is not None and buffer.device != device:
        module._buffers[name] = buffer.to(device)


def relocate_state(state: dict[str, Any], device: torch.device) -> None:
    """Move an optimizer's state of one parameter; its step counters stay where they are."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != device:
            state[name] = value.to(device)


def _exchanges_data(parameter: torch.Tensor, moved: torch.Tensor) -> bool:
    """Whether ``.data =`` can do it, as ``Module.to`` decides it."""
    plain = type(moved) is torch.Tensor and not isinstance(parameter, FakeTensor)
    return plain and type(parameter.data) is torch.Tensor and torch._has_compatible_shallow_copy_type(
        parameter, moved
    )
