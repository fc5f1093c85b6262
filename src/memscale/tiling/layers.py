"""Wide layers in tiles: find those that are position-wise, and run them some positions at a time.

Note [Tiles of positions]
~~~~~~~~~~~~~~~~~~~~~~~~~
Forward runs the layer on one tile after the other, without a graph, and keeps the layer's input alone. Backward runs it
again, tile by tile, each with a small graph that is used at once. So nothing wide exists for more than one tile.

*Exactness.* The tiles are recomputed in the order of forward from the random state of forward, so that dropout draws
the same masks; they are other masks than the whole layer would have drawn, of the same distribution.

*Inside a recomputed block.* The input goes through the surrounding saved-tensor hooks before the layer runs. If those
belong to a region (Note [Regions]) that has nothing else to fill, its recomputation stops there: the layer is computed
twice in all, not three times.

*Parameters.* Inside an offloaded block, modules have copies on the device in forward; backward uses the parameters
behind them, which are copied to the device again, once for all tiles.

Note [Position-wise]
~~~~~~~~~~~~~~~~~~~~
A layer is position-wise if its output for a position depends on that position of its input alone. It is called
once on the meta device with an input of (P, Q, width), where P and Q are primes that nothing else in the layer is a
multiple of. Every tensor that comes from the input must begin with the dimensions (P, Q) or (P · Q); then its rows
are positions. Each operation on such a tensor must be known to compute each row from that row:

- elementwise operations, with other operands that do not differ by row;
- products with a matrix that does not come from the input;
- reductions, norms and softmax over other dimensions than the leading ones;
- views that keep the leading dimensions as they are, flatten them or unflatten them.

Anything else (attention, convolutions, a mean over the sequence, an unknown operation) is refused. Nothing is computed,
and no random number is drawn.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memscale._torch import (
    FakeTensor,
    LightDispatchMode,
    backward_keeps_graph,
    disable_current_modes,
    graph_task_id,
    hooks_are_allowed,
    surrounding_hooks,
    tree_leaves,
)
from memscale._util.snapshots import Attributes, HostRngState
from memscale._util.trees import Tree
from memscale.checkpointing.state import FREED, Conditions, Inputs, ModuleFlags, exchanged, submodules
from memscale.errors import RecomputeError
from memscale.profiler.recorder import recorded_times

ResultT = TypeVar("ResultT")
Layer = Callable[[torch.Tensor], torch.Tensor]


def tiles_of(tensor: torch.Tensor, dim: int, rows: int) -> Iterator[slice]:
    """Yield the tiles of a tensor along one dimension: `rows` each, the last one the remainder.

    Of a fake tensor, only the first two and the last: the others need memory like the second, whose work is recorded
    for them as well.

    Example:
        >>> [(tile.start, tile.stop) for tile in tiles_of(torch.ones(7), 0, 3)]
        [(0, 3), (3, 6), (6, 7)]
    """
    size = tensor.shape[dim]
    starts = range(0, size, rows)
    if isinstance(tensor, FakeTensor) and len(starts) > 3:
        yield slice(0, rows)
        with recorded_times(len(starts) - 2):
            yield slice(rows, 2 * rows)
        starts = starts[-1:]
    for start in starts:
        yield slice(start, min(start + rows, size))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type to add tiles up in: float32 at least, as one matrix product over all rows does."""
    return torch.promote_types(dtype, torch.float32)


def without_saved_tensor_hooks() -> saved_tensors_hooks:
    """Return a block in which saved tensors stay as they are: its graph is used at once, or holds nothing new."""
    # Detached: an output that a node saves with its history would keep the node alive, and itself, after an error.
    return saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)


