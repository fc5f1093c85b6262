"""The memory tracker of a virtual GPU: its tensors, the workspaces of cuBLAS, and temporaries inside of kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memscale.memory.tracker import MemoryTracker
from memscale.simulator.workspace import MATMULS, TEMPORARIES


def op_name(func: Any) -> str:
    """The name without namespace and overload: "add" of aten::add.Tensor."""
    return str(getattr(func, "_opname", ""))  # operators that take functions have no such name


class DeviceTracker(MemoryTracker):  # type: ignore[no-untyped-call]  # its `__init_subclass__`
    """Follows the memory of one virtual device and the host beside it."""

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
        """Allocate what the kernel does beside its results, which are there already, and free it again."""
        sizes = [size for size in TEMPORARIES[name](*args) if size]
        what = f"a temporary of {name}"
        self.temporary_bytes = sum(sizes)
        for release in [self.hold(size, args[0].device, what) for size in sizes]:
            release()

    def _reserve_workspace(self, result: torch.Tensor) -> None:
        # One workspace per handle, and a handle belongs to a thread: the training loop's, and the one that
        # autograd runs the device's backward in. (Of a simulation inside this block nothing is followed.)
        if self._in_backward in self._workspaces or result.device.type == "cpu":
            return
        if result.untyped_storage()._cdata in self._live:
            self.reserve(self._workspace_bytes, result.device, "cuBLAS workspace")
            self._workspaces.add(self._in_backward)
