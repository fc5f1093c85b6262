"""The state of a parameter: in 32 bits while it is stepped, its moments in 8 bits otherwise."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from memscale._torch import is_traceable_wrapper_subclass
from memscale.optimizer.eight_bit.kinds import MOMENTS
from memscale.optimizer.eight_bit.quantizer import BLOCK, Quantizer
from memscale.optimizer.state import MovingState, Origins

__all__ = ["LEAST", "EightBitMoments", "Moment", "moment_bytes", "parameters_in_eight_bits"]

LEAST = 4096
"""Fewer elements than this stay in 32 bits, as in bitsandbytes: they are little memory, and often delicate."""


def parameters_in_eight_bits(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model whose moments are kept in 8 bits: see Note [Eight bits between steps].

    Example:
        >>> model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64))
        >>> [tuple(each.shape) for each in parameters_in_eight_bits(model)]
        [(64, 64)]
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
    return [
        parameter
        for parameter in model.parameters()
        if id(parameter) not in embeddings
        and parameter.numel() >= LEAST
        and parameter.dtype is torch.float32
        and parameter.layout is torch.strided
        and not is_traceable_wrapper_subclass(parameter)
    ]


def moment_bytes(elements: int) -> int:
    """Bytes of one moment of so many numbers: a code each, and the scale of each block.

    Example:
        >>> moment_bytes(1024 * 1024) / (1024 * 1024)
        1.015625
    """
    return elements + 4 * -(-elements // BLOCK)


class Moment(dict[str, Tensor]):
    """A state tensor in 8 bits, in the place of the tensor: its ``codes``, and the ``scales`` of its blocks.

    A dict, so that whoever moves an optimizer's tensors, also into a lower tier, finds them.
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, *, signed: bool, shape: torch.Size, stride: tuple[int, ...]
    ) -> None:
        super().__init__(codes=codes, scales=scales)
        self.signed = signed
        self.shape = shape
        self.stride = stride

    @classmethod
    def like(cls, tensor: Tensor, *, signed: bool) -> Moment:
        """One for a contiguous tensor of that shape, to be filled a part at a time."""
        elements = tensor.numel()
        codes = torch.empty(elements, dtype=torch.uint8, device=tensor.device)
        scales = torch.empty(-(-elements // BLOCK), device=tensor.device)
        return cls(codes, scales, signed=signed, shape=tensor.shape, stride=tensor.stride())

    def part(self, part: slice) -> tuple[Tensor, Tensor]:
        """Codes and scales of a part that begins where a block does."""
        stop = min(part.stop, self.shape.numel())
        return self["codes"][part.start : stop], self["scales"][part.start // BLOCK : -(-stop // BLOCK)]

    @property
    def nbytes_up(self) -> int:
        """Its bytes in 32 bits."""
        return 4 * self.shape.numel()


class EightBitMoments(MovingState):
    """Takes the moments of single parameters down to 8 bits, and up to 32 again.

    Args:
        quantizer: bitsandbytes.
        logger: told, once, if it fails in the middle of training.

    Attributes:
        has_failed: whether it has; then nothing is taken down any more.
    """

    def __init__(self, quantizer: Quantizer, logger: logging.Logger) -> None:
        super().__init__(_Beside())
        self._quantizer = quantizer
        self._logger = logger
        self.has_failed = False

    def bytes_of(self, state: Any, parameter: Tensor) -> int:
        """How much is up while this state is: its moments in 32 bits."""
        total = 0
        for name, value in _items(state):
            if isinstance(value, Moment):
                total += value.nbytes_up
            elif _goes_down(name, value, parameter):
                total += value.nbytes
        return total

    def up(self, state: Any, parameter: Tensor, origins: Origins) -> None:
        """Bring a parameter's moments to 32 bits, and note that they are about to be stepped."""
        origins[()] = parameter
        self.bring_back(state, parameter)

    def down(self, state: Any, parameter: Tensor, origins: Origins) -> None:
        """Take down what a step has left; what was not stepped is left as it is.

        If bitsandbytes fails now, state stays in 32 bits from here on.
        """
        if () not in origins or self.has_failed:
            return
        for name, value in _items(state):
            if not _goes_down(name, value, parameter):
                continue
            try:
                state[name] = self._taken_down(value, signed=MOMENTS[name])
            except Exception as error:
                self.has_failed = True
                self._logger.warning(
                    "Optimizer state stays in 32 bits from now on: bitsandbytes failed (%s: %s).",
                    type(error).__name__,
                    error,
                )
                return

    def part_up(self, moment: Moment, part: slice, beside: Tensor) -> Tensor:
        """Return a part of a moment in 32 bits, flat."""
        codes, scales = (each.to(beside.device) for each in moment.part(part))
        self.bytes_moved += codes.nbytes + scales.nbytes
        return self._quantizer.up(codes, scales, signed=moment.signed)

    def part_down(self, values: Tensor, part: slice, moment: Moment) -> None:
        """Take down a part into a moment."""
        for to, new in zip(
            moment.part(part), self._quantizer.down(values, signed=moment.signed), strict=True
        ):
            self.bytes_moved += new.nbytes
            to.copy_(new)

    def settle(self, state: Any, parameter: Tensor) -> None:
        """Leave what was not stepped as it is."""

    def bring_back(self, state: Any, parameter: Tensor) -> None:
        """Moments in 32 bits, beside their parameter, as ordinary tensors."""
        for name, value in _items(state):
            if isinstance(value, Moment):
                state[name] = self._brought_up(value, parameter)

    def copied(self, state: Any, parameter: Tensor) -> Any:
        """Return the state as it would be in 32 bits; the original stays as it is."""
        return self.ordinary(state, parameter, parameter.device)

    def ordinary(self, state: Any, parameter: Tensor, device: torch.device) -> Any:
        """Return the same, with what was in 8 bits on another device, one after the other."""
        if not any(isinstance(value, Moment) for _, value in _items(state)):
            return state
        return {
            name: self._brought_up(value, parameter).to(device) if isinstance(value, Moment) else value
            for name, value in _items(state)
        }

    def _taken_down(self, tensor: Tensor, *, signed: bool) -> Moment:
        stride = tensor.stride()
        if not _is_dense(tensor):
            tensor = tensor.contiguous()
            stride = tensor.stride()
        # In the order of memory, whatever the layout is (channels last, say).
        codes, scales = self._quantizer.down(tensor.as_strided((tensor.numel(),), (1,)), signed=signed)
        self.bytes_moved += codes.nbytes + scales.nbytes
        return Moment(codes, scales, signed=signed, shape=tensor.shape, stride=stride)

    def _brought_up(self, moment: Moment, parameter: Tensor) -> Tensor:
        # Beside the parameter, where it is known to work, wherever the codes have waited.
        codes, scales = (moment[name].to(parameter.device) for name in ("codes", "scales"))
        numbers = self._quantizer.up(codes, scales, signed=moment.signed)
        self.bytes_moved += codes.nbytes + scales.nbytes
        return numbers.as_strided(moment.shape, moment.stride)


class _Beside:
    """The place of 8-bit moments: beside their parameters, unless someone else moves them."""

    def down(self, tensor: Tensor) -> Tensor:
        return tensor

    def up(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        return tensor

    def new(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def reserve(self, like: Tensor, parameter: Tensor) -> Tensor | None:
        return None

    def fill(self, home: Tensor, values: Tensor) -> None:
        home.copy_(values)

    def rest(self, tensor: Tensor) -> None:
        pass


def _items(state: Any) -> list[tuple[Any, Any]]:
    return list(state.items()) if isinstance(state, dict) else []


def _goes_down(name: Any, value: Any, parameter: Tensor) -> bool:
    return (
        name in MOMENTS
        and isinstance(value, Tensor)
        and value.dtype is torch.float32
        and value.layout is torch.strided
        and value.shape == parameter.shape
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill their memory without gaps, from its beginning, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.storage_offset() == 0
