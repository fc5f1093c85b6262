"""How tensors travel between the device and the tier below: activations that go down, and what runs beside compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memscale._torch import hooks_are_allowed, surrounding_hooks
from memscale._util.trees import Tree
from memscale.checkpointing.technique import SlicedForward
from memscale.execution_plan import LayerPlan
from memscale.offload.activations import Activations
from memscale.offload.prefetch import Prefetcher
from memscale.offload.technique import StreamedForward
from memscale.techniques.base import Scene
from memscale.techniques.forward import ReplacedForward, top_forward
from memscale.tiers.engine import Engine, async_settings

if TYPE_CHECKING:
    from memscale.techniques.undo_log import Record

__all__ = ["OffloadedForward", "Transfers"]


class Transfers:
    """Sends down what layers leave for backward, where the plan says so; and fetches ahead what they will need.

    It goes on after all blocks have theirs, and so around their recomputation: what that keeps, the inputs, is what
    goes down.
    """

    def attach(self, scene: Scene, record: Record) -> None:
        engine = Engine(async_settings(scene.plan, scene.config))
        if engine.is_async:
            _attach_prefetcher(scene, record, engine)
        _attach_activations(scene, record, engine)


# ---------------------------------------------------------------------- parameters


def _attach_prefetcher(scene: Scene, record: Record, engine: Engine) -> None:
    streamed = {
        id(forward.module): forward for forward in record.forwards() if isinstance(forward, StreamedForward)
    }
    if not streamed:
        return
    segments: list[list[StreamedForward]] = []  # what backward runs again as one
    for layer in scene.plan.layers:
        modules = (scene.model.get_submodule(name) for name in layer.members)
        members = [streamed[id(module)] for module in modules if id(module) in streamed]
        chained = layer.checkpointing is not None and layer.checkpointing.chained
        if "checkpointing" not in layer.techniques:
            segments += [[member] for member in members]
        elif chained and segments:
            segments[-1] += members
        else:
            segments.append(members)
    in_forward = [forward for segment in segments for forward in segment]
    in_backward = [forward for segment in reversed(segments) for forward in segment]
    prefetcher = Prefetcher(engine, scene.device, in_forward, in_backward)
    for forward in in_forward:
        forward.fetched_ahead_by(prefetcher)
    record.add_forward_pre_hook(scene.model, _BeginPass(prefetcher))
    record.add_forward_hook(scene.model, _EndPass(prefetcher))


class _BeginPass:
    """A hook before the model's forward."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher

    def __call__(self, model: nn.Module, args: Any, kwargs: Any = None) -> None:
        if not torch.compiler.is_compiling():
            self._prefetcher.begin_forward()


class _EndPass:
    """A hook after the model's forward, also after one that failed: then there is no output."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        prefetcher = self._prefetcher
        if torch.compiler.is_compiling():
            return
        prefetcher.end_forward(complete=output is not None)

        def begin(*gradients: Any) -> None:
            prefetcher.begin_backward()

        if output is not None and torch.is_grad_enabled():
            for tensor in Tree.of(output).tensors():
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(begin)


# ---------------------------------------------------------------------- activations


def _attach_activations(scene: Scene, record: Record, engine: Engine) -> None:
    logs = scene.config is None or scene.config.enable_logging
    on_host: Activations | None = None
    on_disk: Activations | None = None
    for layer in scene.plan.layers:
        if layer.offloading is None or not layer.offloading.activations:
            continue
        if scene.device.type == "cpu" or layer.offloading.to == "disk":
            on_disk = on_disk or Activations(
                engine, scene.device, store=scene.homes.store, logs=logs, meter=scene.meter
            )
            activations = on_disk
        else:
            capacity = _room_on_host(scene)
            on_host = on_host or Activations(
                engine, scene.device, capacity=capacity, logs=logs, meter=scene.meter
            )
            activations = on_host
        _attach_to(layer, scene, record, activations)


def _attach_to(layer: LayerPlan, scene: Scene, record: Record, activations: Activations) -> None:
    names: Sequence[str] = layer.members
    container = names[0].rpartition(".")[0]
    sliced = top_forward(scene.model.get_submodule(container))
    if len(names) > 1 and isinstance(sliced, SlicedForward) and "checkpointing" in layer.techniques:
        names = [container]  # its slices are run, and recomputed, by the container
    for name in names:
        module = scene.model.get_submodule(name)
        if not isinstance(top_forward(module), OffloadedForward):
            record.set_attribute(module, "forward", OffloadedForward(module, activations), name=name)


def _room_on_host(scene: Scene) -> int | None:
    """What ``max_cpu_offload_gb`` leaves for activations: all but the parameters at home, their gradients and state."""
    cap = None if scene.config is None else scene.config.max_cpu_offload_bytes
    if cap is None:
        return None
    on_disk = {id(parameter) for parameter in scene.homes.on_disk}
    parameters = list(scene.model.parameters())
    at_home = [each for each in parameters if each.device.type == "cpu" and id(each) not in on_disk]
    trained = [each for each in at_home if each.requires_grad]
    optimizer = scene.plan.optimizer
    eight_bit = optimizer is not None and optimizer.eight_bit
    moments = 0.5 if eight_bit else 2.0  # bytes of Adam's state for each byte of a parameter
    if optimizer is None or optimizer.state == "device":  # beside their parameters
        state = sum(each.nbytes for each in trained)
    elif optimizer.state == "host":
        state = sum(each.nbytes for each in parameters if each.requires_grad)
    else:
        state = 0
    taken = sum(each.nbytes for each in at_home) + sum(each.nbytes for each in trained) + int(moments * state)
    return max(0, cap - taken)


class OffloadedForward(ReplacedForward):
    """The forward of a block whose saved tensors go down. See Note [Activations below].

    Args:
        module: The module that this goes on.
        activations: Where they go.
    """

    def __init__(self, module: nn.Module, activations: Activations) -> None:
        super().__init__(module)
        self._activations = activations

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        # Whoever has hooks around this, such as a recomputed region, has it that nothing is kept, or where.
        if not hooks_are_allowed() or surrounding_hooks() is not None:
            return forward(*args, **kwargs)
        with self._activations.around([module]):
            return forward(*args, **kwargs)
