"""Tensors without data, which could be computed at any time and are when somebody asks.

What a tensor like this stays lazy under is registered by `follows`: a function that is called in place of one of
torch's. Everything else gets the true tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from memscale._torch import tree_leaves, tree_map, without_torch_function

__all__ = ["Function", "LazyTensor", "follows"]

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)

# What can be asked without data.
_PROPERTIES = """
    shape dtype device layout ndim requires_grad is_leaf grad_fn nbytes itemsize is_cuda is_cpu is_meta is_nested
    is_sparse is_sparse_csr is_quantized is_mkldnn is_mps is_xla is_xpu is_vgpu output_nr _version retains_grad
    _backward_hooks
"""
_METHODS = """
    size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex is_inference
    is_signed is_same_size get_device _is_view __len__ __hash__
"""

_looks: set[Function] = {
    getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split() if hasattr(torch.Tensor, name)
}
_looks.update(
    getattr(owner, name)
    for name in _METHODS.split()
    for owner in (torch.Tensor, torch)
    if hasattr(owner, name)
)


_COMMUTATIVE = {
    torch.add,
    torch.Tensor.add,
    torch.Tensor.__add__,
    torch.mul,
    torch.Tensor.mul,
    torch.Tensor.__mul__,
}


def follows(kind: type[LazyTensor], *functions: Function) -> Callable[[F], F]:
    """Says what is called in place of functions of torch with a tensor of some kind as their first argument.

    It gets the same arguments, and may return `NotImplemented`, or not take them at all: then the function gets the
    true tensor.
    """

    def register(follower: F) -> F:
        kind.followed.update(dict.fromkeys(functions, (follower, inspect.signature(follower))))
        return follower

    return register


class LazyTensor(torch.Tensor):
    """Stands in for a tensor. A subclass says how that is computed, and has a dictionary `followed` of its own."""

    followed: ClassVar[dict[Function, tuple[Function, inspect.Signature]]]
    is_computed_later: ClassVar[bool] = True  # for whoever looks at tensors, and must not ask for this one
    _true: torch.Tensor | None

    @property
    def is_whole(self) -> bool:
        """Whether the true tensor has been asked for."""
        return self._true is not None

    def whole(self) -> torch.Tensor:
        """The true tensor, with its history."""
        if self._true is None:
            # It may be needed with its history later, whoever asks for it first.
            with torch.inference_mode(False), torch.enable_grad():
                self._true = self.compute()
        return self._true

    def compute(self) -> torch.Tensor:
        """The true tensor, as the functions that it stands for would have made it."""
        raise NotImplementedError

    def before_a_change(self) -> None:
        """It will be changed in place: make what must not see that, or must."""
        self.whole()

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _COMMUTATIVE and len(args) == 2 and isinstance(args[1], LazyTensor):
            args = args if isinstance(args[0], LazyTensor) else (args[1], args[0])
        first = args[0] if args else None
        if isinstance(first, LazyTensor) and not first.is_whole:
            if func in _looks:
                with without_torch_function():
                    return func(*args, **kwargs)
            follower, signature = type(first).followed.get(func, (None, None))
            if follower is not None and signature is not None and _takes(signature, args, kwargs):
                result = follower(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        if _changes_in_place(func, kwargs):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, LazyTensor):
                    leaf.before_a_change()
        args, kwargs = tree_map(_true_one, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it on the instance
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with without_torch_function():
            args, kwargs = tree_map(_true_values, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def _takes(signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _true_one(leaf: Any) -> Any:
    return leaf.whole() if isinstance(leaf, LazyTensor) else leaf


def _true_values(leaf: Any) -> Any:
    return leaf.whole().detach() if isinstance(leaf, LazyTensor) else leaf


def _changes_in_place(function: Function, kwargs: dict[str, Any]) -> bool:
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") or name in ("__setitem__", "__set__", "__setstate__")
    return name.endswith("_") or kwargs.get("out") is not None
