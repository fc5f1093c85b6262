"""The undo log: every change of a model, so that all of them can be undone exactly.

A change is logged before it is made, and removed from the log after it is undone; undoing a change that was never made
does nothing. So an interrupt at any point leaves a log by which the rest can be undone. Modules are referred to weakly:
a log keeps no model alive. It is never copied (Note [Copies]).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from memscale._torch import drop_empty_hooks
from memscale._util.interrupts import raise_pending_interrupt
from memscale.techniques.base import EXECUTOR
from memscale.techniques.forward import (
    OVERRIDE,
    CompileNotice,
    ForwardOverride,
    ForwardStage,
    is_covered,
    override_of,
)


class Change(Protocol):
    """One change of a model.

    If it changes attributes of modules, it also has `undo_in(module, attributes)`, which undoes it in a copy of those.
    """

    def undo(self) -> None:
        """Undo it; do nothing if it was not made."""


class _SetAttribute:
    """An attribute in an object's own `__dict__`, and what was there before."""

    def __init__(self, owner: object, owner_name: str, name: str, value: object, replaced: list[str]) -> None:
        self._owner = weakref.ref(owner)
        self._owner_name = owner_name
        self._name = name
        self._replaced = replaced
        self._value = value
        self._had_before = name in vars(owner)
        self._before = vars(owner).get(name)

    def make(self) -> None:
        owner = self._owner()
        if owner is not None:
            # Not setattr: a module may have its own, and nn.Module's looks for parameters and submodules.
            vars(owner)[self._name] = self._value

    def undo(self) -> None:
        owner = self._owner()
        if owner is None or self.undo_in(owner, vars(owner)):
            return
        if isinstance(owner, nn.Module) and self._name == "forward" and is_covered(owner):
            return  # it calls the module's own forward from now on. See Note [Forward override]
        now = vars(owner).get(self._name)
        if isinstance(self._value, ForwardOverride) and EXECUTOR in vars(owner) and callable(now):
            # The whole model's: each plan has a new one, and what is over this one calls the module's own forward.
            wrapped = inspect.unwrap(now, stop=lambda each: each is self._value)
            if wrapped is self._value:
                return
        self._replaced.append(f"{self._owner_name or type(owner).__name__}.{self._name}")

    def undo_in(self, owner: object, attributes: dict[str, Any]) -> bool:
        """Undo it in the attributes of an object; return False if someone has replaced it."""
        has, now = self._name in attributes, attributes.get(self._name)
        if owner is not self._owner() or (has == self._had_before and now is self._before):
            return True
        if now is not self._value:
            return False
        if self._had_before:
            attributes[self._name] = self._before
        else:
            del attributes[self._name]
        return True

    def before(self) -> tuple[object, str, object] | None:
        """Return the object, if it is not a module, with the attribute's name and the value before."""
        owner = self._owner()
        return None if owner is None or isinstance(owner, nn.Module) else (owner, self._name, self._before)


class _AddedStage:
    def __init__(self, override: ForwardOverride, stage: ForwardStage) -> None:
        self.override = override
        self.stage = stage

    def make(self) -> None:
        self.override.add(self.stage)

    def undo(self) -> None:
        self.override.remove(self.stage)


class _AddedHook:
    def __init__(self, register: Callable[[], RemovableHandle]) -> None:
        self._register: Callable[[], RemovableHandle] | None = register
        self._handle: RemovableHandle | None = None

    def make(self) -> None:
        if self._register is not None:
            self._handle, self._register = self._register(), None

    def undo(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def undo_in(self, owner: object, attributes: dict[str, Any]) -> None:
        handle = self._handle
        if handle is None:
            return
        registered = [reference() for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref)]
        for name, value in vars(owner).items():
            if any(value is each for each in registered):
                kept = ((key, hook) for key, hook in attributes[name].items() if key != handle.id)
                attributes[name] = type(value)(kept)


