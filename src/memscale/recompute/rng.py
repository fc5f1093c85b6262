"""The state of torch's random generators, on the CPU and on every device in use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["RngState"]


class RngState:
    """The random state of the CPU and of all devices of some types, to go back to.

    Python's `random` and NumPy's generators are not in it: a region that draws from them computes something
    else the second time. A device that has not been initialised has no state yet, and asking must not
    initialise it.
    """

    __slots__ = ("_cpu", "_devices")

    def __init__(self, device_types: Iterable[str]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices: list[tuple[str, int, torch.Tensor]] = []
        for device_type in device_types:
            module = _module_with_rng(device_type)
            if module is not None:
                for index in range(module.device_count()):
                    self._devices.append((device_type, index, _get(module, device_type, index)))

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device_type, index, state in self._devices:
            _set(_module_with_rng(device_type), device_type, index, state)


def _module_with_rng(device_type: str) -> Any:
    if device_type in ("cpu", "meta"):
        return None
    try:
        module: Any = torch.get_device_module(device_type)
    except RuntimeError:  # a label without a module, as simulated devices may be
        return None
    is_there = getattr(module, "is_initialized", None) or getattr(module, "is_available", None)
    if is_there is not None and not is_there():
        return None
    has_rng = all(hasattr(module, name) for name in ("get_rng_state", "set_rng_state", "device_count"))
    return module if has_rng else None


def _get(module: Any, device_type: str, index: int) -> torch.Tensor:
    # `torch.mps` has one device, and its functions take none.
    state: torch.Tensor = module.get_rng_state() if device_type == "mps" else module.get_rng_state(index)
    return state


def _set(module: Any, device_type: str, index: int, state: torch.Tensor) -> None:
    if device_type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, index)
