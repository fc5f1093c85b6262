"""The 8-bit optimizer: the moments of the user's own optimizer wait in 8 bits, by ``bitsandbytes``.

The mechanism is ``memscale.optimizer.eight_bit``; see Note [Eight bits between steps] there. Two moments take 2.03
bytes a parameter instead of 8. Embeddings and small tensors stay in 32 bits: GPT-2 XL, of which they are 5%, has 2.35
bytes a parameter in all, GPT-2 small, with 32%, has 3.9.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from torch import nn

from memscale.optimizer.eight_bit import Unavailable, find_quantizer, parameters_in_eight_bits
from memscale.optimizer.eight_bit.states import EightBitSettings, EightBitStates
from memscale.techniques.base import ModelSite

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

__all__ = ["DEFAULT_BUCKET_BYTES", "EightBitOptimizer"]

logger = logging.getLogger("memscale")

DEFAULT_BUCKET_BYTES = 64 * 2**20
"""What is in 32 bits at once where the plan does not say: enough for `foreach` to be worth its name."""


class EightBitOptimizer:
    """Keeps the moments of a model's parameters in 8 bits if ``plan.optimizer.eight_bit`` says so."""

    def __init__(self) -> None:
        # By model, not by attachment: a plan is often replaced after the first batch.
        self._told: MutableMapping[nn.Module, str] = weakref.WeakKeyDictionary()

    def attach(self, site: ModelSite, log: UndoLog) -> None:
        moments, wanted = site.homes.moments, site.plan.optimizer
        parameters = parameters_in_eight_bits(site.model)
        if wanted is None or not wanted.eight_bit or not parameters:
            moments.restore()  # of a plan before this one
            return
        logs = site.config is None or site.config.enable_logging
        try:
            quantizer = find_quantizer(parameters)
        except Unavailable as reason:
            moments.restore()
            if logs:
                self._tell(site.model, str(reason))
            return
        moments.arrange(
            parameters, EightBitSettings(wanted.bucket_bytes or DEFAULT_BUCKET_BYTES, logs), quantizer
        )
        log.add(_Arranged(moments))

    def _tell(self, model: nn.Module, reason: str) -> None:
        if self._told.get(model) != reason:
            self._told[model] = reason
            logger.warning("No 8-bit optimizer, the standard one goes on as it is: %s.", reason)


class _Arranged:
    """Moments in 8 bits. They stay so between two plans; `Homes.restore` brings them back at the end."""

    def __init__(self, moments: EightBitStates) -> None:
        self._moments = moments

    def undo(self) -> None:
        self._moments.pause()
