"""Optimizer state in 8 bits between steps, under the user's own optimizer.

Note [Eight bits between steps]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An optimizer's moments are in 8 bits only while it does not step. In a step they are dequantized, a bucket of
parameters at a time, the optimizer's own arithmetic runs, and its results are quantized again (by `bitsandbytes`, in
blocks of 256 numbers with a scale each). So all settings are the user's own. Two moments take 2.03 bytes a parameter
instead of 8.

A number is rounded only after it went through a step. State that was loaded, or was there before, is used as it is;
`state_dict` gives the 32-bit numbers that the next step would begin with. So a run that is saved and resumed goes on
as if it had not been, and any optimizer of that class can load the file.

In 32 bits stay: parameters with fewer than 4,096 elements, as in `bitsandbytes`; and the weights of embeddings (and
heads tied to them), whose gradients are zero but for the rows of a batch, so that the numbers of one block differ by
orders of magnitude. With these GPT-2 XL has 2.35 bytes a parameter, GPT-2 small 3.9.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memscale._torch import FakeTensor, is_traceable_wrapper_subclass
from memscale.optimizer.interceptor import MOMENTS

LEAST_ELEMENTS = 4096
"""Smaller parameters stay in 32 bits, as in bitsandbytes: they are little memory, and often delicate."""

BLOCK = 256
"""How many numbers share a scale, as in bitsandbytes' optimizers."""

_ZERO = 127  # its code, in the map of numbers with a sign
OLDEST = (0, 49)  # before it, the CPU had no such kernels


