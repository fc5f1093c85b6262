"""Profile one training step: on fake tensors, or where they fail by a guarded real run.

Note [Shortened models]
Equal layers need the same: of each run of equal blocks in a `ModuleList` only the first two stay in the fake copy (two,
because the first may differ: its input may need no gradient). A model that does not run without its other blocks (a
U-Net's skip connections) is run whole.

Note [Guarded runs]
A real run serves where fake tensors fail (shapes that depend on data), and must leave the model as it was: weights are
not stepped; gradients are returned instead of accumulated, so that hooks that wait for them (DistributedDataParallel's,
or those of an optimizer in backward) do not run, except for reentrant checkpoints, which require accumulation, where
they are dropped afterwards; buffers are replaced by copies (batch-norm statistics); random states, training flags and
counters are restored. Forward hooks of the user do run.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import torch
from torch import nn

from memscale._torch import accumulation_hooks, graph_nodes
from memscale._util.snapshots import Attributes, RngState
from memscale.errors import ProfileError
from memscale.hardware import DeviceSpec, find_gpu
from memscale.memory.allocator import CachingAllocator
from memscale.memory.tracker import MemoryTracker
from memscale.profiler.blocks import Block, find_blocks, stacks
from memscale.profiler.profile import ModelProfile, build_profile
from memscale.profiler.recorder import Recorder
from memscale.profiler.sample import Sample
from memscale.simulator import Simulation, simulate
from memscale.simulator.simulate import DEFAULT_CAPABILITY

UNLIMITED_BYTES = 1 << 50  # bytes: the peak of a step that does not fit is wanted, too


@dataclass(frozen=True)
class Place:
    """The device of a simulated step."""

    kind: Literal["cpu", "vgpu"]  # the CPU's kernels and exact bytes, or CUDA's and its allocator
    capability: tuple[int, int] = DEFAULT_CAPABILITY  # decides on attention kernels and workspaces
    index: int | None = None  # of the card that it is a simulation of, on a machine that has it

    @classmethod
    def of(cls, device: DeviceSpec) -> Place:
        if device.kind == "cpu":
            return cls("cpu")
        return cls("vgpu", device.compute_capability or DEFAULT_CAPABILITY, device.index)

    @property
    def counts_exactly(self) -> bool:
        """Whether memory is counted to the byte, not in the allocator's blocks."""
        return self.kind == "cpu"

    def simulate(self) -> AbstractContextManager[Simulation]:
        gpu = replace(find_gpu("RTX 3090"), memory_bytes=UNLIMITED_BYTES, compute_capability=self.capability)
        return simulate(gpu, device=self.kind, index=self.index)


