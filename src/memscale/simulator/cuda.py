"""Make the virtual device behave as CUDA does: attention kernels, autocast, fused kernels, and the name "cuda".

Attention. On CUDA `scaled_dot_product_attention` chooses a kernel that never builds the score matrix. They are aten
operations with shape rules and gradients: calling them on fake tensors shows what they allocate and save for backward.

Autocast. torch has autocast rules for the devices it ships; for a device registered from Python autocast would silently
do nothing. The lists of operations are those of CUDA in torch 2.13 (`aten/src/ATen/autocast_mode.h`).

Fused kernels. torch decomposes some operations on a device it has no kernel for, which needs other memory.

Names. On a build of torch without CUDA, `model.to("cuda")` and `torch.autocast("cuda")` mean the virtual device, which
also answers `torch.cuda`. Tensors report `vgpu` as their device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from memscale._torch import (
    DispatchKey,
    DispatchKeySet,
    attribute,
    destroy_library,
    efficient_attention_is_enabled,
    exclude_dispatch_keys,
    flash_attention_is_enabled,
    tree_leaves,
    tree_map,
)
from memscale.simulator.device import NAME, VirtualGenerator, operators

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256
AMPERE = (8, 0)
# The efficient kernel takes keys and values of fewer heads (pytorch#191085): seen in 2.15, and not in 2.13.
EFFICIENT_TAKES_GROUPS = torch.__version__ >= "2.15"


def choose_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, capability: tuple[int, int]
) -> str:
    """Return the kernel that CUDA would choose: "flash", "efficient" or "math"."""
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
        and (EFFICIENT_TAKES_GROUPS or not grouped)
        and width % alignment == 0
        and value.size(-1) % alignment == 0
    ):
        return "efficient"
    return "math"


def _expand_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Make an additive mask with rows aligned to 16 elements, as the efficient kernel requires."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    length = mask.size(-1)
    if length % 16:
        mask = functional.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    capability: tuple[int, int] = AMPERE,
) -> Tensor:
    """Compute attention by the aten operations of CUDA's kernels."""
    kernel = choose_kernel(query, key, value, attn_mask, is_causal, capability)
    if kernel == "flash":
        width = query.size(-1)
        if width % 8:
            scale = scale if scale is not None else 1 / math.sqrt(width)
            query, key, value = (functional.pad(each, (0, -width % 8)) for each in (query, key, value))
        flash: Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return flash[..., :width] if flash.size(-1) != width else flash
    if kernel == "math" and enable_gqa and query.size(-3) != key.size(-3):
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if kernel == "math":
        math_out: Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale
        )[0]
        return math_out
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    mask = None if attn_mask is None else _expand_mask(attn_mask, query, key)
    out: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale
    )[0]
    return out


@contextlib.contextmanager
def cuda_attention(capability: tuple[int, int], dispatch_key: str = "AutogradPrivateUse1") -> Iterator[None]:
    """Let the virtual device's attention use CUDA's kernels inside the block."""
    with operators(dispatch_key) as implement:
        implement("scaled_dot_product_attention", partial(fused_attention, capability=capability))
        yield


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


def _castable(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.device.type == NAME
        and value.dtype is not torch.float64
    )


def _operator(name: str) -> Any | None:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, overload or "default", None) if packet is not None else None


