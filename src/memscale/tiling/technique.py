"""Activation tiling: the wide layers inside a block are computed some positions at a time.

The mechanism is `memscale.tiling`; here the layers that it is right for are found in a block, and get a forward:
those shown to be position-wise (Note [Position-wise]) with something inside that is wider than what goes in and comes
out. Mostly that is one, the MLP. Some blocks have it in a method of their own instead, which is replaced alike.

Attention that makes all scores is handed to torch's own, where a model has that choice. It is one for the whole
model: the first block that is tiled makes it. Attention that a model has no such choice for is left alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memscale.execution_plan import Tiling
from memscale.profiler.profile import BlockProfile
from memscale.techniques.base import LayerSite
from memscale.techniques.cost import BlockOption, CostTerms
from memscale.techniques.forward import ForwardStage, Stage
from memscale.tiling import run_in_tiles
from memscale.tiling.positionwise import NotPositionWise, show_position_wise
from memscale.tiling.sdpa import AttentionHandedOver, eager_attention

if TYPE_CHECKING:
    from memscale.techniques.undo_log import UndoLog

__all__ = ["ActivationTiling", "Place", "TileStage", "find_places"]

# Methods of a block that are an MLP: of Hugging Face's encoders, and of torch's own transformer layers.
METHODS = ("feed_forward_chunk", "ff_chunk", "_ff_block")

MOST_WIDTHS = 4
DEFAULT_ROWS = 1024


@dataclass(frozen=True)
class Place:
    """A position-wise layer inside a block.

    Attributes:
        name: The name of its module inside the block.
        attribute: `"forward"`, or another method of the module.
        uses: The names of the module's children that it uses.
    """

    name: str
    attribute: str
    uses: tuple[str, ...]


class ActivationTiling:
    """The technique `"tiling"`."""

    name = "tiling"

    def __init__(self) -> None:
        # What `unsupported_reason` has found, for `attach`, which comes next.
        self._found: weakref.WeakKeyDictionary[nn.Module, list[Place]] = weakref.WeakKeyDictionary()

    def options(self, block: BlockProfile, terms: CostTerms) -> Iterable[BlockOption]:
        return ()  # the planner chooses it for the model as a whole, as a `Setting`

    def unsupported_reason(self, site: LayerSite) -> str | None:
        if any(isinstance(module, torch.jit.ScriptModule) for module in site.modules):
            return "it is a scripted module, whose forward cannot be replaced"
        for module in site.modules:
            self._found[module] = find_places(module)
        if not any(self._found[module] for module in site.modules) and not eager_attention(site.model):
            return "no wide layer inside is known to be position-wise"
        return None

    def attach(self, site: LayerSite, log: UndoLog) -> None:
        rows = (site.layer.tiling or Tiling(DEFAULT_ROWS)).rows
        for member, module in zip(site.layer.members, site.modules, strict=True):
            places = self._found.pop(module, None) or find_places(module)
            for place in places:
                owner = module.get_submodule(place.name)
                name = ".".join(filter(None, (member, place.name)))
                log.add_stage(owner, TileStage(rows, place), method=place.attribute, name=name)
        configs = eager_attention(site.model)
        if configs:
            handed_over = AttentionHandedOver(configs)
            log.add(handed_over)
            log.add_forward_pre_hook(site.model, _AttentionsAsked(handed_over))


class _AttentionsAsked:
    """Before a call that asks for attention weights, which torch's attention does not have, all is as it was."""

    def __init__(self, handed_over: AttentionHandedOver) -> None:
        self._handed_over = handed_over

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is not None and kwargs.get("output_attentions"):
            self._handed_over.undo()


def find_places(block: nn.Module) -> list[Place]:
    """The position-wise layers inside a block, none inside another.

    Example:
        >>> block = nn.Module()
        >>> block.norm = nn.LayerNorm(4)
        >>> block.mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        >>> find_places(block)
        [Place(name='mlp', attribute='forward', uses=('0', '1', '2'))]
    """
    return list(_places("", block))


def _places(name: str, module: nn.Module) -> Iterator[Place]:
    for method in METHODS:
        uses = _shown(module, method) if hasattr(type(module), method) else None
        if uses is not None:
            yield Place(name, method, uses)
            return
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        uses = _shown(child, "forward") if "forward" not in vars(child) else None
        if uses is not None:
            yield Place(path, "forward", uses)
        else:
            yield from _places(path, child)


def _shown(module: nn.Module, attribute: str) -> tuple[str, ...] | None:
    """What a method of a module uses, if it is shown to be position-wise and has something wide inside."""
    matrices = [each for each in module.parameters() if each.dim() == 2]
    if len(matrices) < 2 or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return None
    function = getattr(type(module), attribute).__get__(module)
    for width in _widths(matrices):
        try:
            shown = show_position_wise(function, module, width, matrices[0].dtype)
        except NotPositionWise:
            continue
        return shown.uses if shown.widest > shown.width else None
    return None


def _widths(matrices: Sequence[torch.Tensor]) -> list[int]:
    """What the input's width may be: it is that of a matrix on one of its sides."""
    sides = dict.fromkeys(side for matrix in matrices for side in reversed(matrix.shape))
    return list(sides)[:MOST_WIDTHS]


class TileStage(ForwardStage):
    """Calls a position-wise method of a module some positions at a time. See Note [Tiles of positions].

    Args:
        rows: How many positions make a tile.
        place: Which method it is, and what it uses.
    """

    order = Stage.TILE

    def __init__(self, rows: int, place: Place) -> None:
        self._rows = rows
        self._attribute = place.attribute
        self._uses = place.uses

    def run(
        self, module: nn.Module, call_next: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[0] * x.shape[1] <= self._rows:
            return call_next(*args, **kwargs)
        modules = [module] if self._attribute == "forward" else [module._modules[name] for name in self._uses]
        return run_in_tiles(call_next, x, self._rows, [each for each in modules if each is not None])
