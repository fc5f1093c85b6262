"""Streams, events and generators of the virtual device.

Everything happens in order, so that they only need to exist. torch has half of them for a device registered
from Python: it can't wait for an event, and makes no generator at all (tried on torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch

from memscale._torch import Generator, private_device_name


def _device() -> torch.device:
    return torch.device(private_device_name(), 0)


class VirtualStream(torch.Stream):
    """A stream on which everything is done at once."""

    def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> VirtualStream:
        return super().__new__(cls, device=_device())


class VirtualEvent(torch.Event):
    """An event that has happened."""

    def __new__(cls, *args: Any, **options: Any) -> VirtualEvent:
        return super().__new__(cls, device=_device())

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: torch.Event) -> float:
        return 0.0


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    """Every generator counts as one, also those made before the block began."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Generator)


class VirtualGenerator(torch.Generator, metaclass=_AnyGenerator):
    """The host's generator, which the virtual device's operations take as well."""

    def __new__(cls, device: Any = "cpu") -> VirtualGenerator:
        here = torch.device(device).type in ("cuda", _device().type)
        return super().__new__(cls, "cpu" if here else device)  # type: ignore[call-arg]
