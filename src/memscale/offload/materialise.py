"""Deferred initialisation: a model built on the meta device gets memory and weights when its plan is attached.

Note [Models larger than memory]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A model built under ``torch.device("meta")`` has shapes and no memory, so it may be larger than the RAM. Each of its
tensors gets memory directly on the tier that the plan names (disk, host or device), and its values there: from the
safetensors files that the user named (``loading.py``), or by its module's own initialisation. Modules are initialised
one by one, children first: by ``reset_parameters()``, which every module of torch has; in a model of transformers by
its ``_init_weights``; in a class of the user's by ``reset_parameters()``, ``init_weights()``, or
``_init_weights(module)``, which is applied to all modules inside.

Parameters stay the same objects (optimizers and tied modules keep them); tensors that had values keep their values. A
tensor that no initialiser wrote to is an error and never garbage: its version has not changed and the NaNs that were
written to its first and last element are there. Numbers are drawn in another order than by the constructors, so they
are not those of the plainly built model after the same seed; the distributions are.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memscale.errors import WrapError
from memscale.offload.loading import is_on_meta, pending_tensors, tie_on_meta
from memscale.units import format_bytes

__all__ = ["Materialised", "has_meta_tensors", "materialise", "swap_keeping_hooks"]

_HF_FLAG = (
    "_is_hf_initialized"  # transformers' own mark on tensors and modules that are not to be initialised
)


def has_meta_tensors(model: nn.Module) -> bool:
    """Return whether any parameter or buffer of a model is on the meta device.

    Example:
        >>> has_meta_tensors(nn.Linear(2, 2, device="meta")), has_meta_tensors(nn.Linear(2, 2))
        (True, False)
    """
    return any(map(is_on_meta, _tensors(model)))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", requires_grad=False)


def materialise(
    model: nn.Module,
    allocate: Callable[[torch.Tensor], torch.Tensor] = _on_host,
    fill: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
    release: Callable[[torch.Tensor], object] = lambda tensor: None,
) -> Materialised:
    """Give all tensors of a model that are on the meta device memory and values.

    Args:
        model: The model.
        allocate: Return memory for a tensor on the tier it belongs to.
        fill: Write the values of a file to a tensor.
        release: Called with tensors that were written to and are not needed for now.

    Returns:
        What was done, so that it can be undone.

    Raises:
        WrapError: No initialiser writes to a tensor, which is named. The model is as it was.
        WeightsError: A file that the weights were to come from can't be read any more. The model is as it was.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        >>> weight = model[0].weight
        >>> made = materialise(model)
        >>> model(torch.ones(2, 4)).shape, model[0].weight is weight
        (torch.Size([2, 4]), True)
        >>> made.undo()
        >>> weight.device.type
        'meta'
    """
    tie_on_meta(model)
    _refuse_foreign_modules(model)
    made = Materialised(model, allocate)
    had_values = {id(each) for each in _tensors(model) if not is_on_meta(each)}
    # Not under the caller's default device, which may be the meta device.
    with _without_weak_references(model), torch.no_grad(), torch.device("cpu"):
        try:
            for tensor, stored in pending_tensors(model):
                target = made.allocate(tensor)
                fill(target, stored.read())
                release(target)
                made.file_bytes += target.nbytes if isinstance(target, nn.Parameter) else 0
                had_values.add(id(target))
            if has_meta_tensors(model):
                _Initialisation(model, made, had_values, release).run()
        except BaseException:
            made.undo()
            raise
    return made


class Materialised:
    """The tensors of a model that were on the meta device and have memory now.

    A parameter stays the same object. A buffer is replaced, as ``Module.to`` does it, in all modules that have it.
    """

    def __init__(self, model: nn.Module, allocate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._model = type(model).__name__
        self._allocate = allocate
        self.file_bytes = 0
        self.parameters: list[nn.Parameter] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and is_on_meta(buffer):
                    self._owners.setdefault(id(buffer), []).append((module, name))

    def allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give a meta tensor memory without values, or raise a WrapError; returns what the modules have now."""
        if isinstance(tensor, nn.Parameter):
            if type(tensor) is not nn.Parameter:
                raise WrapError(
                    f"A parameter on the meta device is a {type(tensor).__name__}, which can't be given memory "
                    "as an ordinary tensor can. Materialise it yourself before memscale.wrap."
                )
            _become(tensor, self._allocate(tensor))
            self.parameters.append(tensor)
            return tensor
        memory = self._allocate(tensor)
        for module, name in self._owners[id(tensor)]:
            module._buffers[name] = memory
            self._buffers.append((module, name, tensor))
        return memory

    def undo(self) -> None:
        """Put everything on the meta device again."""
        while self.parameters:
            parameter = self.parameters.pop()
            parameter.grad = None
            _become(parameter, torch.empty_like(parameter, device="meta"))
        while self._buffers:
            module, name, tensor = self._buffers.pop()
            module._buffers[name] = tensor

    def __str__(self) -> str:
        drawn = sum(parameter.nbytes for parameter in self.parameters) - self.file_bytes
        sources = [f"{format_bytes(self.file_bytes)} from files"] if self.file_bytes else []
        if drawn:
            sources.append(f"{format_bytes(drawn)} by the initialisation of its own modules")
        return f"{self._model} was on the meta device; its parameters were made: {' and '.join(sources) or 'none'}."