def uses_cache(model: nn.Module) -> bool:
    """Return whether a part of a Hugging Face model creates a cache for generation by default."""
    return bool(_configs_with_cache(model))


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Set `config.use_cache` to False in every part of a Hugging Face model inside the block, as plans do."""
    switched_off = _configs_with_cache(model)
    for config in switched_off:
        config.use_cache = False
    try:
        yield
    finally:
        for config in switched_off:
            config.use_cache = True


def _configs_with_cache(model: nn.Module) -> list[Any]:
    configs = (getattr(module, "config", None) for module in model.modules())
    return [config for config in configs if getattr(config, "use_cache", None) is True]


KEPT_OF_EQUAL = 2


def profile_static(
    model: nn.Module,
    sample: Sample,
    place: Place,
    *,
    with_cache: bool = False,  # leave the cache for generation on; it is off while a plan is attached
    prepare: Callable[[nn.Module], object]
    | None = None,  # called with the shortened fake copy before it runs
    offloaded: bool = False,  # `prepare` offloads the parameters
    resident: Mapping[str, tuple[str, ...]] | None = None,
) -> ModelProfile:
    """Profile a training step on fake tensors; the model is not changed. Raises what it raises on them."""
    blocks = find_blocks(model)

    def profile(short: dict[str, str]) -> ModelProfile:
        with place.simulate() as simulation:
            left_out = [model.get_submodule(block.members[0]) for block in blocks if block.name in short]
            twin = simulation.copy_of(model, without=left_out).train(model.training)
            kept = [block for block in blocks if block.name not in short]
            modules = [(each.name, [twin.get_submodule(path) for path in each.members]) for each in kept]
            _shorten(twin, short)
            if prepare is not None:
                prepare(twin)
            batch = Sample(*simulation.batch_of((sample.args, sample.kwargs)))
            with contextlib.nullcontext() if with_cache else without_cache(twin):
                recorder = Recorder(simulation.tracker, simulation.device)
                step = recorder.run_step(twin, batch, modules, torch.autograd.backward)
        return build_profile(
            model,
            blocks,
            step,
            stand_ins=short,
            source="static",
            reason=f"{f'{len(kept)} of {len(blocks)} blocks ' if short else ''}run on fake tensors",
            batch=sample.describe(),
            exact_bytes=place.counts_exactly,
            offloaded=offloaded,
            resident=resident,
        )

    short = _shortening(model, blocks)
    if not short:
        return profile({})
    try:
        found = profile(short)
    except Exception as error:
        why = f"as it does not run shortened ({type(error).__name__})"
    else:
        if resident is not None or not any(found.block(name).resident for name in short.values()):
            return found
        # The model may read only one of the blocks that it stands for.
        why = "as a block that stands in for others is read outside of its forward"
    whole = profile({})
    return replace(whole, reason=f"{whole.reason}, whole, {why}")


def _shortening(model: nn.Module, blocks: Sequence[Block]) -> dict[str, str]:
    """Return the blocks that need not run, each with the equal block that stands for it."""
    short: dict[str, str] = {}
    for stack in stacks(blocks):
        if not isinstance(model.get_submodule(stack[0].container), nn.ModuleList):
            continue
        for _, run in groupby(stack, key=lambda block: block.signature):
            equal = list(run)
            for block in equal[KEPT_OF_EQUAL:]:
                short[block.name] = equal[KEPT_OF_EQUAL - 1].name
    return short


def _shorten(twin: nn.Module, short: dict[str, str]) -> None:
    for container in {name.rpartition(".")[0] for name in short}:
        modules = twin.get_submodule(container)
        prefix = f"{container}." if container else ""
        kept = [module for index, module in modules._modules.items() if f"{prefix}{index}" not in short]
        modules._modules.clear()
        modules._modules.update({str(index): module for index, module in enumerate(kept)})


def profile_empirical(model: nn.Module, sample: Sample, *, reason: str) -> ModelProfile:
    """Profile a real forward and backward on the model's device. See Note [Guarded runs]."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    blocks = find_blocks(model)
    allocators = {} if device.type == "cpu" else {device.type: CachingAllocator}
    batch = sample.copy().on(device)
    with untouched(model), without_cache(model):
        tracker = MemoryTracker(model, *batch.tensors(), allocators=allocators)
        modules = [(block.name, [model.get_submodule(path) for path in block.members]) for block in blocks]
        with tracker:
            step = Recorder(tracker, device).run_step(model, batch, modules, gradients_of(model))
    return build_profile(
        model,
        blocks,
        step,
        stand_ins={},
        source="empirical",
        reason=reason,
        batch=sample.describe(),
        exact_bytes=device.type == "cpu",
    )


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, plain attributes, random states and training flags after the block."""
    attributes = Attributes(list(model.modules()))
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    flags = [(module, module.training) for module in model.modules()]
    buffers = [(module, module._buffers) for module in model.modules() if module._buffers]
    random = RngState({parameter.device for parameter, _ in gradients})
    for parameter, _ in gradients:
        parameter.grad = None
    copies: dict[int, torch.Tensor | None] = {id(None): None}
    for module, own in buffers:
        for buffer in own.values():
            if buffer is not None and id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone()
        module.__dict__["_buffers"] = {name: copies[id(buffer)] for name, buffer in own.items()}
    try:
        yield
    finally:
        attributes.restore()
        for module, own in buffers:
            module.__dict__["_buffers"] = own
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in flags:
            module.training = training
        random.restore()


def gradients_of(model: nn.Module) -> Callable[[torch.Tensor], object]:
    """Return a backward that computes every gradient and stores none, unless the graph requires it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    has_hooks = any(map(accumulation_hooks, trained))

    def backward(loss: torch.Tensor) -> object:
        if not is_reentrant(loss):
            return compute_gradients(loss, trained)
        if has_hooks:
            raise ProfileError(
                f"{type(model).__name__} can't be profiled by a real run: its torch.utils.checkpoint(use_reentrant="
                "True) stores gradients in backward, and it has hooks that run when one is stored, which a profiling "
                "run must not call. Pass use_reentrant=False to torch.utils.checkpoint."
            )
        torch.autograd.backward(loss)
        return None

    return backward


