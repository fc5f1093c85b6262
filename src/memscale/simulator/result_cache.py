"""A cache of what operations return for fake tensors.

Note [Cached results]
~~~~~~~~~~~~~~~~~~~~~
A step of a transformer runs the same few hundred operations on the same few shapes, layer by layer. torch's fake mode
has a cache too, but its lookup takes over 100 microseconds; here it is some 20.

A result is cached only if it follows from the key: the operation, its arguments (tensors by their description, all else
by type and value), and torch's defaults. So it is one of

- an argument itself (an operation in place),
- a view of the only tensor among the arguments,
- a new tensor, with memory that no argument has,
- None, or a number;

or several of them. What torch marks as depending on data, or as changing a tensor's shape in place, is never cached;
neither is anything that is not described below: constants, sparse tensors, generators. And a cached tensor is created
once on trial: it must have the same description, dispatch keys included, as the one that torch created.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from memscale._torch import (
    FakeTensor,
    FakeTensorMode,
    default_device,
    dispatch_keys_of,
    make_subclass,
    throw_on_data_pointer,
    warn_on_data_pointer,
)

__all__ = ["NOT_CACHED", "CachingFakeMode"]

NOT_CACHED = object()

_META = torch.device("meta")
_BY_VALUE = frozenset(
    {int, float, bool, complex, str, type(None)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_NEVER_CACHED = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}
_MAX_RECIPES = 2**14  # of some hundred bytes each


class _NotDescribed(Exception):
    """An argument that has no description."""


class _TensorRecipe(NamedTuple):
    """How to create a tensor over the memory of an argument, or over new memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    view_of: int | None  # the position of that argument


class _Argument(NamedTuple):
    position: int


class _Value(NamedTuple):
    value: int | float | None


class _Several(NamedTuple):
    kind: type  # tuple or list
    parts: tuple[_TensorRecipe | _Argument | _Value, ...]


_Recipe = _TensorRecipe | _Argument | _Value | _Several

# By key; None for what is never cached. They outlive a mode, and hold no tensors.
_recipes: dict[Any, _Recipe | None] = {}
_NEW = _Value(None)  # this object: not seen yet


class CachingFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # its `__init_subclass__`
    """A fake mode that computes each result once. See Note [Cached results]."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # torch's own cache takes a fifth of the time and is never hit.
        self.cache_enabled = False
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # that every fake tensor on a device has

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in MemoryTracker

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        try:
            key = self._key(func, args, kwargs)
        except _NotDescribed:
            return self.dispatch(func, types, args, kwargs)
        recipe = _recipes.get(key, _NEW)
        if recipe is _NEW:
            return self._compute(key, func, types, args, kwargs)
        if recipe is None:
            return self.dispatch(func, types, args, kwargs)
        return self._create(recipe, args)

    def cached_result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return an operation's result if it is cached, else `NOT_CACHED`; to be called while no mode is on.

        For a mode above this one: going through torch's dispatcher takes as long as the rest.
        """
        try:
            recipe = _recipes.get(self._key(func, args, kwargs))
        except _NotDescribed:
            return NOT_CACHED
        return NOT_CACHED if recipe is None else self._create(recipe, args)

    def _compute(
        self, key: Any, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        result = self.dispatch(func, types, args, kwargs)
        if len(_recipes) >= _MAX_RECIPES:
            _recipes.clear()
        _recipes[key] = self._recipe(func, args, kwargs, result)
        return result

    def _key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        described = self._described
        return (
            func,
            tuple([described(value) for value in args]),
            tuple([(name, described(value)) for name, value in kwargs.items()]) if kwargs else (),
            torch.get_default_dtype(),
            default_device(),
            torch.is_inference_mode_enabled(),
        )

    def _described(self, value: Any) -> Any:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.fake_mode is not self:
                raise _NotDescribed
            if value.layout is not torch.strided:
                raise _NotDescribed
            return (
                value.shape,
                value.stride(),
                value.storage_offset(),
                value.dtype,
                value.fake_device,
                value.requires_grad,
                dispatch_keys_of(value).raw_repr(),  # conjugated, negated, created in inference mode ...
                value.untyped_storage().nbytes(),
            )
        if kind in _BY_VALUE:
            return kind, value  # 1, 1.0 and True are equal, and promote differently
        if kind is list or kind is tuple or kind is torch.Size:
            return kind, tuple([self._described(each) for each in value])
        raise _NotDescribed

    # ------------------------------------------------------------------ storing

    def _recipe(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> _Recipe | None:
        if getattr(func, "namespace", "") != "aten" or not _NEVER_CACHED.isdisjoint(func.tags):
            return None
        tensors = [each for each in _flat((*args, *kwargs.values())) if isinstance(each, torch.Tensor)]
        memory = {each.untyped_storage()._cdata for each in tensors}
        source = _first_tensor(args) if len(tensors) == 1 else None
        if isinstance(result, (tuple, list)):
            parts = [self._part(each, args, memory, source) for each in result]
            made = [each.untyped_storage()._cdata for each in result if isinstance(each, torch.Tensor)]
            new = [each for each in made if each not in memory]
            if any(part is None for part in parts) or len(set(new)) < len(new):  # they share new memory
                return None
            # A named tuple is a plain one outside.
            kind = list if isinstance(result, list) else tuple
            return _Several(kind, tuple(part for part in parts if part is not None))
        return self._part(result, args, memory, source)

    def _part(
        self, result: Any, args: Sequence[Any], memory: set[int], source: int | None
    ) -> _TensorRecipe | _Argument | _Value | None:
        if result is None or type(result) in (int, float, bool):
            return _Value(result)
        if type(result) is not FakeTensor or result.layout is not torch.strided:
            return None
        for position, value in enumerate(args):
            if value is result:
                return _Argument(position)
        is_view = result.untyped_storage()._cdata in memory
        if result.constant is not None or (is_view and source is None):
            return None
        recipe = _TensorRecipe(
            tuple(result.shape),
            result.stride(),
            int(result.storage_offset()),
            result.dtype,
            result.fake_device,
            result.requires_grad,
            source if is_view else None,
        )
        trial = self._create_tensor(recipe, args)
        return recipe if self._described(trial) == self._described(result) else None

    # ------------------------------------------------------------------ creating

    def _create(self, recipe: _Recipe, args: Sequence[Any]) -> Any:
        kind = type(recipe)
        if kind is _TensorRecipe:
            return self._create_tensor(recipe, args)  # type: ignore[arg-type]
        if kind is _Argument:
            return args[recipe.position]  # type: ignore[union-attr]
        if kind is _Several:
            return recipe.kind([self._create(each, args) for each in recipe.parts])  # type: ignore[union-attr]
        return recipe.value  # type: ignore[union-attr]

    def _create_tensor(self, recipe: _TensorRecipe, args: Sequence[Any]) -> FakeTensor:
        shape, stride, offset, dtype, device, requires_grad, view_of = recipe
        if view_of is None:
            elements = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
        else:
            elements = torch.empty(0, dtype=dtype, device=_META)
            elements.set_(args[view_of].untyped_storage(), offset, shape, stride)
        tensor: FakeTensor = make_subclass(
            FakeTensor, elements, requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        if self._allow_unsafe_data_ptr_access:
            warn_on_data_pointer(tensor)
        else:
            throw_on_data_pointer(tensor)
        attributes = self._attributes.get(device)
        if attributes is None:
            attributes = dict(vars(FakeTensor(self, elements, device)))
            del attributes["fake_mode"]  # a reference cycle
            self._attributes[device] = attributes
        vars(tensor).update(attributes)
        tensor.fake_mode = self
        return tensor


def _first_tensor(args: Sequence[Any]) -> int | None:
    positions = [position for position, value in enumerate(args) if isinstance(value, torch.Tensor)]
    return positions[0] if positions else None


def _flat(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found.extend(_flat(value))
        else:
            found.append(value)
    return found
