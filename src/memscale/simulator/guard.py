"""The virtual device's guard, and the errors that pass by it.

Note [Errors in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~
While autograd unwinds from an error it asks the device's guard which kind of device it is for. Ours is
written in Python, and Python code that runs with an error set fails in turn, in a place where C++ allows no
errors: the process ends (torch 2.13). So the guard puts the error aside before it answers, and it is raised
again where the user called ``backward``. An error in a hook, in the unpacking of a saved tensor or in an
operation is then what it is on any other device: backward stops there, with the gradients as they are at that
moment.

It relies on a detail of CPython: ``ctypes`` raises an error that is set. Without it such an error would end the
process.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import graph

from memscale._torch import PRIVATE_DEVICE_TYPE, PrivateDeviceGuard
from memscale.simulator.patches import attribute

_DEVICE_TYPE = PRIVATE_DEVICE_TYPE
_raise_what_is_set = ctypes.pythonapi.PyErr_Occurred
_raise_what_is_set.restype = ctypes.c_void_p
_put_aside: list[BaseException] = []


class Guard(PrivateDeviceGuard):
    """The guard of a device that has nothing to guard."""

    def type_(self) -> Any:
        try:
            _raise_what_is_set()
        except BaseException as error:  # even an interrupt: it is raised again a moment later
            _put_aside.append(error)
        return _DEVICE_TYPE


@contextlib.contextmanager
def errors_after_backward() -> Iterator[None]:
    """Raise what was put aside when backward returns to the user. See Note [Errors in backward]."""
    run_backward = graph._engine_run_backward

    def run_and_raise(*args: Any, **kwargs: Any) -> Any:
        try:
            return run_backward(*args, **kwargs)
        except SystemError:  # "returned NULL without setting an exception": the guard has it
            if not _put_aside:
                raise
        raise _put_aside.pop()

    with contextlib.ExitStack() as stack:
        for owner in (graph, torch.autograd):
            if hasattr(owner, "_engine_run_backward"):
                stack.enter_context(attribute(owner, "_engine_run_backward", run_and_raise))
        stack.callback(_put_aside.clear)
        yield
