"""What a batch says: the few values of a real batch that decide what a model computes.

A padding mask decides whether an attention mask is built, and with it which kernel runs and what is kept for
backward. So a fake batch remembers the integers of the real one, and the operations by which code asks about a
mask (is all of it set? are its values equal to this?) are answered from them. Weights and activations are never
looked at.
"""

from __future__ import annotations

from typing import Any

import torch

from memscale._torch import FakeTensor, disable_current_modes

asked = 0  # how often code has been told a value of a batch, in this process
LARGEST = 1 << 20  # elements; a larger tensor is no mask
FOLLOWED = {
    "_to_copy",
    "detach",
    "alias",
    "view",
    "slice",
    "all",
    "any",
    "sum",
    "eq",
    "ne",
    "logical_not",
    "bitwise_not",
}


def remember(twin: torch.Tensor, real: torch.Tensor) -> None:
    """Let a fake tensor of a batch know the values of the real one."""
    has_values = type(real) is torch.Tensor and not real.is_meta and not isinstance(real, FakeTensor)
    if has_values and not real.is_floating_point() and not real.is_complex() and real.numel() <= LARGEST:
        twin._memscale_known = real  # type: ignore[attr-defined]


def follow(result: Any, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    """Work out the values of a result, if those of its operand are known."""
    operand = args[0] if args else None
    known = getattr(operand, "_memscale_known", None)
    if known is None:
        return
    if name.endswith("_"):
        operand._memscale_known = None  # type: ignore[union-attr]  # changed in place, to what is not known
    if name not in FOLLOWED or any(isinstance(each, torch.Tensor) for each in args[1:]):
        return
    options = {key: value for key, value in (kwargs or {}).items() if key == "dtype"}
    with disable_current_modes():
        values = known.to(**options) if name == "_to_copy" else func(known, *args[1:], **options)
        result._memscale_known = values
        if values.numel() == 1:
            result._memscale_value = values.item()
