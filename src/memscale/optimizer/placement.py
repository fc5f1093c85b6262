"""Steps of parameters that are placed on the host below an accelerator.

Their state follows them, it must fit under the cap on host memory, and the numbers must be those of the device:
torch steps parameters that are on an accelerator by its ``foreach`` implementation, and those on a CPU, or some of
each, by its loop over them. The two round differently in the classes of :data:`FOREACH_DIFFERS`, with 16-bit parameters
in those of :data:`FOREACH_DIFFERS_IN_16_BITS` (``tests/optimizer/test_same_implementation.py`` compares all). For these
the step is asked to run as it would on the device. In 16 bits the ``foreach`` of a CPU itself rounds what that of CUDA
does not: see :func:`memscale._torch.foreach_mul_`.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memscale._torch import FOREACH_MUL, LightDispatchMode, foreach_mul_, takes_foreach
from memscale.errors import TierFullError
from memscale.optimizer.buckets import bytes_of_gradient
from memscale.optimizer.eight_bit import stored_layout
from memscale.optimizer.interceptor import StepOrder, StepSubscriber
from memscale.optimizer.kinds import (
    FOREACH_DIFFERS,
    FOREACH_DIFFERS_IN_16_BITS,
    NewState,
    arithmetic_of,
    why_whole,
)
from memscale.optimizer.states import OptimizerStates
from memscale.units import format_bytes

__all__ = ["PlacedModel", "PlacementSteps"]

_HOST = torch.device("cpu")


class PlacedModel(Protocol):
    """What of a model's parameter placement a step has to know."""

    @property
    def device(self) -> torch.device | None:
        """Where the model computes; None while nothing is placed."""

    @property
    def host_capacity(self) -> int | None:
        """The cap on host memory for parameters with gradients and state, in bytes; None for no cap."""

    @property
    def states(self) -> OptimizerStates:
        """Where optimizer state is kept, if the plan says so."""

    def parameter_ids(self) -> Container[int]:
        """Return the ids of the parameters that are placed."""

    def host_masters(self, *, with_disk_bound: bool = True) -> list[nn.Parameter]:
        """Return the parameters in host memory instead of on the device.

        Args:
            with_disk_bound: Whether to include those of a layer on disk that are too small for a page there.
        """


class PlacementSteps(StepSubscriber):
    """Makes the optimizers of placed parameters follow them.

    Args:
        placement: Where parameters are; it is not kept alive.
    """

    order = StepOrder.PLACEMENT

    def __init__(self, placement: PlacedModel) -> None:
        self._placement = weakref.ref(placement)
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that have stepped the parameters."""
        return list(self._optimizers)

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Note an optimizer whose state is to follow its parameters."""
        self._optimizers.add(optimizer)

    def find_optimizers(self) -> None:
        """Note the optimizers of the parameters that have not made a step yet.

        Adagrad has state when it is built, others when it was loaded: both where the parameters were then. torch has
        no list of optimizers, so that the garbage collector's is searched, once, when parameters move back.
        """
        for each in gc.get_objects():
            # `param_groups`: not one whose `__init__` has raised.
            if issubclass(type(each), Optimizer) and "param_groups" in vars(each) and self.concerns(each):
                self._optimizers.add(each)

    def forget_optimizers(self) -> None:
        """Forget all optimizers: nothing is placed any more."""
        self._optimizers.clear()

    def parameter_ids(self) -> Container[int]:
        placement = self._placement()
        return () if placement is None else placement.parameter_ids()

    def before_step(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)
        self.follow(optimizer)
        placement = self._placement()
        if (
            placement is not None
            and placement.device not in (None, _HOST)
            and placement.host_capacity is not None
        ):
            masters = placement.host_masters(with_disk_bound=False)
            check_room(optimizer, masters, placement.host_capacity, placement.states)

    def around_arithmetic(self, call: Callable[[], Any], optimizer: Optimizer) -> None:
        placement = self._placement()
        if placement is None or placement.device is None or placement.device == _HOST:
            call()
            return
        masters = {id(each) for each in placement.host_masters()}
        with as_on_the_device(optimizer, masters, placement.device):
            call()

    def follow(self, optimizer: Optimizer) -> None:
        """Move an optimizer's state to where its parameters are now.

        As in `Optimizer.load_state_dict`, the counter of steps follows to an accelerator only where the implementation
        wants it there. It never stays on one that its parameter has left: ASGD, for example, makes it there.
        """
        placement = self._placement()
        if placement is None:
            return
        ids = placement.parameter_ids()
        for group in optimizer.param_groups:
            counts_on_device = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                if id(parameter) not in ids:
                    continue
                state = optimizer.state.get(parameter, {})
                for name, value in state.items():
                    if not isinstance(value, Tensor) or value.device == parameter.device:
                        continue
                    stays = name == "step" and parameter.device != _HOST and not counts_on_device
                    if not stays and not placement.states.is_stored(value):
                        state[name] = value.to(parameter.device)