def parameters_in_eight_bits(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model whose moments are kept in 8 bits: see Note [Eight bits between steps]."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
    return [
        parameter
        for parameter in model.parameters()
        if id(parameter) not in embeddings
        and parameter.numel() >= LEAST_ELEMENTS
        and parameter.dtype is torch.float32
        and parameter.layout is torch.strided
        and not is_traceable_wrapper_subclass(parameter)
    ]


def moment_bytes(elements: int) -> int:
    """Return the bytes of one moment of so many numbers: a code each, and the scale of each block."""
    return elements + 4 * -(-elements // BLOCK)


class Moment(dict[str, Tensor]):
    """A state tensor in 8 bits, in the place of the tensor: its ``codes``, and the ``scales`` of its blocks.

    It is a dict so that whatever moves an optimizer's tensors finds them.
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, *, signed: bool, shape: torch.Size, stride: tuple[int, ...]
    ) -> None:
        super().__init__(codes=codes, scales=scales)
        self.signed = signed
        self.shape = shape
        self.stride = stride

    def copied(self) -> Moment:
        """Return another of the same tensors."""
        return Moment(**self, signed=self.signed, shape=self.shape, stride=self.stride)


def stored_layout(name: str, like: Tensor, *, quantized: bool) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield what a new state tensor is after its step: where in the parameter's state, and a tensor as large."""
    if quantized and name in MOMENTS:
        elements = like.numel()
        yield (name, "codes"), torch.empty(elements, dtype=torch.uint8, device="meta")
        yield (name, "scales"), torch.empty(-(-elements // BLOCK), device="meta")
    else:
        yield (name,), like


def is_moment(name: Any, value: Any, parameter: Tensor) -> bool:
    """Return whether an entry of a parameter's state is a moment in 32 bits that can be quantized."""
    return (
        name in MOMENTS
        and isinstance(value, Tensor)
        and value.dtype is torch.float32
        and value.layout is torch.strided
        and value.shape == parameter.shape
    )


class EightBitState:
    """Quantizes and dequantizes the moments of some parameters."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], quantizer: Bitsandbytes, logger: logging.Logger
    ) -> None:
        # Not weakly: torch.utils.swap_tensors refuses parameters that are referred to weakly.
        self.parameters = {id(each): each for each in parameters}
        self.has_failed = False  # in the middle of training: then nothing is quantized any more
        self._quantizer = quantizer
        self._logger = logger

    def quantize(self, state: Any, parameter: Tensor) -> None:
        """Quantize the moments that a step has left in a parameter's state; if that fails, stop for good."""
        for name, value in list((state or {}).items()):
            if self.has_failed or not is_moment(name, value, parameter):
                continue
            try:
                state[name] = self._quantized(value, signed=MOMENTS[name])
            except Exception as error:
                self.has_failed = True
                self._logger.warning(
                    "Optimizer state stays in 32 bits from now on: bitsandbytes failed (%s: %s).",
                    type(error).__name__,
                    error,
                )

    def dequantize(self, state: Any, parameter: Tensor, device: torch.device | None = None) -> None:
        """Make the moments in a parameter's state ordinary tensors on a device, by default the parameter's."""
        for name, value in list((state or {}).items()):
            if isinstance(value, Moment):
                # On the parameter's device, where the quantizer was tried, wherever the codes are kept.
                codes, scales = (value[part].to(parameter.device) for part in ("codes", "scales"))
                numbers = self._quantizer.dequantize(codes, scales, signed=value.signed)
                state[name] = numbers.as_strided(value.shape, value.stride).to(device or parameter.device)

    def _quantized(self, tensor: Tensor, *, signed: bool) -> Moment:
        if not is_dense(tensor):
            tensor = tensor.contiguous()
        # In the order of memory, whatever the layout is (channels last, say).
        codes, scales = self._quantizer.quantize(tensor.as_strided((tensor.numel(),), (1,)), signed=signed)
        return Moment(codes, scales, signed=signed, shape=tensor.shape, stride=tensor.stride())


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory without gaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class Unavailable(Exception):
    """bitsandbytes is missing, too old, or does not work on a device."""


class Bitsandbytes:
    """Converts flat 32-bit tensors to 8-bit codes and back, by the kernels of bitsandbytes.

    Without the module ``bitsandbytes.functional`` it makes tensors of the same shapes, for a simulation.
    """

    def __init__(self, functional: Any) -> None:
        self._functional = functional
        self._maps: dict[tuple[bool, torch.device], Tensor] = {}

    def quantize(self, tensor: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
        """Return the codes, one byte a number, and the scale of each block."""
        if self._functional is None:
            scales = torch.empty(-(-tensor.numel() // BLOCK), device=tensor.device)
            return torch.empty_like(tensor, dtype=torch.uint8), scales
        codes, scales = torch.ops.bitsandbytes.quantize_blockwise(tensor, self._map(tensor, signed), BLOCK)
        if signed:
            # On the CPU it takes zero for the next small number, and a weight without gradient would drift by it.
            codes.masked_fill_(tensor == 0, _ZERO)
        return codes, scales

    def dequantize(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        """Return the numbers in 32 bits."""
        if self._functional is None:
            return torch.empty_like(codes, dtype=torch.float32)
        numbers: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
            codes, scales, self._map(codes, signed), BLOCK, torch.float32
        )
        return numbers

    def check(self, device: torch.device) -> None:
        """Raise `Unavailable` if the kernels do not work on a device."""
        numbers = torch.linspace(-1, 1, 2 * BLOCK, device=device)
        try:
            again = self.dequantize(*self.quantize(numbers, signed=True), signed=True)
            is_right = float((again - numbers).abs().max()) < 0.02 and not self._map(numbers, True)[_ZERO]
        except Exception as error:
            raise Unavailable(f"bitsandbytes does not run on {device} ({_in_short(error)})") from error
        if not is_right:
            raise Unavailable(f"bitsandbytes computes wrong numbers on {device}")

    def _map(self, beside: Tensor, signed: bool) -> Tensor:
        """Return the number that each code stands for: fine near zero, coarse near the largest."""
        key = (signed, beside.device)
        if key not in self._maps:
            self._maps[key] = self._functional.create_dynamic_map(signed=signed).to(beside.device)
        return self._maps[key]


def find_quantizer(parameters: Sequence[Tensor]) -> Bitsandbytes:
    """Return a quantizer that was tried on the devices of the parameters, or raise `Unavailable` with the reason."""
    _check_version()
    if any(isinstance(parameter, FakeTensor) for parameter in parameters):
        # Not imported: inside a simulation it would find a GPU that is not there, and make its tables of nothing.
        return Bitsandbytes(None)
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)  # at import it warns of missing kernels for 4-bit inference
    try:
        functional = importlib.import_module("bitsandbytes.functional")
    except Exception as error:  # its native libraries fail in many ways
        advice = f"; {_INSTALL}" if isinstance(error, ImportError) else ""
        raise Unavailable(f"bitsandbytes can't be imported ({_in_short(error)}){advice}") from error
    finally:
        logger.setLevel(level)
    quantizer = Bitsandbytes(functional)
    for device in {parameter.device for parameter in parameters if not parameter.is_meta}:
        quantizer.check(device)
    return quantizer


_INSTALL = "pip install bitsandbytes"


def _check_version() -> None:
    try:
        version = importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError as error:
        raise Unavailable(f"bitsandbytes is not installed; {_INSTALL}") from error
    if tuple(int(part) if part.isdecimal() else 0 for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise Unavailable(f"bitsandbytes is {version}, and at least {oldest} is needed")


def _in_short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}"