class UndoLog:
    """Changes of a model, in the order in which they were made; `notice` logs that compiled code calls a replaced one.

    Attributes:
        replaced: The attributes that others had replaced when they were to be undone, and that stayed so.

    Example:
        >>> layer, log = nn.Linear(2, 2), UndoLog()
        >>> log.set_attribute(layer, "note", "hello")
        >>> layer.note
        'hello'
        >>> log.undo()
        >>> hasattr(layer, "note")
        False
    """

    def __init__(self, notice: CompileNotice | None = None) -> None:
        self._changes: list[Change] = []
        self._notice = notice or CompileNotice()
        self.replaced: list[str] = []

    def __len__(self) -> int:
        return len(self._changes)

    def set_attribute(self, owner: object, attribute: str, value: object, *, name: str = "") -> None:
        """Set an attribute in an object's own `__dict__`; messages call the object `name`."""
        self._make(_SetAttribute(owner, name, attribute, value, self.replaced))

    def add_stage(
        self, module: nn.Module, stage: ForwardStage, *, method: str = "forward", name: str = ""
    ) -> None:
        """Add a stage to a module's forward, or to another method; messages call the module `name`."""
        override = override_of(module, method)
        if override is None:
            override = ForwardOverride(module, method, self._notice)
            covered = method == "forward" and is_covered(module)
            if method == "forward":
                self.set_attribute(module, OVERRIDE, override, name=name)
            if not covered:
                self.set_attribute(module, method, override, name=name)
        self._make(_AddedStage(override, stage))

    def add_forward_pre_hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Register a hook `(module, args, kwargs)` that runs before all that are there."""
        self._make(_AddedHook(lambda: module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)))

    def add_forward_hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Register a hook `(module, args, output)` that runs after forward; if that failed, with no output."""
        self._make(_AddedHook(lambda: module.register_forward_hook(hook, always_call=True)))

    def add(self, change: Change) -> None:
        """Log a change that is made elsewhere."""
        self._changes.append(change)

    def stages(self) -> Iterator[tuple[nn.Module, ForwardStage]]:
        """Yield the stages that were added, each with its module."""
        for change in self._changes:
            if isinstance(change, _AddedStage):
                yield change.override.module, change.stage

    def undo_in(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        """Undo all changes of a module's attributes in a copy of those."""
        for change in reversed(self._changes):
            undo_in = getattr(change, "undo_in", None)
            if undo_in is not None:
                undo_in(module, attributes)

    def changed_objects(self) -> list[tuple[object, str, object]]:
        """Return the changed attributes of objects other than modules, with their values before."""
        changes = (each.before() for each in self._changes if isinstance(each, _SetAttribute))
        return [each for each in changes if each is not None]

    def undo(self) -> None:
        """Undo all changes, the last one first; an error in one does not keep the others from being undone.

        After an error or an interrupt it can be called again: what could not be undone is tried again.
        """
        errors = []
        position = len(self._changes)
        while position := min(position, len(self._changes)):
            position -= 1
            change = self._changes[position]
            try:
                change.undo()
            except Exception as error:
                errors.append(error)
                continue
            if position < len(self._changes) and self._changes[position] is change:
                del self._changes[position]
        if errors:
            raise errors[0]

    def _make(self, change: _SetAttribute | _AddedStage | _AddedHook) -> None:
        raise_pending_interrupt()
        self._changes.append(change)
        change.make()


class GradientHook:
    """Calls a method when a parameter's gradient was accumulated, until `remove`.

    It refers to the method's object weakly: a parameter of a model that was dropped would else be in a cycle.
    """

    changes_parameter = False  # unlike an optimizer that steps here: see `ModuleFlags.check_parameters`

    def __init__(self, parameter: nn.Parameter, method: Callable[[nn.Parameter], None]) -> None:
        self._method = weakref.WeakMethod(method)
        self._handle = parameter.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]

    def __call__(self, parameter: nn.Parameter) -> None:
        method = self._method()
        if method is not None:
            method(parameter)

    def remove(self, parameter: nn.Parameter) -> None:
        """Call it no more."""
        self._handle.remove()
        drop_empty_hooks(parameter)
