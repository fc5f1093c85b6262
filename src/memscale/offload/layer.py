"""One offloaded layer: its parameters are on the device while it computes, and their gradients return to the host.

Note [Master and working copy]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The user's ``nn.Parameter`` is the master, on the host or on disk, which the optimizer steps and ``state_dict`` saves.
When its layer runs on an accelerator, a differentiable copy on the device stands in for it in the module; autograd
copies the gradient of the copy back to the host, and accumulates it there. On a CPU the master itself is used; one on
disk needs its pages while the layer computes (Note [Parameters on disk]).

A copy must not outlive the layer's computation. Inside a recomputed region nothing is saved anyway: backward runs the
layer again and fetches again. Elsewhere autograd would hold the copies that it saved (``nn.Linear`` saves its weight);
there :class:`Refetch` is saved in their place, and backward fetches them again. All else that is saved goes through the
hooks that surround the layer, if there are any (``activations.py``).

Two sums are not in the order of the plain model, and may differ in the last bit: the gradient of a parameter that is
used several times in a call (a recurrent weight, or any weight under ``create_graph=True``) by a layer that is called
several times before one backward, which is added up by calls; and the norm of ``clip_grad_norm_``, which adds up the
gradients of each device apart. Under autocast the plain model casts a parameter once for all of its uses and adds up
their gradients in 16 bits; here that is so for the uses of a matrix in one call only.

Note [Gradients to the host]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The copy of a parameter is made by two autograd nodes. In backward the first, on the device, starts the copy of the
gradient to the host, with an asynchronous engine on a stream of its own, and hands on the tensor that it will arrive
in. The second, on the host, waits for it. Autograd runs each node in the thread of its device, so it is the host's
thread that waits, and the device's goes on, two gradients ahead at most (Note [Prefetching]). The accumulation, and
whatever hooks are on the parameter, are autograd's own, and the page-locked memory that a gradient arrives in becomes
``.grad`` itself. A graph of backward itself (``create_graph=True``) is made of plain copies.

Note [Masters must not change]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A copy from page-locked memory reads it after the call has returned, and the host may change a master, by
``optimizer.step()`` say, when a pass is over. So no such copy outlasts a pass: at its end the prefetcher waits for the
copies to the device; without one, and outside of a pass of the whole model, a layer waits for its own.

Note [Inputs on the host]
~~~~~~~~~~~~~~~~~~~~~~~~~
A loop may leave the batch on the host: if no tensor of a call is on an accelerator, all are copied there. If one is,
those on the host are meant to be: the lengths that `pack_padded_sequence` takes, or indices that the model reads. The
same holds of a sample that is profiled or simulated, so that it is planned for as it is called.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memscale._torch import (
    OUTSIDE_BACKWARD,
    ConvNd,
    graph_task_id,
    hooks_are_allowed,
    surrounding_hooks,
    tree_leaves,
    tree_map,
)
from memscale._util.interrupts import interrupts_deferred
from memscale._util.trees import Tree, any_on_accelerator
from memscale.checkpointing.state import KeptTensor, mark_as_copy
from memscale.observe.counters import Meter
from memscale.offload.activations import Refetch
from memscale.offload.placement import ModelPlacement
from memscale.offload.prefetch import Prefetcher
from memscale.techniques.forward import ForwardStage, Stage
from memscale.tiers.engine import Engine, Lane, Transfer


class LayerState(enum.Enum):
    """What a layer's modules have as their parameters."""

    OFFLOADED = "the masters"
    FETCHED = "working copies on the device, or masters with their pages in memory"


