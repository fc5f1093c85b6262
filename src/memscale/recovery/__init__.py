"""Survive an out-of-memory error inside a step: repeat it under a heavier plan, with the same numbers.

Of forward and backward the model's part is repeated (`guard.py`), of an optimizer's step its arithmetic, a few
parameters at a time (`steps.py`). Nothing of what failed may be alive while the next plan is tried, or there is no room
for it: neither the error's frames (Note [What an error holds]) nor what the failed graph has saved (Note [Backward
again]). Parameters are not moved while the graph of another call waits for its backward. What cannot be repeated is
explained with the error.
"""

from memscale.recovery.guard import StepGuard

__all__ = ["StepGuard"]
