"""A layer's parameters on the device, for as long as it computes; their gradients back to the host.

Note [Master and working copy]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The user's ``nn.Parameter`` is the master, on the host: it is what the optimizer steps, what ``state_dict`` saves, what
``clip_grad_norm_`` sees. When its layer runs, a differentiable copy on the device stands in for it in the module;
autograd copies the gradient of the copy back to the host, and accumulates it there. So everything a training loop does
with parameters and gradients stays true, because what it sees is the truth.

A copy must not outlive the layer's computation. Inside a recomputed region nothing is saved anyway: backward runs the
layer again and fetches again. Elsewhere autograd would hold the copies that it saved (``nn.Linear`` saves its weight);
there :class:`Refetch` is saved in their place, and backward fetches them again. All else that is saved goes through the
hooks that surround the layer, if there are any (``activations.py``).

Two sums are not in the order of the plain model, and may differ in the last bit: the gradient of a parameter that is
used several times in a call (a recurrent weight, or any weight in a loss that has a gradient in it, by
``create_graph=True``) by a layer that is called several times before one backward, which is added up by calls; and
the norm of ``clip_grad_norm_``, which adds up the gradients of each device apart. Under autocast the plain model casts
a parameter once for all of its uses and adds up their gradients in 16 bits; here that is so for the uses of a matrix
in one call only, and all else is added up in the parameter's own type.

Note [Asynchronous gradients]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``parameter.to(device)`` is differentiable: its backward copies the gradient to the host, and waits there until the
device has computed it, with nothing new for the device to do meanwhile. With an asynchronous engine that is two nodes.
The first, on the device's side, starts the copy on a stream of its own and hands on the tensor that it will arrive in.
The second, on the host, waits for it. Autograd runs each node in the thread of its device, so that it is the host's
thread that waits, which has nothing else to do; the device's goes on. What comes after, the accumulation and whatever
hooks are on the parameter, is autograd's own. A graph of backward itself (``create_graph=True``) is made of plain
copies.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.conv import _ConvNd

from memscale._torch import (
    OUTSIDE_BACKWARD,
    graph_task_id,
    hooks_are_allowed,
    is_fake,
    surrounding_hooks,
    tree_map,
)
from memscale.checkpointing.state import KeptTensor, mark_as_copy
from memscale.observe.counters import Meter
from memscale.offload.activations import Refetch
from memscale.offload.prefetch import Prefetcher
from memscale.techniques.forward import ForwardStage, Stage
from memscale.tiers.engine import Engine, Lane, Transfer

__all__ = ["FetchStage", "GradientTransfer", "bring_inputs"]


class FetchStage(ForwardStage):
    """Fetches the parameters of a layer that are on the host. See Note [Master and working copy].

    Args:
        module: The module that this goes on.
        device: Where it computes.
        meter: Counts what is moved.
        recomputed: Whether it runs inside a recomputed region, which saves nothing.

    Attributes:
        prefetcher: Who fetches the parameters of the next layers while this one computes; None if nobody does.
    """

    order = Stage.FETCH_PARAMETERS
    in_evaluation = True  # the parameters are on the host then as well

    def __init__(self, module: nn.Module, device: torch.device, meter: Meter, *, recomputed: bool) -> None:
        self._module = weakref.ref(module)
        self.device = device
        self.meter = meter
        self.prefetcher: Prefetcher | None = None
        self._recomputed = recomputed
        # By the parameters' ids: the types that the last pass had them in, and those that backward asks for.
        self._dtypes: dict[int, torch.dtype] = {}
        self._refetched: dict[int, torch.dtype] = {}

    def run(
        self, module: nn.Module, call_next: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        args, kwargs = bring_inputs(args, kwargs, self.device)
        copies = _WorkingCopies(self, module)
        self._dtypes = {id(parameter): dtype for parameter, dtype in copies.parameters()}
        try:
            with copies.in_place():
                if self.prefetcher is not None:
                    self.prefetcher.reached(self, again=True)
                if self._recomputed or not torch.is_grad_enabled():
                    self._refetched = self._dtypes
                    return call_next(*args, **kwargs)
                with copies.not_saved():
                    output = call_next(*args, **kwargs)
                self._refetched = copies.refetched
                return output
        except Exception:
            if self.prefetcher is not None:
                self.prefetcher.forget()
            raise

    def needs(self, *, in_backward: bool) -> list[tuple[nn.Parameter, torch.dtype]]:
        """Return the parameters to prefetch, and in which type; none if the module is gone."""
        module = self._module()
        if module is None:
            return []
        wanted = _WorkingCopies(self, module).parameters()
        # As the last pass had them: autocast may be off where a pass begins.
        dtypes = self._refetched if in_backward else self._dtypes
        if not in_backward and not dtypes:
            return wanted
        return [(parameter, dtypes[id(parameter)]) for parameter, _ in wanted if id(parameter) in dtypes]

    def copy_to_device(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter's values on the device."""
        copy = values.to(self.device, dtype, non_blocking=True)
        self.meter.up("parameters", "host", copy.nbytes)
        return copy

    def working_copy(self, parameter: nn.Parameter, dtype: torch.dtype, *, sparse: bool) -> torch.Tensor:
        """Return a differentiable copy of a parameter on the device.

        Args:
            parameter: The parameter.
            dtype: Its type there.
            sparse: Whether its gradient is sparse, which the backward of ``parameter.to(device)`` refuses.
        """
        if self.prefetcher is not None:
            values = self._fetched(parameter, dtype)
            return differentiable_copy(parameter, values, self.prefetcher.engine, self.meter)
        if sparse:
            values = self.copy_to_device(parameter.detach(), dtype)
            return differentiable_copy(parameter, values, Engine(), self.meter)
        with self.meter.timing("offloading"):
            copy = parameter.to(self.device, dtype, non_blocking=True)
        self.meter.up("parameters", "host", copy.nbytes)
        if copy.grad_fn is not None and graph_task_id() == OUTSIDE_BACKWARD and hooks_are_allowed():
            _GradientMeter(self.meter).watch(copy.grad_fn)
        return copy

    def refetch(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter's values on the device once more, for backward."""
        values = self._fetched(parameter, dtype)
        if self.prefetcher is not None:
            self.prefetcher.reached(self, again=False)
        return values

    def _fetched(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        with self.meter.timing("offloading"):
            prefetcher = self.prefetcher
            values = None if prefetcher is None else prefetcher.take(self, parameter, dtype)
            return self.copy_to_device(parameter.detach(), dtype) if values is None else values


def bring_inputs(args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> tuple[Any, Any]:
    """Return the arguments of a call with the tensors that are still on the host copied to the device."""

    def copied(leaf: Any) -> Any:
        on_host = isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
        if on_host and not isinstance(leaf, nn.Parameter):
            return leaf.to(device, non_blocking=True)
        return leaf

    return tree_map(copied, (args, kwargs)) if device.type != "cpu" else (args, kwargs)


# ---------------------------------------------------------------------- working copies


class _WorkingCopies:
    """The parameters of a layer as copies on the device, for one call; in 16 bits where autocast would cast them.

    Args:
        layer: Fetches them.
        module: The layer's module.

    Attributes:
        refetched: The parameters that backward will ask for, by their ids, and in which type.
    """

    def __init__(self, layer: FetchStage, module: nn.Module) -> None:
        self._layer = layer
        self._owners = [
            (inner, name, parameter)
            for inner in module.modules()
            for name, parameter in inner._parameters.items()
            if parameter is not None and parameter.device != layer.device
        ]
        self._sparse = {
            id(parameter) for inner, _, parameter in self._owners if getattr(inner, "sparse", False)
        }
        self._dtype = _autocast_dtype(layer.device)
        self._cast = _cast_by_autocast(self._owners) if self._dtype is not None else set()
        self._copies: dict[int, torch.Tensor] = {}
        self._masters: dict[int, nn.Parameter] = {}  # by the storage of the copy
        self.refetched: dict[int, torch.dtype] = {}

    def parameters(self) -> list[tuple[nn.Parameter, torch.dtype]]:
        """Return the parameters that are copied, each once, and in which type."""
        found = {id(parameter): parameter for _, _, parameter in self._owners}
        return [(parameter, self._dtype_of(parameter)) for parameter in found.values()]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the modules see the copies inside a block; afterwards they have their own parameters again."""
        try:
            for module, name, parameter in self._owners:
                module._parameters[name] = self._copy_of(parameter)  # type: ignore[assignment]
            yield
        finally:
            for module, name, parameter in self._owners:
                module._parameters[name] = parameter
            self._copies.clear()

    def _copy_of(self, parameter: nn.Parameter) -> torch.Tensor:
        key = id(parameter)  # a tied parameter has one copy
        if key not in self._copies:
            dtype = self._dtype_of(parameter)
            copy = self._layer.working_copy(parameter, dtype, sparse=key in self._sparse)
            if parameter.requires_grad and not copy.requires_grad and dtype == parameter.dtype:
                # Gradients are off. Still torch.matmul looks at this flag of a weight to choose between mm and bmm.
                copy = copy.detach().requires_grad_()
            mark_as_copy(copy, parameter)
            self._copies[key] = copy
            self._masters[copy.untyped_storage()._cdata] = parameter
        return self._copies[key]

    def _dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        return self._dtype if self._dtype is not None and id(parameter) in self._cast else parameter.dtype

    @contextlib.contextmanager
    def not_saved(self) -> Iterator[None]:
        """Have autograd save of a copy only where its master is, inside a block."""
        outer_pack, outer_unpack = surrounding_hooks() or (KeptTensor, KeptTensor.get)

        def pack(tensor: torch.Tensor) -> Any:
            master = self._masters.get(tensor.untyped_storage()._cdata)
            if master is None:
                return outer_pack(tensor)
            self.refetched[id(master)] = tensor.dtype
            return Refetch(master, tensor, self._layer)

        def unpack(saved: Any) -> torch.Tensor:
            return saved.fetch() if isinstance(saved, Refetch) else outer_unpack(saved)

        with saved_tensors_hooks(pack, unpack):
            yield


class _GradientMeter:
    """Counts what the node of autograd moves that copies a gradient to the host, and for how long."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._start: Any = None

    def watch(self, node: Any) -> None:
        node.register_prehook(self._before)
        node.register_hook(self._after)

    def _before(self, gradients: Any) -> None:
        self._start = self._meter.now()

    def _after(self, on_host: Any, gradients: Any) -> None:
        self._meter.lost("offloading", self._start)
        # As they arrive: they were converted on the device.
        strided = (each for each in on_host if each is not None and each.layout is torch.strided)
        self._meter.down("gradients", "host", sum(each.nbytes for each in strided))


# ---------------------------------------------------------------------- gradients


def differentiable_copy(
    parameter: nn.Parameter, values: torch.Tensor, engine: Engine, meter: Meter | None = None
) -> torch.Tensor:
    """Return a parameter's values on the device as a differentiable copy of it. See Note [Asynchronous gradients].

    Example:
        >>> parameter = nn.Parameter(torch.ones(2))
        >>> copy = differentiable_copy(parameter, parameter.detach().clone(), Engine())
        >>> (3 * copy).sum().backward()
        >>> parameter.grad
        tensor([3., 3.])
    """
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return values
    if not hooks_are_allowed():  # under torch.func, which has rules of its own for such nodes
        return parameter.to(values.device, values.dtype)
    transfer = GradientTransfer(engine, parameter.device, meter)
    on_host = _HostNode.apply(parameter, transfer, values.dtype)  # type: ignore[no-untyped-call]
    copy: torch.Tensor = _DeviceNode.apply(on_host, transfer, [values])  # type: ignore[no-untyped-call]
    return copy


class GradientTransfer:
    """Copies one gradient to the host.

    Args:
        engine: Who moves it.
        host: Where to.
        meter: Counts it.
    """

    def __init__(self, engine: Engine, host: torch.device, meter: Meter | None = None) -> None:
        self._engine = engine
        self._meter = meter
        self.host = host
        self._source: torch.Tensor | None = None
        self._transfer: Transfer[torch.Tensor] | None = None
        self._is_pinned = False

    def start(self, gradient: torch.Tensor) -> torch.Tensor:
        """Start the copy; returns the tensor that it goes to, which may be read after :meth:`finish`."""
        if gradient.layout is torch.sparse_coo:
            return self._copy_sparse(gradient)
        if self._meter is not None:
            self._meter.down("gradients", "host", gradient.nbytes)
        on_stream = gradient.device.type == "cuda" and not is_fake(gradient)
        pinned = self._pinned(gradient) if on_stream else None
        target = torch.empty_like(gradient, device=self.host) if pinned is None else pinned
        self._source = gradient  # its memory must not be used again before it was read
        self._transfer = self._engine.run(
            lambda: target.copy_(gradient, non_blocking=on_stream),
            Lane.STREAM if on_stream else Lane.CALLER,
            gradient.device,
            outward=True,
        )
        return target

    def finish(self, target: torch.Tensor) -> torch.Tensor:
        """Wait until the gradient is there, and return it."""
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return target
        transfer.finish()
        self._source = None
        # Page-locked memory is for what is being copied.
        return target.clone() if self._is_pinned else target

    def _copy_sparse(self, gradient: torch.Tensor) -> torch.Tensor:
        """Copy a sparse gradient (that of an embedding with ``sparse=True``): its indices and its values."""
        indices, values = gradient._indices(), gradient._values()
        if self._meter is not None:
            self._meter.down("gradients", "host", indices.nbytes + values.nbytes)
        return torch.sparse_coo_tensor(
            indices.to(self.host),
            values.to(self.host),
            gradient.shape,
            check_invariants=False,
            is_coalesced=gradient.is_coalesced(),
        )

    def _pinned(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return page-locked memory of the same geometry, if there is any: only to that a copy is asynchronous."""
        strides = torch.empty_like(gradient, device="meta").stride()
        memory = self._engine.gradients.allocate(gradient.nbytes) if gradient.numel() else None
        if memory is None:
            return None
        self._is_pinned = True
        return memory.view(gradient.dtype).as_strided(gradient.shape, strides)


class _HostNode(torch.autograd.Function):
    """The node on the host: in backward it waits for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, transfer: GradientTransfer, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.transfer = transfer
        ctx.set_materialize_grads(False)
        # Only its shape and type matter: of another type, autograd would convert the gradient before it is there.
        return torch.empty((), dtype=dtype, device=parameter.device).expand(parameter.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        return None if gradient is None else ctx.transfer.finish(gradient), None, None


class _DeviceNode(torch.autograd.Function):
    """The node on the device: in backward it starts the copy of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, on_host: torch.Tensor, transfer: GradientTransfer, values: list[torch.Tensor]
    ) -> torch.Tensor:
        ctx.transfer = transfer
        ctx.set_materialize_grads(False)
        return values.pop()  # in a list: a tensor that goes through as an input comes out as a view of it

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        transfer: GradientTransfer = ctx.transfer
        if gradient is None:  # an output that the loss does not use: no gradient, rather than zeros
            return None, None, None
        if torch.is_grad_enabled():
            return gradient.to(transfer.host), None, None
        return transfer.start(gradient), None, None


# ---------------------------------------------------------------------- autocast

# transformers' GPT-2 has a linear layer of its own, by this name.
_LINEAR_BY_NAME = frozenset({"Conv1D"})


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return what autocast computes in on a device, here and now; None if it is off."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _cast_by_autocast(owners: Iterable[tuple[nn.Module, str, torch.Tensor]]) -> set[int]:
    """Return the ids of the parameters that every one of their modules uses in products of matrices only.

    Autocast makes 16-bit copies of these, so a working copy can be 16-bit from the start. Other parameters (norms,
    embeddings, positions that are added) are used in 32 bits, or in a way that can't be known from here; and a
    parameter that an embedding has too is the embedding's.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> [id(layer.weight)] == [*_cast_by_autocast([(layer, "weight", layer.weight)])]
        True
    """
    cast: set[int] = set()
    kept: set[int] = set()
    for module, name, parameter in owners:
        matrix = parameter.dim() >= 2 and parameter.dtype is torch.float32 and _multiplies(module, name)
        (cast if matrix else kept).add(id(parameter))
    return cast - kept


def _multiplies(module: nn.Module, name: str) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return name.endswith("proj_weight")
    linear = isinstance(module, (nn.Linear, _ConvNd)) or type(module).__name__ in _LINEAR_BY_NAME
    return linear and name == "weight"
