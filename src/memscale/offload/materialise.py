"""Deferred initialisation: a model built on the meta device gets memory and weights when its plan is attached.

Note [Models larger than memory]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A model built under ``torch.device("meta")`` has shapes and no memory, so it may be larger than the RAM. Each of its
tensors gets memory directly on the tier that the plan names (disk, host or device), and its values there: from the
safetensors files that the user named (``loading.py``), or by its module's own initialisation. Modules are initialised
one by one, children first: by ``reset_parameters()``, which every module of torch has, or ``init_weights()``; and by
the ``_init_weights(module)`` of the nearest class around it that has one, as models of transformers do.

Tensors stay the same objects (optimizers and tied modules keep them), and those that had values keep their values. A
tensor that no initialiser wrote to is an error and never garbage: its version has not changed and the NaN that was
written to its last element is there. Numbers are drawn in another order than by the constructors, so they are not those
of the plainly built model after the same seed; the distributions are.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale._torch import share_gradient_hooks, without_flat_weights
from memscale.errors import WrapError
from memscale.offload.loading import pending_tensors, tie_on_meta
from memscale.units import format_bytes

_HF_FLAG = "_is_hf_initialized"  # transformers' mark on tensors and modules that are not to be initialised


def has_meta_tensors(model: nn.Module) -> bool:
    """Return whether any parameter or buffer of a model is on the meta device."""
    return any(each.is_meta for each in _tensors(model))


def materialise(
    model: nn.Module,
    allocate: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: torch.empty_like(tensor, device="cpu"),
    fill: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
    release: Callable[[torch.Tensor], object] = lambda tensor: None,
) -> Materialised:
    """Give all tensors of a model that are on the meta device memory and values.

    Args:
        model: The model.
        allocate: Return memory for a tensor on the tier it belongs to.
        fill: Write the values of a file to a tensor.
        release: Called with tensors that were written to and are not needed for now.

    Raises:
        WrapError: No initialiser writes to a tensor, which is named. The model is as it was.
        WeightsError: A file that the weights were to come from can't be read any more. The model is as it was.
    """
    tie_on_meta(model)
    _refuse_foreign_modules(model)
    made = Materialised(model, allocate)
    had_values = {id(each) for each in _tensors(model) if not each.is_meta}
    # Not under the caller's default device, which may be the meta device.
    with without_flat_weights(model), torch.no_grad(), torch.device("cpu"):
        try:
            for tensor, stored in pending_tensors(model):
                made.allocate(tensor)
                fill(tensor, stored.read())
                release(tensor)
                made.file_bytes += tensor.nbytes if isinstance(tensor, nn.Parameter) else 0
                had_values.add(id(tensor))
            if has_meta_tensors(model):
                _Initialisation(model, made, had_values, release).run()
        except BaseException:
            made.undo()
            raise
    return made


class Materialised:
    """The tensors of a model that were on the meta device and have memory now; they are the same objects."""

    def __init__(self, model: nn.Module, allocate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._model = type(model).__name__
        self._allocate = allocate
        self._tensors: list[torch.Tensor] = []
        self.file_bytes = 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters among them."""
        return [each for each in self._tensors if isinstance(each, nn.Parameter)]

    def allocate(self, tensor: torch.Tensor) -> None:
        """Give a meta tensor memory without values, or raise a WrapError."""
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise WrapError(
                f"A tensor on the meta device is a {type(tensor).__name__}, which can't be given memory as an ordinary "
                "tensor can. Materialise it yourself before memscale.wrap."
            )
        _become(tensor, self._allocate(tensor))
        self._tensors.append(tensor)

    def undo(self) -> None:
        """Put everything on the meta device again."""
        while self._tensors:
            tensor = self._tensors.pop()
            tensor.grad = None
            _become(tensor, torch.empty_like(tensor, device="meta"))

    def __str__(self) -> str:
        drawn = sum(parameter.nbytes for parameter in self.parameters) - self.file_bytes
        sources = [f"{format_bytes(self.file_bytes)} from files"] if self.file_bytes else []
        if drawn:
            sources.append(f"{format_bytes(drawn)} by the initialisation of its own modules")
        return f"{self._model} was on the meta device; its parameters were made: {' and '.join(sources) or 'none'}."


