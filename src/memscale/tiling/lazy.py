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

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from memscale._torch import make_wrapper_subclass
from memscale.checkpointing.inputs import version_of
from memscale.errors import RecomputeError
from memscale.tiling.first_order import first_order_only
from memscale.tiling.head import Head, Step
from memscale.tiling.lazy_tensor import Function, LazyTensor

__all__ = ["LazyLogits", "Recipe", "lazy_logits"]


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


class LazyLogits(LazyTensor):
    """Stands in for logits. See Note [Lazy logits]; `lazy_logits` makes one."""

    followed: ClassVar[dict[Function, tuple[Function, inspect.Signature]]] = {}

    hidden: torch.Tensor
    recipe: Recipe
    _version_of_hidden: int
    _family: _Family
    _origin: _Origin | None

    @property
    def is_whole(self) -> bool:
        """Whether the true logits have been asked for."""
        return self._family.is_whole

    def compute(self) -> torch.Tensor:
        self._family.is_whole = True
        if self._origin is not None:
            return self._origin.whole()
        self.check()
        return self.recipe.head.whole(self.hidden)

    def before_a_change(self) -> None:
        for reference in self._family.members:
            member = reference()
            if member is not None:
                member.whole()

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
        ctx.set_materialize_grads(False)
        ctx.recipe = recipe
        ctx.save_for_backward(hidden, weight, bias)
        tokens = list(hidden.shape[:-1])
        dim = recipe.vocabulary_dim % (len(tokens) + 1)
        shape = [*tokens[:dim], recipe.head.vocabulary, *tokens[dim:]]
        logits: torch.Tensor = make_wrapper_subclass(
            LazyLogits, shape, dtype=recipe.dtype, device=hidden.device
        )
        return logits

    @staticmethod
    @first_order_only
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