def compute_gradients(loss: torch.Tensor, trained: Sequence[nn.Parameter]) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of parameters; those of the inputs, which a loop may train, are computed as well."""
    leaves = {id(each): each for each in trained}
    for node in graph_nodes([loss]):
        if type(node).__name__ == "AccumulateGrad":
            leaves.setdefault(id(node.variable), node.variable)
    return torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True)[: len(trained)]


def is_reentrant(loss: torch.Tensor) -> bool:
    """Return whether a graph has reentrant checkpoints, which `torch.autograd.grad` refuses."""
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in graph_nodes([loss]))


def profile_model(
    model: nn.Module, sample: Sample, place: Place, *, static: bool = True, empirical: bool = True
) -> ModelProfile:
    """Profile one training step: on fake tensors if possible (`static`), else by a guarded real run (`empirical`).

    Where a copy of the model calls no block (an instance forward may refer to the original model), a real run is tried
    too. Where neither works, a `ProfileError` has the reasons.
    """
    why_not_static = "use_static_profiling=False"
    is_on_meta = any(parameter.is_meta for parameter in model.parameters())
    if static:
        try:
            profile = profile_static(model, sample, place)
        except Exception as error:
            why_not_static = f"fake tensors failed: {type(error).__name__}: {_first_line(error)}"
        else:
            if profile.calls_blocks or not empirical or is_on_meta:
                return profile
            why_not_static = "a copy of the model on fake tensors calls none of its layers"
    name = type(model).__name__
    if not empirical:
        raise ProfileError(
            f"{name} can't be profiled without running it ({why_not_static}), and a real run is switched off "
            "by use_empirical_fallback=False. Check that sample_input is what the model takes in training, or "
            "allow the fallback."
        )
    if is_on_meta:
        raise ProfileError(
            f"{name} can't be profiled without running it ({why_not_static}), and it can't be run while its "
            "weights are on the meta device. Check that the batch is what the model takes in training."
        )
    try:
        return profile_empirical(model, sample, reason=f"a real run ({why_not_static})")
    except Exception as error:
        # The activations in its frames take memory, and their graph keeps parameters from being swapped.
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, (torch.OutOfMemoryError, ProfileError)):
            raise
        devices = sorted({str(parameter.device) for parameter in model.parameters()})
        advice = (
            "Pass as sample_input what you pass to the model in training."
            if len(devices) < 2
            else f"Its parameters are on {' and '.join(devices)}; while some are offloaded, a model that can't be run "
            "on fake tensors can't be profiled again. Pass the largest batch as sample_input to plan once."
        )
        raise ProfileError(
            f"{name} does not run on the sample: {type(error).__name__}: {_first_line(error)}. The sample "
            f"was: {sample.describe() or 'no tensors'}. {advice}"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
