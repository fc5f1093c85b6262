"""Optimizer state in 8 bits, under the user's own optimizer.

Note [Eight bits between steps]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An optimizer's moments are in 8 bits only while it does not step. In a step they are brought to 32 bits, a
bucket of parameters at a time, the optimizer's own arithmetic runs, and what it leaves is taken down to 8 bits
again (`bitsandbytes` does that, in blocks of 256 numbers with a scale each). So whatever the optimizer is told,
learning rates, groups, schedulers, closures, `amsgrad`, `maximize`, `foreach`, `fused`, holds as ever, and its
weight decay is its own: `bitsandbytes`' own Adam has that of AdamW.

*Exact where it can be.* A number is made coarser only after it went through a step. State that was loaded, or
was there before, is used as it is; `state_dict` gives the very numbers that the next step would begin with.
So a run that is saved, ended and resumed goes on as if it had not been, though the file holds ordinary 32-bit
state which any optimizer of that class can load.

*What stays in 32 bits.* Parameters with fewer than 4,096 elements, as `bitsandbytes` has it. The weights of
embeddings: their gradients are zero but for the rows of this batch, so that the numbers of one block differ by
orders of magnitude, and the small ones would be lost. A head that is tied to an embedding is that embedding.
"""

from __future__ import annotations

from memscale.optimizer.eight_bit.moments import moment_bytes, parameters_in_eight_bits
from memscale.optimizer.eight_bit.quantizer import Quantizer, Unavailable, find_quantizer, why_unavailable

__all__ = [
    "Quantizer",
    "Unavailable",
    "find_quantizer",
    "moment_bytes",
    "parameters_in_eight_bits",
    "why_unavailable",
]
