"""Out of memory inside a step: a heavier plan, and the step again, with the same numbers.

| where | what is repeated |
|---|---|
| forward (``forward.py``) | the model's forward, with its random state and its buffers as it found them |
| backward (``backward.py``) | the model's forward, and backward for the gradients that had not arrived |
| the optimizer's step (``steps.py``) | its arithmetic, a few parameters at a time |

Nothing of what failed may be held while the next plan is tried, or there is no room for it: not by the error
(Note [What an error holds]), nor by what the loop has of the failed graph (Note [Backward again]). And what another
graph still needs stays: parameters are not moved while one waits for its backward.

What can't be repeated is said with the error: a backward pass that fails in the loop's own loss, before it comes to the
model; one that is to keep its graph; state of an optimizer that does not fit even a parameter at a time.
"""

from memscale.recovery.guard import StepGuard

__all__ = ["StepGuard"]
