"""Snapshots of state that a forward changes beside its tensors: random generators, and attributes of modules.

Note [Attributes of a region]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A module may count its calls (`self.steps += 1`), keep its last hidden state, append to a list, draw from a generator of
its own, or pass a tensor to a later module through a dictionary. A recomputation that finds such state as forward left
it silently computes something else. So the attributes of modules are read before forward, restored while it is
recomputed, and set back afterwards:

- Attributes by identity, including those that forward adds or deletes.
- Lists, dictionaries, sets and deques by their elements, nested ones too.
- Tensors by value: each is copied, and the copy dropped when forward ends unless the tensor was changed in place. One
  with a history is given to the recomputation as a leaf: its history would keep the graph alive.
- Random generators by their state.

Not restored are objects of other classes that forward changes in place, and modules of `torch.nn`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import pickle
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from memscale._torch import Generator, pytree, same_version, version_of
from memscale._util.trees import Tree, is_lazy


class TorchRngState:
    """A snapshot of the random state of the CPU, of some devices, and of the current ones of their types."""

    __slots__ = ("_cpu", "_devices")

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices: list[tuple[str, int, torch.Tensor]] = []
        indices = defaultdict[str, set[int]](set)
        for device in devices:
            indices[device.type] |= set() if device.index is None else {device.index}
        for device_type, used in indices.items():
            module = _module_with_rng(device_type)
            if module is not None:
                # A layer may draw on the current device, wherever its tensors are.
                for index in sorted({module.current_device(), *used}):
                    self._devices.append((device_type, index, module.get_rng_state(index)))

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device_type, index, state in self._devices:
            _module_with_rng(device_type).set_rng_state(state, index)

    def is_same(self, other: TorchRngState) -> bool:
        """Return whether it is the same state of the same devices."""
        if not torch.equal(self._cpu, other._cpu) or len(self._devices) != len(other._devices):
            return False
        pairs = zip(self._devices, other._devices, strict=True)
        return all(one[:2] == two[:2] and torch.equal(one[2], two[2]) for one, two in pairs)


class HostRngState:
    """A snapshot of the global generators of Python and, if it was imported, of NumPy; not of generator objects."""

    __slots__ = ("_numpy", "_python")

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def has_moved(self) -> bool:
        """Return whether a number was drawn or a state set since."""
        if random.getstate() != self._python:
            return True
        # Where NumPy was imported since, nobody knows what it would have drawn.
        return self._numpy is not None and not _equal(self._numpy, _numpy_state())

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)

    def is_same(self, other: HostRngState) -> bool:
        """Return whether it is the same state."""
        return self._python == other._python and _equal(self._numpy, other._numpy)


class RngState:
    """All global random state: torch's and the host's."""

    __slots__ = ("_host", "_torch")

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._torch = TorchRngState(devices)
        self._host = HostRngState()

    def restore(self) -> None:
        self._torch.restore()
        self._host.restore()

    def is_same(self, other: RngState) -> bool:
        """Return whether all of it is the same."""
        return self._torch.is_same(other._torch) and self._host.is_same(other._host)


def _numpy_state() -> dict[str, Any] | None:
    """Return the state of NumPy's global generator; None if NumPy was not imported."""
    module: Any = sys.modules.get("numpy.random")
    return module.get_state(legacy=False) if hasattr(module, "get_state") else None


def _equal(state: Any, other: Any) -> bool:
    """Compare states of any kind of generator as bytes; nothing is ever unpickled."""
    return pickle.dumps(state) == pickle.dumps(other)


def _module_with_rng(device_type: str) -> Any:
    if device_type in ("cpu", "meta"):
        return None
    try:
        module: Any = torch.get_device_module(device_type)
    except RuntimeError:  # a label without a module, as simulated devices may be
        return None
    # A device that has not been initialised has no state yet, and asking must not initialise it.
    is_there = getattr(module, "is_initialized", None) or getattr(module, "is_available", None)
    return module if hasattr(module, "get_rng_state") and (is_there is None or is_there()) else None


_PLAIN = frozenset({int, float, bool, str, complex, type(None)})
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, set, deque})
# A plan that is attached between a forward and its repetition sets some of them anew.
_NOT_THE_USERS = frozenset(
    {
        *vars(nn.Module()),
        *("_memscale_executor", "_memscale_forward", "_apply", "forward", "__reduce_ex__", "__deepcopy__"),
    }
)
_MISSING = object()


