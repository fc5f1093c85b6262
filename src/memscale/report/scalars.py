"""A report's numbers for TensorBoard, or for anything else with ``add_scalar``."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from memscale.errors import WrapError, WrapTypeError, shown
from memscale.executor import executor_of

__all__ = ["PREFIX", "Writer", "log_scalars"]

PREFIX = "memscale/"


class Writer(Protocol):
    """What a ``torch.utils.tensorboard.SummaryWriter`` is here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None, /) -> Any:
        """Note a number at a step."""


def log_scalars(model: nn.Module, writer: Writer, step: int | None = None) -> dict[str, float]:
    """Write what a wrapped model's plan has done so far to a TensorBoard writer; returns what was written.

    Call it as often as the curves are to have points, once in a hundred steps say. All counts are totals since
    ``wrap``; what is not known (a peak that was higher before) is left out.

    Args:
        model: a model that is wrapped.
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or another with ``add_scalar(tag, value, step)``.
        step: where on the axis; the forward passes that were seen, if it is not given.

    Raises:
        WrapError: the model is not wrapped.
        WrapTypeError: ``model`` is no module, or ``writer`` has no ``add_scalar``.

    Example:
        >>> import memscale, torch
        >>> class Printer:
        ...     def add_scalar(self, tag, value, step):
        ...         if tag == "memscale/forward_passes":
        ...             print(tag, value, step)
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> model = memscale.wrap(model, memscale.Config(enable_logging=False), torch.ones(2, 4))
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> written = log_scalars(model, Printer())
        memscale/forward_passes 1 1
        >>> memscale.detach(model)
    """
    if not isinstance(model, nn.Module):
        raise WrapTypeError(f"log_scalars takes the wrapped nn.Module first, got {shown(model, 60)}.")
    if not callable(getattr(writer, "add_scalar", None)):
        raise WrapTypeError(
            f"log_scalars takes a writer with add_scalar(tag, value, step), such as a SummaryWriter, got "
            f"{shown(writer, 60)}."
        )
    executor = executor_of(model)
    if executor is None:
        raise WrapError(
            f"{type(model).__name__} is not wrapped, so that there is nothing to log. Call memscale.wrap(model) first."
        )
    report = executor.report()
    written = {f"{PREFIX}{name}": value for name, value in report.scalars().items()}
    at = report.forward_passes if step is None else step
    for tag, value in written.items():
        writer.add_scalar(tag, value, at)
    return written
