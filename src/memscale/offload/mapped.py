"""Parameters and gradients on disk: memory-mapped tensors, whose pages are in memory while they are used.

Note [Parameters on disk]
~~~~~~~~~~~~~~~~~~~~~~~~~
A parameter on disk is the user's own ``nn.Parameter``; its ``.data`` is a mapped tensor (Note [Mapped tensors] in
``tiers/disk.py``). Whoever touches it, a kernel, the optimizer, ``state_dict``, finds the values; what has
to be done is to release the pages when a layer is done with them:

- after its forward pass;
- in backward, when the gradient of a parameter is there: nothing below needs the parameter any more. And, for the
  sake of parameters that are frozen, when the next layer begins, and when backward ends.

To release pages too early costs a page fault, and never a value; so nothing here has to be exact. What the page cache
has not kept is prefetched, a layer at a time, while the layer before it computes.

*Gradients.* Autograd makes a gradient in memory. When it has been accumulated, it is exchanged for a mapped copy,
to which the next micro-batch adds in place, as autograd adds to any gradient that is there. What is no ordinary
gradient stays as it is: a sparse one, a view of a bucket, one with a graph of its own (``create_graph=True``).

*Small ones* stay in memory: below a page there is nothing to release.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memscale._torch import (
    OUTSIDE_BACKWARD,
    FakeTensor,
    allows_shallow_copy,
    at_end_of_backward,
    graph_task_id,
    is_fake,
)
from memscale._util.trees import Tree
from memscale.memory.tracker import ResidentPages
from memscale.observe.counters import Meter
from memscale.techniques.forward import ForwardStage, Stage
from memscale.tiers.disk import PAGE, DiskStore

__all__ = ["MappedParameters", "MappedStage", "can_be_mapped", "exchange_data", "swap_keeping_hooks"]


class MappedParameters:
    """The parameters of one model that are on disk. See Note [Parameters on disk].

    Args:
        store: The disk.
        meter: Counts what is used of it.

    Example:
        >>> layer = nn.Linear(64, 64)
        >>> mapped = MappedParameters(DiskStore(capacity=2**20))
        >>> mapped.send(layer.weight)
        True
        >>> layer(torch.ones(1, 64)).sum().backward()
        >>> mapped.store.bytes_used == 2 * layer.weight.nbytes  # its gradient, too
        True
        >>> mapped.bring_back(layer.weight)
        >>> mapped.store.bytes_used
        0
        >>> mapped.store.close()
    """

    def __init__(self, store: DiskStore, meter: Meter | None = None) -> None:
        self.store = store
        self._meter = meter or Meter()
        self._handles: dict[
            int, RemovableHandle
        ] = {}  # by the parameter's id; whoever sends it keeps it alive
        self._in_backward: list[Sequence[nn.Parameter]] = []
        self._task = OUTSIDE_BACKWARD
        self._latest: tuple[bool, int] | None = None
        self._followers: dict[tuple[bool, int], Sequence[nn.Parameter]] = {}  # by direction and layer
        self._pages: dict[int, ResidentPages] = {}  # by the parameter's id: what trackers are told of

    def send(self, parameter: nn.Parameter) -> bool:
        """Move a parameter to disk, with its gradient; returns False for one that is better left in memory.

        Raises:
            TierFullError: The cap would be exceeded, or the disk is full; the parameter is as it was.
            TierError: The directory can't be used.
        """
        if not self.move(parameter):
            return False
        self.watch([parameter])
        self._take_gradient(parameter)
        return True

    def move(self, parameter: nn.Parameter) -> bool:
        """Exchange a parameter's memory for mapped memory, without pages in use; what :meth:`send` does first.

        Raises:
            As :meth:`send`.
        """
        if not self.store.holds(parameter):
            if not can_be_mapped(parameter):
                return False
            home, gradient = self.store.copy_of(parameter), parameter.grad
            parameter.grad = None
            exchange_data(parameter, home)
            parameter.grad = gradient
        return True

    def home_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return mapped memory without values for a parameter on the meta device; None if it is better in memory.

        Raises:
            As :meth:`send`.
        """
        with torch.no_grad():
            like = torch.empty_like(parameter, device="cpu")  # no memory is used until it is touched
        return self.store.empty_like(parameter) if can_be_mapped(like) else None

    def bring_back(self, parameter: nn.Parameter) -> None:
        """Make it an ordinary parameter in memory again, with an ordinary gradient."""
        handle = self._handles.pop(id(parameter), None)
        if handle is not None:
            handle.remove()
            if not parameter._post_accumulate_grad_hooks:
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # as it was
        with torch.no_grad():
            gradient, parameter.grad = parameter.grad, None
            if self.store.holds(parameter):
                exchange_data(parameter, parameter.detach().clone())
            if gradient is not None and self.store.holds(gradient):
                gradient = gradient.clone()
            parameter.grad = gradient

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Have gradients go to disk, also those of parameters that were frozen until now."""
        for parameter in parameters:
            if (
                parameter.requires_grad
                and parameter.is_leaf
                and id(parameter) not in self._handles
                and self.store.holds(parameter)
            ):
                hook = _GradientHook(self)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles[id(parameter)] = handle

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Prefetch and count the parameters of a layer that is about to compute, in forward or in backward."""
        task = graph_task_id()
        used = sum(each.nbytes for each in parameters if self.store.holds(each))
        with self._timed(used):
            self._prefetch(parameters, in_backward=task != OUTSIDE_BACKWARD)
            if task != OUTSIDE_BACKWARD:
                if task != self._task:
                    self._task = task
                    at_end_of_backward(functools.partial(_after_backward, weakref.ref(self)))
                self._release_after_backward()
                self._in_backward.append(parameters)
        self._meter.up("parameters", "disk", used)
        for parameter in parameters:
            if id(parameter) not in self._pages and self.store.holds(parameter):
                self._pages[id(parameter)] = ResidentPages(parameter.nbytes, simulated=is_fake(parameter))

    def end(self, parameters: Sequence[nn.Parameter]) -> None:
        """Release the parameters of a layer whose forward is over, unless it was run by backward, which needs them."""
        if graph_task_id() == OUTSIDE_BACKWARD:
            with self._timed(any(map(self.store.holds, parameters))):
                self.rest(parameters)

    def rest(self, parameters: Iterable[nn.Parameter]) -> None:
        """Release the pages of parameters and of their gradients."""
        for parameter in parameters:
            self.store.release_pages(parameter)
            pages = self._pages.pop(id(parameter), None)
            if pages is not None:
                pages.release()
            if parameter.grad is not None:
                self.store.release_pages(parameter.grad)

    def _prefetch(self, parameters: Sequence[nn.Parameter], *, in_backward: bool) -> None:
        """Prefetch this layer, and the one that came after it last time."""
        if not parameters:
            return
        key = (in_backward, id(parameters[0]))
        if self._latest is not None and self._latest[0] == in_backward and self._latest != key:
            self._followers[self._latest] = parameters
        self._latest = key
        for parameter in (*parameters, *self._followers.get(key, ())):
            self.store.prefetch_pages(parameter)

    def _release_after_backward(self) -> None:
        while self._in_backward:
            self.rest(self._in_backward.pop())

    def _timed(self, anything: object) -> contextlib.AbstractContextManager[None]:
        return self._meter.timing("offloading") if anything else contextlib.nullcontext()

    def _gradient_arrived(self, parameter: nn.Parameter) -> None:
        with self._meter.timing("offloading"):
            self._take_gradient(parameter)
            self.rest([parameter])
        if parameter.grad is not None and self.store.holds(parameter.grad):
            self._meter.down("gradients", "disk", parameter.grad.nbytes)

    def _take_gradient(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is not None and not self.store.holds(gradient) and can_be_mapped(gradient):
            parameter.grad = self.store.copy_of(gradient)


class _GradientHook:
    """Moves a parameter's gradient to disk when it was accumulated."""

    changes_parameter = False  # unlike an optimizer that steps here: see `ModuleFlags.check_parameters`

    def __init__(self, mapped: MappedParameters) -> None:
        self._mapped = weakref.ref(mapped)  # or a parameter of a dropped model would be in a cycle

    def __call__(self, parameter: nn.Parameter) -> None:
        mapped = self._mapped()
        if mapped is not None and mapped.store.holds(parameter):
            mapped._gradient_arrived(parameter)


def _after_backward(reference: weakref.ref[MappedParameters]) -> None:
    mapped = reference()
    if mapped is not None:
        mapped._release_after_backward()


def can_be_mapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an ordinary one in the CPU's memory, all of a storage that is its own."""
    if not is_fake(tensor) and type(tensor) not in (torch.Tensor, nn.Parameter):
        return False
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.nbytes < PAGE:
        return False
    if tensor.grad_fn is not None or (tensor.requires_grad and not isinstance(tensor, nn.Parameter)):
        return False
    storage = tensor.untyped_storage()
    shared = not is_fake(tensor) and storage.is_shared()
    return storage.nbytes() == tensor.nbytes and not shared and _is_dense(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether its elements lie side by side in some order of its dimensions, none of them twice."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


# ---------------------------------------------------------------------- in forward


class MappedStage(ForwardStage):
    """Holds the mapped parameters of a block in memory while it computes. See Note [Parameters on disk].

    Args:
        mapped: The parameters of the model that are on disk.
        recomputed: Whether it runs inside a recomputed region.
    """

    order = Stage.MAP_PARAMETERS
    in_evaluation = True  # the parameters are on disk then as well

    def __init__(self, mapped: MappedParameters, *, recomputed: bool) -> None:
        self._mapped = mapped
        self._recomputed = recomputed

    def run(
        self, module: nn.Module, call_next: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        # Not other weights that `torch.func.functional_call` has put there.
        mapped = self._mapped
        parameters = [each for each in module.parameters() if isinstance(each, nn.Parameter)]
        mapped.watch(parameters)
        mapped.begin(parameters)
        try:
            output = call_next(*args, **kwargs)
        finally:
            mapped.end(parameters)
        if not self._recomputed and torch.is_grad_enabled() and graph_task_id() == OUTSIDE_BACKWARD:
            _before_backward(output, mapped, parameters)
        return output


def _before_backward(output: object, mapped: MappedParameters, parameters: Sequence[nn.Parameter]) -> None:
    """Have the parameters ready when backward gets to a block that is not recomputed: nothing else tells of it."""

    def begin(gradient: torch.Tensor) -> None:
        mapped.begin(parameters)

    for tensor in Tree.of(output).tensors():
        tensor = getattr(tensor, "hidden", tensor)  # lazy logits of a tiled head get no gradient themselves
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(begin)


# ---------------------------------------------------------------------- a parameter's memory


def exchange_data(parameter: nn.Parameter, new: torch.Tensor) -> None:
    """Give a parameter the memory of another tensor. Its gradient must be None, or fit that.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> weight = layer.weight
        >>> exchange_data(weight, torch.zeros(2, 2))
        >>> layer.weight is weight, float(weight.sum())
        (True, 0.0)
    """
    with torch.no_grad():
        if _can_be_set(parameter, new):
            parameter.data = new
        else:
            old = nn.Parameter(new, parameter.requires_grad)
            swap_keeping_hooks(parameter, old)
            if not isinstance(old, FakeTensor):
                # The graph of the last loss, which a loop holds though it is through with it, refers to `old`.
                old.data = old.data.new_empty(0)


def swap_keeping_hooks(parameter: nn.Parameter, new: nn.Parameter) -> None:
    """Exchange two parameters as `torch.utils.swap_tensors` does; the first keeps the hooks on its gradient.

    They belong to what is swapped: an optimizer that steps inside backward would never be called again.
    """
    new._backward_hooks = parameter._backward_hooks
    new._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]


def _can_be_set(parameter: nn.Parameter, new: torch.Tensor) -> bool:
    """Return whether ``.data =`` can do it, as ``Module.to`` decides it; fake and wrapped tensors are swapped."""
    plain = type(new) is torch.Tensor and not isinstance(parameter, FakeTensor)
    return plain and type(parameter.data) is torch.Tensor and allows_shallow_copy(parameter, new)
