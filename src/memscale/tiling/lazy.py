"""Logits that are not there until somebody asks for them.

Note [Lazy logits]
~~~~~~~~~~~~~~~~~~
A tiled head returns a tensor of the logits' shape, type and device that has no data: it knows the hidden states and
the head, and so could be computed at any time. Models do little with logits on their way to the loss: they cut off
the last token, make them float, flatten them. `memscale.tiling.follow` does all that to the hidden states instead;
and a loss that is known there (`memscale.tiling.losses`) is computed tile by tile from the hidden states.

*Whoever asks gets them.* Any operation that is not known gets the true logits, computed once, as the plain head
would have, with their history: to print, compare or index them, to change them in place, to send them elsewhere.
From then on everything that belongs to these logits is plain. What was derived from them before (a flat view, a
copy in float) is derived again from the true ones. Before a change in place all of that is made first, as views see
such a change and copies do not.

*Below Python.* An autograd function that is written for logits takes them without asking. So lazy logits have a
history of their own, and a gradient that arrives there goes on to the hidden states and the head.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from memscale.errors import RecomputeError
from memscale.recompute.inputs import version_of
from memscale.tiling.head import Head, Step

__all__ = ["LazyLogits", "Recipe", "follows", "lazy_logits", "looks"]

Function = Callable[..., Any]

_followed: dict[Function, Function] = {}
_looks: set[Function] = set()


def follows(*functions: Function) -> Callable[[Function], Function]:
    """Says what is called in place of a function of torch with lazy logits as its first argument.

    It gets the same arguments, and may return `NotImplemented`: then the function gets the true logits.
    """

    def register(follower: Function) -> Function:
        _followed.update(dict.fromkeys(functions, follower))
        return follower

    return register


def looks(functions: Iterable[Function]) -> None:
    """Says which functions of torch look at nothing but shape, type and the like."""
    _looks.update(functions)


@dataclass(frozen=True)
class Recipe:
    """How lazy logits are computed.

    Attributes:
        head: The linear map.
        steps: What is done to its output, token by token.
        vocabulary_dim: Where the vocabulary is among the dimensions.
    """

    head: Head
    steps: tuple[Step, ...] = ()
    vocabulary_dim: int = -1

    def cook(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        values = self.head.linear(hidden, weight, bias)
        for step in self.steps:
            values = step.run(values)
        return values.movedim(-1, self.vocabulary_dim)

    @property
    def dtype(self) -> torch.dtype:
        return self.steps[-1].dtype if self.steps else self.head.dtype


@dataclass
class _Family:
    """All that was derived from one call of the head, and whether the true logits are there."""

    members: list[weakref.ref[LazyLogits]] = field(default_factory=list)
    is_whole: bool = False


@dataclass(frozen=True)
class _Origin:
    """What lazy logits were derived from, and how; again with true logits, if it comes to that."""

    parent: LazyLogits
    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def whole(self) -> torch.Tensor:
        result: torch.Tensor = self.function(self.parent.whole(), *self.args, **self.kwargs)
        return result


class LazyLogits(torch.Tensor):
    """Stands in for logits. See Note [Lazy logits]; `lazy_logits` makes one."""

    hidden: torch.Tensor
    recipe: Recipe
    _version_of_hidden: int
    _family: _Family
    _origin: _Origin | None
    _true: torch.Tensor | None

    @property
    def is_whole(self) -> bool:
        """Whether the true logits have been asked for."""
        return self._family.is_whole

    def whole(self) -> torch.Tensor:
        """The true logits, with their history."""
        if self._true is None:
            # They may be needed with their history later, whoever asks for them first.
            with torch.inference_mode(False), torch.enable_grad():
                self._true = self._compute() if self._origin is None else self._origin.whole()
            self._family.is_whole = True
        return self._true

    def _compute(self) -> torch.Tensor:
        self.check()
        return self.recipe.head.whole(self.hidden)

    def check(self) -> None:
        """To be called before the hidden states are read.

        Raises:
            RecomputeError: They, or the head, have changed since the model was called.
        """
        self.recipe.head.check()
        if version_of(self.hidden) != self._version_of_hidden:
            raise RecomputeError(
                f"The input of a tiled head (shape {tuple(self.hidden.shape)}) was changed in place before its logits "
                "were used. Use the out-of-place form of that operation (x = x + y, not x += y), or switch tiling off "
                "(enable_tiling=False)."
            )

    def derive(
        self,
        function: Function,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        hidden: torch.Tensor | None = None,
        recipe: Recipe | None = None,
    ) -> LazyLogits:
        """What `function(logits, *args, **kwargs)` gives, as lazy as these."""
        self.check()
        origin = _Origin(self, function, tuple(args), kwargs or {})
        return _make(self.hidden if hidden is None else hidden, recipe or self.recipe, self._family, origin)

    # For those who look through wrappers, such as memory trackers: what is really there.

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["hidden"], self.recipe

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], recipe: Recipe, size: Any, stride: Any
    ) -> LazyLogits:
        return lazy_logits(inner["hidden"], recipe.head)

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and not first.is_whole:
            if func in _looks:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            follow = _followed.get(func)
            if follow is not None:
                result = follow(first, *args[1:], **kwargs)
                if result is not NotImplemented:
                    return result
        if _changes_in_place(func, kwargs):
            _before_a_change((args, kwargs))
        args, kwargs = tree_map(_true_one, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it on the instance
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map(_true_values, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def _true_one(leaf: Any) -> Any:
    return leaf.whole() if isinstance(leaf, LazyLogits) else leaf


def _true_values(leaf: Any) -> Any:
    return leaf.whole().detach() if isinstance(leaf, LazyLogits) else leaf


def _changes_in_place(function: Function, kwargs: dict[str, Any]) -> bool:
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") or name in ("__setitem__", "__set__", "__setstate__")
    return name.endswith("_") or kwargs.get("out") is not None


def _before_a_change(arguments: Any) -> None:
    """Make all that was derived from the logits, before one of them is changed."""

    def settle(leaf: Any) -> Any:
        if isinstance(leaf, LazyLogits):
            for reference in leaf._family.members:
                member = reference()
                if member is not None:
                    member.whole()
        return leaf

    tree_map(settle, arguments)


def lazy_logits(hidden: torch.Tensor, head: Head) -> LazyLogits:
    """What the head would make of the hidden states, without making it.

    Example:
        >>> head = Head(torch.ones(5, 2), None, torch.float32, rows=4)
        >>> logits = lazy_logits(torch.ones(3, 2, requires_grad=True), head)
        >>> logits.shape, logits.is_whole
        (torch.Size([3, 5]), False)
        >>> logits.tolist()[0], logits.is_whole
        ([2.0, 2.0, 2.0, 2.0, 2.0], True)
    """
    return _make(hidden, Recipe(head), _Family(), None)


def _make(hidden: torch.Tensor, recipe: Recipe, family: _Family, origin: _Origin | None) -> LazyLogits:
    # What it saves is what the lazy logits hold anyway: not for hooks that recompute or move tensors.
    with saved_tensors_hooks(_as_it_is, _as_it_is):
        made: LazyLogits = _Made.apply(hidden, recipe.head.weight, recipe.head.bias, recipe)  # type: ignore[no-untyped-call]
    made.hidden = hidden
    made.recipe = recipe
    made._version_of_hidden = version_of(hidden)
    made._family = family
    made._origin = origin
    made._true = None
    family.members.append(weakref.ref(made))
    return made


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Made(torch.autograd.Function):
    """The history of lazy logits, for a gradient that comes from below Python."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe
    ) -> torch.Tensor:
        ctx.recipe = recipe
        ctx.save_for_backward(hidden, weight, bias)
        tokens = list(hidden.shape[:-1])
        dim = recipe.vocabulary_dim % (len(tokens) + 1)
        shape = [*tokens[:dim], recipe.head.vocabulary, *tokens[dim:]]
        return torch.Tensor._make_wrapper_subclass(
            LazyLogits, shape, dtype=recipe.dtype, device=hidden.device
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = ctx.saved_tensors
        with torch.enable_grad(), ctx.recipe.head.borrow([each for each in inputs[1:] if each is not None]):
            leaves = [
                None if tensor is None else tensor.detach().requires_grad_(wanted)
                for tensor, wanted in zip(inputs, ctx.needs_input_grad, strict=False)
            ]
            values = ctx.recipe.cook(*leaves)
            wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            found = iter(torch.autograd.grad(values, wanted, gradient))
        return *(next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves), None
