"""What a technique is to the executor: something that goes on a block, and comes off it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from memscale.execution_plan import LayerPlan

if TYPE_CHECKING:
    from memscale.executor.record import Record

__all__ = ["Site", "Technique"]


@dataclass(frozen=True)
class Site:
    """A block of a model that a technique is to be put on.

    Attributes:
        model: The whole model.
        layer: The block's entry in the plan.
        modules: The block's modules, in the order of `layer.members`.
        device: Where the model trains.
    """

    model: nn.Module
    layer: LayerPlan
    modules: tuple[nn.Module, ...]
    device: torch.device


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
