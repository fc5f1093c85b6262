"""The cache for generation, off while a Hugging Face model trains.

Note [use_cache]
~~~~~~~~~~~~~~~~
Such a model has `config.use_cache`, mostly on, and a forward that takes `use_cache` and looks into the config
if it is not given. A cache is of no use in training, holds memory, and breaks recomputation, which would
write to it twice. So each module with such a config and such a forward gets a hook, which in training says
`use_cache=False` for a caller who does not say anything. In `eval()` mode a call with gradients on is training if it
has labels; without them it may be the first of a loop that generates. The config itself is never written to: it is
at all times what its user set, also in the middle of a forward, after an interrupt, and in `save_pretrained`.

A caller who passes `use_cache=True` or a cache of their own (as prefix tuning does, for the model to read)
gets what they ask for. Layers that are given a cache are not recomputed in that call (`is_cache`), and once
it is logged that this costs memory.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memscale.checkpointing.technique import is_cache

__all__ = ["NoCache", "no_cache_hooks"]

logger = logging.getLogger("memscale")


class NoCache:
    """A forward pre-hook that turns the cache off in training. See Note [use_cache].

    Args:
        position: The place of `use_cache` among the forward's positional arguments, if it has one.
        logs: Whether to log, once, that a cache was asked for.
    """

    def __init__(self, position: int | None, *, logs: bool) -> None:
        self._position = position
        self._logs = logs

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # None: an earlier hook of the same call has taken this one off, which torch notices by half.
        if kwargs is None or not torch.is_grad_enabled():
            return None
        if not module.training and kwargs.get("labels") is None:
            return None
        position = self._position
        if position is not None and len(args) <= position:
            position = None
        wanted = kwargs.get("use_cache") if position is None else args[position]
        if wanted or kwargs.get("past_key_values") is not None or any(map(is_cache, args)):
            self._log()
            return None
        if wanted is not None:
            return None
        if position is not None:
            return (*args[:position], False, *args[position + 1 :]), kwargs
        return args, {**kwargs, "use_cache": False}

    def _log(self) -> None:
        if self._logs:
            self._logs = False
            logger.warning(
                "A training step asked for a cache (use_cache=True, or past_key_values). Layers that get one "
                "are not checkpointed in such a step, as they would write to it twice. To save the memory, "
                "leave use_cache out."
            )


def no_cache_hooks(model: nn.Module, *, logs: bool) -> list[tuple[nn.Module, NoCache]]:
    """The modules that would use a cache, each with the hook for it."""
    found: list[tuple[nn.Module, NoCache]] = []
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", None) is None:
            continue
        parameters = _parameters(module.forward)
        if "use_cache" in parameters:
            kind = parameters["use_cache"].kind
            by_position = kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            position = list(parameters).index("use_cache") if by_position else None
            found.append((module, NoCache(position, logs=logs and not found)))
    return found


def _parameters(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(forward).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}
