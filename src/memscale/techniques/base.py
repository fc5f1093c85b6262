"""The technique protocol: what the executor asks of a technique, and what it tells it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from memscale.config import Config
from memscale.execution_plan import LayerPlan, Plan
from memscale.observe.counters import Meter

if TYPE_CHECKING:
    from memscale.offload.placement import ModelPlacement
    from memscale.profiler.profile import BlockProfile
    from memscale.techniques.cost import BlockOption, CostTerms
    from memscale.techniques.undo_log import UndoLog

EXECUTOR = "_memscale_executor"
"""The attribute under which a wrapped model has its executor."""


@dataclass(frozen=True)
class ModelSite:
    """A model that a plan is being attached to."""

    model: nn.Module
    plan: Plan
    device: torch.device  # where the model trains
    config: Config
    placement: ModelPlacement
    meter: Meter
    state: dict[str, Any]  # what techniques keep from one plan to the next, by names of their choice

    @property
    def logs(self) -> bool:
        return self.config.enable_logging


@dataclass(frozen=True)
class LayerSite(ModelSite):
    """One layer of a plan, with its modules in the order of `layer.members`."""

    layer: LayerPlan
    modules: tuple[nn.Module, ...]

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]


class LayerTechnique(Protocol):
    """One way to use less memory in a layer.

    It needs no `detach`: a technique changes a model through the undo log only.
    """

    @property
    def name(self) -> str:
        """What plans call it."""

    def options(self, block: BlockProfile, terms: CostTerms) -> Iterable[BlockOption]:
        """Return what it can do with a block, in bytes and seconds, for the planner to choose from."""

    def unsupported_reason(self, site: LayerSite) -> str | None:
        """Return why the layer cannot have it and is left alone; None if it can."""

    def attach(self, site: LayerSite, log: UndoLog) -> None:
        """Put it on the layer.

        Raises:
            WrapError: The plan does not fit the model. What was changed so far is in the log.
        """


class ModelTechnique(Protocol):
    """One way to use less memory in the model as a whole; it is attached after the layers' techniques."""

    def attach(self, site: ModelSite, log: UndoLog) -> None:
        """Put it on the model if the plan says so, else do nothing."""
