"""How fast a device computes, by the type of number it computes with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memscale.errors import HardwareError

if TYPE_CHECKING:
    import torch

__all__ = ["Rates"]

# A dtype without hardware still runs: torch converts to fp32, computes, and converts back. The tensors cross
# the memory twice for it, which halves the rate (bf16 on Turing and Volta behaves so).
_EMULATED = 0.5


@dataclass(frozen=True, slots=True)
class Rates:
    """Floating point operations per second of a dense matrix product, by dtype.

    Attributes:
        fp32: IEEE single precision.
        tf32: fp32 tensors multiplied in TF32, which a user allows with `torch.set_float32_matmul_precision`;
            None where the device has no TF32.
        fp16: Half precision with fp32 accumulation where the device has it.
        bf16: None where the device has no bf16 arithmetic and torch would emulate it.

    Example:
        >>> import torch
        >>> Rates(fp32=8.1e12, tf32=None, fp16=65e12, bf16=None).of(torch.float16)
        65000000000000.0
    """

    fp32: float
    tf32: float | None
    fp16: float
    bf16: float | None

    def __post_init__(self) -> None:
        for field, rate in (
            ("fp32", self.fp32),
            ("tf32", self.tf32),
            ("fp16", self.fp16),
            ("bf16", self.bf16),
        ):
            if rate is not None and not rate > 0:
                raise HardwareError(
                    f"The {field} rate is {rate!r} FLOP/s: a rate must be above zero, or None."
                )

    def of(self, dtype: torch.dtype) -> float:
        """The rate at which matrices of `dtype` are multiplied.

        A dtype without a figure of its own (float64, integers) answers the fp32 rate: plans compare times,
        and what all of them share cancels out.

        Example:
            >>> import torch
            >>> Rates(fp32=10e12, tf32=None, fp16=20e12, bf16=None).of(torch.bfloat16)  # emulated
            5000000000000.0
        """
        # By name, so that a table of GPUs can be read without importing torch.
        match str(dtype):
            case "torch.float16":
                return self.fp16
            case "torch.bfloat16":
                return self.fp32 * _EMULATED if self.bf16 is None else self.bf16
            case _:
                return self.fp32
