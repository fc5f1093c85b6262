"""A cache for generation has no place in a profile of training: while a plan is attached, it is off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """``config.use_cache`` is off in every part of a Hugging Face model that has it, inside the block."""
    switched_off: list[Any] = []
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
            switched_off.append(config)
    try:
        yield
    finally:
        for config in switched_off:
            config.use_cache = True
