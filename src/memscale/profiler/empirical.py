"""The empirical profile: one real step, where fake tensors cannot follow (shapes that depend on data).

The run is guarded: weights are not stepped, gradients are asked for instead of accumulated (so that hooks that wait
for them, those of DistributedDataParallel or of an optimizer in backward, do not hear of it; reentrant checkpoints
refuse that, and there they are accumulated and dropped), buffers are exchanged
for copies (so that batch-norm statistics stay), random states, training flags and counters are put back. Forward hooks
that the user has put on the model do run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from memscale._util.attributes import Attributes
from memscale._util.rng import RngState
from memscale.errors import ProfileError
from memscale.memory.allocator import CachingAllocator
from memscale.memory.tracker import MemoryTracker
from memscale.profiler.blocks import find_blocks
from memscale.profiler.build import build_profile, run_step
from memscale.profiler.cache import without_cache
from memscale.profiler.profile import ModelProfile
from memscale.profiler.recorder import Recorder
from memscale.profiler.sample import Sample


def profile_empirical(model: nn.Module, sample: Sample, *, reason: str) -> ModelProfile:
    """Profile a real forward and backward on the model's own device; the model is as before afterwards."""
    device = _device_of(model)
    blocks = find_blocks(model)
    allocators = {} if device.type == "cpu" else {device.type: CachingAllocator}
    batch = sample.on(device)
    with untouched(model), without_cache(model):
        tracker = MemoryTracker(model, *batch.tensors(), allocators=allocators)
        recorder = Recorder(tracker, device)
        named = [(block.name, [model.get_submodule(path) for path in block.members]) for block in blocks]
        with tracker, recorder.listening(named):
            run_step(model, batch, recorder, gradients_of(model))
    return build_profile(
        model,
        blocks,
        recorder.step,
        stand_ins={},
        source="empirical",
        reason=reason,
        batch=sample.describe(),
        exact_bytes=device.type == "cpu",
    )


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Leave gradients, buffers, plain attributes, random states and training flags as they were before the block."""
    attributes = Attributes(list(model.modules()))
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    flags = [(module, module.training) for module in model.modules()]
    buffers = [(module, module._buffers) for module in model.modules() if module._buffers]
    random = RngState(sorted({parameter.device.type for parameter, _ in gradients}))
    for parameter, _ in gradients:
        parameter.grad = None
    copies: dict[int, torch.Tensor] = {}
    for module, own in buffers:
        module.__dict__["_buffers"] = {name: _copy(buffer, copies) for name, buffer in own.items()}
    try:
        yield
    finally:
        attributes.take_back()
        for module, own in buffers:
            module.__dict__["_buffers"] = own
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in flags:
            module.training = training
        random.restore()


def gradients_of(model: nn.Module) -> Callable[[torch.Tensor], object]:
    """A backward that makes every gradient and stores none, unless the graph allows no other way.

    Raises:
        ProfileError: gradients must be stored, and hooks of the user's wait for that.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    waited_for = any(parameter._post_accumulate_grad_hooks for parameter in trained)

    def backward(loss: torch.Tensor) -> object:
        if not is_reentrant(loss):
            return torch.autograd.grad(loss, trained, allow_unused=True)
        if waited_for:
            raise ProfileError(
                f"{type(model).__name__} can't be profiled by a real run: its torch.utils.checkpoint(use_reentrant="
                "True) stores gradients in backward, and it has hooks that run when one is stored, which a profiling "
                "run must not call. Pass use_reentrant=False to torch.utils.checkpoint."
            )
        torch.autograd.backward(loss)
        return None

    return backward


def is_reentrant(loss: torch.Tensor) -> bool:
    """Return whether the graph of a loss has reentrant checkpoints, which `torch.autograd.grad` refuses."""
    waiting = [loss.grad_fn]
    seen: set[object] = {None}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__ == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting.extend(each for each, _ in node.next_functions)
    return False


def _copy(buffer: torch.Tensor | None, copies: dict[int, torch.Tensor]) -> torch.Tensor | None:
    if buffer is not None and id(buffer) not in copies:
        copies[id(buffer)] = buffer.detach().clone()
    return None if buffer is None else copies[id(buffer)]


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
