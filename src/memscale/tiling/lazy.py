"""Logits that are computed only when somebody asks for them, and otherwise tile by tile inside of the loss.

Note [Lazy logits]
~~~~~~~~~~~~~~~~~~
A tiled head returns a tensor of the logits' shape, type and device that has no data: it knows the hidden states and
the head, and so can be computed at any time. What is in the table `_SUPPORTED` keeps it lazy: cutting, flattening and
permuting tokens is done to the hidden states instead, and operations on each token (another type, scaling, softmax) are
recorded and run on each tile. A loss in the table is computed tile by tile from the hidden states.

*Any other operation* gets the true logits, computed once, as the plain head would have, with their history. From then
on everything that was derived from these logits is plain: a flat view or a copy in float that was taken before is
derived again from the true ones. Before a change in place all of that is computed first, as views see such a change and
copies do not.

*Below Python.* A custom `autograd.Function` takes tensors without asking `__torch_function__`. So lazy logits have a
history of their own, and a gradient that arrives there goes on to the hidden states and the head.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from memscale._torch import (
    disable_current_modes,
    make_wrapper_subclass,
    tree_leaves,
    tree_map_only,
    version_of,
    without_torch_function,
)
from memscale.errors import RecomputeError
from memscale.tiling.head import Head, LogitsStep, compute_tiled
from memscale.tiling.layers import first_order_only, without_saved_tensor_hooks

Function = Callable[..., Any]
F = nn.functional

_SUPPORTED: dict[Function, Function] = {}
"""From functions of torch to what is called instead; see `_supports`."""

# What can be answered without data.
_PROPERTIES = """
    shape dtype device layout ndim requires_grad is_leaf grad_fn nbytes itemsize is_cuda is_cpu is_meta is_nested
    is_sparse is_sparse_csr is_quantized is_mkldnn is_mps is_xla is_xpu is_vgpu output_nr _version retains_grad
    _backward_hooks
"""
_METHODS = """
    size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex is_inference
    is_signed is_same_size get_device _is_view __len__ __hash__
