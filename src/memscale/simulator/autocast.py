"""Autocast on the virtual device, with CUDA's lists of operations.

torch has autocast rules for each device it ships; a device registered from Python has none, and autocast
would silently do nothing. The lists are those of CUDA in torch 2.13 (`aten/src/ATen/autocast_mode.h`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from memscale._torch import DispatchKey, DispatchKeySet, exclude_dispatch_keys, tree_leaves, tree_map
from memscale.simulator.backend import NAME
from memscale.simulator.patches import attribute, operators

KEY = "AutocastPrivateUse1"

LOWER_PRECISION = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution prelu
    addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm linalg_multi_dot
    scaled_dot_product_attention
"""
FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm nll_loss nll_loss2d
    nll_loss_nd cross_entropy_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss soft_margin_loss
    binary_cross_entropy_with_logits cosine_similarity cosine_embedding_loss margin_ranking_loss
    hinge_embedding_loss triplet_margin_loss multi_margin_loss poisson_nll_loss logsumexp norm.Scalar
    norm.ScalarOpt_dim dist pdist cdist renorm
"""
FLOAT32_BY_DTYPE_ARGUMENT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm sum sum.dim_IntList
"""
WIDEST_INPUT = """
    addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add vdot cat stack
"""


class _Casts:
    """The casts of one block, with autocast's cache of weights."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        self.cache.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not _castable(value) or value.dtype is dtype:
            return value
        weight = (
            dtype is not torch.float32
            and value.dtype is torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
        )
        if not weight or not torch.is_autocast_cache_enabled():
            return value.to(dtype)
        if id(value) not in self.cache:
            self.cache[id(value)] = (value, value.to(dtype))
        return self.cache[id(value)][1]


def _castable(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.device.type == NAME
        and value.dtype is not torch.float64
    )


def _operator(name: str) -> Any | None:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, overload or "default", None) if packet is not None else None


def _kernel(operator: Any, policy: str, casts: _Casts) -> Callable[..., Any]:
    takes_dtype = any(argument.name == "dtype" for argument in operator._schema.arguments)
    off = DispatchKeySet(getattr(DispatchKey, KEY))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with exclude_dispatch_keys(off):
            if policy == "by dtype argument":
                if takes_dtype and kwargs.get("dtype") is None and any(map(_castable, args)):
                    kwargs = {**kwargs, "dtype": torch.float32}
                return operator(*args, **kwargs)
            if policy == "lower":
                dtype = torch.get_autocast_dtype(NAME)
            elif policy == "float32":
                dtype = torch.float32
            else:
                present = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if _castable(leaf)}
                dtype = torch.float32 if torch.float32 in present or not present else present.pop()
            args, kwargs = tree_map(lambda leaf: casts.cast(leaf, dtype), (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Inside the block ``torch.autocast("vgpu")`` does what ``torch.autocast("cuda")`` does."""
    casts = _Casts()
    clear = torch.clear_autocast_cache
    rest = cast(Any, torch.library.Library)("_", "IMPL")

    def clear_both() -> None:
        casts.clear()
        clear()

    try:
        rest.fallback(torch.library.fallthrough_kernel, KEY)
        with operators(KEY) as implement:
            for names, policy in (
                (LOWER_PRECISION, "lower"),
                (FLOAT32, "float32"),
                (FLOAT32_BY_DTYPE_ARGUMENT, "by dtype argument"),
                (WIDEST_INPUT, "widest"),
            ):
                for operator in filter(None, map(_operator, names.split())):
                    implement(operator, _kernel(operator, policy, casts))
            with attribute(torch, "clear_autocast_cache", clear_both):
                yield
    finally:
        casts.clear()
        rest._destroy()
