"""Optimizer steps whose moments are in 8 bits in between: ``StreamedSteps`` with another place for state."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from memscale.observe.counters import Meter, WatchedState
from memscale.optimizer.eight_bit.kinds import MOMENTS, holds_moments, why_in_full
from memscale.optimizer.eight_bit.moments import EightBitMoments, Moment
from memscale.optimizer.eight_bit.quantizer import Quantizer
from memscale.optimizer.eight_bit.slices import EightBitSlices
from memscale.optimizer.groups import Member
from memscale.optimizer.interceptor import StepOrder
from memscale.optimizer.slices import INSIDE, SlicedParameter, length_of_slices
from memscale.optimizer.streamed import StreamedSteps

__all__ = ["EightBitSteps"]

_HOST = torch.device("cpu")


class EightBitSteps(StreamedSteps):
    """Keeps the moments of some parameters in 8 bits, whichever optimizer steps them.

    See Note [Eight bits between steps]. Attached before a ``StreamedSteps`` it is inside of it: that one moves
    the 8-bit codes between tiers, a bucket at a time, and this one is given the bucket to step.

    Args:
        parameters: whose moments are kept so.
        quantizer: bitsandbytes.
        bucket_bytes: the most that parameters, gradients and 32-bit moments of one bucket may take; a
            parameter that needs more has a bucket to itself, or comes in slices.
        logger: told which optimizers keep their state in 32 bits, and why.
        meter: takes the time of it.

    Example:
        >>> from memscale.optimizer.eight_bit import find_quantizer
        >>> model = nn.Linear(64, 64)
        >>> steps = EightBitSteps(model.parameters(), find_quantizer([]), bucket_bytes=2**20)
        >>> steps.attach()
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg"]["codes"].dtype
        torch.uint8
        >>> optimizer.state_dict()["state"][0]["exp_avg"].dtype
        torch.float32
        >>> steps.detach()
        >>> optimizer.state[model.weight]["exp_avg"].dtype
        torch.float32
    """

    order = StepOrder.EIGHT_BIT
    _notice = "The state of this %s stays in 32 bits: %s."

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        quantizer: Quantizer,
        bucket_bytes: int,
        *,
        logger: logging.Logger | None = None,
        meter: Meter | None = None,
    ) -> None:
        logger = logger or logging.getLogger("memscale")
        self._moments = EightBitMoments(quantizer, logger)
        super().__init__(parameters, self._moments.place, bucket_bytes, logger=logger)
        self._state = self._moments
        self._state.watched = WatchedState(meter, cost="8-bit optimizer")
        self._saving: MutableMapping[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()

    def attach(self) -> None:
        super().attach()
        INSIDE.add(self)

    def pause(self) -> None:
        super().pause()
        INSIDE.discard(self)

    def detach(self) -> None:
        super().detach()
        INSIDE.discard(self)

    def keeps(self, parameter: torch.Tensor) -> bool:
        """Whether moments of this parameter are kept in 8 bits; whoever is around must not cut it."""
        return self._parameters.get(id(parameter)) is parameter

    def as_left(
        self, optimizer: Optimizer, parameter: torch.Tensor, name: str, like: torch.Tensor
    ) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        """Yield new state of such a parameter after a step: of a moment its codes and their scales."""
        if name in MOMENTS and self._why_whole(optimizer) is None and not self._moments.has_failed:
            for part, value in Moment.like(like, signed=MOMENTS[name]).items():
                yield (name, part), value
        else:
            yield (name,), like

    def concerns(self, optimizer: Optimizer) -> bool:
        return holds_moments(optimizer) and super().concerns(optimizer)

    def _why_whole(self, optimizer: Optimizer) -> str | None:
        return why_in_full(optimizer) or super()._why_whole(optimizer)

    def _sliced(self, optimizer: Optimizer, bucket: list[Member], needed: int) -> SlicedParameter | None:
        if len(bucket) != 1 or self._moments.has_failed:
            return None
        parameter = bucket[0].parameter
        length = length_of_slices(optimizer, parameter, needed, self.bucket_bytes)
        return None if length is None else EightBitSlices(optimizer, parameter, self._moments, length)

    def _keep(self, optimizer: Optimizer) -> None:
        if optimizer not in self._saving:
            hook = _OrdinaryState(self._moments)
            self._saving[optimizer] = optimizer.register_state_dict_post_hook(hook)
        super()._keep(optimizer)

    def _bring_back(self, optimizer: Optimizer) -> None:
        super()._bring_back(optimizer)
        handle = self._saving.pop(optimizer, None)
        if handle is not None:
            handle.remove()


class _OrdinaryState:
    """What ``state_dict`` gives instead of 8-bit moments: the numbers that they stand for, on the host.

    On the host, because all of them at once in 32 bits may be more than the device has room for.
    """

    def __init__(self, moments: EightBitMoments) -> None:
        self._moments = moments

    def __call__(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        # torch numbers the parameters in the order of the groups.
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with torch.no_grad():
            state = {
                key: self._moments.ordinary(value, parameters[key], _HOST) if isinstance(key, int) else value
                for key, value in state_dict["state"].items()
            }
        return {**state_dict, "state": state}