"""
_METADATA: set[Function] = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split() if hasattr(Tensor, name)),
    *(getattr(owner, name) for name in _METHODS.split() for owner in (Tensor, torch) if hasattr(owner, name)),
}
_COMMUTATIVE = {torch.add, Tensor.add, Tensor.__add__, torch.mul, Tensor.mul, Tensor.__mul__}


class _Derivation(NamedTuple):
    """What lazy logits were derived from, and how."""

    parent: LazyLogits
    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LazyLogits(Tensor):
    """Stands in for logits. See Note [Lazy logits]; `lazy_logits` makes one."""

    is_computed_later: ClassVar[bool] = True  # for code that looks at tensors, and must not ask for this one

    hidden: Tensor  # tokens in the order of the logits' other dimensions
    head: Head  # with the operations on its output
    _hidden_version: int
    _origin: _Derivation | None
    _derived: list[weakref.ref[LazyLogits]]  # of the head's own output: all that comes from it
    _true: Tensor | None

    @property
    def root(self) -> LazyLogits:
        """The logits as the head returned them."""
        return self if self._origin is None else self._origin.parent.root

    @property
    def is_whole(self) -> bool:
        """Whether the true logits have been computed."""
        return self.root._true is not None

    def whole(self) -> Tensor:
        """Return the true logits, with their history."""
        if self._true is None:
            # They may be needed with their history later, whoever asks for them first.
            with torch.inference_mode(False), torch.enable_grad():
                if self._origin is None:
                    self.check()
                    self._true = self.head.logits(self.hidden)
                else:
                    origin = self._origin
                    self._true = origin.function(origin.parent.whole(), *origin.args, **origin.kwargs)
        return self._true

    def check(self) -> None:
        """Raise a `RecomputeError` if the hidden states or the head have changed since the model was called."""
        self.head.check()
        if version_of(self.hidden) != self._hidden_version:
            raise RecomputeError(
                f"The input of a tiled head (shape {tuple(self.hidden.shape)}) was changed in place before its logits "
                "were used. Use the out-of-place form of that operation (x = x + y, not x += y), or switch tiling off "
                "(enable_tiling=False)."
            )

    @property
    def vocabulary_dim(self) -> int:
        return self.head.vocabulary_dim % self.dim()

    @property
    def vocabulary_is_last(self) -> bool:
        return self.vocabulary_dim == self.dim() - 1

    def derive(
        self,
        function: Function,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        hidden: Tensor | None = None,
        head: Head | None = None,
    ) -> LazyLogits:
        """Return what `function(logits, *args, **kwargs)` gives, as lazy as these."""
        self.check()
        origin = _Derivation(self, function, tuple(args), kwargs or {})
        derived = _make(self.hidden if hidden is None else hidden, head or self.head, origin)
        self.root._derived.append(weakref.ref(derived))
        return derived

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _COMMUTATIVE and len(args) == 2 and not isinstance(args[0], LazyLogits):
            args = (args[1], args[0])
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and not first.is_whole:
            if func in _METADATA:
                with without_torch_function():
                    return func(*args, **kwargs)
            handler = _SUPPORTED.get(func)
            result = NotImplemented if handler is None else handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if _changes_in_place(func, kwargs):  # first compute all that comes from the same call of the head
            lazy = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LazyLogits)]
            family = [reference() for leaf in lazy for reference in leaf.root._derived]
            for each in (*family, *lazy):
                if each is not None:
                    each.whole()
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.whole, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it on the instance
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with without_torch_function():
            args, kwargs = tree_map_only(
                LazyLogits, lambda leaf: leaf.whole().detach(), (tuple(args), kwargs or {})
            )
        return func(*args, **kwargs)

    # For those who look through wrappers, such as memory trackers: what is really there.

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["hidden"], self.head

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], head: Head, size: Any, stride: Any) -> LazyLogits:
        return lazy_logits(inner["hidden"], replace(head, steps=(), vocabulary_dim=-1))


def lazy_logits(hidden: Tensor, head: Head) -> LazyLogits:
    """Return what the head would make of the hidden states, without computing it.

    Example:
        >>> head = Head(torch.ones(5, 2), None, torch.float32, rows=4)
        >>> logits = lazy_logits(torch.ones(3, 2, requires_grad=True), head)
        >>> logits.shape, logits.is_whole
        (torch.Size([3, 5]), False)
    """
    return _make(hidden, head, None)


def _make(hidden: Tensor, head: Head, origin: _Derivation | None) -> LazyLogits:
    with without_saved_tensor_hooks():  # what it saves is what the lazy logits hold anyway
        made: LazyLogits = _History.apply(head, hidden, *head.parameters)  # type: ignore[no-untyped-call]
    made.hidden, made.head, made._origin = hidden, head, origin
    made._hidden_version = version_of(hidden)
    made._derived = []
    made._true = None
    return made


class _History(torch.autograd.Function):
    """The history of lazy logits, for a gradient that comes from below Python."""

    @staticmethod
    def forward(ctx: Any, head: Head, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.head = head
        ctx.save_for_backward(hidden, *parameters)
        shape = list(hidden.shape[:-1])
        shape.insert(head.vocabulary_dim % (len(shape) + 1), head.vocabulary)
        logits: Tensor = make_wrapper_subclass(
            LazyLogits, shape, dtype=head.final_dtype, device=hidden.device
        )
        return logits

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *parameters = ctx.saved_tensors
        head: Head = ctx.head
        with torch.enable_grad(), head.borrow(parameters):
            leaves = [
                tensor.detach().requires_grad_(is_wanted)
                for tensor, is_wanted in zip((hidden, *parameters), ctx.needs_input_grad[1:], strict=True)
            ]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            logits = head.after_steps(head.linear(*leaves)).movedim(-1, head.vocabulary_dim)
            found = iter(torch.autograd.grad(logits, wanted, gradient))
        return None, *(next(found) if leaf.requires_grad else None for leaf in leaves)


def _changes_in_place(function: Function, kwargs: dict[str, Any]) -> bool:
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") or name in ("__setitem__", "__set__")
    return name.endswith("_") or kwargs.get("out") is not None


def _supports(*functions: Function) -> Callable[[Function], Function]:
    """Register a handler for functions of torch that have lazy logits as their first argument.

    The handler gets the function and its arguments. If it does not accept them, or returns `NotImplemented`, the
    function gets the true logits; so it is with what is an error, which torch explains best.
    """

    def register(handler: Function) -> Function:
        signature = inspect.signature(handler)

        def handle(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                return NotImplemented
            return handler(*args, **kwargs)

        _SUPPORTED.update(dict.fromkeys(functions, handle))
        return handler

    return register


# Tokens: done to the hidden states, whose last dimension stands for the vocabulary.


@_supports(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten)
def _reshape(function: Function, logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if logits.numel() == 0 or not logits.vocabulary_is_last:
        return NotImplemented
    try:
        with disable_current_modes():
            example = function(torch.empty(logits.shape, dtype=logits.dtype, device="meta"), *args, **kwargs)
    except RuntimeError:
        return NotImplemented
    if example.dtype is not logits.dtype or example.shape[-1:] != logits.shape[-1:]:
        return NotImplemented
    hidden = logits.hidden.reshape(*example.shape[:-1], logits.hidden.shape[-1])
    return logits.derive(Tensor.reshape, (example.shape,), hidden=hidden)


@_supports(Tensor.contiguous, Tensor.clone, torch.clone)
def _clone(function: Function, logits: LazyLogits, *, memory_format: Any = torch.preserve_format) -> Any:
    if memory_format not in (torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    return logits.derive(Tensor.clone)


@_supports(Tensor.__getitem__)
def _index(function: Function, logits: LazyLogits, index: Any) -> Any:
    parts = list(index) if isinstance(index, tuple) else [index]
    kinds = [part.dtype if isinstance(part, Tensor) else type(part) for part in parts]
    supported = (torch.bool, torch.int64, type(None), type(Ellipsis), int, slice)
    if not logits.vocabulary_is_last or parts[-1] is None or not all(kind in supported for kind in kinds):
        return NotImplemented
    indexed = sum(map(_dimensions_indexed, parts))
    if any(part is Ellipsis for part in parts):
        reaches_vocabulary = _dimensions_indexed(parts[-1]) > 0
    else:
        reaches_vocabulary = indexed >= logits.dim()
    takes_all = isinstance(parts[-1], slice) and parts[-1] == slice(None)
    if indexed > logits.dim() or (reaches_vocabulary and not takes_all):
        return NotImplemented
    return logits.derive(function, (index,), hidden=logits.hidden[index])


def _dimensions_indexed(part: Any) -> int:
    if part is None or part is Ellipsis:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype is torch.bool else 1


@_supports(Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.mT.__get__)  # type: ignore[attr-defined]
def _permute(function: Function, logits: LazyLogits, *args: Any) -> Any:
    dims = args[0] if args and isinstance(args[0], Sequence) else args
    order = list(range(logits.dim()))
    if function == Tensor.mT.__get__:  # type: ignore[attr-defined]
        dims = (-2, -1)
    if not all(isinstance(dim, int) and -logits.dim() <= dim < logits.dim() for dim in dims):
        return NotImplemented
    if function in (Tensor.permute, torch.permute):
        order = [dim % logits.dim() for dim in dims]
    elif len(dims) == 2:
        order[dims[0]], order[dims[1]] = order[dims[1]], order[dims[0]]
    if len(dims) < 2 or sorted(order) != list(range(logits.dim())):
        return NotImplemented
    vocabulary = logits.vocabulary_dim
    # The hidden states lack the vocabulary's dimension in its place.
    tokens = [dim - (dim > vocabulary) for dim in order if dim != vocabulary]
    head = replace(logits.head, vocabulary_dim=order.index(vocabulary))
    return logits.derive(Tensor.permute, (order,), hidden=logits.hidden.permute(*tokens, -1), head=head)


# Operations on each token: recorded, and run on each tile.


def _with_step(logits: LazyLogits, step: LogitsStep, args: Sequence[Any] | None = None) -> LazyLogits:
    """Return lazy logits with one step more; `args` are those of the call, if the step has others."""
    head = replace(logits.head, steps=(*logits.head.steps, step))
    return logits.derive(step.function, step.args if args is None else args, step.kwargs, head=head)


def _example(logits: LazyLogits) -> Tensor:
    """Return a row of logits, to learn the type of an operation's result."""
    return torch.empty(1, logits.head.vocabulary, dtype=logits.dtype, device=logits.device)


