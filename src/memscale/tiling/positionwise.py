"""Decide whether a layer is position-wise, by tracing one call of it on tensors without data.

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
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale._torch import LightDispatchMode, disable_current_modes, tree_leaves
from memscale._util.snapshots import HostRngState
from memscale.checkpointing.state import submodules

__all__ = ["NotPositionWise", "PositionWise", "show_position_wise"]

P, Q = 10007, 10009

# Operations of aten, by what must be checked of them; elementwise ones are known by their tag.
_VIEWS = """
    alias detach clone contiguous view _unsafe_view reshape _reshape_alias expand permute t transpose squeeze unsqueeze
    select slice split split_with_sizes chunk unbind
    empty_like zeros_like ones_like full_like rand_like randn_like bernoulli bernoulli_
"""
_OVER_DIMS = "mean sum amax amin var var_mean _softmax _log_softmax linalg_vector_norm"
_NORMS = "native_layer_norm _fused_rms_norm rms_norm"
_PRODUCTS = "mm addmm"
_OTHER_ELEMENTWISE = "native_dropout _to_copy copy_ glu cat lift_fresh"


class NotPositionWise(Exception):
    """Says why a layer is not known to be position-wise."""


@dataclass(frozen=True)
class PositionWise:
    """A position-wise function of a module.

    Attributes:
        uses: The names of the module's children whose parameters it uses, and of those that have none.
        width: Elements per position of its input or output, the larger one.
        widest: Elements per position of the largest tensor in between.
    """

    uses: tuple[str, ...]
    width: int
    widest: int


def show_position_wise(
    function: Callable[[torch.Tensor], Any], module: nn.Module, width: int, dtype: torch.dtype
) -> PositionWise:
    """Trace a function of a module to show that it is position-wise. See Note [Position-wise].

    Args:
        function: The module's forward, or another method.
        module: The module.
        width: The last dimension of the input.
        dtype: The type of the input.

    Raises:
        NotPositionWise: It is not, or cannot be traced.

    Example:
        >>> layer = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        >>> show_position_wise(layer.forward, layer, 4, torch.float32)
        PositionWise(uses=('0', '1', '2'), width=4, widest=8)
        >>> layer = nn.Softmax(dim=1)
        >>> show_position_wise(layer.forward, layer, 4, torch.float32)
        Traceback (most recent call last):
        memscale.tiling.positionwise.NotPositionWise: _softmax over positions
    """
    # A simulation or a memory tracker around must neither see this nor change the result.
    with torch.no_grad(), disable_current_modes(), _without_data(module):
        x = torch.empty(P, Q, width, dtype=dtype, device="meta")
        random = HostRngState()
        try:
            with _Tracer(x) as tracer:
                result = function(x)
        except NotPositionWise:
            raise
        except Exception as error:  # whatever a layer raises that cannot be called like this
            raise NotPositionWise(
                f"it cannot be traced ({type(error).__name__}: {str(error)[:80]})"
            ) from error
        finally:
            draws = random.has_moved()
            random.restore()
        if draws:
            raise NotPositionWise("it draws from Python's or NumPy's random numbers, once a call")
        if not isinstance(result, torch.Tensor):
            raise NotPositionWise(f"it returns a {type(result).__name__}")
        if not tracer.is_of_positions(result) or tuple(result.shape[:-1]) != (P, Q):
            raise NotPositionWise("what it returns is not one vector for each position")
        uses = tuple(name for name, child in module.named_children() if tracer.may_have_run(child))
        return PositionWise(uses, max(width, result.shape[-1]), tracer.widest())


@contextlib.contextmanager
def _without_data(root: nn.Module) -> Iterator[None]:
    """Replace parameters and buffers by meta tensors inside the block."""
    before = [(module, module._parameters, module._buffers) for module in submodules([root])]
    meta: dict[int, Any] = {}

    def on_meta(tensor: Any) -> Any:
        if tensor is None:
            return None
        if id(tensor) not in meta:
            meta[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return meta[id(tensor)]

    try:
        for module, parameters, buffers in before:
            vars(module)["_parameters"] = {name: on_meta(each) for name, each in parameters.items()}
            vars(module)["_buffers"] = {name: on_meta(each) for name, each in buffers.items()}
        yield
    finally:
        for module, parameters, buffers in before:
            vars(module)["_parameters"] = parameters
            vars(module)["_buffers"] = buffers


class _Tracer(LightDispatchMode):
    """Check every operation. See Note [Position-wise]."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self._of_positions = {id(x): x}  # with the tensors, so that no other gets their ids
        self._input = x.untyped_storage()._cdata
        self._seen: dict[int, torch.Tensor] = {}

    def is_of_positions(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._of_positions

    def may_have_run(self, module: nn.Module) -> bool:
        parameters = [each for one in submodules([module]) for each in one._parameters.values()]
        return not parameters or any(id(each) in self._seen for each in parameters)

    def widest(self) -> int:
        return max(each.numel() // (P * Q) for each in self._of_positions.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        self._seen.update((id(each), each) for each in tensors)
        rows = [each for each in tensors if self.is_of_positions(each)]
        if rows:
            self._check(
                func, args, kwargs, rows, [each for each in tensors if not self.is_of_positions(each)]
            )
        elif func._schema.is_mutable:
            raise NotPositionWise(f"{func} changes a tensor of its own")
        result = func(*args, **kwargs)
        if rows:
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor):
                    if not _leading(each):
                        raise NotPositionWise(f"{func} mixes positions with other dimensions")
                    self._of_positions[id(each)] = each
        return result

    def _check(
        self, func: Any, args: Any, kwargs: Any, rows: list[torch.Tensor], others: list[torch.Tensor]
    ) -> None:
        name = func._schema.name.removeprefix("aten::")
        first = args[0] if args else None
        if func._schema.is_mutable and isinstance(first, torch.Tensor):
            if not self.is_of_positions(first):
                raise NotPositionWise(f"{name} changes a tensor of its own")
            if first.untyped_storage()._cdata == self._input:
                raise NotPositionWise(f"{name} changes its input in place")
        if name in _VIEWS.split():
            return
        if torch.Tag.pointwise in func.tags or name in _OTHER_ELEMENTWISE.split():
            _check_operands(name, rows, others)
            if name in ("glu", "cat"):
                _check_dims(
                    name, args[1] if len(args) > 1 else kwargs.get("dim", -1 if name == "glu" else 0), rows[0]
                )
        elif name in _PRODUCTS.split():
            factor = args[-1] if name == "mm" else args[2]
            bias = None if name == "mm" else args[0]
            if self.is_of_positions(factor) or (bias is not None and (bias.dim() > 1 and bias.shape[0] != 1)):
                raise NotPositionWise(f"{name} multiplies positions with each other")
        elif name in _OVER_DIMS.split():
            _check_dims(name, args[1] if len(args) > 1 else kwargs.get("dim"), rows[0])
        elif name in _NORMS.split():
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
