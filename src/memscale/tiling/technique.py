"""The techniques of this package: wide layers in tiles, eager attention by SDPA, head and loss in tiles.

*Wide layers.* Inside a block, those modules or methods are tiled that are shown to be position-wise
(Note [Position-wise]) and have something inside that is wider than their input and output; mostly that is the MLP.

*Attention.* Models of Hugging Face have a setting: `"eager"` attention computes all scores, queries × keys, and keeps
two or three tensors of that size for backward; `"sdpa"` is torch's `scaled_dot_product_attention`, whose kernels never
have them whole. Where a plan has tiles, models that ask for the first get the second, if it computes the same.

*Head and loss.* The head returns lazy logits (Note [Lazy logits]). Its parameters are copied to the device while the
loss is computed, and not before.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memscale._torch import hooks_are_allowed, in_ddp_static_graph
from memscale.checkpointing.state import parameter_behind
from memscale.execution_plan import LossTiling, Tiling
from memscale.offload.placement import ModelPlacement
from memscale.profiler.blocks import find_head
from memscale.profiler.profile import BlockProfile
from memscale.techniques.base import LayerSite, ModelSite
from memscale.techniques.cost import BlockOption, CostTerms
from memscale.techniques.forward import Args, Forward, ForwardOverride, ForwardStage, Kwargs, Stage
from memscale.tiling.head import Head
from memscale.tiling.layers import TiledMethod, find_wide_layers, run_in_tiles
from memscale.tiling.lazy import LazyLogits, lazy_logits
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

logger = logging.getLogger("memscale")

LAYER_ROWS = 1024  # positions of a tile of a wide layer
LONG_SEQUENCE = 4096  # positions from which on wide layers are computed in tiles
LOGITS_TILE_BYTES = 32 * 2**20  # 128 tokens of GPT-2. Smaller tiles are slower, larger ones hardly faster
LOGITS_BUDGET_SHARE = 1 / 32  # of a memory budget, for one tile of logits
FEWEST_LOGITS_ROWS = 16
FEWEST_LOGITS_TILES = (
    4  # in a tile four copies of its logits exist at once, in a plain backward three of all logits
)


def rows_of_layers(positions: int) -> int | None:
    """Return the positions of a tile of a wide layer; None for sequences that are too short for tiles."""
    return LAYER_ROWS if positions >= LONG_SEQUENCE else None


def tiled_loss(tokens: int, vocabulary: int, memory_budget: int | None) -> LossTiling | None:
    """Return tiles of logits that are fast, and small in comparison with the budget; None for one tile's worth."""
    room = LOGITS_TILE_BYTES
    if memory_budget is not None:
        room = min(room, int(memory_budget * LOGITS_BUDGET_SHARE))
    rows = FEWEST_LOGITS_ROWS
    while 2 * rows * vocabulary * 4 <= room and 2 * rows * FEWEST_LOGITS_TILES <= tokens:
        rows *= 2
    if rows >= tokens:
        return None
    whole, tile = format_bytes(4 * tokens * vocabulary), format_bytes(4 * rows * vocabulary)
    return LossTiling(rows, "logits-in-tiles", f"logits of {whole} are never whole, but {tile} at a time")


class ActivationTiling:
    name = "tiling"

    def options(self, block: BlockProfile, terms: CostTerms) -> Iterable[BlockOption]:
        return ()  # it is chosen for the model as a whole: see `rows_of_layers`

    def unsupported_reason(self, site: LayerSite) -> str | None:
        if not any(any(find_wide_layers(module)) for module in site.modules):
            return "no wide layer inside is known to be position-wise"
        return None

    def attach(self, site: LayerSite, log: UndoLog) -> None:
        rows = (site.layer.tiling or Tiling(LAYER_ROWS)).rows
        for member, module in zip(site.layer.members, site.modules, strict=True):
            for tiled in find_wide_layers(module):
                name = ".".join(filter(None, (member, tiled.name)))
                owner = module.get_submodule(tiled.name)
                log.add_stage(owner, TileStage(rows, tiled), method=tiled.method, name=name)


class TileStage(ForwardStage):
    """Runs a position-wise method of a module some positions at a time. See Note [Tiles of positions]."""

    order = Stage.TILE

    def __init__(self, rows: int, tiled: TiledMethod) -> None:
        self._rows = rows
        self._tiled = tiled

    def run(self, module: nn.Module, call_next: Forward, args: Args, kwargs: Kwargs) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[0] * x.shape[1] <= self._rows:
            return call_next(*args, **kwargs)
        if self._tiled.method == "forward":
            modules = [module]
        else:
            modules = [module.get_submodule(name) for name in self._tiled.uses]
        return run_in_tiles(call_next, x, self._rows, modules)


_ATTENTION_SETTING = "_attn_implementation_internal"

# Settings of models by which eager attention computes something else than torch's.
_OTHER_ATTENTION = ("attn_logit_softcapping", "reorder_and_upcast_attn", "output_attentions")


