"""Operations that CUDA does in one kernel, and that torch takes apart on a device it has no kernel for.

Taken apart they need temporaries that CUDA does not, and RMS norm keeps more for backward. These are all
that torch 2.13 lists with a kernel for CUDA and a composite one for other devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from memscale.simulator.patches import operators

FUSED = ("silu_backward", "mish_backward", "_fused_rms_norm", "_fused_rms_norm_backward")


def _kernel(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the virtual device's operations are caught before they come to a kernel")


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Inside the block these operations stay in one piece on the virtual device."""
    with operators("PrivateUse1") as implement:
        for name in FUSED:
            implement(name, _kernel)
        yield
