"""The scratch memory that cuBLAS takes from the device, which no tensor shows."""

from __future__ import annotations

CUBLAS_WORKSPACE = 8_519_680  # torch's default, ":4096:2:16:8"
CUBLAS_WORKSPACE_HOPPER = 32 * 2**20
HOPPER = (9, 0)
MATMULS = {"mm", "addmm", "bmm", "baddbmm"}


def workspace_bytes(capability: tuple[int, int]) -> int:
    """What torch gives each cuBLAS handle on a card of this compute capability."""
    return CUBLAS_WORKSPACE_HOPPER if capability >= HOPPER else CUBLAS_WORKSPACE
