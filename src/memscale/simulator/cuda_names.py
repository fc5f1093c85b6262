"""``"cuda"`` in user code means the virtual device while a simulation runs.

A training script says ``model.to("cuda")`` and ``torch.autocast("cuda")``. On a build of torch without CUDA
those words are rewritten to the virtual device's name, and the few ``torch.cuda`` questions that scripts ask
are answered by it. Tensors still say ``vgpu`` when asked for their device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memscale.simulator.patches import attribute
from memscale.simulator.streams import VirtualGenerator

# What ``torch.cuda`` is asked, and what ``torch.accelerator`` is asked under the same name.
ANSWERED = """
    is_available is_initialized init device_count current_device set_device is_bf16_supported
    get_device_name get_device_capability get_device_properties
    synchronize current_stream default_stream set_stream stream Stream Event ipc_collect
    empty_cache memory_allocated max_memory_allocated memory_reserved max_memory_reserved
    reset_peak_memory_stats reset_max_memory_allocated mem_get_info memory_stats memory_summary
    manual_seed manual_seed_all get_rng_state get_rng_state_all set_rng_state set_rng_state_all
"""
ANSWERED_BY_ACCELERATOR = """
    synchronize empty_cache memory_allocated max_memory_allocated memory_reserved max_memory_reserved
    reset_peak_memory_stats memory_stats
"""


class _Rewrite(TorchFunctionMode):
    """Rewrites the device argument of torch functions and tensor methods."""

    def __init__(self, target: torch.device) -> None:
        super().__init__()
        self._target = target

    def device(self, value: Any) -> Any:
        """The device that is meant, if ``value`` names one."""
        if isinstance(value, torch.device):
            return self._target if value.type == "cuda" else value
        if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
            return self._target
        return value

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.to:
            args = tuple(map(self.device, args))
        elif func is torch.Tensor.cuda:
            return args[0].to(self._target)
        if not kwargs:
            return func(*args)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self.device(kwargs["device"])}
        return func(*args, **kwargs)


@contextlib.contextmanager
def answered_by(target: torch.device) -> Iterator[None]:
    """Inside the block the word "cuda" stands for ``target``."""
    module = torch.get_device_module(target)
    rewrite = _Rewrite(target)
    set_default_device = torch.set_default_device
    autocast = torch.amp.autocast_mode.autocast.__init__
    scaler = torch.amp.grad_scaler.GradScaler.__init__

    def autocast_init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, target.type if device_type == "cuda" else device_type, *args, **kwargs)

    def scaler_init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler(self, target.type if device == "cuda" else device, *args, **kwargs)

    def to_target(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
        return self.to(target)

    with contextlib.ExitStack() as stack:
        for owner, names in ((torch.cuda, ANSWERED), (torch.accelerator, ANSWERED_BY_ACCELERATOR)):
            for name in filter(partial(hasattr, owner), names.split()):
                # The compiler keeps books of functions and takes no one function under two names.
                answer = getattr(module, name) if owner is torch.cuda else partial(getattr(module, name))
                stack.enter_context(attribute(owner, name, answer))
        stack.enter_context(attribute(torch.amp.autocast_mode.autocast, "__init__", autocast_init))
        stack.enter_context(attribute(torch.amp.grad_scaler.GradScaler, "__init__", scaler_init))
        stack.enter_context(attribute(torch.nn.Module, "cuda", to_target))
        # Before torch 2.12 Adam asks the CUDA runtime itself, which raises where there is no driver.
        stack.enter_context(attribute(torch.cuda, "is_current_stream_capturing", lambda: False))
        stack.enter_context(attribute(torch, "Generator", VirtualGenerator))
        stack.enter_context(
            attribute(torch, "set_default_device", lambda device: set_default_device(rewrite.device(device)))
        )
        stack.enter_context(rewrite)
        yield