@contextlib.contextmanager
def as_on_the_device(optimizer: Optimizer, masters: set[int], device: torch.device) -> Iterator[None]:
    """Step the groups that masters are in by the implementation that the device would have had by default.

    Args:
        optimizer: One whose arithmetic is torch.optim's.
        masters: The ids of parameters that are on the host instead of on the device.
        device: The device.
    """
    has_16_bits = any(
        each.dtype.itemsize == 2
        for group in optimizer.param_groups
        for each in group["params"]
        if id(each) in masters
    )
    changed = []
    if arithmetic_of(type(optimizer)) in (FOREACH_DIFFERS_IN_16_BITS if has_16_bits else FOREACH_DIFFERS):
        for group in optimizer.param_groups:
            parameters = group["params"]
            if group["foreach"] is None and any(id(each) in masters for each in parameters):
                kinds = {device.type if id(each) in masters else each.device.type for each in parameters}
                if takes_foreach(kinds, {type(each) for each in parameters}):
                    changed.append(group)
    try:
        for group in changed:
            group["foreach"] = True
        by_foreach = any(group.get("foreach") for group in optimizer.param_groups)
        with _DeviceRounding() if has_16_bits and by_foreach else contextlib.nullcontext():
            yield
    finally:
        for group in changed:
            group["foreach"] = None


class _DeviceRounding(LightDispatchMode):
    """Make the CPU's ``foreach`` round as CUDA's does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FOREACH_MUL and args[0][0].device.type == "cpu":
            return foreach_mul_(*args)
        return func(*args, **(kwargs or {}))


def check_room(
    optimizer: Optimizer, masters: Sequence[Tensor], capacity: int, states: OptimizerStates
) -> None:
    """Raise if the state that a step is about to make for masters exceeds the cap on host memory with them.

    Raises:
        TierFullError: It does. Nothing was changed.
    """
    if why_whole(optimizer) is not None:
        return  # what state it makes is not known
    with_gradient = {id(each) for each in masters if each.grad is not None}
    # Before a closure is evaluated there are none.
    ids = with_gradient or {id(each) for each in masters if each.requires_grad}
    new, layout = 0, NewState(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in ids:
                quantized = states.quantizes(optimizer, parameter)
                for name, like in layout.of(group, parameter).items():
                    new += sum(part.nbytes for _, part in stored_layout(name, like, quantized=quantized))
    if not new:
        return
    used = sum(
        each.nbytes + (each.nbytes if id(each) in ids else bytes_of_gradient(each.grad)) for each in masters
    )
    used += sum(_state_bytes(optimizer.state.get(each)) for each in masters)
    if used + new > capacity:
        raise TierFullError(
            f"This step of {type(optimizer).__name__} was not made, and no parameter was changed: its state needs "
            f"{format_bytes(new)} of host memory beside {format_bytes(used)} of parameters and gradients, and the cap "
            f"is {format_bytes(capacity)}. Raise Config(max_cpu_offload_gb=...), or give the optimizer to "
            "memscale.wrap(model, optimizer=optimizer), so that the plan reckons with its state."
        )


def _state_bytes(state: Any) -> int:
    values = state.values() if isinstance(state, dict) else ()
    return sum(
        _state_bytes(value) if isinstance(value, dict) else value.nbytes
        for value in values
        if isinstance(value, (Tensor, dict))
    )
