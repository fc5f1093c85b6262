"""What a technique is to the executor: something that goes on a block, and comes off it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from memscale.config import Config
from memscale.execution_plan import LayerPlan, Plan
from memscale.observe.counters import Meter

if TYPE_CHECKING:
    from memscale.offload.homes import Homes
    from memscale.techniques.undo_log import Record

__all__ = ["Scene", "Site", "Technique", "WholeTechnique"]


@dataclass(frozen=True)
class Site:
    """A block of a model that a technique is to be put on.

    Attributes:
        model: The whole model.
        layer: The block's entry in the plan.
        modules: The block's modules, in the order of `layer.members`.
        device: Where the model trains.
        homes: Where the model's tensors are, and the disk below it.
        meter: Counts what a technique does.
    """

    model: nn.Module
    layer: LayerPlan
    modules: tuple[nn.Module, ...]
    device: torch.device
    homes: Homes
    meter: Meter


class Technique(Protocol):
    """One way to use less memory, as it is put on a block.

    How it comes off needs no method: a technique changes a model through the record only, and the record
    undoes its changes in reverse.
    """

    @property
    def name(self) -> str:
        """What plans call it."""

    def objection(self, site: Site) -> str | None:
        """Why it must not go on this block as the model is now, which is left alone then; None if it may."""

    def attach(self, site: Site, record: Record) -> None:
        """Put it on the block.

        Raises:
            WrapError: The plan does not fit the model. What was changed so far is in the record.
        """


@dataclass(frozen=True)
class Scene:
    """A model as a whole, for what is not put on single blocks.

    Attributes:
        model: The model.
        plan: The plan that is being attached.
        device: Where the model trains.
        config: The user's settings; None if the plan was attached without any.
        homes: Where the model's tensors are, and the disk below it.
        meter: Counts what a technique does.
    """

    model: nn.Module
    plan: Plan
    device: torch.device
    config: Config | None
    homes: Homes
    meter: Meter


class WholeTechnique(Protocol):
    """One way to use less memory that concerns the model as a whole: its precision, optimizer or loss.

    It goes on after all blocks have what the plan says of them, and comes off before. Like a `Technique` it
    changes the model through the record only.
    """

    def attach(self, scene: Scene, record: Record) -> None:
        """Put it on the model if the plan says so, else do nothing."""
