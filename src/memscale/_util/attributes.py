"""Python state that a forward pass changes: counters, flags, random generators that modules hold.

Note [Attributes of a region]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A module may count its calls (``self.steps += 1``), remember that it has been called, or draw from a generator of its
own. If it computes with that, a recomputation that finds the state as forward left it computes something else, and
silently. So plain values (numbers, strings, None) and random generators among a module's attributes are read before
forward; those that have changed are put back while it is recomputed, and are afterwards as they were.

Modules of `torch.nn` do not do such things and are not looked at, which is most of the modules of a model. Containers
that forward changes (a list that it appends to) are not put back: they may hold anything.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from memscale._torch import Generator

__all__ = ["Attributes"]

_PLAIN = frozenset({int, float, bool, str, complex, type(None)})
_NOT_LOOKED_AT = frozenset(
    {"_memscale_executor", "_memscale_forward", "forward", "training"}
)  # others take care of these
_MISSING = object()  # the value of an attribute that was not there


class Attributes:
    """Plain attributes and generators of some modules, before a forward pass. See Note [Attributes of a region]."""

    __slots__ = ("_generators", "_names", "_plain")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._plain: list[dict[str, Any]] = []
        self._names: list[tuple[dict[str, Any], frozenset[str]]] = []
        self._generators: list[tuple[_Generator, Any]] = []
        for module in modules:
            if not type(module).__module__.startswith("torch.nn."):
                self._read(vars(module))

    def _read(self, own: dict[str, Any]) -> None:
        plain = {}
        for name, value in own.items():
            kind = type(value)
            if kind in _PLAIN:
                plain[name] = value
            elif (generator := _generator(value)) is not None:
                self._generators.append((generator, generator.read()))
        self._plain.append(plain)
        self._names.append((own, frozenset(own)))

    def settle(self) -> None:
        """Forward has run: note which attributes it added, for they were missing before."""
        for plain, (own, names) in zip(self._plain, self._names, strict=True):
            plain.update((name, _MISSING) for name in own if name not in names)

    def take_back(self) -> None:
        """Forward has failed: all is again as it found it."""
        self.settle()
        self._exchange()

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Run with everything as forward found it, and leave it as it is now."""
        now = self._exchange()
        try:
            yield
        finally:
            now._exchange()

    def _exchange(self) -> Attributes:
        """Set everything as it was, and return what it has been until now."""
        now = Attributes(())
        for plain, (own, names) in zip(self._plain, self._names, strict=True):
            changed = {
                name: own.get(name, _MISSING)
                for name, before in plain.items()
                if own.get(name, _MISSING) is not before and name not in _NOT_LOOKED_AT
            }
            if changed:
                now._plain.append(changed)
                now._names.append((own, names))
            for name in changed:
                if plain[name] is _MISSING:
                    del own[name]
                else:
                    own[name] = plain[name]
        for generator, state in self._generators:
            now._generators.append((generator, generator.read()))
            generator.write(state)
        return now


class _Generator(NamedTuple):
    """How to read and write the state of a random generator."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _generator(value: object) -> _Generator | None:
    """Return the random generator of torch, Python or NumPy that an attribute is; None if it is anything else.

    The class is asked for by its private name: `torch.Generator` is another class while a GPU is simulated, where this
    module may be imported first.
    """
    if isinstance(value, Generator):
        return _Generator(value.get_state, value.set_state)
    if isinstance(value, random.Random) and not isinstance(
        value, random.SystemRandom
    ):  # the system's has no state
        return _Generator(value.getstate, value.setstate)
    if (numpy := sys.modules.get("numpy.random")) is None:  # not imported: nobody has one
        return None
    if isinstance(value, numpy.Generator):
        bits = value.bit_generator
        return _Generator(lambda: bits.state, functools.partial(setattr, bits, "state"))
    if isinstance(value, numpy.RandomState):
        return _Generator(value.get_state, value.set_state)
    return None