class OffloadedLayer(ForwardStage):
    """Fetches the parameters of a layer when it computes. See Note [Master and working copy].

    Args:
        module: The module that this goes on.
        placement: Where the model's parameters are.
        device: Where it computes.
        meter: Counts what is moved.
        recomputed: Whether it runs inside a recomputed region, which saves nothing.
    """

    order = Stage.FETCH_PARAMETERS
    in_evaluation = True  # the parameters are offloaded then as well

    def __init__(
        self,
        module: nn.Module,
        placement: ModelPlacement,
        device: torch.device,
        meter: Meter,
        *,
        recomputed: bool,
    ) -> None:
        self._module = weakref.ref(module)
        self._placement = placement
        self._synchronous = Engine(None, placement.pinned)
        self.device = device
        self.meter = meter
        self.prefetcher: Prefetcher | None = None  # fetches the next layers while this one computes
        self.state = LayerState.OFFLOADED
        self._recomputed = recomputed
        self._masters: list[tuple[nn.Module, str, nn.Parameter]] = []  # while modules have copies of them
        self._copied: dict[int, nn.Parameter] = {}  # by the storage of the copy
        # By the parameters' ids: the types that the last pass had them in, and those that backward asks for.
        self._dtypes: dict[int, torch.dtype] = {}
        self._refetched: dict[int, torch.dtype] = {}

    def run(
        self, module: nn.Module, call_next: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if self.state is LayerState.FETCHED:  # it calls itself
            return call_next(*args, **kwargs)
        # Ctrl-C waits for the end of the layer: its modules must not be left with working copies.
        with contextlib.nullcontext() if self.device.type == "cpu" else interrupts_deferred():
            return self._run(module, call_next, *bring_inputs(args, kwargs, self.device))

    def _run(self, module: nn.Module, call_next: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Not other weights that `torch.func.functional_call` has put there.
        parameters = [each for each in module.parameters() if isinstance(each, nn.Parameter)]
        mapped = self._placement.begin_use(parameters)
        try:
            self.pre_forward(module)
            if self._recomputed or not torch.is_grad_enabled() or not self._copied:
                self._refetched = self._dtypes
                output = call_next(*args, **kwargs)
            else:
                self._refetched = {}
                with saved_tensors_hooks(*self._saved_tensors_hooks()):
                    output = call_next(*args, **kwargs)
        except Exception:
            if self.prefetcher is not None:
                self.prefetcher.drop()
            raise
        finally:  # the masters are put back here, not in a function whose call could fail
            for inner, name, parameter in self._masters:
                inner._parameters[name] = parameter
            self._masters = []
            self._copied.clear()
            self.state = LayerState.OFFLOADED
            self._placement.end_use(mapped)
        in_training = torch.is_grad_enabled() and graph_task_id() == OUTSIDE_BACKWARD
        if mapped and in_training and not self._recomputed:
            self._register_pre_backward(output, parameters)
        return output

    def pre_forward(self, module: nn.Module) -> None:
        """Exchange the layer's parameters for working copies, in 16 bits where autocast would cast them."""
        self.state = LayerState.FETCHED
        self._masters = masters = self._masters_of(module)
        self._dtypes = dtypes = _working_dtypes(masters, self.device)
        copies: dict[int, torch.Tensor] = {}  # a tied parameter has one
        for inner, name, parameter in masters:
            copy = copies.get(id(parameter))
            if copy is None:
                copy = copies[id(parameter)] = self._working_copy(parameter, dtypes[id(parameter)])
                self._copied[copy.untyped_storage()._cdata] = parameter
            inner._parameters[name] = copy  # type: ignore[assignment]
        if self.prefetcher is not None:
            self.prefetcher.reached(self, again=True)

    def _register_pre_backward(self, output: object, parameters: Sequence[nn.Parameter]) -> None:
        """Have the pages ready when backward gets to a layer that is not recomputed: nothing else tells of it."""
        placement = self._placement

        def pre_backward(gradient: torch.Tensor) -> None:
            placement.begin_use(parameters)

        for tensor in Tree.of(output).tensors():
            tensor = getattr(tensor, "hidden", tensor)  # lazy logits of a tiled head get no gradient
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(pre_backward)

    def _saved_tensors_hooks(self) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """Return hooks by which autograd saves of a copy only where its master is."""
        outer_pack, outer_unpack = surrounding_hooks() or (KeptTensor, KeptTensor.get)
        copied, refetched = self._copied, self._refetched

        def pack(tensor: torch.Tensor) -> Any:
            master = copied.get(tensor.untyped_storage()._cdata) if copied else None
            if master is None:
                return outer_pack(tensor)
            refetched[id(master)] = tensor.dtype
            return Refetch(master, tensor, self)

        def unpack(saved: Any) -> torch.Tensor:
            return saved.get() if isinstance(saved, Refetch) else outer_unpack(saved)

        return pack, unpack

    # ------------------------------------------------------------------ copies

    def needs(self, *, in_backward: bool) -> list[tuple[nn.Parameter, torch.dtype]]:
        """Return the parameters to prefetch, and in which type; none if the module is gone."""
        module = self._module()
        if module is None:
            return []
        masters = self._masters_of(module)
        # As the last pass had them: autocast may be off where a pass begins.
        dtypes = self._refetched if in_backward else self._dtypes
        if not in_backward and not dtypes:
            dtypes = _working_dtypes(masters, self.device)
        wanted = {id(parameter): parameter for _, _, parameter in masters if id(parameter) in dtypes}
        return [(parameter, dtypes[key]) for key, parameter in wanted.items()]

    def copy_to_device(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Copy a parameter's values to a tensor on the device, and return that."""
        # See Note [Masters must not change].
        waits = self.device.type == "cuda" and (self.prefetcher is None or not self.prefetcher.in_pass)
        self.meter.count_read("parameters", "host", target.nbytes)
        return target.copy_(values, non_blocking=not waits)

    def refetch(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter's values on the device once more, for backward."""
        values = self._fetch(parameter, dtype)
        if self.prefetcher is not None:
            self.prefetcher.reached(self, again=False)
        return values

    def _fetch(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        with self.meter.timing("offloading"):
            if self.prefetcher is None:
                target = torch.empty_like(parameter, device=self.device, dtype=dtype, requires_grad=False)
                with torch.no_grad():
                    return self.copy_to_device(parameter.detach(), target)
            return self.prefetcher.fetch(self, parameter, dtype)

    def _working_copy(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        engine, hold = self._synchronous, None
        if self.prefetcher is not None:
            engine, hold = self.prefetcher.engine, self.prefetcher.hold_gradient
        copy = differentiable_copy(parameter, self._fetch(parameter, dtype), engine, self.meter, hold)
        if parameter.requires_grad and not copy.requires_grad and dtype == parameter.dtype:
            # Gradients are off. Still torch.matmul looks at this flag of a weight to choose between mm and bmm.
            copy = copy.detach().requires_grad_()
        mark_as_copy(copy, parameter)
        return copy

    def _masters_of(self, module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
        return [
            (inner, name, parameter)
            for inner in module.modules()
            for name, parameter in inner._parameters.items()
            if parameter is not None and parameter.device != self.device
        ]


def bring_inputs(args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> tuple[Any, Any]:
    """Return the arguments of a call, copied to the device if all of them are on the host.

    See Note [Inputs on the host].
    """

    def is_on_host(leaf: Any) -> bool:
        on_host = isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
        return on_host and not isinstance(leaf, nn.Parameter)

    leaves = tree_leaves((args, kwargs))
    if device.type == "cpu" or any_on_accelerator(leaves) or not any(map(is_on_host, leaves)):
        return args, kwargs  # the same containers, which the model may change
    # The copies wait: the caller may fill a page-locked batch anew.
    brought: tuple[Any, Any] = tree_map(
        lambda leaf: leaf.to(device) if is_on_host(leaf) else leaf, (args, kwargs)
    )
    return brought


# ---------------------------------------------------------------------- gradients

HoldGradient = Callable[[Transfer[None], torch.Tensor], None]


def differentiable_copy(
    parameter: nn.Parameter,
    values: torch.Tensor,
    engine: Engine,
    meter: Meter | None = None,
    hold: HoldGradient | None = None,
) -> torch.Tensor:
    """Return a parameter's values on the device as a differentiable copy of it. See Note [Gradients to the host].

    `engine` moves its gradient to the host, `hold` keeps it on the device so long.
    """
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return values
    if not hooks_are_allowed():  # under torch.func, which has rules of its own for such nodes
        return parameter.to(values.device, values.dtype)
    transfer = GradientTransfer(engine, parameter.device, meter or Meter(), hold)
    on_host = _HostNode.apply(parameter, transfer, values.dtype)  # type: ignore[no-untyped-call]
    copy: torch.Tensor = _DeviceNode.apply(on_host, transfer, [values])  # type: ignore[no-untyped-call]
    return copy


class GradientTransfer:
    """Copies one gradient to the host. See :func:`differentiable_copy`."""

    def __init__(
        self, engine: Engine, host: torch.device, meter: Meter, hold: HoldGradient | None = None
    ) -> None:
        self._engine = engine
        self._meter = meter
        self._hold = hold
        self.host = host
        self._transfer: Transfer[None] | None = None
        self._landing: torch.UntypedStorage | None = None  # where it is copied to, while that may be written

    def start(self, gradient: torch.Tensor) -> torch.Tensor:
        """Start the copy; returns the tensor that it goes to, which may be read after :meth:`finish`."""
        with self._meter.timing("offloading"):
            self._wait()  # for that of a pass that failed
            if gradient.layout is torch.sparse_coo:  # of an embedding with `sparse=True`
                indices, values = gradient._indices(), gradient._values()
                self._meter.count_written("gradients", "host", indices.nbytes + values.nbytes)
                return torch.sparse_coo_tensor(
                    indices.to(self.host),
                    values.to(self.host),
                    gradient.shape,
                    check_invariants=False,
                    is_coalesced=gradient.is_coalesced(),
                )
            self._meter.count_written("gradients", "host", gradient.nbytes)
            pinned = self._engine.pinned.empty_like(gradient, gradient.device)
            target = torch.empty_like(gradient, device=self.host) if pinned is None else pinned
            beside = pinned is not None and self._engine.is_async

            def copy() -> None:  # without a reference to what it returns: autograd would clone the gradient
                target.copy_(gradient, non_blocking=beside)

            lane = Lane.STREAM if beside else Lane.CALLER
            self._transfer = self._engine.run(copy, lane, gradient.device, outward=True)
            self._landing = target.untyped_storage()
            if self._hold is not None:
                self._hold(self._transfer, gradient)
            return target

    def finish(self, target: torch.Tensor) -> torch.Tensor:
        """Wait until the gradient is there, and return it."""
        self._wait()
        return target

    def _wait(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.finish()
        self._landing = None

    # A pass that fails drops what it has not come to. The memory of a gradient must not be reused before it has landed.
    __del__ = _wait


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


def _working_dtypes(
    masters: Sequence[tuple[nn.Module, str, nn.Parameter]], device: torch.device
) -> dict[int, torch.dtype]:
    """Return the type of each working copy, by the parameter's id.

    Autocast makes 16-bit copies of parameters that are used in products of matrices only, so their working copies are
    16-bit from the start. Other parameters (norms, embeddings, positions that are added) are used in 32 bits, or in a
    way that can't be known from here; and a parameter that an embedding has too is the embedding's.
    """
    kind = device.type
    dtypes = {id(parameter): parameter.dtype for _, _, parameter in masters}
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return dtypes
    kept: set[int] = set()
    for module, name, parameter in masters:
        if isinstance(module, nn.MultiheadAttention):
            multiplies = name.endswith("proj_weight")
        else:  # transformers' GPT-2 has a linear layer of its own, by the name of Conv1D
            is_linear = isinstance(module, (nn.Linear, ConvNd)) or type(module).__name__ == "Conv1D"
            multiplies = is_linear and name == "weight"
        if not multiplies or parameter.dim() < 2 or parameter.dtype is not torch.float32:
            kept.add(id(parameter))
    autocast = torch.get_autocast_dtype(kind)
    return {key: dtype if key in kept else autocast for key, dtype in dtypes.items()}
