"""Tests on a CUDA device: a card, or the stand-in of `tests/fakecuda`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch

IS_STAND_IN = "libfakecuda" in os.environ.get("LD_PRELOAD", "")
collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture
def runtime() -> Iterator[ctypes.CDLL]:
    """The stand-in, to be told what to do; as before after the test."""
    if not IS_STAND_IN:
        pytest.skip("needs the stand-in for CUDA")
    from fakecuda.computing import library

    found = library()
    yield found
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
    """A block in which CUDA operations have true results: on the stand-in, those of the CPU."""
    if not IS_STAND_IN:
        return contextlib.nullcontext
    from fakecuda.computing import computing

    return computing


@pytest.fixture(autouse=True)
def empty_device() -> Iterator[None]:
    """No test meets the memory of another."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
