"""Survive an out-of-memory error inside a step: repeat it under a heavier plan, with the same numbers.

Of forward and backward the model's part is repeated, of an optimizer's step its arithmetic, a few parameters at a time
(`guard.py`). What cannot be repeated is explained with the error (`shortage.py`).
"""

from memscale.recovery.guard import StepGuard

__all__ = ["StepGuard"]