class SdpaAttention:
    """Hands eager attention to torch's `scaled_dot_product_attention` where a plan has tiles."""

    def attach(self, site: ModelSite, log: UndoLog) -> None:
        if not any("tiling" in layer.techniques for layer in site.plan.layers):
            return
        configs, reasons = _eager_configs(site.model)
        if reasons and site.logs:
            logger.warning("Attention stays eager: %s.", "; ".join(reasons))
        if configs:
            log.add_forward_pre_hook(site.model, _EagerOnRequest(configs))
        for config in configs:
            log.set_attribute(config, _ATTENTION_SETTING, "sdpa")


def _eager_configs(model: nn.Module) -> tuple[list[Any], list[str]]:
    """Return the configurations in a model that may go from eager attention to SDPA, and why others may not."""
    found: dict[int, Any] = {}
    reasons: dict[int, str] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        is_model = hasattr(type(module), "_supports_sdpa")  # a layer has the configuration of its model
        if not is_model or getattr(config, "__dict__", {}).get(_ATTENTION_SETTING) != "eager":
            continue
        found[id(config)] = config
        can_choose = getattr(type(module), "_can_set_attn_implementation", lambda: False)
        others = [name for name in _OTHER_ATTENTION if getattr(config, name, None)]
        if others:
            reasons[id(config)] = f"{type(module).__name__} has {', '.join(others)} set"
        elif getattr(module, "_supports_sdpa", False) is not True or not can_choose():
            reasons[id(config)] = f"{type(module).__name__} does not support SDPA"
    return [each for key, each in found.items() if key not in reasons], list(dict.fromkeys(reasons.values()))


class _EagerOnRequest:
    """Goes back to eager attention before a call that asks for attention weights, which SDPA does not have."""

    def __init__(self, configs: Sequence[Any]) -> None:
        self._eager = [(config, vars(config)[_ATTENTION_SETTING]) for config in configs]

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is not None and kwargs.get("output_attentions"):
            for config, eager in self._eager:
                vars(config)[_ATTENTION_SETTING] = eager


class TiledLoss:
    def attach(self, site: ModelSite, log: UndoLog) -> None:
        settings = site.plan.loss
        if settings is None:
            return
        name, head, reason = find_head(site.model)
        foreign = None if head is None else vars(head).get("forward")
        if isinstance(foreign, ForwardOverride):  # a tiled head does without its other stages
            foreign = foreign.inner
        if foreign is not None:
            kind = type(foreign).__name__
            head, reason = None, f"{name} has a forward of its own ({kind}), put there by others"
        if head is None:
            if site.logs:
                logger.warning("Head and loss are not tiled: %s.", reason)
            return
        device = site.device if site.placement.device is not None else None
        log.add_stage(head, TileHeadStage(settings.rows, device, site.placement, logs=site.logs), name=name)


class TileHeadStage(ForwardStage):
    """Makes a head's logits lazy, `rows` tokens per tile, on `device`. See Note [Lazy logits]."""

    order = Stage.TILE_HEAD

    def __init__(
        self, rows: int, device: torch.device | None, placement: ModelPlacement, *, logs: bool
    ) -> None:
        self._logs = logs
        self._rows = rows
        self._device = device
        self._placement = placement

    def run(self, module: nn.Module, call_next: Forward, args: Args, kwargs: Kwargs) -> Any:
        logits = self._lazy_logits(module, args[0]) if len(args) == 1 and not kwargs else None
        return call_next(*args, **kwargs) if logits is None else logits

    def _lazy_logits(self, module: nn.Module, hidden: Any) -> LazyLogits | None:
        """Return the logits of hidden states; None if the head is to compute them as usual."""
        if not isinstance(hidden, torch.Tensor) or isinstance(hidden, LazyLogits) or not hooks_are_allowed():
            return None
        if in_ddp_static_graph():
            # That puts a node of its own on every tensor that the model returns, to learn when all gradients are
            # there. Lazy logits are no such tensor.
            if self._logs:
                self._logs = False
                logger.warning(
                    "Head and loss are not tiled inside DistributedDataParallel(static_graph=True), which would not "
                    "average their gradients. To save the memory of the logits, leave static_graph out."
                )
            return None
        if self._device is not None and hidden.device.type == "cpu":
            hidden = hidden.to(self._device)
        # Inside an offloaded block the module has copies on the device, which must not be held on to.
        weight, bias = (
            None if each is None else parameter_behind(each)
            for each in (module._parameters["weight"], module._parameters["bias"])
        )
        if not isinstance(weight, nn.Parameter) or not isinstance(bias, (nn.Parameter, type(None))):
            return None  # other weights, by torch.func.functional_call
        dtype = _logits_dtype(hidden, weight)
        tensors = [each for each in (hidden, weight, bias) if each is not None]
        if dtype is None or hidden.dim() < 2 or not any(each.requires_grad for each in tensors):
            return None
        return lazy_logits(hidden, Head(weight, bias, dtype, self._rows, self._borrow))

    @contextlib.contextmanager
    def _borrow(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        mapped = self._placement.begin_use(parameters)
        try:
            yield
        finally:
            self._placement.end_use(mapped)


def _logits_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype | None:
    """Return the type of the logits; None if the plain head would refuse."""
    kind = hidden.device.type
    is_cast = hidden.is_floating_point() and torch.float64 not in (hidden.dtype, weight.dtype)
    if is_cast and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype if weight.dtype is hidden.dtype else None
