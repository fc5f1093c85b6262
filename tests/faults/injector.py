"""Faults at any call or line of MemScale: counted in a first run, and raised at one of them in a second."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch

import memscale

SOURCE = str(Path(memscale.__file__).parent)
DEVICES = ("/testing.py", "/simulator/", "/memory/")  # which stand for hardware
# The rest is bookkeeping of a few lines without an operation that could fail, or runs in finalizers, whose errors
# Python does not pass on.
FINALIZERS = ("free", "_release", "_count", "is_forked", "__del__")
NOT_HOOKS = (
    *DEVICES,
    "/observe/counters.py",
    "/_util/",
    "/errors.py",
    "/_torch.py",
    "/units.py",
)
# Around an operation of torch's own step: one that fails leaves the plain step half made, too.
ARITHMETIC = ("/recovery/guard.py", "__torch_dispatch__")


class Injector:
    """Runs a function with a fault at the `at`-th call, or line, of MemScale; counts them if `at` is None.

    Args:
        fault: What to raise; None for a real SIGINT at a line.
    """

    def __init__(self, at: int | None = None, fault: Callable[[], BaseException] | None = None) -> None:
        self.count = 0
        self.where = ""
        self.first: dict[CodeType, int] = {}  # the number of each function's first call
        self._at = at
        self._fault = fault

    @property
    def is_signal(self) -> bool:
        return self._fault is None

    @property
    def was_injected(self) -> bool:
        return bool(self.where)

    def run(self, function: Callable[[], object]) -> BaseException | None:
        """Return what the function raised; errors that have nothing to do with the fault are raised."""
        with self._active():
            try:
                function()
            except BaseException as error:
                if not self.was_injected:
                    raise
                return error
        return None

    @contextmanager
    def _active(self) -> Iterator[None]:
        _Traced.injector = self
        if self._fault is None:
            sys.setprofile(self._interrupt)
        else:
            sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.setprofile(None)
            sys.settrace(None)
            _Traced.injector = None

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        """Raise the fault where a function begins."""
        name = frame.f_code.co_filename
        is_hook = name.startswith(SOURCE) and not any(each in name for each in NOT_HOOKS)
        is_hook = is_hook and event == "call" and _Traced.injector is self and self._is_whole(frame)
        if is_hook and self._fault is not None and self._reached(frame):
            raise self._fault()

    def _interrupt(self, frame: FrameType, event: str, argument: object) -> None:
        """Press Ctrl-C where Python looks for signals: when a function begins, and after a call of one in C."""
        name = frame.f_code.co_filename
        is_ours = name.startswith(SOURCE) and not any(each in name for each in DEVICES)
        is_ours = (
            is_ours and frame.f_code.co_name != "find_optimizers"
        )  # which asks every object of the process
        if is_ours and event in ("call", "c_return") and self._reached(frame):
            signal.raise_signal(signal.SIGINT)

    @staticmethod
    def _is_whole(frame: FrameType) -> bool:
        """Whether this is a function: not a comprehension, or a generator that goes on."""
        name = frame.f_code.co_name
        if frame.f_code.co_filename.endswith(ARITHMETIC[0]) and name == ARITHMETIC[1]:
            return False
        return not name.startswith("<") and frame.f_lasti <= 4 and not Injector._is_in_finalizer(frame)

    @staticmethod
    def _is_in_finalizer(frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_filename.startswith(SOURCE):
            if frame.f_code.co_name in FINALIZERS:
                return True
            frame = frame.f_back
        return False

    @staticmethod
    def _is_attribute_read(frame: FrameType | None) -> bool:
        """Whether torch asks a fake tensor for its device or the like: it ends the process if that raises."""
        while frame is not None:
            function = frame.f_locals.get("func") if frame.f_code.co_name == "__torch_dispatch__" else None
            if getattr(function, "namespace", "") == "prim":
                return True
            frame = frame.f_back
        return False

    def _reached(self, frame: FrameType) -> bool:
        self.count += 1
        self.first.setdefault(frame.f_code, self.count)
        if self.count != self._at:
            return False
        if self._is_attribute_read(frame):
            self._at += 1
            return False
        code = frame.f_code
        self.where = f"{Path(code.co_filename).relative_to(SOURCE)}:{frame.f_lineno} {code.co_name}"
        return True


class Syscalls(Injector):
    """Has the `at`-th call of a function of `os` fail."""

    def __init__(self, at: int | None, name: str, code: int) -> None:
        super().__init__(at, lambda: OSError(code, os.strerror(code)))
        self._name = name

    @contextmanager
    def _active(self) -> Iterator[None]:
        original = getattr(os, self._name)

        def call(*args: Any) -> Any:
            self.count += 1
            if self.count == self._at and self._fault is not None:
                self.where = self._name
                raise self._fault()
            return original(*args)

        with patch.object(os, self._name, call):
            yield


class _Traced(torch.autograd.Function):
    """The identity; from its backward on, the thread that runs it is traced as well."""

    injector: Injector | None = None

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        injector = _Traced.injector
        sys.settrace(None if injector is None else injector.trace)
        return gradient


def traced(tensor: torch.Tensor) -> torch.Tensor:
    """Have backward through a tensor traced, whichever thread it runs in."""
    result: torch.Tensor = _Traced.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def spread(count: int, points: int) -> list[int]:
    """Return so many of the numbers from 1 to `count`, evenly spread."""
    if count <= points:
        return list(range(1, count + 1))
    return sorted({1 + (index * (count - 1)) // (points - 1) for index in range(points)})
