"""Values that are made when they are first needed.

Note [Awaited values]
~~~~~~~~~~~~~~~~~~~~~
To draw the numbers of a large model takes as long as to build it plainly: longer than all else that ``wrap`` does, and
for nothing if a checkpoint is loaded next. So when a plan is attached to a model on the meta device, its tensors get
their places, on disk, on the host or on the device, and no values yet. Whoever asks for values finds them: until they
are made, these tensors are of a class that hears of everything that torch does with them (``__torch_function__``, as
torch's own lazy modules have it), answers itself what is asked of their shapes and flags, and at anything else has the
values of the whole model made first. Then they are ordinary parameters and buffers, the same objects. Before the
model's own forward, which is what mostly comes first, they are made in any case. What is given its values by ``copy_``,
as ``load_state_dict`` does it, waits no longer; if all of them are, nothing is drawn.

*Numbers* are drawn from the state that torch's generator had when the plan was attached: they are those of the plainly
built model. If nobody has used the generator since, it goes on as after plain building; else it stays as it was found.

*Errors.* That all tensors will have values is known when the plan is attached: their initialisation has been run
without memory then, and written to each of them. Where it does not, or fails (some look at values), values are made at
once, with whatever error there is. So they are on devices whose tensors are of a class of their own already.

*How.* Initialisation runs on a copy of the model that was made while it had nothing but shapes, layer by layer, and
writes to the places of the model's own tensors. So the model itself, with all that is attached to it, is not touched.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memscale._torch import disable_current_modes, without_torch_function
from memscale.offload.data import exchange_data
from memscale.offload.freed_memory import freed_memory_returns
from memscale.offload.materialise import materialise, rehearse
from memscale.offload.materialised import HOST, Materialised, is_on_meta
from memscale.simulator.fake import is_simulating
from memscale.tiers.store import DiskStore

__all__ = ["AwaitedValues", "Skeleton"]

_AWAITS = "_memscale_awaits"

# What is asked of a tensor without asking for its values, as Python calls it.
_ATTRIBUTES = """
    shape device dtype layout ndim requires_grad grad is_leaf grad_fn nbytes itemsize is_cuda is_cpu is_meta is_mps
    is_xpu is_sparse is_quantized is_nested output_nr retains_grad _backward_hooks _post_accumulate_grad_hooks
"""
_METHODS = """
    size dim numel nelement stride storage_offset element_size is_contiguous is_floating_point is_complex
    requires_grad_ register_hook register_post_accumulate_grad_hook get_device ndimension is_inference is_signed
"""
_SET = ("requires_grad", "grad")
_HARMLESS: set[Any] = {
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()),
    *(getattr(torch.Tensor, name).__set__ for name in _SET),
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    *(torch.is_complex, torch.is_floating_point, torch.numel),
}


class _Awaiting:
    """A tensor whose values are still to be made."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = args[0] if func is torch.Tensor.copy_ else None  # so do checkpoints come
        needed = args[1:] if isinstance(given, _Awaiting) else args
        if func not in _HARMLESS:
            for each in _those_in((*needed, *kwargs.values())):
                vars(each)[_AWAITS].make()
        with without_torch_function():
            result = func(*args, **kwargs)
        if isinstance(given, _Awaiting):
            vars(given)[_AWAITS].was_given(given)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        vars(self)[_AWAITS].make()
        return copy.deepcopy(self, memo)  # an ordinary tensor now

    def __reduce_ex__(self, protocol: Any) -> Any:
        vars(self)[_AWAITS].make()
        return self.__reduce_ex__(protocol)


class AwaitedParameter(_Awaiting, nn.Parameter):
    """A parameter until its values are made."""


class AwaitedBuffer(_Awaiting, torch.Tensor):
    """A buffer until its values are made."""


def _those_in(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, _Awaiting):
            yield value  # type: ignore[misc]
        elif isinstance(value, (list, tuple)):
            yield from _those_in(value)
        elif isinstance(value, dict):
            yield from _those_in(value.values())


