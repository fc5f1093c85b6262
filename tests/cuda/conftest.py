"""Tests on a CUDA device: a card, or the stand-in of `tests/fakecuda`."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch

from support import devices
from support.devices import IS_STAND_IN

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture
def runtime() -> Iterator[ctypes.CDLL]:
    """The stand-in, to be told what to do; as before after the test."""
    if not IS_STAND_IN:
        pytest.skip("needs the stand-in for CUDA")
    from fakecuda.computing import library

    found = library()
    yield found
    found.fakecuda_succeed()
    torch.cuda.synchronize()
    found.fakecuda_set_copies(b"now")
    found.fakecuda_set_page_locks(0)


@pytest.fixture(params=["late", "poisoned", "random"])
def copies(request: pytest.FixtureRequest) -> Iterator[str]:
    """When asynchronous copies happen; a card decides that itself."""
    if not IS_STAND_IN:
        if request.param != "late":
            pytest.skip("a card copies as it copies")
        yield "card"
        return
    from fakecuda.computing import library

    library().fakecuda_set_copies(request.param.encode())
    yield request.param
    torch.cuda.synchronize()
    library().fakecuda_set_copies(b"now")


@pytest.fixture
def computing() -> Callable[[], AbstractContextManager[None]]:
    """A block in which CUDA operations have true results, the same every time."""
    return devices.computing


@pytest.fixture(autouse=True)
def empty_device() -> Iterator[None]:
    """No test leaves memory on the device, where the next one would meet it."""
    before = torch.cuda.memory_allocated()
    yield
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # that of a handle which an injected error took its stream from
    for _ in range(100):  # autograd's threads release the last tensors after backward has returned
        if torch.cuda.memory_allocated() <= before:
            break
        time.sleep(0.01)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_allocated() <= before