class Attributes:
    """The attributes of some modules before a forward. See Note [Attributes of a region].

    Modules of `torch.nn` are skipped, and tensors of more than `copy_bytes` are not copied.
    """

    __slots__ = ("_contents", "_copy_bytes", "_generators", "_tensors")

    def __init__(self, modules: Sequence[object], *, copy_bytes: float = math.inf) -> None:
        self._copy_bytes = copy_bytes
        self._contents: dict[int, tuple[_State, Any]] = {}  # of modules and containers
        self._generators: list[tuple[_State, Any]] = []
        self._tensors: dict[int, _HeldTensor] = {}
        for module in modules:
            if not type(module).__module__.startswith("torch.nn."):
                own = module.__dict__
                state = _State(functools.partial(_attributes, own), functools.partial(_set_attributes, own))
                self._contents[id(own)] = (state, _mapped(state.read(), self._read))

    def _read(self, value: Any) -> Any:
        """Return what stands for a value in the snapshot: itself, or what its value at forward can be had from."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in _CONTAINERS:
            if id(value) not in self._contents:
                state = _State(value.copy, functools.partial(_set_elements, value))
                self._contents[id(value)] = (state, None)  # it may contain itself
                self._contents[id(value)] = (state, _mapped(value, self._read))
        elif kind is tuple:
            return _mapped(value, self._read)
        elif isinstance(value, torch.Tensor):
            if isinstance(value, nn.Parameter) or is_lazy(value):
                return value
            if id(value) not in self._tensors:
                self._tensors[id(value)] = _HeldTensor(value, self._copy_bytes)
            return self._tensors[id(value)]
        elif (generator := _generator(value)) is not None:
            self._generators.append((generator, generator.read()))
        return value

    def end_forward(self) -> None:
        """Drop the copies of tensors that forward has not changed, and the history of all."""
        for tensor in self._tensors.values():
            tensor.end_forward()

    def unknown_tensor(self) -> torch.Tensor | None:
        """Return a tensor that was changed in place, of which no copy was made."""
        return next((each.tensor for each in self._tensors.values() if each.is_unknown()), None)

    def has_changed(self) -> bool:
        """Return whether anything is not as it was before forward."""
        if not all(_has_elements(each.read(), before) for each, before in self._contents.values()):
            return True
        return not all(_equal(each.read(), before) for each, before in self._generators)

    def restore(self) -> Callable[[], None]:
        """Set everything as it was before a forward that has failed, or that has ended and is to leave no trace.

        Returns a function that sets all but the values of tensors as it was until now.
        """
        with torch.no_grad():
            for each in self._tensors.values():
                each.write_back()
        return self._exchange(lambda each: each.tensor)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run the block with everything as it was before forward, and set it back afterwards."""
        values: dict[_HeldTensor, torch.Tensor] = {}

        def value_of(held: _HeldTensor) -> torch.Tensor:
            if held not in values:
                values[held] = held.at_forward()
            return values[held]

        put_back = self._exchange(value_of)
        try:
            yield
        finally:
            put_back()

    def _exchange(self, value_of: Callable[[_HeldTensor], torch.Tensor]) -> Callable[[], None]:
        """Set everything as it was before forward, and return a function that sets it as it was until now."""

        def thawed(value: Any) -> Any:
            if isinstance(value, _HeldTensor):
                return value_of(value)
            return _mapped(value, thawed) if type(value) is tuple else value

        states = [*self._contents.values(), *self._generators]
        until_now = [(state, state.read()) for state, _ in states]
        for state, before in self._contents.values():
            state.write(_mapped(before, thawed))
        for state, before in self._generators:
            state.write(before)

        def put_back() -> None:
            for state, value in until_now:
                state.write(value)

        return put_back


def inputs_before(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, copy_bytes: float = math.inf
) -> Attributes:
    """Return what the inputs of a call are before forward: tensors, containers, and objects that hold tensors."""
    inputs = SimpleNamespace(values=(args, kwargs), tensors=tuple(Tree.of((args, kwargs)).tensors()))
    batches = filter(is_batch_object, pytree.tree_leaves((args, kwargs)))
    return Attributes([inputs, *batches], copy_bytes=copy_bytes)


def is_batch_object(leaf: object) -> bool:
    """Return whether a leaf of a call's inputs is an object that holds tensors, as attributes or as a mapping."""
    if isinstance(leaf, torch.Tensor | nn.Module | type) or not hasattr(leaf, "__dict__"):
        return False
    return isinstance(leaf, Mapping) or any(isinstance(each, torch.Tensor) for each in vars(leaf).values())


