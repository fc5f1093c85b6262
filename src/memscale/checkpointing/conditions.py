"""What surrounds a forward pass and changes what it computes: random state, autocast, flags."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memscale._util.rng import HostRngState, TorchRngState
from memscale.checkpointing.saved import changed_parameter

__all__ = ["Conditions", "ModuleFlags", "mark_as_copy", "parameter_behind", "submodules"]


def mark_as_copy(copy: torch.Tensor, parameter: torch.Tensor) -> None:
    """Note that a tensor stands in for a parameter of a module while that computes."""
    copy._memscale_parameter = parameter  # type: ignore[attr-defined]


def parameter_behind(tensor: torch.Tensor) -> torch.Tensor:
    """Return the parameter that a tensor stands in for; the tensor itself, if it stands in for none."""
    parameter: torch.Tensor = getattr(tensor, "_memscale_parameter", tensor)
    return parameter


def submodules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Every module under some modules, each once: `nn.Module.modules()`, without making the names."""
    found: dict[nn.Module, None] = {}
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting.extend(child for child in module._modules.values() if child is not None)
    return list(found)


class ModuleFlags:
    """`training` of some modules, their parameters, `requires_grad` of these and their versions.

    The parameters are those that the modules have in forward: `torch.func.functional_call` puts other tensors in
    their place as long as a call lasts, and a recomputation must use the very same. One that was computed (MAML's
    weights after an inner step) is held without its history, and of a copy on the device the parameter behind it.
    """

    __slots__ = (
        "_modules",
        "_owned",
        "_parameters",
        "_versions",
        "any_requires_grad",
        "any_was_computed",
        "device_types",
    )

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [(module, module.training) for module in modules]
        self._owned: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = [
            (module, dict(module._parameters)) for module in modules if "_parameters" in vars(module)
        ]
        self.any_was_computed = False
        for _, own in self._owned:
            for name, tensor in own.items():
                if tensor is not None and not tensor.is_leaf:
                    own[name] = self._without_history(parameter_behind(tensor))
        self._parameters = [
            (tensor, tensor.requires_grad)
            for _, own in self._owned
            for tensor in own.values()
            if tensor is not None
        ]
        self.any_requires_grad = any(flag for _, flag in self._parameters)
        self.device_types = {parameter.device.type for parameter, _ in self._parameters}
        self._versions = [parameter._version for parameter, _ in self._parameters]

    def _without_history(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_leaf:
            return tensor
        self.any_was_computed = True
        return tensor.detach().requires_grad_(tensor.requires_grad)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters; one that is shared, as often as it has owners."""
        return [parameter for parameter, _ in self._parameters]

    def check_parameters(self) -> None:
        """To be called before the first recomputation of a backward pass.

        An optimizer that steps inside backward (`register_post_accumulate_grad_hook`) changes a parameter
        when nothing that depends on it is left to recompute, so such parameters are not looked at.

        Raises:
            RecomputeError: A parameter was changed in place after the forward pass began.
        """
        for (parameter, _), version in zip(self._parameters, self._versions, strict=True):
            if parameter._version != version and not _is_stepped_in_backward(parameter):
                raise changed_parameter(parameter, version)

    def parameters_moved(self) -> None:
        """Parameters have gone elsewhere, with their values: count versions from here."""
        self._versions = [parameter._version for parameter, _ in self._parameters]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Set parameters and flags as they were, and leave them as they are now."""
        owners = [
            (module, module._parameters, own)
            for module, own in self._owned
            if not _are_same(own, module._parameters)
        ]
        modules = [(module, module.training) for module, flag in self._modules if module.training != flag]
        parameters = [
            (parameter, parameter.requires_grad)
            for parameter, flag in self._parameters
            if parameter.requires_grad != flag
        ]
        try:
            for owner, _, own in owners:
                vars(owner)["_parameters"] = dict(own)
            for module, now in modules:
                module.training = not now
            for parameter, now in parameters:
                parameter.requires_grad_(not now)
            yield
        finally:
            for owner, real, _ in owners:
                vars(owner)["_parameters"] = real
            for module, now in modules:
                module.training = now
            for parameter, now in parameters:
                parameter.requires_grad_(now)


def _are_same(then: Mapping[str, object], now: Mapping[str, object]) -> bool:
    return len(then) == len(now) and all(now.get(name) is each for name, each in then.items())


def _is_stepped_in_backward(parameter: torch.Tensor) -> bool:
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(getattr(hook, "changes_parameter", True) for hook in hooks.values())


class Conditions:
    """Everything outside a region's inputs and buffers that its recomputation must find again.

    Which is: the random state of every device in use, of Python and of NumPy, autocast (on or off, its dtype,
    its cache), the flags of the modules, the default device, and which attention kernels are allowed
    (`sdpa_kernel`). Grad mode is not in it: a region exists only where gradients are on.
    """

    __slots__ = ("_attention", "_autocast", "_default_device", "_device_types", "_flags", "_host_rng", "_rng")

    def __init__(self, flags: ModuleFlags, device_types: Iterable[str]) -> None:
        self._device_types = sorted({*device_types, *flags.device_types})
        self._flags = flags
        self._rng = TorchRngState(self._device_types)
        self._host_rng: HostRngState | None = HostRngState()
        self._autocast = _Autocast(self._device_types)
        self._default_device = torch.get_default_device()
        self._attention = _allowed_attention()

    def check_parameters(self) -> None:
        """Raise a `RecomputeError` if a parameter was changed since. See `ModuleFlags`."""
        self._flags.check_parameters()

    @property
    def any_was_computed(self) -> bool:
        """Whether a module had a parameter that is not a leaf of autograd."""
        return self._flags.any_was_computed

    def parameters(self) -> list[torch.Tensor]:
        """Those of the modules."""
        return self._flags.parameters()

    def forward_has_run(self) -> None:
        """Forget the state of Python's and NumPy's generators if forward has not drawn from them."""
        if self._host_rng is not None and not self._host_rng.has_moved():
            self._host_rng = None

    def restore_random(self) -> None:
        """The random state as it was at forward."""
        self._rng.restore()
        if self._host_rng is not None:
            self._host_rng.restore()

    def parameters_moved(self) -> None:
        """Parameters have gone elsewhere, with their values."""
        self._flags.parameters_moved()

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Gradients on, and all else as it was at forward; afterwards as it is now."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._flags.put_back())
            stack.enter_context(self._autocast.replay())
            stack.enter_context(_attention_allowed(self._attention))
            if torch.get_default_device() != self._default_device:
                stack.enter_context(self._default_device)
            stack.enter_context(torch.enable_grad())
            stack.callback(TorchRngState(self._device_types).restore)
            if self._host_rng is not None:
                stack.callback(HostRngState().restore)
            self.restore_random()
            yield


class _Autocast:
    """Autocast as it stands, on the CPU, on the given devices, and on this machine's accelerator."""

    __slots__ = ("_cache", "_states")

    def __init__(self, device_types: Iterable[str]) -> None:
        accelerator = torch.accelerator.current_accelerator()
        names = {"cpu", *device_types} | ({accelerator.type} if accelerator is not None else set())
        self._states = [
            (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
            for name in sorted(names)
            if torch.amp.is_autocast_available(name)
        ]
        self._cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        if not any(was or torch.is_autocast_enabled(name) for name, was, _ in self._states):
            yield
            return
        # Casts of weights are cached as long as the outermost autocast lasts. If backward runs inside one,
        # it would go on holding what is cast here, and this region would find what others have cast.
        torch.clear_autocast_cache()
        try:
            with contextlib.ExitStack() as stack:
                for name, enabled, dtype in self._states:
                    stack.enter_context(
                        torch.autocast(name, dtype=dtype, enabled=enabled, cache_enabled=self._cache)
                    )
                yield
        finally:
            torch.clear_autocast_cache()


_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


def _allowed_attention() -> tuple[bool, ...]:
    backends: Any = torch.backends.cuda  # of the CPU's kernels too, in spite of the name
    return tuple(getattr(backends, f"{kind}_sdp_enabled")() for kind in _ATTENTION)


@contextlib.contextmanager
def _attention_allowed(wanted: tuple[bool, ...]) -> Iterator[None]:
    now = _allowed_attention()
    try:
        _allow_attention(now, wanted)
        yield
    finally:
        _allow_attention(wanted, now)


def _allow_attention(now: tuple[bool, ...], wanted: tuple[bool, ...]) -> None:
    backends: Any = torch.backends.cuda
    for kind, is_on, on in zip(_ATTENTION, now, wanted, strict=True):
        if is_on != on:
            getattr(backends, f"enable_{kind}_sdp")(on)