@dataclass(eq=False)
class _Initialisation:
    """Initialises the modules of a model that have tensors on the meta device, children first."""

    model: nn.Module
    made: Materialised
    had_values: set[int]  # tensors that keep their values, by their ids
    release: Callable[[torch.Tensor], object]

    def __post_init__(self) -> None:
        # Modules that are left alone, since all of their tensors have values, or since they were visited.
        modules = self.model.modules()
        self._done = {id(each) for each in modules if _tensors(each) and not has_meta_tensors(each)}
        # Tensors, by their first owner: another one leaves them alone.
        self._initialised = set(self.had_values)
        self._unwritten: dict[int, int] = {}  # the version of a tensor when it was allocated, by its id

    def run(self) -> None:
        """Give memory and values to everything, or raise a WrapError if no initialiser writes to a tensor."""
        with _flagged(each for each in _tensors(self.model) if id(each) in self.had_values):
            self._visit(self.model, ())
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        left = [name for name, tensor in named if id(tensor) in self._unwritten]
        if left:
            raise WrapError(_not_initialised(self.model, left))

    def _visit(self, module: nn.Module, owners: tuple[Any, ...]) -> None:
        """Initialise a module after its children; `owners` are the modules around it that have `_init_weights`."""
        if id(module) in self._done:
            return
        self._done.add(id(module))
        if _method(module, "_init_weights", 1) is not None:
            owners = (module, *owners)
        for child in module.children():
            self._visit(child, owners)
        own = _tensors(module, recurse=False)
        for tensor in own:
            self._allocate(tensor)
        kept = [each for each in own if id(each) in self._initialised]
        _init_weights(owners, module, kept)
        self._note_writes(module)
        pretrained = any(map(_is_pretrained, owners))
        reset = _method(module, "reset_parameters", 0) or _method(module, "_reset_parameters", 0)
        if not pretrained:
            reset = reset or _method(module, "init_weights", 0)
        # transformers leaves some tensors as their constructor made them.
        if reset is not None and (self._unwritten.keys() & map(id, own) or not (own or pretrained)):
            keep = self.had_values | set(map(id, kept))
            with _restored(each for each in _tensors(module) if id(each) in keep):
                reset()
            _init_weights(owners, module, kept)
            self._note_writes(module)
        self._initialised.update(map(id, own))

    def _allocate(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            self.made.allocate(tensor)
            vars(tensor).pop(_HF_FLAG, None)
            if tensor.numel():
                if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                    _last_element(tensor).fill_(torch.nan)
                self._unwritten[id(tensor)] = tensor._version

    def _note_writes(self, module: nn.Module) -> None:
        for tensor in _tensors(module):
            if id(tensor) in self._unwritten:
                # By `.data` a tensor is written to without a new version.
                by_data = tensor.is_floating_point() and not _last_element(tensor).isnan()
                if by_data or tensor._version != self._unwritten[id(tensor)]:
                    del self._unwritten[id(tensor)]
            self.release(tensor)


def _is_pretrained(module: nn.Module) -> bool:
    return hasattr(module, "_initialize_weights")  # a model of transformers


def _init_weights(owners: Iterable[Any], module: nn.Module, kept: Sequence[torch.Tensor]) -> None:
    """Call the `_init_weights(module)` of the modules around one, innermost first; some tensors keep their values."""
    vars(module).pop(_HF_FLAG, None)  # accelerate's init_empty_weights marks modules on the meta device
    for owner in owners:
        if _is_pretrained(owner):  # which leaves a module alone that another one has initialised
            with _flagged(kept):
                owner._initialize_weights(module)
        else:
            with _restored(kept):
                owner._init_weights(module)


@contextlib.contextmanager
def _restored(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore the values of tensors after a block."""
    before = [(each, each.clone()) for each in tensors]
    yield
    for tensor, values in before:
        tensor.copy_(values)


@contextlib.contextmanager
def _flagged(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have transformers leave tensors as they are inside the block."""
    flagged = [each for each in tensors if _HF_FLAG not in vars(each)]
    for tensor in flagged:
        vars(tensor)[_HF_FLAG] = True
    try:
        yield
    finally:
        for tensor in flagged:
            vars(tensor).pop(_HF_FLAG, None)


def _become(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Give a tensor the memory of another one; it stays the same object, with the attributes that others gave it."""
    new = nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory
    vars(new).update(vars(tensor))
    try:
        swap_keeping_hooks(tensor, new)
    except RuntimeError as error:
        raise WrapError(
            f"A tensor of the shape {tuple(tensor.shape)} is on the meta device and can't be given memory: {error}. "
            "Let go of what refers to it, a graph or a weak reference, and wrap the model again."
        ) from error


def swap_keeping_hooks(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Exchange two tensors as `torch.utils.swap_tensors` does; the first keeps the hooks on its gradient.

    They belong to what is swapped: an optimizer that steps inside backward would never be called again.
    """
    share_gradient_hooks(tensor, new)
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]


def _tensors(module: nn.Module, *, recurse: bool = True) -> list[torch.Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _last_element(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[(-1,) * tensor.dim()]


def _method(module: nn.Module, name: str, arguments: int) -> Callable[..., object] | None:
    """Return a module's method of that name, if it can be called with so many arguments."""
    method: object = getattr(module, name, None)
    if not callable(method):
        return None
    try:
        inspect.signature(method).bind(*[None] * arguments)
    except (TypeError, ValueError):  # it takes others, or is a built-in
        return None
    return method


def _refuse_foreign_modules(model: nn.Module) -> None:
    """Refuse tensors on the meta device that another library put there, or initialises itself."""
    for path, module in model.named_modules():
        for name in getattr(module, "adapter_layer_names", ()):  # of peft
            adapter = getattr(module, name, None)
            if isinstance(adapter, nn.Module) and has_meta_tensors(adapter):
                raise WrapError(
                    f"{path}.{name} is an adapter on the meta device, and its initialisation is peft's own. Add "
                    "adapters to the wrapped model instead, or give it adapters that have values."
                )
        offloaded = getattr(getattr(module, "_hf_hook", None), "offload", False)
        if offloaded and any(each.is_meta for each in _tensors(module, recurse=False)):
            raise WrapError(
                f"{path} is on the meta device because accelerate has offloaded it. Build the model on the meta device "
                "instead (with torch.device('meta'): ...from_config(config)), give it its files by "
                "memscale.load_safetensors(model, directory), and wrap it then."
            )


def _not_initialised(model: nn.Module, names: list[str]) -> str:
    path, _, name = names[0].rpartition(".")
    module = model.get_submodule(path)
    kind = "parameter" if name in module._parameters else "buffer"
    return (
        f"The {kind} {names[0]!r} is on the meta device, and its {type(module).__name__} has no reset_parameters() "
        f"that sets it ({len(names)} such tensors in all). Give the class one; or give the model its weights with "
        "memscale.load_safetensors(model, path) before memscale.wrap; or set this tensor yourself before that, after "
        f"model.get_submodule({path!r}).to_empty(device='cpu', recurse=False). The model is as it was."
    )
