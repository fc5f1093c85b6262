"""CUDA-only operations, and those that round otherwise there, computed on the CPU for the executing device.

Each returns tensors of exactly the shapes and layouts of the CUDA operation (by torch's shape rules for meta tensors),
so that the executing device and the simulator account for the same bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from memscale._torch import FOREACH_MUL, foreach_mul_, with_autograd_below_dispatch
from memscale.simulator.fake import gru_cell, gru_cell_backward

aten = torch.ops.aten

# Backward draws a dropout mask again from the random state that forward began with. The operation only passes an 8-byte
# seed, so the state is kept here under that number; old ones are dropped.
_random_states: OrderedDict[int, torch.Tensor] = OrderedDict()
_MAX_STATES = 4096
_next_state = 0


def forget_random_states() -> None:
    _random_states.clear()


def _remember_random_state() -> int:
    global _next_state
    _next_state += 1
    _random_states[_next_state] = torch.get_rng_state()
    if len(_random_states) > _MAX_STATES:
        _random_states.popitem(last=False)
    return _next_state


def _like_cuda(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the operation's outputs with CUDA's shapes and strides, uninitialised."""
    meta = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in args]
    shapes = func(*meta, **kwargs)
    return tuple(
        torch.empty_strided(each.size(), each.stride(), dtype=each.dtype)
        if isinstance(each, torch.Tensor)
        else each
        for each in shapes
    )


def _attend(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    # The CPU's own attention, for the numbers of a CPU run, whichever kernels the user allows on the device.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        return functional.scaled_dot_product_attention(query, key, value, bias, dropout, causal, scale=scale)


def _attention_gradients(
    gradient: torch.Tensor,
    inputs: tuple[torch.Tensor | None, ...],
    wanted: tuple[bool, ...],
    dropout: float,
    causal: bool,
    scale: float | None,
    state: int,
) -> list[torch.Tensor | None]:
    now = torch.get_rng_state()
    if dropout > 0:
        torch.set_rng_state(_random_states[state])
    try:
        with torch.enable_grad(), with_autograd_below_dispatch():
            leaves = [
                None if each is None else each.detach().requires_grad_(want)
                for each, want in zip(inputs, wanted, strict=True)
            ]
            query, key, value, bias = leaves
            out = _attend(query, key, value, bias, dropout, causal, scale)
            asked = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want and leaf is not None]
            found = iter(torch.autograd.grad(out, asked, gradient))
        return [
            next(found) if want and leaf is not None else None
            for leaf, want in zip(leaves, wanted, strict=True)
        ]
    finally:
        torch.set_rng_state(now)


def _fill(targets: tuple[Any, ...], values: list[torch.Tensor | None]) -> None:
    for target, value in zip(targets, values, strict=False):
        if isinstance(target, torch.Tensor) and value is not None and target.numel():
            target.copy_(value)


def efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    func = aten._scaled_dot_product_efficient_attention.default
    shapes = _like_cuda(func, query, key, value, bias, compute_log_sumexp, dropout, causal, scale=scale)
    state = _remember_random_state() if dropout > 0 else 0
    shapes[0].copy_(_attend(query, key, value, bias, dropout, causal, scale))
    shapes[2].fill_(state)
    return tuple(shapes)


def efficient_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    dropout: float,
    wanted: list[bool],
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    func = aten._scaled_dot_product_efficient_attention_backward.default
    args = (gradient, query, key, value, bias, out, logsumexp, seed, offset, dropout, wanted, causal)
    shapes = _like_cuda(func, *args, scale=scale)
    want_bias = bool(wanted[3]) and bias is not None
    gradients = _attention_gradients(
        gradient, (query, key, value, bias), (True, True, True, want_bias), dropout, causal, scale, int(seed)
    )
    _fill(shapes, gradients)
    return tuple(shapes)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    func = aten._scaled_dot_product_flash_attention.default
    shapes = _like_cuda(func, query, key, value, dropout, causal, return_debug_mask, scale=scale)
    state = _remember_random_state() if dropout > 0 else 0
    key, value = _ungroup(query, key, value)
    shapes[0].copy_(_attend(query, key, value, None, dropout, causal, scale))
    shapes[6].fill_(state)
    return tuple(shapes)


def flash_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: Any,
    max_k: Any,
    dropout: float,
    causal: bool,
    seed: torch.Tensor,
    offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    func = aten._scaled_dot_product_flash_attention_backward.default
    args = (gradient, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k)
    shapes = _like_cuda(func, *args, dropout, causal, seed, offset, scale=scale)
    full = _ungroup(query, key, value)
    wanted = (True, True, True, False)
    state = int(seed.flatten()[0])
    gradients = _attention_gradients(gradient, (query, *full, None), wanted, dropout, causal, scale, state)
    for index, original in ((1, key), (2, value)):
        whole = gradients[index]
        if whole is not None and whole.shape != original.shape:
            heads = original.size(1)
            grouped = whole.reshape(whole.size(0), heads, -1, *whole.shape[2:])
            gradients[index] = grouped.sum(2)
    _fill(shapes, gradients)
    return tuple(shapes)


def _ungroup(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = query.size(1) // key.size(1)
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    enter, forget, new, show = gates.chunk(4, 1)
    workspace = torch.cat([enter.sigmoid(), forget.sigmoid(), new.tanh(), show.sigmoid()], 1)
    enter, forget, new, show = workspace.chunk(4, 1)
    next_cell = forget * cell + enter * new
    return show * next_cell.tanh(), next_cell, workspace


def lstm_cell_backward(
    grad_hidden: torch.Tensor | None,
    grad_cell: torch.Tensor | None,
    cell: torch.Tensor,
    next_cell: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    enter, forget, new, show = workspace.chunk(4, 1)
    hidden = torch.zeros_like(next_cell) if grad_hidden is None else grad_hidden
    squashed = next_cell.tanh()
    through = hidden * show * (1 - squashed * squashed)
    if grad_cell is not None:
        through = through + grad_cell
    gates = torch.cat(
        [
            through * new * enter * (1 - enter),
            through * cell * forget * (1 - forget),
            through * enter * (1 - new * new),
            hidden * squashed * show * (1 - show),
        ],
        1,
    )
    return gates, through * forget, gates.sum(0) if has_bias else None


def rms_norm_backward(
    gradient: torch.Tensor,
    values: torch.Tensor,
    normalized_shape: list[int],
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    wanted: list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    inner = list(range(-len(normalized_shape), 0))
    outer = list(range(values.dim() - len(normalized_shape)))
    normal = values * scale
    weighted = gradient if weight is None else gradient * weight
    found = (weighted - normal * (weighted * normal).mean(inner, keepdim=True)) * scale
    of_weight = (gradient * normal).sum(outer) if outer else gradient * normal
    return (
        found.to(values.dtype) if wanted[0] else None,
        of_weight.to(weight.dtype) if wanted[1] and weight is not None else None,
    )


CPU_KERNELS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_efficient_attention.default: efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_attention_backward,
    aten._scaled_dot_product_flash_attention.default: flash_attention,
    aten._scaled_dot_product_flash_attention_backward.default: flash_attention_backward,
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
    aten._fused_rms_norm_backward.default: rms_norm_backward,
    **dict.fromkeys(FOREACH_MUL, foreach_mul_),
}
