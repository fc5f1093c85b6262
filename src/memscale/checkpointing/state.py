"""What a call depends on, so that it can be made again: its inputs, the state around it, and its modules' state.

Note [Buffers of a region]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A recomputation must start from the buffers as forward found them, and must not change the real ones a second time. So
they are copied before forward, and each module's `_buffers` dictionary is exchanged while the recomputation runs: even
a buffer that the function registers, replaces or deletes leaves no trace.

A region copies every buffer, and drops copies of unchanged ones when forward ends. Whether a module changes its buffers
is learned, for training and evaluation apart. The first call compares versions and values: batch norm writes its
running statistics in a kernel that raises no version. (It is known by its class too, as the first values could be
equal.) Later calls compare versions only: to compare values, the host would wait for the device.

The call of a whole model (`ModelCall`) copies large buffers only of modules that have been seen to change theirs, as it
is needed when memory is short. If another one changes, that call cannot be repeated.

A buffer that forward did not change must stay so until the recomputation: a change in place raises.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memscale._torch import Hooks, NormBase, accumulation_hooks, same_version, version_of
from memscale._util.snapshots import Attributes, HostRngState, TorchRngState
from memscale._util.trees import Tree
from memscale.errors import RecomputeError


def changed_parameter(parameter: torch.Tensor, version: int) -> RecomputeError:
    """Return the error for a parameter that was changed since forward, where its version was `version`."""
    return RecomputeError(
        f"A parameter (shape {tuple(parameter.shape)}, {parameter.dtype}) of a checkpointed region was "
        f"changed in place since its forward pass: version {version} then, {version_of(parameter)} now. The "
        "region would be recomputed with other weights than forward had. Call backward before "
        "optimizer.step(), or run forward again after it."
    )


FREED = (
    "Trying to backward through the graph a second time: what it had saved has been freed. Specify retain_graph=True "
    "if you need to backward through the graph a second time."
)


class KeptTensor:
    """What a saved-tensor hook gives autograd for a tensor that stays as it is; it can be freed before the graph is."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        # Without its history: a node that saves its own output would be in a cycle that nothing collects.
        self._tensor: torch.Tensor | None = tensor if tensor.grad_fn is None else tensor.detach()

    def get(self) -> torch.Tensor:
        """Return the tensor; raise a `RuntimeError` if it was freed."""
        if self._tensor is None:
            raise RuntimeError(FREED)
        return self._tensor

    def memscale_release(self) -> None:
        self._tensor = None


Slot = Callable[[int], torch.Tensor]
"""One input tensor, kept in some way: returns it for a recomputation in a backward pass."""


class Inputs:
    """The arguments of a call, with each tensor in a slot.

    The function must not be able to tell the second call from the first: a tensor that was given twice is again one
    object (attention modules ask whether the query *is* the key), and parameters and constants are the same objects.
    Only a tensor with a history is given as a leaf, so that the new graph ends there.

    Tensors are kept by the saved-tensor hooks around the call; not those in `links`, by their ids, which have slots.
    """

    def __init__(self, tree: Tree, hooks: Hooks | None, links: Mapping[int, Slot] | None = None) -> None:
        indices: dict[int, _Index] = {}
        self.slots: list[Slot] = []

        def index_of(tensor: torch.Tensor) -> _Index:
            if id(tensor) not in indices:
                indices[id(tensor)] = _Index(len(self.slots))
                link = None if links is None else links.get(id(tensor))
                self.slots.append(link or _keep(tensor, len(self.slots), hooks))
            return indices[id(tensor)]

        self._tree = tree.map(torch.Tensor, index_of)

    def rebuild(self, task: int) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return arguments and keyword arguments for calling the function again, if no input was changed in place."""
        tensors = [slot(task) for slot in self.slots]
        args, kwargs = self._tree.map(_Index, lambda index: tensors[index]).build()
        return args, kwargs


class _Index(int):
    """The number of a tensor's slot, in the place of the tensor; a type of its own among the user's integers."""


def _keep(tensor: torch.Tensor, position: int, hooks: Hooks | None) -> Slot:
    # Note [Inputs go through the surrounding hooks]
    # ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    # To whatever surrounds a region, its inputs are what it saves for backward. If the surrounding hooks are another
    # region's, the input is not kept at all and the outer region recomputes it first. If they move tensors to the host
    # (`torch.autograd.graph.save_on_cpu`), it goes there.
    requires_grad = tensor.requires_grad
    if hooks is not None and not isinstance(tensor, nn.Parameter):
        pack, unpack = hooks
        with torch.no_grad():
            packed = pack(tensor)
        return lambda task: unpack(packed).detach().requires_grad_(requires_grad)
    needs_leaf = not tensor.is_leaf
    # With its history it would keep the graph before the region alive.
    held = tensor.detach() if needs_leaf else tensor
    version = version_of(tensor)

    def fetch(task: int) -> torch.Tensor:
        if version_of(held) != version:
            raise RecomputeError(
                f"Input tensor {position} of a checkpointed region (shape {tuple(held.shape)}, "
                f"{held.dtype}, {held.device}) was changed in place after the region's forward pass: "
                f"version {version} then, {version_of(held)} now. The region is recomputed from its "
                "inputs, so they must stay as they are until backward. Use the out-of-place form of the "
                "operation that changes it (x = x + y, not x += y), or give the region a clone."
            )
        return held.detach().requires_grad_() if needs_leaf else held

    return fetch


def mark_as_copy(copy: torch.Tensor, parameter: torch.Tensor) -> None:
    """Mark a tensor as the copy of a parameter that a module computes with."""
    copy._memscale_parameter = parameter  # type: ignore[attr-defined]


def parameter_behind(tensor: torch.Tensor) -> torch.Tensor:
    """Return the parameter that a tensor is a copy of; the tensor itself, if it is none."""
    parameter: torch.Tensor = getattr(tensor, "_memscale_parameter", tensor)
    return parameter


def submodules(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return every module under some modules, each once."""
    return list(dict.fromkeys(module for root in roots for module in root.modules()))


