"""Computing in 16 bits, with parameters and gradients in 32.

Note [Mixed precision]
~~~~~~~~~~~~~~~~~~~~~~
The model's forward runs under torch's autocast: products of matrices in 16 bits, norms, softmax and losses in
32. What it returns comes out in 32 bits, so that a loss which the loop computes is in 32 bits as well, and goes on
as before with whatever it is combined with. A recomputed layer is recomputed under the same autocast.

*Streamed layers.* The parameters stay at home in 32 bits. Of a weight that autocast would make a 16-bit copy of
anyway, the working copy is 16-bit from the start (``weights.py``): half the bytes on the device and on the way
there, the same numbers. Its gradient is made in 16 bits, and arrives at home in 32.

*Casts are not cached.* Autocast can keep the 16-bit copies of all weights until the forward pass ends, which would
be as much memory again as recomputation saves. A weight that is used twice is cast twice.

*Whose precision.* If autocast is on already when the model is called, the loop (or the Trainer, or accelerate) has
a precision of its own, and MemScale's has no effect in that call.
"""

from __future__ import annotations

from memscale.precision.loss_scale import LossScale
from memscale.precision.outputs import in_full
from memscale.precision.scaling import LossScaling

__all__ = ["LossScale", "LossScaling", "in_full"]
