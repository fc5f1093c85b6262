"""A model on the meta device while a plan is attached: its tensors get their places, and now or later their values."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from memscale._util.interrupts import raise_pending_interrupt
from memscale.errors import WrapError
from memscale.execution_plan import LayerPlan, Plan
from memscale.offload.awaited import AwaitedValues, Skeleton
from memscale.offload.freed_memory import freed_memory_returns
from memscale.offload.homes import HOST, Homes, training_device
from memscale.offload.loading import has_pending
from memscale.offload.materialise import materialise, place
from memscale.offload.materialised import Materialised, tie_on_meta
from memscale.units import format_bytes

__all__ = ["Newborn", "find_module"]

logger = logging.getLogger("memscale")


class Newborn:
    """A model of which some tensors are on the meta device. See Note [Models larger than memory].

    Args:
        model: The model, before anything is attached to it.
        device: Where it will train.
        homes: Where its tensors will be.
        logs: Tell the user what is done.

    Attributes:
        awaited: The values that are still to be made, once it is settled; None if they are there.
    """

    def __init__(self, model: nn.Module, device: torch.device, homes: Homes, *, logs: bool) -> None:
        self._homes = homes
        self._logs = logs
        self._made: Materialised | None = None
        self._skeleton = _skeleton_of(model, device)
        self.awaited: AwaitedValues | None = None

    def settle(
        self,
        model: nn.Module,
        plan: Plan,
        device: torch.device,
        at_home: Sequence[nn.Parameter],
        on_disk: Sequence[nn.Parameter],
    ) -> None:
        """Take each tensor that is on the meta device straight to its place, with its values or without.

        Raises:
            WrapError: A tensor has no initialisation. The model is as it was.
            WeightsError: A file that its weights were to come from can't be read any more.
        """
        below = {id(parameter) for parameter in on_disk}
        home = {id(parameter) for parameter in at_home} | below
        before = training_device(model)  # where detach leaves all of it: with what of it has been somewhere

        def settle(parameter: nn.Parameter) -> None:
            raise_pending_interrupt()
            where = HOST if id(parameter) in home else device
            self._homes.settle(parameter, where, before=before, on_disk=id(parameter) in below)

        tell: Callable[[Materialised], None] = (
            functools.partial(logger.info, "%s") if self._logs else _say_nothing
        )
        if self._skeleton is None:
            with freed_memory_returns():
                self._made = materialise(model, settle, _members(model, plan))
            tell(self._made)
            return
        self._made = place(model, functools.partial(self._memory_of, device, home, below))
        for _, parameter in self._skeleton.parameters:
            settle(parameter)
        layers = _members(self._skeleton.twin, plan)
        self.awaited = AwaitedValues(self._skeleton, layers, self._homes.store, tell)
        if self._logs:
            size = format_bytes(sum(parameter.nbytes for _, parameter in self._skeleton.parameters))
            logger.info(
                "%s is on the meta device; its parameters (%s) get their values when they are first needed.",
                type(model).__name__,
                size,
            )

    def undo(self) -> None:
        """Everything on the meta device again."""
        self.awaited = None  # it refers to parameters weakly, and those can't be exchanged then
        if self._made is not None:
            self._made.undo()

    def _memory_of(
        self, device: torch.device, home: Collection[int], below: Collection[int], tensor: torch.Tensor
    ) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter) and id(tensor) in below:
            on_disk = self._homes.mapped.home_of(tensor)
            if on_disk is not None:
                return on_disk
        where = HOST if id(tensor) in home else device
        return torch.empty_like(tensor, device=where, requires_grad=False)


def _skeleton_of(model: nn.Module, device: torch.device) -> Skeleton | None:
    """What values can be made on later; None if they are to be made at once. See Note [Awaited values]."""
    if has_pending(model) or type(torch.empty(0, device=device)) is not torch.Tensor:
        return None
    tie_on_meta(model)
    try:
        return Skeleton(model)
    except Exception as error:  # if values can't be made at all, that says so when they are made at once
        logger.debug("The values of %s are made at once: %s", type(model).__name__, error)
        return None


def _say_nothing(made: Materialised) -> None:
    pass


def _members(model: nn.Module, plan: Plan) -> list[nn.Module]:
    return [find_module(model, layer, member) for layer in plan.layers for member in layer.members]


def find_module(model: nn.Module, layer: LayerPlan, name: str) -> nn.Module:
    """A module of a plan's layer, by its name.

    Raises:
        WrapError: The model has none of that name.
    """
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise WrapError(
            f"The plan's layer {layer.name!r} has the module {name!r}, and the model "
            f"({type(model).__name__}) has none of that name. A plan fits the model that it was made for: "
            "make a new one."
        ) from None
