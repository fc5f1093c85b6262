"""Context managers that patch torch inside a block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from memscale._torch import destroy_library, foreach_type_lists


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` inside the block."""
    inherited = name not in vars(owner)
    before = None if inherited else vars(owner)[name]  # not by getattr: a staticmethod stays one
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def operators(key: str) -> Iterator[Callable[[Any, Callable[..., Any]], None]]:
    """Provide a function that implements an aten operator for a dispatch key inside the block."""
    library = cast(Any, torch.library.Library)("aten", "IMPL")
    try:
        yield lambda operator, kernel: library.impl(operator, kernel, key)
    finally:
        destroy_library(library)


@contextlib.contextmanager
def foreach_by_default(kind: type[torch.Tensor]) -> Iterator[None]:
    """Let optimizers use `foreach` for this class of tensors inside the block, as they do for CUDA tensors."""
    lists = foreach_type_lists
    for kinds in lists:
        kinds.append(kind)
    try:
        yield
    finally:
        for kinds in lists:
            kinds.remove(kind)


@contextlib.contextmanager
def swap_on_conversion() -> Iterator[None]:
    """Let `module.to(device)` swap whole tensors inside the block: the data of virtual ones can't be exchanged.

    The hooks on a parameter's gradient stay with it, as on CUDA, where only its data is exchanged.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    swap: Any = torch.utils.swap_tensors

    def swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
        if isinstance(first, nn.Parameter) and isinstance(second, nn.Parameter):
            second._backward_hooks = first._backward_hooks
            second._post_accumulate_grad_hooks = first._post_accumulate_grad_hooks
        swap(first, second)

    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with attribute(torch.utils, "swap_tensors", swap_tensors):
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def transformers_masks() -> contextlib.AbstractContextManager[None]:
    """Keep transformers from building attention masks inside the block that a real step would not have.

    It takes fake tensors for a tracer's, for which it builds masks that it omits otherwise.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None or not hasattr(masking, "is_tracing"):
        return contextlib.nullcontext()
    return attribute(masking, "is_tracing", lambda *args, **kwargs: False)
