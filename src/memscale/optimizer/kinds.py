"""What is known of the classes of torch.optim: which can be stepped a few parameters at a time, in slices, in 8 bits.

Note [Whose arithmetic is split]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The classes in :data:`ONE_BY_ONE` treat every parameter by itself: its new value depends on its gradient, its own
state and its group's settings. Calling their ``step`` for some parameters, and then for the others, gives the same
bits as one call for all. They keep no counters of a group or of the optimizer that several calls would change.

Of any other ``step`` that is not known. It may scale by the norm of all gradients, count its calls, update a moving
average of the model, or write to a log, and no inspection or trial run would show all of that. So code that is not
torch's is called once per step, with all parameters, and its state stays where it makes it. If it calls torch's own
(``super().step()``, or the step of an optimizer that it wraps), then that call is split, and nothing around it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import optim
from torch.optim import Optimizer

__all__ = [
    "ELEMENTWISE",
    "FOREACH_DIFFERS",
    "MOMENTS",
    "ONE_BY_ONE",
    "arithmetic_of",
    "has_moments",
    "has_own_step",
    "why_32_bits",
    "why_whole",
]

ONE_BY_ONE: tuple[type[Optimizer], ...] = tuple(
    getattr(optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
        "SparseAdam",
    )
    if hasattr(optim, name)  # Muon is new
)
"""All classes of torch.optim but LBFGS, whose direction and step length come from all parameters together."""

ELEMENTWISE = frozenset(ONE_BY_ONE) - {
    getattr(optim, name) for name in ("Adafactor", "Muon", "SparseAdam") if hasattr(optim, name)
}
"""Those that treat every element of a parameter by itself: they can step a slice of it."""

FOREACH_DIFFERS = frozenset({optim.ASGD, optim.NAdam, optim.RAdam})
"""Those whose ``foreach`` implementation rounds differently from the loop over parameters."""

MOMENTS: Mapping[str, bool] = {
    "exp_avg": True,
    "exp_avg_sq": False,
    "max_exp_avg_sq": False,
    "momentum_buffer": True,
    "square_avg": False,
    "sum": False,
}
"""The names of state that can be kept in 8 bits, and whether it has a sign."""

# The classes that bitsandbytes has 8-bit versions of, by name: of the class, or of one that it derives from.
_EIGHT_BIT_NAMES = ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad")

_OWNERS = {inspect.unwrap(vars(kind)["step"]): kind for kind in ONE_BY_ONE if "step" in vars(kind)}


def arithmetic_of(kind: type[Optimizer]) -> type[Optimizer] | None:
    """Return the class of torch.optim whose step this class has, or can call by ``super()``; None if there is none.

    Example:
        >>> arithmetic_of(optim.AdamW) is optim.Adam
        True
        >>> arithmetic_of(optim.LBFGS) is None
        True
    """
    for each in kind.__mro__:
        owner = _OWNERS.get(inspect.unwrap(vars(each)["step"])) if "step" in vars(each) else None
        if owner is not None:
            # torch's steps call this one for each group: overridden, it is somebody else's code.
            own, torchs = (inspect.unwrap(getattr(each, "_init_group", len)) for each in (kind, owner))
            return owner if own is torchs else None
    return None


def has_own_step(kind: type[Optimizer]) -> bool:
    """Return whether a class has a step that is not torch's own, whatever that calls."""
    owner = arithmetic_of(kind)
    return owner is None or inspect.unwrap(kind.step) is not inspect.unwrap(owner.step)


def why_whole(optimizer: Optimizer) -> str | None:
    """Return why this optimizer's arithmetic is not split, or None if it can be."""
    kind = type(optimizer)
    if arithmetic_of(kind) is None:
        if isinstance(optimizer, optim.LBFGS):
            return "its direction and step length come from all parameters together"
        return (
            "its step is not one of torch.optim's, which are known to treat parameters one by one, so that it is "
            "called once, with all of them"
        )
    if vars(optimizer).get("param_groups") is not optimizer.param_groups:
        return "its param_groups are another object's"
    if any(group.get("differentiable") for group in (optimizer.defaults, *optimizer.param_groups)):
        return "differentiable=True: gradients flow through its state"
    return None


def has_moments(optimizer: Optimizer) -> bool:
    """Return whether an optimizer keeps moments at all: SGD without momentum has no state."""
    is_plain = "SGD" in _class_names(optimizer) and not any(
        group.get("momentum") for group in optimizer.param_groups
    )
    return not is_plain


def why_32_bits(optimizer: Optimizer) -> str | None:
    """Return why the moments of this optimizer stay in 32 bits, or None if they can be kept in 8."""
    if type(optimizer).__module__.startswith("bitsandbytes"):
        return "it keeps its state as it was told to itself"
    if not any(name in _EIGHT_BIT_NAMES for name in _class_names(optimizer)):
        return f"of optimizers only {', '.join(_EIGHT_BIT_NAMES)} and what derives from them are known to bear 8 bits"
    if any(group.get("centered") for group in optimizer.param_groups):
        return "centered=True takes the root of a difference, which coarse numbers would make negative"
    return why_whole(optimizer)


def _class_names(optimizer: Optimizer) -> list[str]:
    return [kind.__name__ for kind in type(optimizer).__mro__]