@_supports(Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to)
def _convert(function: Function, logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if kwargs.keys() - {"device", "dtype", "non_blocking"} or len(args) > 3:
        return NotImplemented
    example = function(torch.empty(1, dtype=logits.dtype, device=logits.device), *args, **kwargs)
    if example.device != logits.device:
        return NotImplemented
    if example.dtype is logits.dtype:
        return logits
    if not example.is_floating_point():
        return NotImplemented
    return _with_step(logits, LogitsStep(Tensor.to, (example.dtype,), {}, example.dtype))


@_supports(
    *(torch.neg, Tensor.neg, Tensor.__neg__, torch.tanh, Tensor.tanh),
    *(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.div, Tensor.div, Tensor.__truediv__),
    *(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, torch.sub, Tensor.sub, Tensor.__sub__),
)
def _elementwise(function: Function, logits: LazyLogits, *operands: Any) -> Any:
    """Record an operation without operands, with a number, or with one constant for each word."""
    if not all(type(each) in (int, float) or _is_constant(logits, each) for each in operands):
        return NotImplemented
    flat = tuple(each.reshape(-1) if isinstance(each, Tensor) and each.dim() else each for each in operands)
    dtype = function(_example(logits), *flat).dtype
    return _with_step(logits, LogitsStep(function, flat, {}, dtype), operands)


def _is_tensor_constant(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, LazyLogits) and not value.requires_grad


def _is_constant(logits: LazyLogits, operand: Any) -> bool:
    if not _is_tensor_constant(operand) or operand.is_complex() or operand.dim() > logits.dim():
        return False
    if operand.dim() == 0:
        return operand.device in (logits.device, torch.device("cpu"))
    is_row = operand.numel() == operand.shape[-1] == logits.head.vocabulary
    return is_row and logits.vocabulary_is_last and operand.device == logits.device


@_supports(torch.log_softmax, Tensor.log_softmax, F.log_softmax, torch.softmax, Tensor.softmax, F.softmax)
def _softmax(
    function: Function, logits: LazyLogits, dim: Any = None, *, _stacklevel: int = 3, dtype: Any = None
) -> Any:
    if not _is_over_vocabulary(logits, dim):
        return NotImplemented
    # Under autocast it computes in another type than that of the logits.
    dtype = dtype or function(_example(logits), -1).dtype
    return _with_step(logits, LogitsStep(function, (-1,), {"dtype": dtype}, dtype))


def _is_over_vocabulary(logits: LazyLogits, dim: Any) -> bool:
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    is_last = isinstance(dim, int) and dim in (-1, logits.dim() - 1)
    return is_last and logits.vocabulary_is_last and logits.numel() > 0


# Results for each token, and losses: computed tile by tile.


def _reduced(logits: LazyLogits, of_tile: Callable[[Tensor, slice], Tensor], **options: Any) -> Tensor:
    logits.check()
    flat = logits.hidden.reshape(-1, logits.hidden.shape[-1])
    return compute_tiled(logits.head, flat, of_tile, **options)


@_supports(torch.logsumexp, Tensor.logsumexp, torch.argmax, Tensor.argmax, torch.sum, Tensor.sum)
def _reduce(
    function: Function, logits: LazyLogits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    options = {} if dtype is None else {"dtype": dtype}
    if not _is_over_vocabulary(logits, dim):
        return NotImplemented
    with torch.set_grad_enabled(torch.is_grad_enabled() and function not in (torch.argmax, Tensor.argmax)):
        rows = _reduced(logits, lambda values, _: function(values, -1, **options))
    return rows.reshape(*logits.shape[:-1], 1) if keepdim else rows.reshape(logits.shape[:-1])


@_supports(torch.gather, Tensor.gather)
def _gather(function: Function, logits: LazyLogits, dim: Any, index: Any) -> Any:
    if not _is_over_vocabulary(logits, dim) or not isinstance(index, Tensor) or index.device != logits.device:
        return NotImplemented
    if index.shape[:-1] != logits.shape[:-1]:
        return NotImplemented
    flat = index.reshape(-1, index.shape[-1])
    return _reduced(logits, lambda values, tile: values.gather(-1, flat[tile])).reshape(index.shape)


@_supports(F.cross_entropy, F.nll_loss)
def _loss(
    function: Function,
    logits: LazyLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float | None = None,
) -> Any:
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        return NotImplemented  # the first two are deprecated names, which torch translates
    constants = [target] if weight is None else [target, weight]
    if any(not _is_tensor_constant(each) or each.device != logits.device for each in constants):
        return NotImplemented
    if logits.numel() == 0 or logits.dim() < 2 or logits.vocabulary_dim != 1:
        return NotImplemented
    # Probabilities as targets are as large as the logits, and whole.
    if target.is_floating_point() or target.shape != logits.hidden.shape[:-1]:
        return NotImplemented
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index}
    if label_smoothing is not None:
        options["label_smoothing"] = label_smoothing
    rows = target.reshape(-1)

    def of_tile(values: Tensor, tile: slice) -> Tensor:
        kind = "none" if reduction == "none" else "sum"
        loss: Tensor = function(values, rows[tile], reduction=kind, **options)
        return loss

    if reduction == "none":
        return _reduced(logits, of_tile).reshape(target.shape)
    divisor = None
    if reduction == "mean":  # over the tokens that are not ignored, each with the weight of its class
        counts = is_counted = rows != ignore_index
        if weight is not None:
            counts = torch.where(is_counted, weight[torch.where(is_counted, rows, 0)], 0)
        divisor = counts.sum().to(torch.promote_types(logits.dtype, torch.float32))
    return _reduced(logits, of_tile, is_total=True, divisor=divisor)
