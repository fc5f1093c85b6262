"""The record of what was changed in a model, so that it can be undone.

A change is noted before it is made, and forgotten after it is undone, and to undo one that is not there does
nothing. So an interrupt at any of them leaves a record by which the rest can be undone.

Modules are referred to weakly, and in `deepcopy` and pickle as ordinary objects: a record keeps no model
alive, and the record of a copied model is about the copy.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from memscale._util.interrupts import raise_pending_interrupt
from memscale.techniques.forward import OWN, ReplacedForward, is_covered

__all__ = ["Change", "Record", "SetAttribute", "WeakModule"]

logger = logging.getLogger("memscale")


class WeakModule:
    """A weak reference to a module that can be copied and pickled, with the module."""

    __slots__ = ("__weakref__", "_reference")

    def __init__(self, module: nn.Module) -> None:
        self._reference: weakref.ref[nn.Module] | None = weakref.ref(module)

    def __call__(self) -> nn.Module | None:
        """The module, or None if it is gone."""
        return None if self._reference is None else self._reference()

    def __getstate__(self) -> tuple[nn.Module | None]:
        return (self(),)

    def __setstate__(self, state: tuple[nn.Module | None]) -> None:
        (module,) = state
        self._reference = None if module is None else weakref.ref(module)


class Change(Protocol):
    """One change of a model."""

    def undo(self) -> None:
        """Take it back."""


class SetAttribute:
    """An attribute of a module's own `__dict__` that is set, and what was there before."""

    def __init__(self, module: nn.Module, module_name: str, name: str, value: object) -> None:
        attributes = vars(module)
        self.module = WeakModule(module)
        self.module_name = module_name
        self.name = name
        self.value = value
        self.had_before = name in attributes
        self.before = attributes.get(name)

    def make(self) -> None:
        """Set it."""
        module = self.module()
        if module is not None:
            # Not setattr: a module may have its own, and nn.Module's looks for parameters and submodules.
            vars(module)[self.name] = self.value

    def undo(self) -> None:
        if isinstance(self.value, ReplacedForward):
            self.value.release()
        module = self.module()
        if module is None:
            return
        attributes = vars(module)
        if (self.name in attributes) == self.had_before and attributes.get(self.name) is self.before:
            return
        if attributes.get(self.name) is not self.value:
            if self.name == "forward" and is_covered(module):
                return  # it goes on to what is underneath. See Note [A replaced forward]
            logger.warning(
                "%s.%s was replaced after MemScale had set it, and stays as it is now; what MemScale had put "
                "there has no effect any more.",
                self.module_name or type(module).__name__,
                self.name,
            )
        elif self.had_before:
            attributes[self.name] = self.before
        else:
            del attributes[self.name]


class AddedHook:
    """A hook that is registered."""

    def __init__(self, register: Callable[[], RemovableHandle]) -> None:
        self._register: Callable[[], RemovableHandle] | None = register
        self._handle: RemovableHandle | None = None

    def make(self) -> None:
        """Register it."""
        if self._register is not None:
            self._handle, self._register = self._register(), None

    def undo(self) -> None:
        if self._handle is not None:
            self._handle.remove()


class Record:
    """Changes of a model, in order.

    Example:
        >>> layer, record = nn.Linear(2, 2), Record()
        >>> record.set_attribute(layer, "note", "hello")
        >>> layer.note
        'hello'
        >>> record.undo()
        >>> hasattr(layer, "note")
        False
    """

    def __init__(self) -> None:
        self._changes: list[Change] = []

    def __len__(self) -> int:
        return len(self._changes)

    def set_attribute(self, module: nn.Module, attribute: str, value: object, *, name: str = "") -> None:
        """Set an attribute of a module's own `__dict__`.

        Args:
            module: Whose attribute.
            attribute: Its name.
            value: Its value.
            name: What the module is called, for messages.
        """
        if attribute == "forward":  # see Note [A replaced forward]
            self._make(SetAttribute(module, name, OWN, value))
            if is_covered(module):
                return
        self._make(SetAttribute(module, name, attribute, value))

    def add_forward_pre_hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Register a hook `(module, args, kwargs)` that runs before all that are there."""
        self._make(AddedHook(lambda: module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)))

    def add_forward_hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Register a hook `(module, args, output)` that runs after forward; if that failed, with no output."""
        self._make(AddedHook(lambda: module.register_forward_hook(hook, always_call=True)))

    def _make(self, change: SetAttribute | AddedHook) -> None:
        raise_pending_interrupt()
        self._changes.append(change)
        change.make()

    def add(self, change: Change) -> None:
        """Note a change that was made elsewhere; it must be right for a copy of the model when it is copied."""
        self._changes.append(change)

    def forwards(self) -> Iterator[ReplacedForward]:
        """The forwards that were put on modules."""
        for change in self._changes:
            if isinstance(change, SetAttribute) and isinstance(change.value, ReplacedForward):
                yield change.value

    def undo(self) -> None:
        """Take all changes back, the last one first; an error in one does not keep the others.

        After an interrupt it can be called again, and goes on where it was.
        """
        errors = []
        while self._changes:
            change = self._changes[-1]
            try:
                change.undo()
            except Exception as error:
                errors.append(error)
            if self._changes and self._changes[-1] is change:
                self._changes.pop()
        if errors:
            raise errors[0]
