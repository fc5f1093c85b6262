"""Out of memory inside a step: a heavier plan, and the step again, with the same numbers.

| where | what is repeated |
|---|---|
| forward (``forward.py``) | the model's forward, with its random state and its buffers as it found them |
| backward (``backward.py``) | the model's forward, and backward for the gradients that had not arrived |
| the optimizer's step (``steps.py``) | its arithmetic, a few parameters at a time |
"""

from memscale.recovery.guard import StepGuard

__all__ = ["StepGuard"]
