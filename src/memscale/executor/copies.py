"""Copies of a wrapped model, by `copy.deepcopy` and by pickle.

Note [Copies]
~~~~~~~~~~~~~
`copy.deepcopy` and pickle ask an object itself for `__reduce_ex__`. While a model is wrapped, each of its modules has
one in its `__dict__`, by which it is copied as if it were not wrapped. That of the model also passes on the plan and
the settings; once the copy is complete, an executor of its own attaches the plan to it. So nothing that a technique
holds is ever copied, and a copy of a single submodule is plain.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memscale.techniques.base import EXECUTOR

if TYPE_CHECKING:
    from memscale.executor.executor import Executor, Settings

_REDUCE, _DEEPCOPY, _SET_STATE = "__reduce_ex__", "__deepcopy__", "__setstate__"


class CopiedAsPlain:
    """Has the modules of a wrapped model copied as plain ones, and the copy wrapped. See Note [Copies]."""

    def __init__(self, model: nn.Module, around: nn.Module | None = None) -> None:
        modules = model.modules() if around is None else (around, *model.modules())
        self._modules = [
            weakref.ref(module)
            for module in modules
            if not isinstance(module, torch.jit.ScriptModule) and _REDUCE not in vars(module)
        ]

    def make(self, executor: Executor) -> None:
        for reference in self._modules:
            if (module := reference()) is not None:
                around = reference, weakref.ref(executor)
                vars(module)[_REDUCE] = functools.partial(_reduce, *around)
                if hasattr(type(module), _DEEPCOPY):
                    vars(module)[_DEEPCOPY] = functools.partial(_deepcopy, *around)

    def undo(self) -> None:
        for reference in self._modules:
            if (module := reference()) is not None:
                self.undo_in(module, vars(module))

    def undo_in(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        """Remove it from a copy of a module's attributes."""
        for name, function in ((_REDUCE, _reduce), (_DEEPCOPY, _deepcopy)):
            if getattr(attributes.get(name), "func", None) is function:
                del attributes[name]


def _plain(
    module: weakref.ref[nn.Module], executor: weakref.ref[Executor]
) -> tuple[nn.Module, Settings | None]:
    """Return a module with the attributes that it would have without a plan, and the settings if it is the model."""
    wrapped, attached = module(), executor()
    assert wrapped is not None
    assert attached is not None
    plain = object.__new__(type(wrapped))
    attributes = {name: value for name, value in vars(wrapped).items() if name != EXECUTOR}
    for log in (attached._techniques, attached._hooks):
        log.undo_in(wrapped, attributes)
    vars(plain).update(attributes)
    return plain, attached.settings() if wrapped is attached.model else None


def _reduce(module: weakref.ref[nn.Module], executor: weakref.ref[Executor], protocol: Any) -> Any:
    plain, settings = _plain(module, executor)
    reduced: Any = plain.__reduce_ex__(protocol)
    if settings is None:
        return reduced
    build, arguments, *contents = reduced
    has_state = bool(contents) and contents[0] is not None
    return _rebuild, (settings, has_state, build, arguments), *contents


def _rebuild(settings: Settings, has_state: bool, build: Any, arguments: Any) -> nn.Module:
    model: nn.Module = build(*arguments)
    if has_state:
        # Copying and unpickling set the state when all of it is there, and ask the object itself for the way.
        vars(model)[_SET_STATE] = functools.partial(_set_state, model, settings)
    else:
        settings.attach_to(model)
    return model


def _set_state(model: nn.Module, settings: Settings, state: Any) -> None:
    del vars(model)[_SET_STATE]
    model.__setstate__(state)  # type: ignore[no-untyped-call]
    settings.attach_to(model)


def _deepcopy(
    module: weakref.ref[nn.Module], executor: weakref.ref[Executor], memo: dict[int, Any]
) -> nn.Module:
    """Copy a module of a class with a `__deepcopy__` of its own."""
    plain, settings = _plain(module, executor)
    memo.setdefault(id(memo), []).append(plain)  # kept alive, as `copy` does: the memo goes by ids
    twin: nn.Module = type(plain).__deepcopy__(plain, memo)  # type: ignore[attr-defined]
    if settings is not None:
        settings.attach_to(twin)
    return twin
