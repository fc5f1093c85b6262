"""Gradient checkpointing: a block keeps its input and is computed again in backward.

Neighbours in an `nn.Sequential` that are one block have no module of their own: the `nn.Sequential` gets a
`SlicesStage`, which runs its children in order, each planned slice as one region.

Note [use_cache]
~~~~~~~~~~~~~~~~
A Hugging Face model has `config.use_cache`, mostly on, and a forward that takes `use_cache`. A cache is of no use in
training, holds memory, and breaks recomputation, which would write to it twice. So each module with such a config and
such a forward gets a hook, which in training passes `use_cache=False` for a caller who does not say anything. In
`eval()` mode a call with gradients on is training if it has labels; without them it may be the first of a loop that
generates, so the cache stays. So it does while the plan does nothing: that model is left as it is. In training the
config is not written to, as `save_pretrained` would save it, or the next call read it after an interrupt. Real runs
that profile or verify a model do set it, for their own length (`profiler.run.without_cache`).

A caller who passes `use_cache=True` or a cache (as prefix tuning does) gets it. Layers that are given a cache to which
keys and values are appended (transformers' `DynamicCache`) are recomputed in `train()` mode, with a copy of it as it
was before. With any other cache, and in `eval()` mode, they are not recomputed in that call.

Note [Own checkpointing]
~~~~~~~~~~~~~~~~~~~~~~~~
Hugging Face models checkpoint themselves where a module's flag `gradient_checkpointing` is on; a Trainer may switch it
on when training begins, and TRL's trainers do so by default. A plan replaces that: the flags are off while it is
attached (`OwnCheckpointing`), so that it decides layer by layer, and are on again after `detach`. A plan that
recomputes no layer leaves them on, and needs less than was predicted; so does `enable_checkpointing=False`. Models that
call `torch.utils.checkpoint` by other means are left alone: nothing but their own code can switch that off.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memscale._torch import is_checkpoint_wrapper, is_compiled, sharded_groups
from memscale.checkpointing.keep import calls_to_keep
from memscale.checkpointing.region import run_region
from memscale.errors import WrapError
from memscale.execution_plan import Checkpointing, StepTime
from memscale.profiler.profile import BlockProfile, OpProfile
from memscale.techniques.base import LayerSite
from memscale.techniques.cost import HOOK_SECONDS, BlockOption, CostTerms
from memscale.techniques.forward import Args, Forward, ForwardStage, Kwargs, Stage, override_of
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

logger = logging.getLogger("memscale")

RunBlock = Callable[[Forward, Args, Kwargs, Sequence[nn.Module]], Any]  # the modules that it uses last


def can_recompute(block: BlockProfile) -> bool:
    """Return whether forward saves anything in a block, and the block can be run again from its input."""
    blocked = block.has_own_checkpointing or block.changes_input or block.gathers_inside
    return block.saved_bytes > 0 and not blocked


def worth_keeping(block: BlockProfile) -> tuple[OpProfile, ...]:
    """Return the block's heavy operations, those that save the most computation per byte first."""
    useful = [op for op in block.ops if op.output_bytes > 0]
    return tuple(sorted(useful, key=lambda op: (-op.flops / op.output_bytes, op.key)))


