"""Forward pre-hooks of the executor: the training batch, inputs on the device, and no cache in training.

They are functions that find the executor by the model, so that they are right for a copy of the model as
well. Each is prepended: the last one that was registered runs first. In the order in which they run:

- `inputs_to_device`, if the plan computes elsewhere than where the inputs are;
- `before_forward`, if there is an `on_training_batch`;
- `NoCache`, on each module that would use a cache.

Note [use_cache]
~~~~~~~~~~~~~~~~
A Hugging Face model has `config.use_cache`, mostly on, and a forward that takes `use_cache` and looks into
the config if it is not given. A cache is of no use in training, holds memory, and breaks recomputation, which
would write to it twice. So each module with such a config and such a forward gets a hook, which in training
passes `use_cache=False` for a caller who does not say anything. In `eval()` mode a call with gradients on is
training if it has labels; without them it may be the first of a loop that generates. The config itself is
never written to: it is at all times what its user set, also in the middle of a forward, after an interrupt,
and in `save_pretrained`.

A caller who passes `use_cache=True` or a cache (as prefix tuning does, for the model to read) gets it. Layers
that are given a cache are not recomputed in that call (`is_cache`), and it is logged once that this costs
memory.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memscale._torch import outside_compiler
from memscale.checkpointing.technique import is_cache
from memscale.offload.layer import bring_inputs
from memscale.techniques.base import EXECUTOR
from memscale.techniques.forward import ForwardStage, override_of

if TYPE_CHECKING:
    from memscale.executor.executor import Executor

__all__ = ["NoCache", "Placeholder", "before_forward", "inputs_to_device", "no_cache_hooks"]

logger = logging.getLogger("memscale")


class Placeholder(ForwardStage):
    """Gives a model an override, though its plan needs none yet.

    A call looks up `forward` before it runs the hooks. If `before_forward` changes the plan, as on the first batch, the
    call runs by the new plan only if what was looked up is an override.
    """

    is_opaque = False


@outside_compiler
def before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Tell the executor of a forward pass in training, before which it may change the plan."""
    executor: Executor | None = vars(model).get(EXECUTOR)
    if executor is None or kwargs is None or not torch.is_grad_enabled():
        return
    if not model.training and not any(each.requires_grad for each in model.parameters()):
        return
    called = override_of(model)
    executor.call_back(args, kwargs)
    if called is not None:
        called.redirect_next_call(override_of(model))


def inputs_to_device(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Copy the inputs of a call to where the model computes."""
    # torch calls it without kwargs if a hook before it has changed the plan, and so removed it: the new plan's own hook
    # does not run in this call, and offloaded layers copy their arguments themselves.
    executor: Executor | None = vars(model).get(EXECUTOR)
    device = None if executor is None else executor.placement.device
    return None if device is None or kwargs is None else bring_inputs(args, kwargs, device)


class NoCache:
    """Turns the cache off in training, as a forward pre-hook. See Note [use_cache].

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
        # None: an earlier hook of the same call has removed this one, and torch calls it without its options.
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
    """Return the modules that would use a cache, each with the hook for it."""
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