class _Initialisation:
    """Initialises the modules of a model that have tensors on the meta device, children first.

    Tensors in `had_values`, by their ids, keep their values; `release` is called with those that were written to.
    """

    def __init__(
        self,
        model: nn.Module,
        made: Materialised,
        had_values: set[int],
        release: Callable[[torch.Tensor], object],
    ) -> None:
        self._model = model
        self._made = made
        self._had_values = had_values
        self._release = release
        # Modules that are left alone, since all of their tensors have values, or since they were visited.
        self._done = {id(each) for each in model.modules() if _tensors(each) and not has_meta_tensors(each)}
        self._initialised = set(had_values)  # tensors, by their first owner: another one leaves them alone
        self._unwritten: dict[int, tuple[torch.Tensor, int]] = {}  # by id, with the version when allocated

    def run(self) -> None:
        """Give memory and values to everything, or raise a WrapError if no initialiser writes to a tensor."""
        with _flagged(each for each in _tensors(self._model) if id(each) in self._had_values):
            self._visit(self._model, None)
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        left = [name for name, tensor in named if id(tensor) in self._unwritten]
        if left:
            raise WrapError(_not_initialised(self._model, left))

    def _visit(self, module: nn.Module, pretrained: Any) -> None:
        if id(module) in self._done:
            return
        self._done.add(id(module))
        modeling_utils = sys.modules.get("transformers.modeling_utils")  # which need not be installed
        if modeling_utils is not None and isinstance(module, modeling_utils.PreTrainedModel):
            pretrained = module
        for child in module.children():
            self._visit(child, pretrained)
        own = [self._with_memory(each) for each in _tensors(module, recurse=False)]
        if pretrained is not None:
            self._initialise_pretrained(module, pretrained, own)
        elif not own or any(id(each) not in self._initialised for each in own):
            self._initialise(module, own)
        self._initialised.update(map(id, own))

    def _initialise(self, module: nn.Module, own: list[torch.Tensor]) -> None:
        reset = _reset_of(module) or _method(module, "init_weights", 0)
        if reset is not None:
            with self._kept(_tensors(module), own):
                reset()
            self._note_writes(_tensors(module))
        for_each = _method(module, "_init_weights", 1)
        if for_each is not None:
            for inner in reversed(list(module.modules())):
                tensors = _tensors(inner, recurse=False)
                with self._kept(tensors):
                    for_each(inner)
                self._note_writes(tensors)

    def _initialise_pretrained(self, module: nn.Module, owner: Any, own: list[torch.Tensor]) -> None:
        with _flagged(each for each in own if id(each) in self._initialised):
            # accelerate's init_empty_weights marks modules on the meta device as initialised.
            vars(module).pop(_HF_FLAG, None)
            owner._initialize_weights(module)
            self._note_writes(_tensors(module))
            reset = _reset_of(module)
            if reset is not None and any(id(each) in self._unwritten for each in own):
                with self._kept(own, own):  # transformers leaves some as their constructor made them
                    reset()
                vars(module).pop(_HF_FLAG, None)
                owner._initialize_weights(module)
                self._note_writes(own)

    def _with_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_on_meta(tensor):
            return tensor
        made = self._made.allocate(tensor)
        vars(made).pop(_HF_FLAG, None)
        if made.numel():
            if made.dtype.is_floating_point or made.dtype.is_complex:
                for corner in _corners(made):
                    corner.fill_(torch.nan)
            self._unwritten[id(made)] = (made, made._version)
        return made

    def _note_writes(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            _, version = self._unwritten.get(id(tensor), (None, -1))
            # By `.data` a tensor is written to without a new version.
            if version >= 0 and (
                tensor._version != version
                or (tensor.dtype.is_floating_point and not all(map(torch.isnan, _corners(tensor))))
            ):
                del self._unwritten[id(tensor)]
            self._release(tensor)

    @contextlib.contextmanager
    def _kept(self, tensors: Iterable[torch.Tensor], own: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Restore what had values before, and what another owner has initialised, after a block."""
        kept = [each for each in tensors if id(each) in self._had_values]
        kept += [each for each in own if id(each) in self._initialised - self._had_values]
        before = [(each, each.clone()) for each in kept]
        yield
        for tensor, values in before:
            tensor.copy_(values)


def _corners(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor[(index,) * tensor.dim()] for index in (0, -1)]


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


def _become(parameter: nn.Parameter, memory: torch.Tensor) -> None:
    new = nn.Parameter(memory, parameter.requires_grad)
    vars(new).update(vars(parameter))  # attributes of others
    try:
        swap_keeping_hooks(parameter, new)
    except RuntimeError as error:
        raise WrapError(
            f"A parameter of the shape {tuple(parameter.shape)} is on the meta device and can't be given memory: "
            f"{error}. Let go of what refers to it, a graph or a weak reference, and wrap the model again."
        ) from error


def swap_keeping_hooks(parameter: nn.Parameter, new: nn.Parameter) -> None:
    """Exchange two parameters as `torch.utils.swap_tensors` does; the first keeps the hooks on its gradient.

    They belong to what is swapped: an optimizer that steps inside backward would never be called again.
    """
    new._backward_hooks = parameter._backward_hooks
    new._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _without_weak_references(model: nn.Module) -> Iterator[None]:
    """Drop the weak references of recurrent layers to their weights for a block: they forbid `swap_tensors`."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in recurrent:
            module._init_flat_weights()


# ---------------------------------------------------------------------- what modules have


def _tensors(module: nn.Module, *, recurse: bool = True) -> list[torch.Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _reset_of(module: nn.Module) -> Callable[..., object] | None:
    return _method(module, "reset_parameters", 0) or _method(module, "_reset_parameters", 0)


def _method(module: nn.Module, name: str, arguments: int) -> Callable[..., object] | None:
    """Return a module's method of that name, if it can be called with so many arguments."""
    method = getattr(module, name, None)
    if not callable(method):
        return None
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # a built-in
        return None
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = sum(each.default is each.empty and each.kind not in several for each in parameters)
    return method if required == arguments else None


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
        if offloaded and any(map(is_on_meta, _tensors(module, recurse=False))):
            raise WrapError(
                f"{path} is on the meta device because accelerate has offloaded it, and brings it itself when "
                "the model is called. Build the model on the meta device instead (with torch.device('meta'): "
                "...from_config(config)), give it its files by memscale.load_safetensors(model, directory), "
                "and wrap it then."
            )


def _not_initialised(model: nn.Module, names: list[str]) -> str:
    path, _, name = names[0].rpartition(".")
    module = model.get_submodule(path)
    kind = "parameter" if name in module._parameters else "buffer"
    others = f" ({len(names)} such tensors in all)" if len(names) > 1 else ""
    where = f"the {type(module).__name__} {path!r}" if path else f"the {type(module).__name__} itself"
    return (
        f"The {kind} {names[0]!r} is on the meta device, and {where} has no initialisation that could be repeated: no "
        f"reset_parameters() that sets it{others}. Give the class one; or give the model its weights with "
        f"memscale.load_safetensors(model, path) before memscale.wrap; or set this tensor yourself before that, for "
        f"example with model.get_submodule({path!r}).to_empty(device='cpu', recurse=False) and your own values. The "
        "model is as it was."
    )
