"""Where a step is rehearsed: a device as the simulator knows it, with room for any step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal

from memscale.hardware import DeviceSpec, find_gpu
from memscale.simulator import Simulation, simulate

ROOM = 1 << 50  # a step that does not fit has a peak too: it is what the user is told
DEFAULT_CAPABILITY = (8, 6)


@dataclass(frozen=True)
class Place:
    """A device to rehearse for.

    Attributes:
        kind: "cpu", with the CPU's kernels and exact bytes, or "vgpu", with CUDA's and its allocator.
        capability: NVIDIA's compute capability, which decides about attention kernels and workspaces.
    """

    kind: Literal["cpu", "vgpu"]
    capability: tuple[int, int] = DEFAULT_CAPABILITY

    @classmethod
    def of(cls, device: DeviceSpec) -> Place:
        """The stand-in for a device.

        >>> from memscale.hardware import virtual_hardware
        >>> Place.of(virtual_hardware("H100").device)
        Place(kind='vgpu', capability=(9, 0))
        """
        if device.kind == "cpu":
            return cls("cpu")
        return cls("vgpu", device.compute_capability or DEFAULT_CAPABILITY)

    @property
    def counts_exactly(self) -> bool:
        """Whether memory is counted to the byte, not in the allocator's units."""
        return self.kind == "cpu"

    def simulate(self) -> AbstractContextManager[Simulation]:
        gpu = replace(find_gpu("RTX 3090"), memory_bytes=ROOM, compute_capability=self.capability)
        return simulate(gpu, device=self.kind)