class _HeldTensor:
    """A tensor that an attribute or a container had before forward."""

    __slots__ = ("_copy", "_is_large", "_requires_grad", "_version", "tensor")

    def __init__(self, tensor: torch.Tensor, copy_bytes: float) -> None:
        self.tensor = tensor
        self._requires_grad = tensor.requires_grad
        self._version = version_of(tensor)
        self._is_large = tensor.layout is torch.strided and tensor.nbytes > copy_bytes
        self._copy = None if self._is_large else tensor.detach().clone()

    def end_forward(self) -> None:
        if version_of(self.tensor) == self._version:
            self._copy = None
        if self.tensor.grad_fn is not None and self._is_large:
            # Most likely the last result of a model, which nothing reads again: not worth its memory. Were it read, an
            # operation on a tensor without data would raise.
            self.tensor = torch.empty_like(self.tensor, device="meta")
            self._version = 0
        elif self.tensor.grad_fn is not None:
            self.tensor = self.tensor.detach()

    def is_unknown(self) -> bool:
        return self._copy is None and version_of(self.tensor) != self._version

    def is_unchanged(self, now: Any) -> bool:
        return now is self.tensor and version_of(self.tensor) == self._version

    def at_forward(self) -> torch.Tensor:
        """Return the tensor as forward found it, for a recomputation to change."""
        if self._copy is not None:
            return self._copy.clone().requires_grad_(self._requires_grad)
        if self.tensor.requires_grad == self._requires_grad:
            return self.tensor
        return self.tensor.detach().requires_grad_(self._requires_grad)

    def write_back(self) -> None:
        if self._copy is not None and version_of(self.tensor) != self._version:
            with same_version(self.tensor):
                self.tensor.copy_(self._copy)
            self._version = version_of(self.tensor)


def _has_elements(container: Any, read: Any) -> bool:
    """Return whether the elements of a container, or the attributes of a module, are those that were read."""
    if isinstance(read, set):
        return bool(container == read)
    if isinstance(read, dict):
        return container.keys() == read.keys() and all(
            _is_value(container[name], each) for name, each in read.items()
        )
    return len(container) == len(read) and all(map(_is_value, container, read))


def _is_value(value: Any, read: Any) -> bool:
    if isinstance(read, _HeldTensor):
        return read.is_unchanged(value)
    if type(read) is tuple and type(value) is tuple:
        return _has_elements(value, read)
    return value is read


def _mapped(container: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container's elements, changed, in a dictionary, set or list; a tuple itself if nothing changed."""
    if isinstance(container, tuple):
        changed = tuple(map(change, container))
        return container if all(map(operator.is_, changed, container)) else changed
    if isinstance(container, dict):
        return {key: change(value) for key, value in container.items()}
    return set(container) if isinstance(container, set) else list(map(change, container))


def _attributes(own: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module that are the user's, not methods that MemScale has put there."""
    users = ((name, value) for name, value in own.items() if name not in _NOT_THE_USERS)
    return {
        name: value
        for name, value in users
        if not (callable(value) and type(value).__module__.startswith("memscale."))
    }


def _set_attributes(own: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in _attributes(own):
        if name not in wanted:
            del own[name]
    for name, value in wanted.items():
        if own.get(name, _MISSING) is not value:
            own[name] = value


def _set_elements(container: Any, wanted: Any) -> None:
    """Set the elements of a container, unless it has them: someone may be iterating over it."""
    now, then = (
        list(each.values()) if isinstance(each, dict) else list(each) for each in (container, wanted)
    )
    if len(now) == len(then) and all(map(operator.is_, [*container, *now], [*wanted, *then])):
        return
    container.clear()
    if isinstance(container, dict | set):
        container.update(wanted)
    else:
        container.extend(wanted)


class _State(NamedTuple):
    """How to read and write the attributes of a module, the elements of a container, or the state of a generator."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _generator(value: object) -> _State | None:
    """Return the state of a random generator of torch, Python or NumPy; None for anything else.

    Not by `torch.Generator`, which is another class while a GPU is simulated, where this module may be imported first.
    """
    if isinstance(value, Generator):
        return _State(value.get_state, value.set_state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # that has no state
        return _State(value.getstate, value.setstate)
    if (numpy := sys.modules.get("numpy.random")) is None:  # not imported: nobody has one
        return None
    if isinstance(value, numpy.Generator):
        bits = value.bit_generator
        return _State(lambda: bits.state, functools.partial(setattr, bits, "state"))
    if isinstance(value, numpy.RandomState):
        return _State(value.get_state, value.set_state)
    return None
