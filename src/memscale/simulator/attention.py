"""Attention as CUDA's fused kernels account it.

On CUDA ``scaled_dot_product_attention`` picks a kernel that never builds the score matrix: flash for 16 bits
without a mask, memory-efficient for the rest. Both are aten operations with shape rules and gradients of
their own, so that calling them on fake tensors shows what they allocate and what they keep for backward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch.nn import functional

from memscale._torch import efficient_attention_is_enabled, flash_attention_is_enabled
from memscale.simulator.patches import operators

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256
AMPERE = (8, 0)


def choose_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    capability: tuple[int, int],
) -> str:
    """The kernel that CUDA would take: "flash", "efficient" or "math"."""
    if query.dim() != 4:
        return "math"
    half, width = query.dtype in HALF, query.size(-1)
    square = query.size(-2) == key.size(-2)
    if (
        flash_attention_is_enabled()
        and half
        and capability >= AMPERE
        and mask is None
        and (square or not causal)
        and width == value.size(-1) <= FLASH_HEAD_DIM
    ):
        return "flash"
    grouped = query.size(-3) != key.size(-3)
    # Tensor cores read 16 bytes at a time; before Ampere they are not used for 32 bits.
    alignment = 8 if half else 4 if capability >= AMPERE else 1
    if (
        efficient_attention_is_enabled()
        and query.dtype is not torch.float64
        and (query.dtype is not torch.bfloat16 or capability >= AMPERE)
        and not grouped
        and width % alignment == 0
        and value.size(-1) % alignment == 0
    ):
        return "efficient"
    return "math"


def _expand_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The efficient kernel takes an additive mask whose rows are aligned to 16 elements."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    length = mask.size(-1)
    if length % 16:
        mask = functional.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    capability: tuple[int, int] = AMPERE,
) -> torch.Tensor:
    kernel = choose_kernel(query, key, value, attn_mask, is_causal, capability)
    if kernel == "flash":
        width = query.size(-1)
        if width % 8:
            scale = scale if scale is not None else 1 / math.sqrt(width)
            query, key, value = (functional.pad(each, (0, -width % 8)) for each in (query, key, value))
        flash: torch.Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return flash[..., :width] if flash.size(-1) != width else flash
    if enable_gqa and query.size(-3) != key.size(-3):
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if kernel == "math":
        math_out: torch.Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale
        )[0]
        return math_out
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    mask = None if attn_mask is None else _expand_mask(attn_mask, query, key)
    out: torch.Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale
    )[0]
    return out


@contextlib.contextmanager
def as_on_cuda(capability: tuple[int, int], dispatch_key: str = "AutogradPrivateUse1") -> Iterator[None]:
    """Inside the block the virtual device's attention takes CUDA's kernels."""

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        return fused_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            capability=capability,
        )

    with operators(dispatch_key) as implement:
        implement("scaled_dot_product_attention", kernel)
        yield
