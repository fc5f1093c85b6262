"""Changes to torch that hold for one block only, undone in reverse order."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from memscale._torch import foreach_type_lists


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside the block."""
    inherited = name not in vars(owner)
    before = None if inherited else vars(owner)[name]  # as it is: a staticmethod stays one
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
    """Yield a function that implements an aten operator for a dispatch key inside the block.

    Private torch API: ``Library._destroy`` (tried on torch 2.13). Without it an implementation would stay
    until the garbage collector finds the library.
    """
    library = cast(Any, torch.library.Library)("aten", "IMPL")
    try:
        yield lambda operator, kernel: library.impl(operator, kernel, key)
    finally:
        library._destroy()


@contextlib.contextmanager
def foreach_by_default(kind: type[torch.Tensor]) -> Iterator[None]:
    """Optimizers take their ``foreach`` path for this kind of tensor, as they do for CUDA tensors."""
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
    """``module.to(device)`` exchanges tensors as a whole: ours can't exchange only their data.

    The hooks on a parameter's gradient stay with it, as they do on CUDA, where its data alone is exchanged.
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
    """Return transformers builds attention masks for a tracer that it would leave out on a real device.

    A fake tensor looks like a tracer to it; the masks would cost memory that a real step does not need.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None or not hasattr(masking, "is_tracing"):
        return contextlib.nullcontext()
    return attribute(masking, "is_tracing", lambda *args, **kwargs: False)
