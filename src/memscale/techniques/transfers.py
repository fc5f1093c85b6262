"""How tensors travel between the device and the tier below: activations that go down, and what runs beside compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from memscale.config import AsyncOffloadConfig, Config
from memscale.errors import ConfigError, shown
from memscale.execution_plan import LayerPlan, Plan
from memscale.offload.activations import Activations
from memscale.offload.shared import SharedEngine
from memscale.recompute._torch_private import hooks_are_allowed, surrounding_hooks
from memscale.techniques.base import Scene
from memscale.techniques.checkpointing import SlicedForward
from memscale.techniques.forwards import ReplacedForward

if TYPE_CHECKING:
    from memscale.executor.record import Record

__all__ = ["ENVIRONMENT", "OffloadedForward", "Transfers", "async_settings"]

ENVIRONMENT = "MEMSCALE_ASYNC_OFFLOAD"
"""Set to 1, transfers overlap with compute wherever a Config does not say."""

_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def async_settings(plan: Plan, config: Config | None) -> AsyncOffloadConfig | None:
    """How transfers run beside the computation; None if they do not.

    What the user has set in the Config wins; else the environment or the plan can switch it on.

    Raises:
        ConfigError: The environment's variable is none of the words for yes and no.
    """
    config = config or Config()
    said = "async_offload" in config.explicit_fields
    wanted = config.async_offload if said else plan.async_offload or _environment_wants_it()
    return (config.async_config or AsyncOffloadConfig()) if wanted else None


def _environment_wants_it() -> bool:
    value = os.environ.get(ENVIRONMENT, "").strip().lower()
    if value not in (*_ON, *_OFF):
        raise ConfigError(
            f"{ENVIRONMENT}={shown(value)} in the environment is not allowed: set it to 1 or 0."
        )
    return value in _ON


class Transfers:
    """Sends down what layers leave for backward, where the plan says so.

    It goes on after all blocks have theirs, and so around their recomputation: what that keeps, the inputs, is what
    goes down.
    """

    def attach(self, scene: Scene, record: Record) -> None:
        settings = async_settings(scene.plan, scene.config)
        engine = SharedEngine(settings)
        _attach_activations(scene, record, engine)


def _attach_activations(scene: Scene, record: Record, engine: SharedEngine) -> None:
    if scene.device.type == "cpu" and not engine.is_async:
        return  # `ActivationsOnDisk` does it
    logs = scene.config is None or scene.config.enable_logging
    on_host: Activations | None = None
    on_disk: Activations | None = None
    for layer in scene.plan.layers:
        if layer.offloading is None or not layer.offloading.activations:
            continue
        if scene.device.type == "cpu" or layer.offloading.to == "disk":
            on_disk = on_disk or Activations(engine, scene.device, store=scene.homes.store, logs=logs)
            activations = on_disk
        else:
            capacity = _room_on_host(scene)
            on_host = on_host or Activations(engine, scene.device, capacity=capacity, logs=logs)
            activations = on_host
        _attach_to(layer, scene, record, activations)


def _attach_to(layer: LayerPlan, scene: Scene, record: Record, activations: Activations) -> None:
    names: Sequence[str] = layer.members
    container = names[0].rpartition(".")[0]
    sliced = vars(scene.model.get_submodule(container)).get("forward")
    if len(names) > 1 and isinstance(sliced, SlicedForward) and "checkpointing" in layer.techniques:
        names = [container]  # its slices are run, and recomputed, by the container
    for name in names:
        module = scene.model.get_submodule(name)
        if not isinstance(vars(module).get("forward"), OffloadedForward):
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
    moments = (
        2.0 if optimizer is None or not optimizer.eight_bit else 0.5
    )  # bytes of them per byte of a parameter
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