def _cast(value: Any, dtype: torch.dtype, cache: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """Cast a tensor as autocast does; the copy of a weight is cached until the autocast block ends."""
    if not _castable(value) or value.dtype is dtype:
        return value
    is_weight = (
        dtype is not torch.float32
        and value.dtype is torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
    )
    if not is_weight or not torch.is_autocast_cache_enabled():
        return value.to(dtype)
    if id(value) not in cache:
        with torch.enable_grad():  # one that is made under `no_grad` serves where there is a gradient, too
            cache[id(value)] = (value, value.to(dtype))
    return cache[id(value)][1]


def _autocast_kernel(
    operator: Any, policy: str, cache: dict[int, tuple[Tensor, Tensor]]
) -> Callable[..., Any]:
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
            args, kwargs = tree_map(lambda leaf: _cast(leaf, dtype, cache), (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Let `torch.autocast("vgpu")` do what `torch.autocast("cuda")` does inside the block."""
    cache: dict[int, tuple[Tensor, Tensor]] = {}
    clear = torch.clear_autocast_cache
    rest = cast(Any, torch.library.Library)("_", "IMPL")

    def clear_both() -> None:
        cache.clear()
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
                    implement(operator, _autocast_kernel(operator, policy, cache))
            with attribute(torch, "clear_autocast_cache", clear_both):
                yield
    finally:
        cache.clear()
        destroy_library(rest)


# All operations for which torch 2.13 lists a kernel for CUDA and a composite one for other devices.
FUSED = ("silu_backward", "mish_backward", "_fused_rms_norm", "_fused_rms_norm_backward")


@contextlib.contextmanager
def cuda_fused_kernels() -> Iterator[None]:
    """Keep these operations from being decomposed on the virtual device inside the block."""

    def _never_called(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the virtual device's operations are intercepted before they reach a kernel")

    with operators("PrivateUse1") as implement:
        for name in FUSED:
            implement(name, _never_called)
        yield


# Functions of `torch.accelerator` that the virtual device answers; of `torch.cuda` all that it has by the same name.
ANSWERED_BY_ACCELERATOR = """
    synchronize empty_cache memory_allocated max_memory_allocated memory_reserved max_memory_reserved
    reset_peak_memory_stats memory_stats
"""


class _RenameDevice(TorchFunctionMode):
    """Replace "cuda" in the device argument of torch functions and tensor methods."""

    def __init__(self, target: torch.device) -> None:
        super().__init__()
        self._target = target

    def device(self, value: Any) -> Any:
        """Return the virtual device if `value` names a CUDA device, else `value`."""
        if isinstance(value, torch.device):
            return self._target if value.type == "cuda" else value
        if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
            return self._target
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            args = tuple(map(self.device, args))
        elif func is torch.Tensor.cuda:
            return args[0].to(self._target)
        if not kwargs:
            return func(*args)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self.device(kwargs["device"])}
        return func(*args, **kwargs)


@contextlib.contextmanager
def cuda_names(target: torch.device) -> Iterator[None]:
    """Let "cuda" mean `target` inside the block."""
    module = torch.get_device_module(target)
    rename = _RenameDevice(target)
    set_default_device = torch.set_default_device
    autocast = torch.amp.autocast_mode.autocast.__init__
    scaler = torch.amp.grad_scaler.GradScaler.__init__

    def autocast_init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, target.type if device_type == "cuda" else device_type, *args, **kwargs)

    def scaler_init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler(self, target.type if device == "cuda" else device, *args, **kwargs)

    def to_target(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
        return self.to(target)

    def answer(name: str) -> Any:
        # The compiler refuses one function under two names.
        return getattr(module, name) if name in ("Stream", "Event") else partial(getattr(module, name))

    public = [name for name in vars(type(module)) if not name.startswith("_")]
    patches: list[tuple[Any, str, Any]] = [
        (owner, name, answer(name))
        for owner, names in ((torch.cuda, public), (torch.accelerator, ANSWERED_BY_ACCELERATOR.split()))
        for name in names
        if hasattr(owner, name)
    ]
    patches += [
        (torch.amp.autocast_mode.autocast, "__init__", autocast_init),
        (torch.amp.grad_scaler.GradScaler, "__init__", scaler_init),
        (torch.nn.Module, "cuda", to_target),
        (torch, "Generator", VirtualGenerator),
        (torch, "set_default_device", lambda device: set_default_device(rename.device(device))),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(attribute(owner, name, value))
        stack.enter_context(rename)
        yield


@contextlib.contextmanager
def behaving_as_cuda(target: torch.device, capability: tuple[int, int]) -> Iterator[None]:
    """Let the virtual device behave as a CUDA device of this compute capability inside the block."""
    with cuda_attention(capability), cuda_autocast(), cuda_fused_kernels(), cuda_names(target):
        yield