class ModuleFlags:
    """`training` of some modules, their parameters, `requires_grad` of these and their versions.

    The parameters are those that the modules have in forward, also by `torch.func.functional_call`. One that was
    computed (MAML's weights after an inner step) is held without its history, and of a copy on the device the parameter
    behind it.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._training: list[tuple[object, bool]] = [(module, module.training) for module in modules]
        self._owned: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = [
            (module, dict(module._parameters)) for module in modules if "_parameters" in vars(module)
        ]
        self.any_was_computed = False
        self._parameters: list[tuple[torch.Tensor, bool]] = []
        for _, own in self._owned:
            for name, tensor in own.items():
                if tensor is None:
                    continue
                behind = tensor if tensor.is_leaf else parameter_behind(tensor)
                if not behind.is_leaf:
                    self.any_was_computed = True
                    behind = behind.detach().requires_grad_(behind.requires_grad)
                own[name] = behind
                self._parameters.append((behind, behind.requires_grad))
        self.any_requires_grad = any(flag for _, flag in self._parameters)
        self.devices = {parameter.device for parameter, _ in self._parameters}
        self.parameters_moved()

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters; one that is shared, as often as it has owners."""
        return [parameter for parameter, _ in self._parameters]

    def check_parameters(self) -> None:
        """Raise a `RecomputeError` if a parameter was changed in place since forward began.

        Not if an optimizer steps it inside backward (`register_post_accumulate_grad_hook`): nothing is left to
        recompute then.
        """
        for (parameter, _), version in zip(self._parameters, self._versions, strict=True):
            if parameter._version != version:
                hooks = accumulation_hooks(parameter)
                if not any(getattr(hook, "changes_parameter", True) for hook in hooks.values()):
                    raise changed_parameter(parameter, version)

    def parameters_moved(self) -> None:
        """Count versions from here: the parameters have been moved, with their values."""
        self._versions = [parameter._version for parameter, _ in self._parameters]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        owners = [
            (module, "_parameters", dict(own))
            for module, own in self._owned
            if not _are_same(own, module._parameters)
        ]
        flags = [
            (each, name, getattr(each, name), then)
            for name, before in (("training", self._training), ("requires_grad", self._parameters))
            for each, then in before
            if getattr(each, name) != then
        ]
        with exchanged(owners):
            try:
                for each, name, _, then in flags:
                    setattr(each, name, then)
                yield
            finally:
                for each, name, now, _ in flags:
                    setattr(each, name, now)


@contextlib.contextmanager
def exchanged(dictionaries: Iterable[tuple[nn.Module, str, dict[str, Any]]]) -> Iterator[None]:
    """Give modules other `_parameters` or `_buffers` inside the block."""
    new = list(dictionaries)
    real = [(vars(module), name, vars(module)[name]) for module, name, _ in new]
    try:
        for module, name, tensors in new:
            vars(module)[name] = tensors
        yield
    finally:
        for attributes, name, tensors in real:
            attributes[name] = tensors


def _are_same(then: Mapping[str, object], now: Mapping[str, object]) -> bool:
    return then.keys() == now.keys() and all(now[name] is each for name, each in then.items())


