"""Gradient checkpointing: a block keeps its input and is computed again in backward.

The mechanism is `memscale.checkpointing`; here it is put on modules. A block that is one module gets a
`RecomputeStage`. A block that is a few neighbours in an `nn.Sequential` has no module of its own, so the
`nn.Sequential` gets a `SlicesStage`, which runs its children in order, each planned slice as one region.

Note [use_cache]
~~~~~~~~~~~~~~~~
A Hugging Face model has `config.use_cache`, mostly on, and a forward that takes `use_cache` and looks into
the config if it is not given. A cache is of no use in training, holds memory, and breaks recomputation, which
would write to it twice. So each module with such a config and such a forward gets a hook, which in training
passes `use_cache=False` for a caller who does not say anything. In `eval()` mode a call with gradients on is
training if it has labels; without them it may be the first of a loop that generates, so that the cache stays
and it is logged once what that costs in training. The config itself is never written to: it is at all times
what its user set, also in the middle of a forward, after an interrupt, and in `save_pretrained`.

A caller who passes `use_cache=True` or a cache (as prefix tuning does, for the model to read) gets it. Layers
that are given a cache are not recomputed in that call (`is_cache`), and it is logged once that this costs
memory.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memscale.checkpointing.cost import recompute_options
from memscale.checkpointing.keep import calls_to_keep
from memscale.checkpointing.region import run_region
from memscale.errors import WrapError
from memscale.execution_plan import Checkpointing
from memscale.observe.counters import WatchedLayer
from memscale.profiler.profile import BlockProfile
from memscale.techniques.base import LayerSite
from memscale.techniques.cost import BlockOption, CostTerms
from memscale.techniques.forward import ForwardStage, Stage, override_of

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

__all__ = [
    "GradientCheckpointing",
    "NoCache",
    "RecomputeStage",
    "Slice",
    "SlicesStage",
    "has_own_checkpointing",
    "is_cache",
    "no_cache_hooks",
]


logger = logging.getLogger("memscale")


class GradientCheckpointing:
    """The technique `"checkpointing"`."""

    name = "checkpointing"

    def options(self, block: BlockProfile, terms: CostTerms) -> Iterable[BlockOption]:
        return recompute_options(block, terms)

    def unsupported_reason(self, site: LayerSite) -> str | None:
        if any(isinstance(module, torch.jit.ScriptModule) for module in site.modules):
            return "it is a scripted module, whose forward cannot be replaced"
        for member, module in zip(site.layer.members, site.modules, strict=True):
            parts = member.split(".")
            around = [".".join(parts[:length]) for length in range(len(parts))]
            outer = [(name, site.model.get_submodule(name)) for name in around]
            for name, one in (*outer, *module.named_modules(prefix=member)):
                if _checkpoints_itself(one):
                    return f"{name or type(one).__name__} has gradient checkpointing of its own switched on"
        return None

    def attach(self, site: LayerSite, log: UndoLog) -> None:
        watched = WatchedLayer(site.meter, site.layer.name, site.layer.recompute_flops)
        region = _Region(site.layer.checkpointing or Checkpointing(), watched)
        if len(site.modules) == 1:
            log.add_stage(site.modules[0], RecomputeStage(region), name=site.layer.members[0])
            return
        name, start = _slice_position(site)
        container = site.model.get_submodule(name)
        override = override_of(container)
        stage = None if override is None else override.find(SlicesStage)
        if stage is None:
            stage = SlicesStage()
            log.add_stage(container, stage, name=name)
        stage.add(Slice(start, start + len(site.modules), region))


class _Region:
    """Runs a block as a region, with the settings of its plan."""

    def __init__(self, settings: Checkpointing, layer: WatchedLayer) -> None:
        calls_to_keep(settings.keep)  # raises now if a name is wrong, and not in the first step
        self.keep = settings.keep
        self.chain = settings.chained
        self.layer = layer

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        modules: Sequence[nn.Module],
    ) -> Any:
        function = self.layer.watched(function)
        return run_region(function, args, kwargs, modules=modules, keep=self.keep, chain=self.chain)


@dataclass(frozen=True)
class Slice:
    """Children `start` to `stop` (exclusive) of an `nn.Sequential`, which run as one region."""

    start: int
    stop: int
    region: _Region


class RecomputeStage(ForwardStage):
    """Recomputes a block in backward."""

    order = Stage.RECOMPUTE

    def __init__(self, region: _Region) -> None:
        self._region = region

    def run(
        self, module: nn.Module, call_next: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if _checkpoints_itself(module) or any(map(is_cache, args)) or any(map(is_cache, kwargs.values())):
            return call_next(*args, **kwargs)
        return self._region.run(call_next, args, kwargs, (module,))


class SlicesStage(ForwardStage):
    """Recomputes slices of an `nn.Sequential` in backward.

    Slices are positions, not modules: whatever is there when it is called runs in order, so that the result is that of
    `nn.Sequential` also after its user has changed it.
    """

    order = Stage.RECOMPUTE

    def __init__(self) -> None:
        self._slices: list[Slice] = []

    def add(self, part: Slice) -> None:
        """Add a slice; none overlaps another."""
        self._slices = sorted((*self._slices, part), key=lambda one: one.start)

    def run(
        self, module: nn.Module, call_next: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if len(args) != 1 or kwargs:
            return call_next(*args, **kwargs)  # `forward(input=x)`, or an error that torch raises
        (value,) = args
        children = list(module._modules.values())
        done = 0
        for one in self._slices:
            value = _in_order(children[done : one.start], value)
            inside = [child for child in children[max(done, one.start) : one.stop] if child is not None]
            done = max(done, one.stop)
            if is_cache(value) or any(map(_checkpoints_itself, inside)):
                value = _in_order(inside, value)
            elif inside:
                value = one.region.run(functools.partial(_in_order, inside), (value,), {}, inside)
        return _in_order(children[done:], value)


def _in_order(modules: Sequence[Any], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value


def _slice_position(site: LayerSite) -> tuple[str, int]:
    """Return the name of the `nn.Sequential` that a block is a slice of, and where the slice begins."""
    layer = site.layer
    parents = {member.rpartition(".")[0] for member in layer.members}
    name = min(parents)
    container = site.model.get_submodule(name)
    override = override_of(container)
    own_forward = vars(container).get("forward") if override is None else override.inner
    in_order = getattr(type(container), "forward", None) is nn.Sequential.forward
    if len(parents) > 1 or not in_order or own_forward is not None:
        raise WrapError(
            f"The plan's layer {layer.name!r} is the modules {', '.join(layer.members)}, which can be one "
            "block only as neighbours in an nn.Sequential that runs them in order; here they are in "
            f"{', '.join(f'{p!r} ({type(site.model.get_submodule(p)).__name__})' for p in sorted(parents))}. "
            "Make a new plan for this model."
        )
    children = list(container._modules)
    wanted = [member.rpartition(".")[2] for member in layer.members]
    start = children.index(wanted[0])
    if children[start : start + len(wanted)] != wanted:
        raise WrapError(
            f"The plan's layer {layer.name!r} is the modules {', '.join(wanted)} of {name!r}, which are not "
            f"neighbours there: it has {', '.join(children)}. Make a new plan for this model."
        )
    return name, start


def has_own_checkpointing(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that recompute by themselves, or whose layers do.

    They are known by their structure: Hugging Face sets `gradient_checkpointing = True` on stacks and layers, torch's
    `checkpoint_wrapper` puts a module around each layer.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model[1].gradient_checkpointing = True
        >>> has_own_checkpointing(model)
        ('1',)
    """
    return tuple(name for name, module in model.named_modules() if _checkpoints_itself(module))


