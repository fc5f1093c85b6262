"""The device that tests run on, by pytest's `--device`: the CPU, the executing virtual GPU, or CUDA.

CUDA is a card, or the stand-in of `tests/fakecuda`, on which operations are computed by the CPU. A test is written for
a device in one of two ways:

- with the fixture `device`: its models train there, whichever it is. `--device cpu`, the default, is the CPU.
- with `accelerator()` and the marker of that name: it needs an accelerator. That is the virtual GPU unless CUDA was
  asked for. `reference()` is where the plain model trains that its numbers are compared with: the CPU, whose numbers
  those of the virtual GPU are, else the accelerator itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from memscale.testing import executing

DEVICES = ("cpu", "virtual", "cuda")
IS_STAND_IN = "libfakecuda" in os.environ.get("LD_PRELOAD", "")
CUDA = torch.device("cuda", 0)

chosen = "cpu"  # one of DEVICES, set by conftest.py


class Card:
    """A CUDA device, with what tests ask of the virtual GPU."""

    device = CUDA

    def manual_seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(CUDA)


@contextlib.contextmanager
def accelerator(capacity: int | str = "24GiB") -> Iterator[Any]:
    """An accelerator: the executing virtual GPU, of that size, or the first CUDA device, of the size that it has."""
    if chosen != "cuda":
        with executing(capacity) as gpu:
            yield gpu
        return
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats(CUDA)
    try:
        yield Card()
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def reference() -> torch.device:
    return CUDA if chosen == "cuda" else torch.device("cpu")


@contextlib.contextmanager
def training_device() -> Iterator[torch.device]:
    """The device that was asked for, inside of the block."""
    if chosen == "virtual":
        with executing("4GiB") as gpu:
            yield gpu.device
    elif chosen == "cuda":
        with computing():
            yield CUDA
    else:
        yield torch.device("cpu")


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """A block in which CUDA operations have true results: on the stand-in, those of the CPU.

    On a card it takes the kernels that the stand-in takes as well, which give the same numbers every time.
    """
    if IS_STAND_IN:
        from fakecuda import computing as stand_in

        with stand_in.computing():
            yield
    else:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            yield
