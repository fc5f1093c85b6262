"""Where the tensors of a model live: at home on the host, or on the device; and back again.

Parameters keep their identity when they move, so that optimizers, schedulers and the user's own references go on
as before. An optimizer's state follows its parameter: before a step, and when everything goes back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["HOST", "Homes", "training_device"]

HOST = torch.device("cpu")


def training_device(model: nn.Module) -> torch.device:
    """Where a model trains: on the accelerator that any of its tensors is on, else on the CPU."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    return HOST


class Homes:
    """The places of one model's tensors while it is wrapped, and where they were before.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> homes = Homes()
        >>> homes.arrange(model, model.parameters(), HOST)
        >>> homes.restore()
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._parameters: dict[int, tuple[nn.Parameter, torch.device]] = {}
        self._buffers: list[tuple[nn.Module, str, torch.device]] = []
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._handle: RemovableHandle | None = None

    @property
    def bytes_at_home(self) -> int:
        """Bytes of the parameters that are on the host now instead of on the device."""
        moved = (parameter for parameter, before in self._parameters.values() if before != parameter.device)
        return sum(parameter.nbytes for parameter in moved)

    def arrange(self, model: nn.Module, at_home: Iterable[nn.Parameter], device: torch.device) -> None:
        """Send parameters home, and bring the others to the device."""
        self.device = device
        home = {id(parameter) for parameter in at_home}
        for parameter in model.parameters():
            self._parameters.setdefault(id(parameter), (parameter, parameter.device))
            relocate(parameter, HOST if id(parameter) in home else device)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    self._buffers.append((module, name, buffer.device))
                    module._buffers[name] = buffer.to(device)
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._before_step)

    def restore(self) -> None:
        """Everything where it was before the first :meth:`arrange`."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        for parameter, before in self._parameters.values():
            relocate(parameter, before)
        for module, name, device in self._buffers:
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
        for optimizer in self._optimizers:
            self._follow(optimizer)
        self._parameters.clear()
        self._buffers.clear()
        self._optimizers.clear()
        self.device = None

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        ours = any(
            id(parameter) in self._parameters
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        if ours:
            self._optimizers.add(optimizer)
            self._follow(optimizer)

    def _follow(self, optimizer: Optimizer) -> None:
        """An optimizer's state goes where its parameter is; its step counters stay."""
        for parameter, state in optimizer.state.items():
            if id(parameter) not in self._parameters:
                continue
            for name, value in state.items():
                moved = isinstance(value, torch.Tensor) and value.dim() > 0
                if moved and value.device != parameter.device:
                    state[name] = value.to(parameter.device)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has parameters of its own; no optimizer has stepped them yet.
        return {
            "device": self.device,
            "parameters": list(self._parameters.values()),
            "buffers": self._buffers,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.device = state["device"]
        self._parameters = {id(parameter): (parameter, before) for parameter, before in state["parameters"]}
        self._buffers = state["buffers"]
        if self._parameters:
            self._handle = register_optimizer_step_pre_hook(self._before_step)


def relocate(parameter: nn.Parameter, device: torch.device) -> None:
    """Move a parameter and its gradient; it stays the same object."""
    if parameter.device == device or parameter.is_meta:
        return
    gradient = parameter.grad
    parameter.grad = None
    with torch.no_grad():
        moved = parameter.detach().to(device)
        if _exchanges_data(parameter, moved):
            parameter.data = moved
        else:
            torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
                parameter, nn.Parameter(moved, parameter.requires_grad)
            )
        if gradient is not None:
            parameter.grad = gradient.to(device)


def _exchanges_data(parameter: nn.Parameter, moved: torch.Tensor) -> bool:
    """Whether ``.data =`` can do it, as ``Module.to`` decides it; fake and wrapped tensors are swapped whole."""
    plain = type(moved) is torch.Tensor and not isinstance(parameter, FakeTensor)
    return (
        plain
        and type(parameter.data) is torch.Tensor
        and bool(torch._has_compatible_shallow_copy_type(parameter, moved))
    )
