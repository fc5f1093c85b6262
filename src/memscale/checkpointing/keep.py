"""Keeping the outputs of chosen operations, so that a recomputation need not run them again.

Note [Keeping outputs]
~~~~~~~~~~~~~~~~~~~~~~
Some outputs are expensive to compute and cheap to keep (a matrix product, an attention); a plan names them. In forward,
a dispatch mode below autograd keeps a detached alias of what a named operation returns. In the recomputation another
mode returns the kept output instead of running the operation; the graph, and what it saves, is as in forward.

Operations are identified by their overload and their place in the order of calls. These are computed again, named or
not:

- An operation that changes an argument or returns an alias of one (views, `add_`, `out=`), by its schema.
- An output that is not one storage (sparse, or a wrapper subclass), as writes to it cannot be seen.
- A cast (`aten._to_copy`): autocast caches casts of weights, so their number may differ from one call to the next.
- An output whose memory was written to after it was kept (`relu_(linear(x))`). Inside the region the mode sees every
  write, and compares storages: the output's version is not enough, as the result of `_unsafe_view` (every 3-D `linear`
  without a bias) or `unsafe_chunk` (the gates of a GRU) shares its memory and has a counter of its own. After the
  region, the versions of the output and of what the region returned in the same memory are compared.

An operation that draws random numbers may be kept: the random state it left behind is kept with it and set when it is
skipped. A kept output is dropped as soon as a backward pass that frees the graph has used it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from memscale._torch import (
    LightDispatchMode,
    alias_below_autograd,
    backward_keeps_graph,
    storage_key,
    version_of,
    written_tensors,
)
from memscale._util.snapshots import TorchRngState
from memscale._util.trees import Tree
from memscale.errors import ConfigError, shown

EVERY = -1  # among the numbers of an operation's calls: all of them


@functools.lru_cache
def calls_to_keep(ops: tuple[str, ...]) -> Mapping[str, frozenset[int]]:
    """Return the numbers of the calls to keep of each operation that `ops` names.

    Example:
        >>> calls_to_keep(("aten.addmm.default#0", "aten.mm.default"))
        {'aten.addmm.default': frozenset({0}), 'aten.mm.default': frozenset({-1})}
    """
    calls: dict[str, set[int]] = {}
    for op in ops:
        name, sign, number = op.partition("#")
        if name.count(".") != 2 or not all(name.split(".")) or (sign and not number.isdecimal()):
            raise ConfigError(
                f"{shown(op)} names no operation to keep. Write namespace.operation.overload, such as "
                "'aten.addmm.default', and '#3' behind it for the fourth call only."
            )
        calls.setdefault(name, set()).add(int(number) if number else EVERY)
    return {name: frozenset(numbers) for name, numbers in calls.items()}


class Kept:
    """The outputs of the operations `ops` that are kept for one region; see `run_region`."""

    def __init__(self, ops: tuple[str, ...], devices: Collection[torch.device]) -> None:
        self.calls = calls_to_keep(ops)
        self._devices = devices  # whose random state the operations may change
        self._outputs: dict[tuple[str, int], _KeptOutput] = {}
        self._calls_by_storage: dict[int | None, list[tuple[str, int]]] = {}
        self.recording = True

    def end_forward(self, returned: Iterable[torch.Tensor]) -> None:
        """Drop what forward has changed, and watch what it returned in the memory of kept outputs."""
        self._outputs = {call: output for call, output in self._outputs.items() if output.is_intact()}
        for tensor in returned:
            for call in self._calls_of(tensor):
                if call in self._outputs:  # a change of that tensor counts as a change of this output
                    self._outputs[call].watched.append((alias_below_autograd(tensor), version_of(tensor)))
        self._calls_by_storage.clear()

    def drop_in_memory_of(self, tensor: torch.Tensor) -> None:
        """Drop the outputs in the memory of a tensor that was written to."""
        for call in self._calls_of(tensor):
            self._outputs.pop(call, None)

    def _calls_of(self, tensor: torch.Tensor) -> Sequence[tuple[str, int]]:
        return self._calls_by_storage.get(storage_key(tensor), ())

    def store(self, call: tuple[str, int], result: object, is_random: bool) -> None:
        output = _KeptOutput(result, TorchRngState(self._devices) if is_random else None)
        keys = {storage_key(tensor) for tensor, _ in output.watched}
        if None in keys:
            return  # writes to it could not be seen
        self._outputs[call] = output
        for key in keys:
            self._calls_by_storage.setdefault(key, []).append(call)

    def pop(self, call: tuple[str, int]) -> _KeptOutput | None:
        """Return the kept output of a call, if there is one and nobody has changed it since."""
        output = self._outputs.get(call) if backward_keeps_graph() else self._outputs.pop(call, None)
        return output if output is not None and output.is_intact() else None


class _KeptOutput:
    """What one call returned, and the random state it left behind."""

    __slots__ = ("_rng", "_tree", "watched")

    def __init__(self, result: object, rng: TorchRngState | None) -> None:
        self._tree = Tree.of(result).map(torch.Tensor, alias_below_autograd)
        self.watched = [(tensor, version_of(tensor)) for tensor in self._tree.tensors()]
        self._rng = rng

    def is_intact(self) -> bool:
        return all(version_of(tensor) == version for tensor, version in self.watched)

    def restore(self) -> Any:
        """Return the output, and set the random state that the call left behind."""
        if self._rng is not None:
            self._rng.restore()
        # Fresh aliases: autograd writes the history of the recomputation into what it is given.
        return self._tree.map(torch.Tensor, alias_below_autograd).build()


class KeepMode(LightDispatchMode):
    """Numbers the calls of named operations, and keeps what they return; or returns in their place what was kept."""

    def __init__(self, kept: Kept, *, replays: bool = False) -> None:
        super().__init__()
        self._kept = kept
        self._replays = replays
        self._numbers: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._replays:
            call = self._call_of(func)
            output = None if call is None else self._kept.pop(call)
            return func(*args, **kwargs) if output is None else output.restore()
        result = func(*args, **kwargs)
        for tensor in written_tensors(func, args, kwargs):
            self._kept.drop_in_memory_of(tensor)
        call = self._call_of(func) if self._kept.recording else None
        if call is not None:
            self._kept.store(call, result, torch.Tag.nondeterministic_seeded in func.tags)
        return result

    def _call_of(self, func: Any) -> tuple[str, int] | None:
        """Return name and number of a call, if its output is to be kept."""
        name = _name_to_keep(func)
        wanted = self._kept.calls.get(name)
        if wanted is None:
            return None
        number = self._numbers[name]
        self._numbers[name] += 1
        return (name, number) if number in wanted or EVERY in wanted else None


@functools.cache
def _name_to_keep(func: Any) -> str:
    """Return the name of an operation; "" if its output cannot be kept."""
    name, schema = str(func), getattr(func, "_schema", None)
    if schema is None or name.startswith("aten._to_copy."):
        return ""
    has_aliases = any(value.alias_info is not None for value in (*schema.arguments, *schema.returns))
    return "" if has_aliases else name
