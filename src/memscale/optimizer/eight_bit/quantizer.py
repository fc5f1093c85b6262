"""bitsandbytes, as far as it is used here: 32-bit numbers to 8-bit codes and back."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from memscale._torch import FakeTensor
from memscale.errors import MemScaleError

__all__ = ["BLOCK", "Bitsandbytes", "Quantizer", "Unavailable", "find_quantizer", "why_unavailable"]

BLOCK = 256
"""How many numbers share a scale, as in bitsandbytes' optimizers."""

_ZERO = 127  # its code, in the map of numbers with a sign
OLDEST = (0, 49)  # before it, the CPU had no such kernels


class Unavailable(MemScaleError, RuntimeError):
    """bitsandbytes is missing, too old, or does not work on a device."""


class Quantizer(Protocol):
    """Takes tensors down to 8 bits and brings them up again."""

    def down(self, tensor: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
        """Codes, one byte a number, and the scale of each block; of a flat tensor in 32 bits."""

    def up(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        """Return the numbers in 32 bits."""


class Bitsandbytes:
    """The real one.

    Args:
        functional: the module ``bitsandbytes.functional``.
    """

    def __init__(self, functional: Any) -> None:
        self._functional = functional
        self._maps: dict[tuple[bool, torch.device], Tensor] = {}

    def down(self, tensor: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
        codes, scales = torch.ops.bitsandbytes.quantize_blockwise(tensor, self._map(tensor, signed), BLOCK)
        if signed:
            # On the CPU it takes zero for the next small number, and a weight without gradient would drift by it.
            codes.masked_fill_(tensor == 0, _ZERO)
        return codes, scales

    def up(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        numbers: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
            codes, scales, self._map(codes, signed), BLOCK, torch.float32
        )
        return numbers

    def check(self, device: torch.device) -> None:
        """Try it on a device.

        Raises:
            Unavailable: It does not work there.
        """
        try:
            numbers = torch.linspace(-1, 1, 2 * BLOCK, device=device)
            again = self.up(*self.down(numbers, signed=True), signed=True)
            error = float((again - numbers).abs().max())
            zero = float(self._map(numbers, True)[_ZERO])
        except Exception as raised:
            raise Unavailable(f"bitsandbytes does not run on {device} ({_in_short(raised)})") from raised
        if zero != 0:
            raise Unavailable(
                f"bitsandbytes has other codes than expected (that of zero stands for {zero:.2g})"
            )
        if not error < 0.02:
            raise Unavailable(f"bitsandbytes computes wrong numbers on {device} (off by {error:.2g})")

    def _map(self, beside: Tensor, signed: bool) -> Tensor:
        """Return what each code stands for: fine near zero, coarse near the largest."""
        key = (signed, beside.device)
        if key not in self._maps:
            self._maps[key] = self._functional.create_dynamic_map(signed=signed).to(beside.device)
        return self._maps[key]


class ShapesOnly:
    """What stands in for it where tensors have no data: the same tensors, and nothing in them."""

    def down(self, tensor: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
        codes = torch.empty_like(tensor, dtype=torch.uint8)
        return codes, torch.empty(-(-tensor.numel() // BLOCK), device=tensor.device)

    def up(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        return torch.empty_like(codes, dtype=torch.float32)


def find_quantizer(parameters: Iterable[Tensor]) -> Quantizer:
    """bitsandbytes, tried on the devices of the parameters that are to be stepped.

    Raises:
        Unavailable: It can't be used, and why.
    """
    parameters = list(parameters)
    if any(isinstance(parameter, FakeTensor) for parameter in parameters):
        # Not imported: inside a simulation it would find a GPU that is not there, and make its tables of nothing.
        _check_version(_installed_version())
        return ShapesOnly()
    try:
        with _quietly():
            module = importlib.import_module("bitsandbytes")
            functional = importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        raise Unavailable(f"{_MISSING} ({_in_short(error)}); {_INSTALL}") from error
    except Exception as error:  # its native libraries fail in many ways
        raise Unavailable(f"{_MISSING} ({_in_short(error)})") from error
    _check_version(str(getattr(module, "__version__", "0")))
    quantizer = Bitsandbytes(functional)
    for device in {parameter.device for parameter in parameters if not parameter.is_meta}:
        quantizer.check(device)
    return quantizer


def why_unavailable() -> str | None:
    """Why bitsandbytes can't be used, as far as that is known without importing it; None if it may well be."""
    try:
        _check_version(_installed_version())
    except Unavailable as reason:
        return str(reason)
    return None


_MISSING = "bitsandbytes can't be imported"
_INSTALL = "pip install 'open-memscale[bnb]'"


def _installed_version() -> str:
    try:
        return importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError as error:
        raise Unavailable(f"bitsandbytes is not installed; {_INSTALL}") from error


def _check_version(version: str) -> None:
    if _numbers(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise Unavailable(f"bitsandbytes is {version}, and at least {oldest} is needed")


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the import's warning about kernels for 4-bit inference, which are not needed."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)


def _in_short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}"
