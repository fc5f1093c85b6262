"""Which state of which optimizers is kept in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Optimizer

__all__ = ["MOMENTS", "holds_moments", "why_in_full"]

# Those of torch.optim that bitsandbytes has 8-bit versions of, by name: of the class, or of one that it derives from.
_KINDS = ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad")

MOMENTS: Mapping[str, bool] = {
    "exp_avg": True,
    "exp_avg_sq": False,
    "max_exp_avg_sq": False,
    "momentum_buffer": True,
    "square_avg": False,
    "sum": False,
}
"""What these call the state that is kept in 8 bits, and whether it has a sign."""


def holds_moments(optimizer: Optimizer) -> bool:
    """Whether there is anything to keep: SGD without momentum has no state."""
    plain = "SGD" in _names(optimizer) and not any(group.get("momentum") for group in optimizer.param_groups)
    return not plain


def why_in_full(optimizer: Optimizer) -> str | None:
    """Why the state of this optimizer stays in 32 bits, or None if it need not."""
    if type(optimizer).__module__.startswith("bitsandbytes"):
        return "it keeps its state as it was told to itself"
    if not any(name in _KINDS for name in _names(optimizer)):
        return f"of optimizers only {', '.join(_KINDS)} and what derives from them are known to bear 8 bits"
    if any(group.get("centered") for group in optimizer.param_groups):
        return "centered=True takes the root of a difference, which coarse numbers would make negative"
    return None


def _names(optimizer: Optimizer) -> list[str]:
    return [kind.__name__ for kind in type(optimizer).__mro__]
