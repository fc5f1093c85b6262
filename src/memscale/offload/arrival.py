"""A working copy that was fetched beside the computation, and its gradient's way home.

Note [The way home]
~~~~~~~~~~~~~~~~~~~
``parameter.to(device)`` is differentiable: its backward copies the gradient to the host, and waits there until the
device has computed it, with nothing new for the device to do meanwhile. Here that is two nodes. The first, on the
device's side, starts the copy on a stream of its own and hands on the tensor that it will land in. The second, at
home, waits for it. Autograd runs each node in the thread of its device, so that it is the host's thread that waits,
which has nothing else to do; the device's goes on.

What comes after, the accumulation and whatever hooks are on the parameter, is autograd's own. A graph of backward
itself (``create_graph=True``) is made of plain copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memscale._torch import hooks_are_allowed
from memscale.observe.counters import Meter
from memscale.tiers.engine import Engine, Lane, Transfer
from memscale.tiers.tier import is_fake

__all__ = ["Journey", "arrived"]


def arrived(
    parameter: nn.Parameter, values: torch.Tensor, engine: Engine, meter: Meter | None = None
) -> torch.Tensor:
    """Return a parameter's values on the device as a differentiable copy of it. See Note [The way home].

    Example:
        >>> parameter = nn.Parameter(torch.ones(2))
        >>> copy = arrived(parameter, parameter.detach().clone(), Engine())
        >>> (3 * copy).sum().backward()
        >>> parameter.grad
        tensor([3., 3.])
    """
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return values
    if not hooks_are_allowed():  # under torch.func, which has rules of its own for such nodes
        return parameter.to(values.device, values.dtype)
    journey = Journey(engine, parameter.device, meter)
    at_home = _AtHome.apply(parameter, journey, values.dtype)  # type: ignore[no-untyped-call]
    copy: torch.Tensor = _OnDevice.apply(at_home, journey, [values])  # type: ignore[no-untyped-call]
    return copy


class Journey:
    """A gradient that goes home.

    Args:
        engine: Who moves it.
        home: Where to.
        meter: Counts it.
    """

    def __init__(self, engine: Engine, home: torch.device, meter: Meter | None = None) -> None:
        self._engine = engine
        self._meter = meter
        self.home = home
        self._source: torch.Tensor | None = None
        self._transfer: Transfer[torch.Tensor] | None = None
        self._pinned_bytes = 0

    def leave(self, gradient: torch.Tensor) -> torch.Tensor:
        """Start; returns the tensor that the gradient lands in, which may be read after :meth:`land`."""
        if gradient.layout is torch.sparse_coo:
            return self._sent_in_parts(gradient)
        if self._meter is not None:
            self._meter.down("gradients", "host", gradient.nbytes)
        beside = gradient.device.type == "cuda" and not is_fake(gradient)
        landing = self._pinned(gradient) if beside else None
        if landing is None:
            landing = torch.empty_like(gradient, device=self.home)
        to = landing
        self._source = gradient  # its memory must not be used again before it was read
        self._transfer = self._engine.run(
            lambda: to.copy_(gradient, non_blocking=beside),
            Lane.D2H if beside else Lane.CALLER,
            gradient.device,
        )
        return landing

    def land(self, landing: torch.Tensor) -> torch.Tensor:
        """Wait until it is there."""
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return landing
        transfer.finish()
        self._source = None
        nbytes, self._pinned_bytes = self._pinned_bytes, 0
        if not nbytes:
            return landing
        gradient = landing.clone()  # page-locked memory is for what is under way
        self._engine.gradients.release(nbytes)
        return gradient

    def _sent_in_parts(self, gradient: torch.Tensor) -> torch.Tensor:
        """Copy a sparse gradient (that of an embedding with ``sparse=True``): its indices and its values."""
        indices, values = gradient._indices(), gradient._values()
        if self._meter is not None:
            self._meter.down("gradients", "host", indices.nbytes + values.nbytes)
        return torch.sparse_coo_tensor(
            indices.to(self.home),
            values.to(self.home),
            gradient.shape,
            check_invariants=False,
            is_coalesced=gradient.is_coalesced(),
        )

    def _pinned(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Page-locked memory of the same geometry, if there is any: only there a copy runs by itself."""
        strides = torch.empty_like(gradient, device="meta").stride()
        memory = self._engine.gradients.allocate(gradient.nbytes) if gradient.numel() else None
        if memory is None:
            return None
        self._pinned_bytes = gradient.nbytes
        return memory.view(gradient.dtype).as_strided(gradient.shape, strides)


class _AtHome(torch.autograd.Function):
    """The end at home: in backward it waits for the gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, journey: Journey, dtype: torch.dtype) -> torch.Tensor:
        ctx.journey = journey
        ctx.set_materialize_grads(False)
        # Only its shape and type matter: of another type, autograd would convert the gradient before it is there.
        return torch.empty((), dtype=dtype, device=parameter.device).expand(parameter.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        return None if gradient is None else ctx.journey.land(gradient), None, None


class _OnDevice(torch.autograd.Function):
    """The end on the device: in backward it sends the gradient home."""

    @staticmethod
    def forward(
        ctx: Any, at_home: torch.Tensor, journey: Journey, values: list[torch.Tensor]
    ) -> torch.Tensor:
        ctx.journey = journey
        ctx.set_materialize_grads(False)
        return values.pop()  # in a list: a tensor that goes through as an input comes out as a view of it

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        journey: Journey = ctx.journey
        if (
            gradient is None
        ):  # an output of the model that the loss does not use: no gradient, rather than zeros
            return None, None, None
        if torch.is_grad_enabled():
            return gradient.to(journey.home), None, None
        return journey.leave(gradient), None, None
