"""Snapshots of the global random generators: torch's on the CPU and on devices, Python's, NumPy's."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["HostRngState", "RngState", "TorchRngState"]


class TorchRngState:
    """A snapshot of the random state of the CPU and of all devices of some types.

    A device that has not been initialised has no state yet, and asking must not initialise it.
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


class HostRngState:
    """A snapshot of Python's `random` and, if `numpy.random` was imported, of NumPy's global generator.

    Generator objects (`random.Random`, `numpy.random.Generator`, `torch.Generator`) are not included: which of them a
    function uses is unknown.
    """

    __slots__ = ("_numpy", "_python")

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def has_moved(self) -> bool:
        """Return whether a number was drawn or a state set since."""
        if random.getstate() != self._python:
            return True
        numpy = _numpy_state()
        return self._numpy is not numpy and _comparable(self._numpy) != _comparable(numpy)

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


class RngState:
    """All global random state: torch's and the host's."""

    __slots__ = ("_host", "_torch")

    def __init__(self, device_types: Iterable[str]) -> None:
        self._torch = TorchRngState(device_types)
        self._host = HostRngState()

    def restore(self) -> None:
        self._torch.restore()
        self._host.restore()


_MT19937_BYTES = 625 * 4  # 624 words and a position
_latest_numpy: tuple[bytes, dict[str, Any]] | None = None


def _numpy_state() -> dict[str, Any] | None:
    """Return the state of NumPy's global generator; the same object as the last time if it has not changed.

    `get_state` takes 30 us for every recomputed layer, so the memory of the generator is compared first. It is
    the whole state, except for the second of two normal numbers that are drawn at once: while one is stored
    (`has_gauss`), the state is always read.
    """
    global _latest_numpy
    module = sys.modules.get("numpy.random")
    if module is None or not hasattr(module, "get_state"):
        return None
    generator: Any = getattr(getattr(module.mtrand, "_rand", None), "_bit_generator", None)
    memory = b""
    if type(generator).__name__ == "MT19937":
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if _latest_numpy is not None and _latest_numpy[0] == memory and not _latest_numpy[1]["has_gauss"]:
            return _latest_numpy[1]
    state: dict[str, Any] = module.get_state(legacy=False)
    _latest_numpy = (memory, state) if memory else None
    return state


def _comparable(state: dict[str, Any] | None) -> object:
    if state is None:
        return None
    inner = {
        name: value if isinstance(value, int) else value.tobytes() for name, value in state["state"].items()
    }
    return state["bit_generator"], inner, state["has_gauss"], state["gauss"]


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