def first_order_only(backward: Callable[..., ResultT]) -> Callable[..., ResultT | tuple[None, ...]]:
    """Decorate a `Function.backward` to refuse a pass whose result is to be differentiated again.

    Torch's `once_differentiable` refuses only if the incoming gradient has a history. That of `output.sum()` has none,
    and the second derivatives of a gradient penalty would be silently missing. Undefined gradients stay undefined.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> ResultT | tuple[None, ...]:
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            raise RecomputeError(
                "A backward pass with create_graph=True came to a tiled layer or loss, which computes its gradients "
                "tile by tile and cannot be differentiated twice. Switch tiling off for this model: "
                "memscale.Config(enable_tiling=False)."
            )
        return backward(ctx, *gradients)

    return checked


def run_in_tiles(function: Layer, x: torch.Tensor, rows: int, modules: Sequence[nn.Module]) -> torch.Tensor:
    """Return `function(x)`, computed `rows` positions at a time.

    `x` is of shape (batch, positions, width); the function, which uses `modules`, gets tiles of (1, rows, width).

    Example:
        >>> layer = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> x = torch.ones(3, 5, 2, requires_grad=True)
        >>> y = run_in_tiles(layer, x, 4, [layer])
        >>> torch.allclose(y, layer(x))
        True
    """
    slots = _ParameterSlots(modules)
    tensors = slots.tensors()
    flat = x.reshape(1, -1, x.shape[-1])
    needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (x, *tensors))
    if not needs_gradient or not hooks_are_allowed():
        out = _run_tiles(function, flat, rows)
    else:
        inputs = Inputs(Tree.of(((flat,), {})), surrounding_hooks())
        conditions = Conditions(ModuleFlags(submodules(modules)), [x.device])
        call = _LayerCall(function, rows, slots, inputs, conditions)
        out = _TiledLayer.apply(call, flat, *tensors)  # type: ignore[no-untyped-call]
    return out.reshape(*x.shape[:-1], out.shape[-1])


class _ParameterSlots:
    """Where modules have their parameters; a shared parameter counts once."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        slots: dict[int, list[tuple[Any, str]]] = {}
        for module in submodules(modules):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    slots.setdefault(id(parameter), []).append((module, name))
        self._slots = list(slots.values())

    def tensors(self) -> list[torch.Tensor]:
        """Return what is there now: parameters, or their copies on the device."""
        return [module._parameters[name] for (module, name), *_ in self._slots]

    @contextlib.contextmanager
    def holding(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Put other tensors there inside the block."""
        before = self.tensors()
        try:
            self._put(tensors)
            yield
        finally:
            self._put(before)

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        for slots, tensor in zip(self._slots, tensors, strict=True):
            for module, name in slots:
                module._parameters[name] = tensor


@dataclass
class _LayerCall:
    """One call of a layer in tiles, for as long as its graph lives."""

    function: Layer
    rows: int
    slots: _ParameterSlots
    inputs: Inputs | None
    conditions: Conditions

    def release(self) -> None:
        """Free the input, which would live as long as the loss."""
        self.inputs = None


def _run_tiles(function: Layer, flat: torch.Tensor, rows: int) -> torch.Tensor:
    out: Any = None
    for tile in tiles_of(flat, 1, rows):
        part = function(flat[:, tile])
        if out is None:
            out = part.new_empty(1, flat.shape[1], part.shape[-1])
        out[:, tile] = part
    result: torch.Tensor = out
    return result


class _TiledLayer(torch.autograd.Function):
    """See Note [Tiles of positions]."""

    @staticmethod
    def forward(ctx: Any, call: _LayerCall, flat: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.memscale_release = call, call.release
        ctx.dtypes = [each.dtype for each in tensors]
        # Without history, or autocast would cache casts of them that have none.
        with call.slots.holding([each.detach() for each in tensors]):
            return _run_tiles(call.function, flat, call.rows)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _LayerCall = ctx.call
        inputs = call.inputs
        if inputs is None:
            raise RuntimeError(FREED)
        if not backward_keeps_graph():
            call.release()
        call.conditions.flags.check_parameters()
        ((flat,), _) = inputs.rebuild(graph_task_id())
        with call.conditions.replay():
            parameters = call.slots.tensors()
        leaves = [
            each.detach().to(flat.device, dtype).requires_grad_(is_wanted)
            for each, dtype, is_wanted in zip(parameters, ctx.dtypes, ctx.needs_input_grad[2:], strict=True)
        ]
        trained = [index for index, leaf in enumerate(leaves) if leaf.requires_grad]
        sums: dict[int, torch.Tensor] = {}
        of_input = torch.empty_like(flat) if ctx.needs_input_grad[1] else None
        with call.conditions.replay(), without_saved_tensor_hooks(), call.slots.holding(leaves):
            for tile in tiles_of(flat, 1, call.rows):
                part = flat[:, tile].detach().requires_grad_(of_input is not None)
                out = call.function(part)
                wanted = [*(leaves[index] for index in trained), *(() if of_input is None else (part,))]
                found = torch.autograd.grad(out, wanted, gradient[:, tile], allow_unused=True)
                del out
                with torch.no_grad():
                    if of_input is not None:
                        of_input[:, tile] = 0 if found[-1] is None else found[-1]
                    for index, addend in zip(trained, found, strict=False):
                        if addend is not None and index in sums:
                            sums[index].add_(addend)
                        elif addend is not None:
                            sums[index] = addend.to(sum_dtype(addend.dtype))
        of_parameters = (
            sums[index].to(dtype) if index in sums else None for index, dtype in enumerate(ctx.dtypes)
        )
        return None, of_input, *of_parameters


# Methods of a block that are an MLP: of Hugging Face's encoders, and of torch's own transformer layers.
MLP_METHODS = ("feed_forward_chunk", "ff_chunk", "_ff_block")
MAX_WIDTHS_TRIED = 4


@dataclass(frozen=True)
class TiledMethod:
    """A position-wise method of a module inside a block, and the names of the module's children that it uses."""

    name: str
    method: str
    uses: tuple[str, ...]


def find_wide_layers(block: nn.Module, name: str = "") -> Iterator[TiledMethod]:
    """Yield the wide position-wise layers inside a block, none inside another; the block itself is called `name`."""
    for method in MLP_METHODS:
        uses = _children_used(block, method) if hasattr(type(block), method) else None
        if uses is not None:
            yield TiledMethod(name, method, uses)
            return
    for child_name, child in block.named_children():
        path = f"{name}.{child_name}" if name else child_name
        uses = _children_used(child, "forward") if "forward" not in vars(child) else None
        if uses is not None:
            yield TiledMethod(path, "forward", uses)
        else:
            yield from find_wide_layers(child, path)


def _children_used(module: nn.Module, method: str) -> tuple[str, ...] | None:
    """Return what a method of a module uses, if it is position-wise and has something wide inside."""
    matrices = [each for each in module.parameters() if each.dim() == 2]
    if len(matrices) < 2 or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return None
    function = getattr(type(module), method).__get__(module)
    # The input's width is that of a matrix on one of its sides.
    widths = list(dict.fromkeys(side for matrix in matrices for side in reversed(matrix.shape)))
    for width in widths[:MAX_WIDTHS_TRIED]:
        try:
            shown = show_position_wise(function, module, width, matrices[0].dtype)
        except NotPositionWise:
            continue
        return shown.uses if shown.widest > shown.width else None
    return None


P, Q = 10007, 10009

# Operations of aten, by what must be checked of them; elementwise ones are known by their tag.
_VIEWS = """
    alias detach clone contiguous view _unsafe_view reshape _reshape_alias expand permute t transpose squeeze unsqueeze
    select slice split split_with_sizes chunk unbind
    empty_like zeros_like ones_like full_like rand_like randn_like bernoulli bernoulli_
"""
_OVER_DIMS = "mean sum amax amin var var_mean _softmax _log_softmax linalg_vector_norm"
_NORMS = ("native_layer_norm", "_fused_rms_norm", "rms_norm")
_OTHER_ELEMENTWISE = ("native_dropout", "_to_copy", "copy_", "glu", "cat", "lift_fresh")


class NotPositionWise(Exception):
    """Says why a layer is not known to be position-wise."""


@dataclass(frozen=True)
class PositionWise:
    uses: tuple[str, ...]  # the module's children whose parameters it uses, and those that have none
    width: int  # elements per position of its input or output, the larger one
    widest: int  # elements per position of the largest tensor in between


def show_position_wise(
    function: Callable[[torch.Tensor], Any], module: nn.Module, width: int, dtype: torch.dtype
) -> PositionWise:
    """Trace a method of a module on `width` elements per position; raise `NotPositionWise` if it is not known to be.

    See Note [Position-wise].

    Example:
        >>> layer = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        >>> show_position_wise(layer.forward, layer, 4, torch.float32)
        PositionWise(uses=('0', '1', '2'), width=4, widest=8)
    """
    # A simulation or a memory tracker around must neither see this nor change the result.
    with torch.no_grad(), disable_current_modes(), _without_data(module):
        x = torch.empty(P, Q, width, dtype=dtype, device="meta")
        inside = submodules([module])
        random, attributes = HostRngState(), Attributes(inside)
        buffers = [id(each) for one in inside for each in one._buffers.values()]
        try:
            with _Tracer(x) as tracer:
                result = function(x)
        except NotPositionWise:
            raise
        except Exception as error:  # whatever a layer raises that cannot be called like this
            raise NotPositionWise(f"it cannot be traced ({type(error).__name__}: {error})") from error
        finally:
            changes = random.has_moved() or attributes.has_changed()
            random.restore()
            attributes.restore()
        if changes or buffers != [id(each) for one in inside for each in one._buffers.values()]:
            raise NotPositionWise(
                "once a call, it draws random numbers of Python or NumPy, or changes attributes or buffers"
            )
        if not isinstance(result, torch.Tensor):
            raise NotPositionWise(f"it returns a {type(result).__name__}")
        if not tracer.is_of_positions(result) or tuple(result.shape[:-1]) != (P, Q):
            raise NotPositionWise("what it returns is not one vector for each position")
        uses = []
        for name, child in module.named_children():
            parameters = [each for one in submodules([child]) for each in one._parameters.values()]
            if not parameters or any(id(each) in tracer.seen for each in parameters):
                uses.append(name)
        widest = max(each.numel() // (P * Q) for each in tracer.of_positions.values())
        return PositionWise(tuple(uses), max(width, result.shape[-1]), widest)


def _without_data(root: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a block in which parameters and buffers are meta tensors."""
    meta: dict[int, Any] = {id(None): None}

    def on_meta(tensor: Any) -> Any:
        if id(tensor) not in meta:
            meta[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return meta[id(tensor)]

    return exchanged(
        (module, kind, {name: on_meta(each) for name, each in vars(module)[kind].items()})
        for module in submodules([root])
        for kind in ("_parameters", "_buffers")
    )


class _Tracer(LightDispatchMode):
    """Check every operation. See Note [Position-wise]."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.of_positions = {id(x): x}  # with the tensors, so that no other gets their ids
        self._input = x.untyped_storage()._cdata
        self.seen: dict[int, torch.Tensor] = {}

    def is_of_positions(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.of_positions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        self.seen.update((id(each), each) for each in tensors)
        if func._schema.is_mutable:
            changed = args[0] if args else None
            if not isinstance(changed, torch.Tensor) or not self.is_of_positions(changed):
                raise NotPositionWise(f"{func} changes a tensor of its own")
            if changed.untyped_storage()._cdata == self._input:
                raise NotPositionWise(f"{func} changes its input in place")
        rows = [each for each in tensors if self.is_of_positions(each)]
        if rows:
            others = [each for each in tensors if not self.is_of_positions(each)]
            self._check(func, args, kwargs, rows, others)
        result = func(*args, **kwargs)
        if rows:
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor):
                    if not _leading(each):
                        raise NotPositionWise(f"{func} mixes positions with other dimensions")
                    self.of_positions[id(each)] = each
        return result

    def _check(
        self, func: Any, args: Any, kwargs: Any, rows: list[torch.Tensor], others: list[torch.Tensor]
    ) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name in _VIEWS.split():
            return
        if torch.Tag.pointwise in func.tags or name in _OTHER_ELEMENTWISE:
            _check_operands(name, rows, others)
            if name in ("glu", "cat"):
                dim = args[1] if len(args) > 1 else kwargs.get("dim", -1 if name == "glu" else 0)
                _check_dims(name, dim, rows[0])
        elif name in ("mm", "addmm"):
            factor = args[-1] if name == "mm" else args[2]
            bias = None if name == "mm" else args[0]
            if self.is_of_positions(factor) or (bias is not None and (bias.dim() > 1 and bias.shape[0] != 1)):
                raise NotPositionWise(f"{name} multiplies positions with each other")
        elif name in _OVER_DIMS.split():
            _check_dims(name, args[1] if len(args) > 1 else kwargs.get("dim"), rows[0])
        elif name in _NORMS:
            if len(args[1]) > rows[0].dim() - _leading(rows[0]):
                raise NotPositionWise(f"{name} over positions")
        else:
            raise NotPositionWise(f"it is not known what {name} does to a position")


def _leading(tensor: torch.Tensor) -> int:
    """Return how many of a tensor's leading dimensions are the positions."""
    if tuple(tensor.shape[:2]) == (P, Q):
        return 2
    return 1 if tensor.dim() and tensor.shape[0] == P * Q else 0


def _check_operands(name: str, rows: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Check operands of an elementwise operation: rows side by side, all else the same for every row."""
    dim, leading = rows[0].dim(), _leading(rows[0])
    for each in rows:
        if each.dim() != dim or _leading(each) != leading:
            raise NotPositionWise(f"{name} of positions in other places")
    for each in others:
        reaches = each.shape[: max(0, each.dim() - (dim - leading))]
        if each.dim() > dim or math.prod(reaches) != 1:
            raise NotPositionWise(f"{name} with an operand that differs by position")


def _check_dims(name: str, dims: Any, tensor: torch.Tensor) -> None:
    wanted = [dims] if isinstance(dims, int) else dims
    if not wanted or any(each % tensor.dim() < _leading(tensor) for each in wanted):
        raise NotPositionWise(f"{name} over positions")
