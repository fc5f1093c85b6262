"""True numbers on the stand-in: each CUDA operation is computed by the CPU, in the memory of its CUDA tensors.

The stand-in's device memory is host memory, so that a CUDA tensor can be seen as a CPU tensor. Inside `computing()`
every operation first runs as it is (torch checks its arguments and allocates its results; the kernel does nothing),
and then once more on CPU tensors over the same memory. Before that, the operations that the current stream has queued
are run, with those that they wait for, and no others: work that should have waited for a copy on another stream and
did not reads what is there without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from memscale._torch import current_fake_mode
from memscale.testing import CPU_KERNELS

aten = torch.ops.aten
_MOVES = (
    aten.record_stream.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten._pin_memory.default,
    aten.is_pinned.default,
)


def library() -> ctypes.CDLL:
    """Return the stand-in that this process was started with."""
    return ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Compute CUDA operations inside the block; attention by its formula, convolutions without cuDNN."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False), _Computing():
        yield


def cpu_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the memory of a CUDA tensor."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    buffer = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(flat, tensor.storage_offset(), tensor.shape, tensor.stride())
    return view.conj() if tensor.is_conj() else view


class _Computing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._library = library()
        self._library.fakecuda_run_stream.argtypes = [ctypes.c_void_p, ctypes.c_int]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if current_fake_mode() is not None:
            return func(*args, **kwargs)  # a simulation, whose tensors seem to be on the card
        state = None
        on_device = [each for each in tree_flatten((args, kwargs))[0] if _is_cuda(each)]
        device = kwargs.get("device")
        is_factory = not on_device and device is not None and torch.device(device).type == "cuda"
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random and (on_device or is_factory):
            state = torch.cuda.get_rng_state(torch.cuda.current_device())
        if func is aten.equal.default and on_device:  # an answer of kernels that torch launches inside it
            self._run_stream()
            return func(*map(_on_cpu, args))
        result = func(*args, **kwargs)
        if func in _MOVES and not self._converts(func, args, kwargs, result):
            return result  # copied by the runtime, on its stream
        if (not on_device and not is_factory) or func.overloadpacket is aten.set_:  # which computes nothing
            return result
        results = [each for each in tree_flatten(result)[0] if _is_cuda(each)]
        if not results and not func._schema.is_mutable:
            return result  # a number read from the device
        self._compute(func, args, kwargs, result, state)
        return result

    def _converts(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Return whether a copy inside the device changes the type or the layout, which a kernel would do."""
        if func is aten.copy_.default:
            return _is_cuda(args[0]) and _is_cuda(args[1])
        return func is aten._to_copy.default and _is_cuda(args[0]) and _is_cuda(result)

    def _run_stream(self) -> None:
        stream = torch.cuda.current_stream()
        self._library.fakecuda_run_stream(stream.cuda_stream or None, stream.device_index)

    def _compute(self, func: Any, args: Any, kwargs: Any, result: Any, state: torch.Tensor | None) -> None:
        self._run_stream()
        on_cpu_args, on_cpu_kwargs = tree_map_only(torch.Tensor, _on_cpu, (args, kwargs))
        if kwargs.get("device") is not None:
            on_cpu_kwargs["device"] = "cpu"
        if kwargs.get("generator") is not None:
            on_cpu_kwargs["generator"] = None
        with _seeded(state):
            computed = CPU_KERNELS.get(func, func)(*on_cpu_args, **on_cpu_kwargs)
        arguments = {
            each.untyped_storage().data_ptr() for each in tree_flatten((args, kwargs))[0] if _is_cuda(each)
        }
        for target, values in zip(tree_flatten(result)[0], tree_flatten(computed)[0], strict=True):
            if _is_cuda(target) and target.numel():
                if target.untyped_storage().data_ptr() in arguments:
                    continue  # a view, or changed in place: the memory is the same
                cpu_view(target).copy_(values)


def _is_cuda(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return cpu_view(tensor) if tensor.is_cuda else tensor


@contextlib.contextmanager
def _seeded(state: torch.Tensor | None) -> Iterator[None]:
    """Draw what follows from the state of the CUDA generator: the same state gives the same numbers."""
    if state is None:
        yield
        return
    before = torch.get_rng_state()
    torch.manual_seed(int.from_bytes(bytes(state.tolist())[:16], "little") % 2**63)
    try:
        yield
    finally:
        torch.set_rng_state(before)
