"""The memory tracker of a virtual GPU: tensors, cuBLAS's workspaces, errors in backward that do not crash.

Note [Errors in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~
A device guard written in Python is called while autograd unwinds from an error, with the Python error still
set; the interpreter cannot run then and the process ends (torch 2.13). So an error in backward is put aside,
every operation after it does nothing, and it is raised where the user called ``backward``. What the user sees
is the same: the error, and gradients as they were at that moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd import graph

from memscale.memory import _autograd
from memscale.memory.tracker import MemoryTracker
from memscale.simulator.patches import attribute
from memscale.simulator.workspace import MATMULS


def op_name(func: Any) -> str:
    """The name without namespace and overload: "add" of aten::add.Tensor."""
    return str(getattr(func, "_opname", ""))  # operators that take functions have no such name


class DeviceTracker(MemoryTracker):  # type: ignore[no-untyped-call]  # its `__init_subclass__`
    """Follows the memory of one virtual device and the host beside it."""

    def __init__(self, *, workspace_bytes: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self._workspace_bytes = workspace_bytes
        self._workspaces: set[bool] = set()
        self._failure: BaseException | None = None
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._failure is not None and _autograd.in_backward():
            return self._nothing(func, args, kwargs or {})
        try:
            result = self.run(func, types, args, kwargs)
            if self._workspace_bytes and op_name(func) in MATMULS:
                self._reserve_workspace(result)
        except Exception as error:
            if not _autograd.in_backward():
                raise
            self._put_aside(error)
            return _empty_results(func, args)
        return result

    def run(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """One operation, its memory followed."""
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _reserve_workspace(self, result: torch.Tensor) -> None:
        # One workspace per handle, and a handle belongs to a thread: the training loop's, and the one that
        # autograd runs the device's backward in.
        if self._in_backward not in self._workspaces and result.device.type != "cpu":
            self._workspaces.add(self._in_backward)
            self.reserve(self._workspace_bytes, result.device, "cuBLAS workspace")

    def _put_aside(self, error: Exception) -> None:
        self._failure = error
        for root in self._running.roots:
            self._gradients.extend((parameter, parameter.grad) for parameter in root.parameters())

    def _nothing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A result of the right kind for an operation that must not have an effect any more."""
        if func._schema.is_mutable:
            return args[0] if args else None
        failure, self._failure = self._failure, None
        try:
            return func(*args, **kwargs)
        except Exception:  # a consequence of the first error, which is the one to raise
            return _empty_results(func, args)
        finally:
            self._failure = failure

    def raise_put_aside(self) -> None:
        """See Note [Errors in backward]."""
        if self._failure is None:
            return
        failure, self._failure = self._failure, None
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients.clear()
        raise failure


def _empty_results(func: Any, args: tuple[Any, ...]) -> Any:
    if func._schema.is_mutable:
        return args[0] if args else None
    empty = [torch.empty(0) for _ in func._schema.returns]
    return empty[0] if len(empty) == 1 else tuple(empty)


@contextlib.contextmanager
def errors_after_backward(tracker: DeviceTracker) -> Iterator[None]:
    """Raise what was put aside during backward when backward returns to the user."""
    run_backward = graph._engine_run_backward

    def run_and_raise(*args: Any, **kwargs: Any) -> Any:
        try:
            return run_backward(*args, **kwargs)
        finally:
            tracker.raise_put_aside()

    with contextlib.ExitStack() as stack:
        for owner in (graph, torch.autograd):
            if hasattr(owner, "_engine_run_backward"):
                stack.enter_context(attribute(owner, "_engine_run_backward", run_and_raise))
        yield