class Conditions:
    """State outside of a call's inputs and buffers: random generators, autocast, flags of modules, and the like."""

    def __init__(self, flags: ModuleFlags, devices: Iterable[torch.device]) -> None:
        self._devices = {*devices, *flags.devices}
        self.flags = flags
        self._rng = TorchRngState(self._devices)
        self._host_rng: HostRngState | None = HostRngState()
        accelerator = torch.accelerator.current_accelerator()
        names = {"cpu", *(device.type for device in self._devices)}
        names |= set() if accelerator is None else {accelerator.type}
        self._autocast = [
            (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
            for name in sorted(names)
            if torch.amp.is_autocast_available(name)
        ]
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._default_device = torch.get_default_device()
        self._switches = [read() for read, _ in _SWITCHES]

    def end_forward(self) -> None:
        """Forget the state of Python's and NumPy's generators if forward has not drawn from them."""
        if self._host_rng is not None and not self._host_rng.has_moved():
            self._host_rng = None

    def restore_random(self) -> None:
        self._rng.restore()
        if self._host_rng is not None:
            self._host_rng.restore()

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Run with gradients on and all else as it was at forward; afterwards all is as it is now."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.flags.put_back())
            if any(was or torch.is_autocast_enabled(name) for name, was, _ in self._autocast):
                # Casts of weights are cached as long as the outermost autocast lasts. If backward runs inside one,
                # it would go on holding what is cast here, and this region would find what others have cast.
                torch.clear_autocast_cache()
                stack.callback(torch.clear_autocast_cache)
                for name, enabled, dtype in self._autocast:
                    stack.enter_context(torch.autocast(name, dtype, enabled, self._caches_casts))
            for (read, write), then in zip(_SWITCHES, self._switches, strict=True):
                if (now := read()) != then:
                    stack.callback(write, now)
                    write(then)
            if torch.get_default_device() != self._default_device:
                stack.enter_context(self._default_device)
            stack.enter_context(torch.enable_grad())
            stack.callback(TorchRngState(self._devices).restore)
            if self._host_rng is not None:
                stack.callback(HostRngState().restore)
            self.restore_random()
            yield


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)


_cuda: Any = torch.backends.cuda  # its switches for attention are those of the CPU's kernels too
_cudnn: Any = torch.backends.cudnn


def _precision(
    older: tuple[Callable[[], Any], Callable[[Any], None]], owners: Sequence[Any]
) -> tuple[Callable[[], tuple[Any, ...]], Callable[[tuple[Any, ...]], None]]:
    """Read and write `fp32_precision` together with the older switch, which raises where the two do not agree."""
    read_older, write_older = older

    def read() -> tuple[Any, ...]:
        try:
            then = read_older()
        except RuntimeError:  # the user has set `fp32_precision`
            then = None
        return then, *(each.fp32_precision for each in owners)

    def write(values: tuple[Any, ...]) -> None:
        then, *precisions = values
        if then is not None:
            write_older(then)
        for each, precision in zip(owners, precisions, strict=True):
            each.fp32_precision = precision

    return read, write


