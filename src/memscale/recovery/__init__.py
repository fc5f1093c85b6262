"""Survive an out-of-memory error inside a step: repeat it under a heavier plan, with the same numbers.

| where | what is repeated |
|---|---|
| forward | the model's forward, with random state and buffers as it found them |
| backward | the model's forward, and backward for the gradients that have not arrived |
| optimizer step | its arithmetic, a few parameters at a time |

Nothing of what failed may be alive while the next plan is tried, or there is no room for it: neither the error's frames
(Note [What an error holds]) nor what the failed graph has saved (Note [Backward again]). Parameters are not moved
while the graph of another call waits for its backward.

What cannot be repeated is explained with the error: a backward pass that fails in the loop's own loss, before it comes
to the model, or one that is to keep its graph (the next step then has the heavier plan); optimizer state that does not
fit even one parameter at a time.
"""

from memscale.recovery.guard import StepGuard

__all__ = ["StepGuard"]
