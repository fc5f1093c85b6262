"""Snapshots of state that a forward changes beside its tensors: random generators, and attributes of modules.

Note [Attributes of a region]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A module may count its calls (`self.steps += 1`), remember that it has been called, or draw from a generator of its own.
A recomputation that found this state as forward left it could silently compute something else. So plain values
(numbers, strings, None) and random generators among a module's attributes are read before forward; those that have
changed are restored while it is recomputed, and set back afterwards.

Modules of `torch.nn` do not do such things and are skipped. Containers that forward changes (a list that it appends to)
are not restored: they may hold anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from memscale._torch import Generator

__all__ = ["Attributes", "HostRngState", "RngState", "TorchRngState"]

# -- global random generators


class TorchRngState:
    """A snapshot of the random state of the CPU and of all devices of some types.

    A device that has not been initialised has no state yet, and asking must not initialise it.
    """

    __slots__ = ("_cpu", "_devices")

    def __init__(self, device_types: Iterable[str]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices: list[tuple[str, int, torch.Tensor]] = []
        for device_type in device_types:
            module = _module_with_rng(device_type)
            if module is not None:
                for index in range(module.device_count()):
                    self._devices.append((device_type, index, module.get_rng_state(index)))

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device_type, index, state in self._devices:
            _module_with_rng(device_type).set_rng_state(state, index)


class HostRngState:
    """A snapshot of Python's `random` and, if `numpy.random` was imported, of NumPy's global generator.

    Generator objects (`random.Random`, `numpy.random.Generator`, `torch.Generator`) are not included: which of them a
    function uses is unknown.
    """

    __slots__ = ("_numpy", "_python")

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def has_moved(self) -> bool:
        """Return whether a number was drawn or a state set since."""
        if random.getstate() != self._python:
            return True
        numpy = _numpy_state()
        return self._numpy is not numpy and _comparable(self._numpy) != _comparable(numpy)

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


class RngState:
    """All global random state: torch's and the host's."""

    __slots__ = ("_host", "_torch")

    def __init__(self, device_types: Iterable[str]) -> None:
        self._torch = TorchRngState(device_types)
        self._host = HostRngState()

    def restore(self) -> None:
        self._torch.restore()
        self._host.restore()


_MT19937_BYTES = 625 * 4  # 624 words and a position
_latest_numpy: tuple[bytes, dict[str, Any]] | None = None


def _numpy_state() -> dict[str, Any] | None:
    """Return the state of NumPy's global generator; the same object as the last time if it has not changed.

    `get_state` takes 30 us for every recomputed layer, so the memory of the generator is compared first. It is
    the whole state, except for the second of two normal numbers that are drawn at once: while one is stored
    (`has_gauss`), the state is always read.
    """
    global _latest_numpy
    module = sys.modules.get("numpy.random")
    if module is None or not hasattr(module, "get_state"):
        return None
    generator: Any = getattr(getattr(module.mtrand, "_rand", None), "_bit_generator", None)
    memory = b""
    if type(generator).__name__ == "MT19937":
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if _latest_numpy is not None and _latest_numpy[0] == memory and not _latest_numpy[1]["has_gauss"]:
            return _latest_numpy[1]
    state: dict[str, Any] = module.get_state(legacy=False)
    _latest_numpy = (memory, state) if memory else None
    return state


def _comparable(state: dict[str, Any] | None) -> object:
    if state is None:
        return None
    inner = {
        name: value if isinstance(value, int) else value.tobytes() for name, value in state["state"].items()
    }
    return state["bit_generator"], inner, state["has_gauss"], state["gauss"]


def _module_with_rng(device_type: str) -> Any:
    if device_type in ("cpu", "meta"):
        return None
    try:
        module: Any = torch.get_device_module(device_type)
    except RuntimeError:  # a label without a module, as simulated devices may be
        return None
    is_there = getattr(module, "is_initialized", None) or getattr(module, "is_available", None)
    if is_there is not None and not is_there():
        return None
    has_rng = all(hasattr(module, name) for name in ("get_rng_state", "set_rng_state", "device_count"))
    return module if has_rng else None


# -- attributes of modules

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