class GradientCheckpointing:
    name = "checkpointing"

    def options(self, block: BlockProfile, terms: CostTerms) -> Iterator[BlockOption]:
        """Yield one option for each number of kept products, none first."""
        if not terms.config.enable_checkpointing or not can_recompute(block):
            return
        products = worth_keeping(block)
        for count in range(len(products) + 1):
            keep = products[:count]
            kept_bytes = sum(op.output_bytes for op in keep)
            flops = max(0, block.forward_flops - sum(op.flops for op in keep) * block.calls)
            half = max(0, block.forward_half_flops - sum(op.flops for op in keep if op.half) * block.calls)
            seconds = terms.rates.seconds(flops, half, block.forward_traffic)
            reason = f"holds {format_bytes(block.saved_bytes)} for backward, recomputed instead"
            if keep:
                reason += f"; keeps {format_bytes(kept_bytes * block.calls)} that are expensive to compute"
            yield BlockOption(
                self.name,
                StepTime(recomputation=seconds, overhead=HOOK_SECONDS),
                held_bytes=kept_bytes * block.calls,
                returned_bytes=max(0, block.saved_bytes // max(1, block.calls) - kept_bytes),
                reruns_forward=True,
                keep=keep,
                settings=Checkpointing(tuple(sorted(op.key for op in keep))),
                reason=reason,
            )

    def unsupported_reason(self, site: LayerSite) -> str | None:
        gathered = {id(module) for group in sharded_groups(site.model) for module in group.modules}
        for member, module in zip(site.layer.members, site.modules, strict=True):
            parts = member.split(".")
            if any(
                id(each) in gathered and (each is not module or len(site.modules) > 1)
                for each in module.modules()
            ):
                return "FSDP2 gathers its parts one by one (fully_shard the whole layer instead)"
            around = [".".join(parts[:length]) for length in range(len(parts))]
            outer = [(name, site.model.get_submodule(name)) for name in around]
            for name, one in (*outer, *module.named_modules(prefix=member)):
                if _checkpoints_itself(one):
                    return f"{name or type(one).__name__} has gradient checkpointing of its own switched on"
        return None

    def attach(self, site: LayerSite, log: UndoLog) -> None:
        layer, meter = site.layer, site.meter
        settings = layer.checkpointing or Checkpointing()
        calls_to_keep(settings.keep)  # raises now if a name is wrong, and not in the first step

        def run_block(function: Forward, args: Args, kwargs: Kwargs, modules: Sequence[nn.Module]) -> Any:
            counted = meter.watched(function, layer.name, layer.recompute_flops)
            keep, chain = settings.keep, settings.chained
            if any(map(is_compiled, modules)):
                keep = ()  # products inside of compiled code are not seen
            return run_region(counted, args, kwargs, modules=modules, keep=keep, chain=chain)

        if len(site.modules) == 1:
            log.add_stage(site.modules[0], RecomputeStage(run_block), name=layer.members[0])
            return
        name, start = _slice_position(site)
        container = site.model.get_submodule(name)
        override = override_of(container)
        stage = None if override is None else override.find(SlicesStage)
        if stage is None:
            stage = SlicesStage()
            log.add_stage(container, stage, name=name)
        stage.add(start, start + len(site.modules), run_block)


class RecomputeStage(ForwardStage):
    order = Stage.RECOMPUTE

    def __init__(self, run_block: RunBlock) -> None:
        self._run_block = run_block

    def run(self, module: nn.Module, call_next: Forward, args: Args, kwargs: Kwargs) -> Any:
        caches = [each for each in (*args, *kwargs.values()) if is_cache(each)]
        is_repeatable = not caches or (module.training and all(map(_is_appended_to, caches)))
        if _checkpoints_itself(module) or not is_repeatable:
            return call_next(*args, **kwargs)
        if caches:
            call_next = _with_caches_as_before(call_next, caches)
        return self._run_block(call_next, args, kwargs, (module,))


class SlicesStage(ForwardStage):
    """Recomputes slices of an `nn.Sequential` in backward: by position, whatever module is there when it runs."""

    order = Stage.RECOMPUTE

    def __init__(self) -> None:
        self._slices: list[tuple[int, int, RunBlock]] = []

    def add(self, start: int, stop: int, run_block: RunBlock) -> None:
        """Add the slice of children from `start` to `stop` (exclusive); none overlaps another."""
        self._slices = sorted((*self._slices, (start, stop, run_block)), key=lambda each: each[0])

    def run(self, module: nn.Module, call_next: Forward, args: Args, kwargs: Kwargs) -> Any:
        if len(args) != 1 or kwargs:
            return call_next(*args, **kwargs)  # `forward(input=x)`, or an error that torch raises
        (value,) = args
        children = list(module._modules.values())
        done = 0
        for start, stop, run_block in self._slices:
            value = _in_order(children[done:start], value)
            inside = [child for child in children[start:stop] if child is not None]
            done = stop
            if is_cache(value) or any(map(_checkpoints_itself, inside)):
                value = _in_order(inside, value)
            elif inside:
                value = run_block(functools.partial(_in_order, inside), (value,), {}, inside)
        return _in_order(children[done:], value)


def _in_order(modules: Sequence[Any], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value


def _slice_position(site: LayerSite) -> tuple[str, int]:
    """Return the name of the `nn.Sequential` that a block is a slice of, and where the slice begins."""
    members = site.layer.members
    name, dot, _ = members[0].rpartition(".")
    container = site.model.get_submodule(name)
    override = override_of(container)
    own_forward = vars(container).get("forward") if override is None else override.inner
    in_order = type(container).forward is nn.Sequential.forward and own_forward is None
    children = [f"{name}{dot}{child}" for child in container._modules]
    start = children.index(members[0])
    if not in_order or tuple(children[start : start + len(members)]) != members:
        raise WrapError(
            f"The plan's layer {site.layer.name!r} is the modules {', '.join(members)}, which are not neighbours in an "
            f"nn.Sequential that runs them in order: {name!r} is a {type(container).__name__} with "
            f"{', '.join(children)}. Make a new plan for this model."
        )
    return name, start


_FLAG = "gradient_checkpointing"
_REPLACED = 0  # the flag while a plan replaces it: off, yet not the False that someone else may set


def _checkpoints_itself(module: nn.Module) -> bool:
    """Return whether Hugging Face's flag is set, or the module is torch's `checkpoint_wrapper`."""
    return getattr(module, _FLAG, False) is True or is_checkpoint_wrapper(module)


class OwnCheckpointing:
    """Switches off a Hugging Face model's own checkpointing, as a change in an undo log. See Note [Own checkpointing].

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, print
        >>> own = OwnCheckpointing(layer)
        >>> own.replace(), bool(layer.gradient_checkpointing), own.replace()
        (1, False, 0)
        >>> own.undo()
        >>> layer.gradient_checkpointing
        True
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [weakref.ref(module) for module in model.modules() if hasattr(module, _FLAG)]

    def replace(self) -> int:
        """Switch off every flag that is on; return how many those were."""
        count = 0
        for module in self._present():
            attributes = vars(module)
            # With the function that it is called with: a flag alone may be another library's.
            if attributes.get(_FLAG) is True and "_gradient_checkpointing_func" in attributes:
                attributes[_FLAG] = _REPLACED
                count += 1
        return count

    def undo(self) -> None:
        for module in self._present():
            self.undo_in(module, vars(module))

    def undo_in(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        """Undo it in a copy of a module's attributes."""
        if attributes.get(_FLAG) is _REPLACED:
            attributes[_FLAG] = True

    def _present(self) -> Iterator[nn.Module]:
        return (module for each in self._modules if (module := each()) is not None)


@contextlib.contextmanager
def without_own_checkpointing(model: nn.Module) -> Iterator[None]:
    """Switch off a Hugging Face model's own checkpointing inside the block."""
    own = OwnCheckpointing(model)
    try:
        own.replace()
        yield
    finally:
        own.undo()


_NOT_CACHES = (torch.Tensor, nn.Module, type(None), str, int, float, tuple, list, Mapping, AbstractSet)
_CACHE_METHODS = ("update", "update_conv_state", "update_ssm_state", "update_recurrent_state")


def is_cache(value: object) -> bool:
    """Return whether an argument is an object that a layer writes its keys and values into, as in generation."""
    # It is known by its structure: it has a method such as `update` and is no container of Python's.
    if isinstance(value, _NOT_CACHES):
        return False
    return any(hasattr(type(value), name) for name in _CACHE_METHODS)


def _entries(cache: Any) -> list[Any]:
    """Return the caches in a cache: one per layer, or one for the encoder's states and one for the decoder's."""
    values = (value if isinstance(value, list) else [value] for value in vars(cache).values())
    return [each for value in values for each in value if is_cache(each)]


def _is_appended_to(cache: Any) -> bool:
    """Return whether an update makes new tensors, and writes into none that a copy of the cache would share."""
    if getattr(cache, "is_compileable", True):  # transformers' word for a cache with tensors of a fixed size
        return False
    entries = _entries(cache)
    return (
        all(map(_is_appended_to, entries))
        if entries
        else not any(hasattr(cache, each) for each in _CACHE_METHODS[1:])
    )


def _copy_of(value: Any) -> Any:
    """Copy a cache with its containers and entries; their tensors are those of the original."""
    if isinstance(value, list):
        return [_copy_of(each) for each in value]
    if isinstance(value, dict):
        return {key: _copy_of(each) for key, each in value.items()}
    if not is_cache(value):
        return value
    twin = copy.copy(value)
    vars(twin).update({name: _copy_of(each) for name, each in vars(value).items()})
    return twin


def _with_caches_as_before(function: Forward, caches: Sequence[object]) -> Forward:
    """Return a function that, when it is called again, passes copies of caches as they are now."""
    before = {id(cache): _copy_of(cache) for cache in caches}
    calls = itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 0:
            return function(*args, **kwargs)

        def restored(value: Any) -> Any:
            return _copy_of(before[id(value)]) if id(value) in before else value

        return function(*map(restored, args), **{name: restored(value) for name, value in kwargs.items()})

    return call


class NoCache:
    """Turns the cache off in training, as a forward pre-hook. See Note [use_cache]."""

    def __init__(self, position: int | None, *, logs: bool) -> None:
        self._position = position  # of `use_cache` among the forward's positional arguments
        self._logs = logs
        self.is_idle = False  # while the plan does nothing

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # None: an earlier hook of the same call has removed this one, and torch calls it without its options.
        if kwargs is None or not torch.is_grad_enabled() or self.is_idle:
            return None
        is_training = module.training or kwargs.get("labels") is not None
        position = self._position
        if position is not None and len(args) <= position:
            position = None
        wanted = kwargs.get("use_cache") if position is None else args[position]
        given = [each for each in (*args, kwargs.get("past_key_values")) if is_cache(each)]
        has_cache = wanted or kwargs.get("past_key_values") is not None or bool(given)
        if is_training and has_cache:
            if given and all(map(_is_appended_to, given)) and not wanted:
                return None  # as in prefix tuning: its layers are recomputed
            self._log(
                "A training step asked for a cache (use_cache=True, or past_key_values)",
                "leave use_cache out",
            )
        elif is_training and wanted is None:
            if position is None:
                return args, {**kwargs, "use_cache": False}
            return (*args[:position], False, *args[position + 1 :]), kwargs
        elif not is_training and wanted is None and self._logs:
            config: Any = module.config
            if config.use_cache and any(each.requires_grad for each in module.parameters()):
                self._log(
                    "A step in eval() mode, with gradients on and no labels, uses a cache",
                    "pass use_cache=False",
                )
        return None

    def _log(self, what: str, remedy: str) -> None:
        if self._logs:
            self._logs = False
            logger.warning(
                "%s. It takes memory that training does not need, and layers may be left without checkpointing in such "
                "a step. To save the memory in training, %s.",
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
