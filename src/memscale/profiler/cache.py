"""A cache for generation has no place in a profile of training: while a plan is attached, it is off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


def uses_cache(model: nn.Module) -> bool:
    """Whether a part of a Hugging Face model makes a cache unless it is told not to."""
    return bool(_configs(model))


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """``config.use_cache`` is off in every part of a Hugging Face model that has it, inside the block."""
    switched_off = _configs(model)
    for config in switched_off:
        config.use_cache = False
    try:
        yield
    finally:
        for config in switched_off:
            config.use_cache = True


def _configs(model: nn.Module) -> list[Any]:
    configs = (getattr(module, "config", None) for module in model.modules())
    return [config for config in configs if getattr(config, "use_cache", None) is True]