def _checkpoints_itself(module: nn.Module) -> bool:
    if getattr(module, "gradient_checkpointing", False) is True:
        return True
    return "_checkpoint_wrapped_module" in module._modules


_NOT_CACHES = (torch.Tensor, nn.Module, type(None), str, int, float, tuple, list, Mapping, AbstractSet)
_CACHE_METHODS = ("update", "update_conv_state", "update_ssm_state", "update_recurrent_state")


def is_cache(value: object) -> bool:
    """Return whether an argument is an object that a layer writes its keys and values into, as in generation.

    A layer that runs again would write twice, so a call with a cache is never recomputed. A cache is known by its
    structure: it has a method such as `update` and is no container of Python's.
    """
    if isinstance(value, _NOT_CACHES):
        return False
    return any(hasattr(type(value), name) for name in _CACHE_METHODS)


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
        is_training = module.training or kwargs.get("labels") is not None
        position = self._position
        if position is not None and len(args) <= position:
            position = None
        wanted = kwargs.get("use_cache") if position is None else args[position]
        has_cache = wanted or kwargs.get("past_key_values") is not None or any(map(is_cache, args))
        if is_training and has_cache:
            self._log(
                "A training step asked for a cache (use_cache=True, or past_key_values)",
                "leave use_cache out",
            )
        elif not is_training and wanted is None and self._logs:
            config: Any = module.config
            if config.use_cache and any(each.requires_grad for each in module.parameters()):
                self._log(
                    "A step in eval() mode, with gradients on and no labels, uses a cache",
                    "pass use_cache=False",
                )
        if not is_training or has_cache or wanted is not None:
            return None
        if position is not None:
            return (*args[:position], False, *args[position + 1 :]), kwargs
        return args, {**kwargs, "use_cache": False}

    def _log(self, what: str, remedy: str) -> None:
        if self._logs:
            self._logs = False
            logger.warning(
                "%s. Layers that get one are not checkpointed in such a step, as they would write to it twice. "
                "To save the memory in training, %s.",
                what,
                remedy,
            )


def no_cache_hooks(model: nn.Module, *, logs: bool) -> list[tuple[nn.Module, NoCache]]:
    """Return the modules that would use a cache, each with the hook for it."""
    found: list[tuple[nn.Module, NoCache]] = []
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", None) is None:
            continue
        try:
            parameters = inspect.signature(module.forward).parameters
        except (TypeError, ValueError):  # a builtin without a signature
            continue
        if "use_cache" in parameters:
            kind = parameters["use_cache"].kind
            by_position = kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            position = list(parameters).index("use_cache") if by_position else None
            found.append((module, NoCache(position, logs=logs and not found)))
    return found