# How to read and write torch's switches between kernels, which differ in the last bits or in what they can do.
_SWITCHES = (
    *(
        (getattr(_cuda, f"{kind}_sdp_enabled"), getattr(_cuda, f"enable_{kind}_sdp"))
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    ),
    *(_attribute(_cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    _precision((torch.get_float32_matmul_precision, torch.set_float32_matmul_precision), [_cuda.matmul]),
    _precision(_attribute(_cudnn, "allow_tf32"), [_cudnn.conv, _cudnn.rnn]),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
)


SMALL_BYTES = 64 * 1024  # a larger buffer is not always copied: Note [Buffers of a region]

# Of each module, and of each value of `training`: does forward change its buffers?
_changes: weakref.WeakKeyDictionary[nn.Module, dict[bool, bool]] = weakref.WeakKeyDictionary()


class Buffers:
    """The buffers and attributes of some modules before forward; large ones if they may change or `copy_all`."""

    # See Note [Buffers of a region] and Note [Attributes of a region].

    def __init__(self, modules: Sequence[nn.Module], *, copy_all: bool = True) -> None:
        with torch.no_grad():
            self._attributes = Attributes(modules, copy_bytes=math.inf if copy_all else SMALL_BYTES)
            copies: dict[int, torch.Tensor] = {}  # a buffer shared by two modules has one copy
            self._owners = [
                _Owner(module, copies, copy_all) for module in modules if "_buffers" in vars(module)
            ]

    def end_forward(self) -> None:
        """Learn which modules changed their buffers in forward, and drop the other copies."""
        self._attributes.end_forward()
        self._owners = [owner for owner in self._owners if owner.end_forward()]

    def restore(self) -> None:
        """Set buffers and attributes as they were before a forward pass that failed."""
        self._check_attributes()
        self._attributes.restore()
        with torch.no_grad():
            for owner in self._owners:
                owner.restore()

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Run with copies of the buffers, and the attributes, as forward found them; then set the real ones again."""
        self._check_attributes()
        copies: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            at_forward = [(owner.module, owner.at_forward(copies)) for owner in self._owners]
        buffers = [(module, "_buffers", each) for module, each in at_forward if each is not None]
        with exchanged(buffers), self._attributes.restored():
            yield

    def _check_attributes(self) -> None:
        tensor = self._attributes.unknown_tensor()
        if tensor is not None:
            raise RecomputeError(
                f"A tensor (shape {tuple(tensor.shape)}, {tensor.dtype}) that a module has as an attribute was changed "
                "in place, so its value at forward is not known and the forward pass cannot be recomputed. Change it "
                "after backward, assign a new tensor instead, or register it as a buffer."
            )


class _Owner:
    """One module's own buffers; it may have none, and register one."""

    def __init__(self, module: nn.Module, copies: dict[int, torch.Tensor], copy_all: bool) -> None:
        self.module = module
        self._training = module.training
        self._before = dict(module._buffers)
        self._versions = self._current_versions()
        self._changed = True  # until `end_forward` has looked
        self._lost: str | None = None
        copy_all = copy_all or _changes.get(module, {}).get(self._training) is not False
        self._copies = {
            name: _copy(buffer, copies)
            for name, buffer in self._before.items()
            if buffer is not None and (copy_all or buffer.nbytes <= SMALL_BYTES)
        }

    def _current_versions(self) -> dict[str, int]:
        return {name: version_of(buffer) for name, buffer in self._before.items() if buffer is not None}

    def _changed_in_place(self) -> list[str]:
        now = self._current_versions()
        return [name for name, version in self._versions.items() if version != now[name]]

    def end_forward(self) -> bool:
        """Learn whether forward changed the buffers; return False if there are none to look after."""
        module = self.module
        is_same = _are_same(self._before, module._buffers)
        if not self._versions and is_same:
            return False
        known = _changes.setdefault(module, {})
        in_place = self._changed_in_place()
        if self._training not in known and not in_place:
            in_place = [name for name, copy in self._copies.items() if _differs(copy, self._before[name])]
        is_batch_norm = isinstance(module, NormBase) and module.training and module.track_running_stats
        known[self._training] = bool(in_place) or known.get(self._training, False) or is_batch_norm
        self._changed = known[self._training] or not is_same
        self._lost = next((name for name in in_place if name not in self._copies), None)
        if not self._changed:
            self._copies = {}
        return True

    def restore(self) -> None:
        lost = [name for name in self._changed_in_place() if name not in self._copies]
        if lost:
            raise RecomputeError(
                f"The buffer {lost[0]!r} of {type(self.module).__name__} was changed in place by a forward pass "
                "that failed, for the first time after passes that left it alone, so its value before that "
                "is not known. Set it again, for example from a checkpoint, before you go on."
            )
        for name, copy in self._copies.items():
            buffer = self._before[name]
            if buffer is not None:
                # An earlier call's graph may have it: batch norm raises no version either.
                with same_version(buffer):
                    buffer.copy_(copy)
        self._versions = self._current_versions()
        if not _are_same(self._before, self.module._buffers):
            self.module._buffers.clear()
            self.module._buffers.update(self._before)

    def at_forward(self, copies: dict[int, torch.Tensor]) -> dict[str, torch.Tensor | None] | None:
        """Return `_buffers` as it was, for a recomputation to change; None if the real ones will do."""
        if self._lost is not None:
            raise RecomputeError(
                f"The buffer {self._lost!r} of {type(self.module).__name__} was changed in place by a forward "
                "pass, for the first time after passes that left it alone, so its value before that is not "
                "known and the pass cannot be repeated. Run the step again: the buffer is copied from now on."
            )
        if self._changed:
            copied = {name: _copy(copy, copies) for name, copy in self._copies.items()}
            return {**self._before, **copied}
        for name in self._changed_in_place():
            raise RecomputeError(
                f"The buffer {name!r} of {type(self.module).__name__} was changed in place between "
                "forward and backward, so the forward pass cannot be recomputed. Change it after "
                "backward, or assign a new tensor instead. (Under DistributedDataParallel, two forward "
                "passes before one backward do this: pass broadcast_buffers=False.)"
            )
        return None if _are_same(self._before, self.module._buffers) else dict(self._before)


def _copy(buffer: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    if id(buffer) not in copies:
        copies[id(buffer)] = buffer.detach().clone()
    return copies[id(buffer)]


def _differs(copy: torch.Tensor, buffer: torch.Tensor | None) -> bool:
    if type(buffer) is not torch.Tensor or buffer.is_meta:
        return False  # a fake tensor has no values to look at
    return copy.shape != buffer.shape or not torch.equal(copy, buffer)