class Skeleton:
    """A copy of a model that has nothing but shapes, where the model has no more either.

    Args:
        model: The model, before anything is attached to it. Tensors that have values are shared with the copy.

    Raises:
        Exception: Whatever is raised because the model can't be copied, or not be initialised without values.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = (*model.parameters(), *model.buffers())
        memo: dict[int, Any] = {id(each): each for each in tensors if not is_on_meta(each)}
        self.twin = copy.deepcopy(model, memo)
        rehearse(self.twin)
        self.parameters = [
            (twin, parameter)
            for twin, parameter in zip(self.twin.parameters(), model.parameters(), strict=True)
            if is_on_meta(parameter)
        ]
        self.buffers = [
            (twin, name, module)
            for twin, module in zip(self.twin.modules(), model.modules(), strict=True)
            for name, buffer in module._buffers.items()
            if buffer is not None and is_on_meta(buffer)
        ]


class AwaitedValues:
    """The values of one model's tensors, which have places already. See Note [Awaited values].

    Args:
        skeleton: The copy that values are made on.
        layers: Modules of it that are initialised as a whole.
        store: The disk that some of the places are on.
        tell: Called with what was made.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        layers: Sequence[nn.Module],
        store: DiskStore,
        tell: Callable[[Materialised], None],
    ) -> None:
        self._twin: nn.Module | None = skeleton.twin
        self._layers = layers
        self._store = store
        self._tell = tell
        self._random = torch.get_rng_state()
        self._lock = threading.RLock()
        # By the twin; weakly, as the model's tensors refer to this.
        self._places: dict[int, weakref.ref[torch.Tensor]] = {
            id(twin): weakref.ref(parameter) for twin, parameter in skeleton.parameters
        }
        self._buffers: list[tuple[nn.Module, str, int]] = []
        for module, name, original in skeleton.buffers:
            twin, buffer = module._buffers[name], original._buffers[name]
            if twin is not None and buffer is not None:
                self._places[id(twin)] = weakref.ref(buffer)
                self._buffers.append((module, name, id(twin)))

    def begin(self) -> None:
        """From now on the tensors know that they have no values."""
        for tensor in self._tensors():
            vars(tensor)[_AWAITS] = self
            tensor.__class__ = AwaitedParameter if isinstance(tensor, nn.Parameter) else AwaitedBuffer

    def was_given(self, tensor: torch.Tensor) -> None:
        """A tensor has values that are not to be made."""
        with self._lock:
            for key in [key for key, place in self._places.items() if place() is tensor]:
                del self._places[key]
            _become_ordinary(tensor)
            if not self._places:
                self._twin = None

    def make(self) -> None:
        """Make the values, unless that is done.

        Raises:
            WrapError: A tensor has no initialisation; nothing has values then.
        """
        with self._lock:
            if self._twin is None:
                return
            twin, self._twin = self._twin, None  # what follows uses the tensors
            self._end()
            try:
                real = disable_current_modes() if is_simulating() else contextlib.nullcontext()
                with real, torch.inference_mode(False), torch.no_grad():
                    self._make(twin)
            except BaseException:
                self._twin = twin
                self.begin()
                raise
            self._places.clear()  # parameters that are referred to weakly can't be exchanged
            self._buffers.clear()

    def _make(self, twin: nn.Module) -> None:
        found = torch.get_rng_state()
        torch.set_rng_state(self._random)
        goes_on = False
        try:
            with freed_memory_returns():
                made = materialise(twin, self._settle, self._layers, self._memory_of)
            goes_on = torch.equal(found, self._random)
        finally:
            if not goes_on:
                torch.set_rng_state(found)
        for module, name, key in self._buffers:
            self._fill(self._place_of(key), module._buffers[name])
        self._tell(made)

    def _place_of(self, key: int) -> torch.Tensor | None:
        """None for what was given its values, or was dropped by its user."""
        reference = self._places.get(key)
        return None if reference is None else reference()

    def _memory_of(self, twin: torch.Tensor) -> torch.Tensor:
        """Where values are made: in their place itself, unless that is on disk or on a device."""
        place = self._place_of(id(twin))
        if place is None or place.device != HOST or self._store.holds(place):
            return torch.empty_like(twin, device=HOST, requires_grad=False)
        return place.detach()

    def _settle(self, twin: nn.Parameter) -> None:
        place = self._place_of(id(twin))
        self._fill(place, twin)
        if place is not None:
            exchange_data(twin, place.detach())  # what is written to it later is written there
            self._store.rest(place)

    def _fill(self, place: torch.Tensor | None, values: torch.Tensor | None) -> None:
        if place is not None and values is not None and not _is_in(place, values):
            self._store.fill(place, values)

    def _end(self) -> None:
        for tensor in self._tensors():
            _become_ordinary(tensor)

    def _tensors(self) -> list[torch.Tensor]:
        found = (reference() for reference in self._places.values())
        return list({id(each): each for each in found if each is not None}.values())


def _become_ordinary(tensor: torch.Tensor) -> None:
    del vars(tensor)[_AWAITS]
    tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor


def _is_in(place: torch.Tensor, values: torch.Tensor) -> bool:
    return place.device == values.device and place.data_ptr() == values.data_ptr()
