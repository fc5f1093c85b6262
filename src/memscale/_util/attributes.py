"""Snapshots of the Python state that a forward changes: counters, flags, random generators of modules.

Note [Attributes of a region]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A module may count its calls (`self.steps += 1`), remember that it has been called, or draw from a generator of its own.
If it computes with that, a recomputation that finds the state as forward left it silently computes something else. So
plain values (numbers, strings, None) and random generators among a module's attributes are read before forward; those
that have changed are restored while it is recomputed, and set back afterwards.

Modules of `torch.nn`, which are most of a model's, do not do such things and are skipped. Containers that forward
changes (a list that it appends to) are not restored: they may hold anything.
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
_IGNORED = frozenset({"_memscale_executor", "_memscale_forward", "forward", "training"})  # handled by others
_MISSING = object()  # the value of an attribute that was not there


class Attributes:
    """The plain attributes and generators of some modules before a forward. See Note [Attributes of a region]."""

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

    def record_added(self) -> None:
        """Record after a forward which attributes it added."""
        for plain, (own, names) in zip(self._plain, self._names, strict=True):
            plain.update((name, _MISSING) for name in own if name not in names)

    def restore(self) -> None:
        """Set everything as it was before forward."""
        self.record_added()
        self._exchange()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run the block with everything as it was before forward, and set it back afterwards."""
        now = self._exchange()
        try:
            yield
        finally:
            now._exchange()

    def _exchange(self) -> Attributes:
        """Set everything as it was before forward, and return a snapshot of what it was until now."""
        now = Attributes(())
        for plain, (own, names) in zip(self._plain, self._names, strict=True):
            changed = {
                name: own.get(name, _MISSING)
                for name, before in plain.items()
                if own.get(name, _MISSING) is not before and name not in _IGNORED
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
