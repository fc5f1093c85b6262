"""Memory for tensors that were on the meta device, given one by one and taken back as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from memscale.errors import WrapError
from memscale.offload.data import swap_keeping_hooks
from memscale.units import format_bytes

__all__ = ["Materialised", "has_meta_tensors", "is_on_meta", "own_tensors", "tie_on_meta", "tied_names"]

HOST = torch.device("cpu")


def is_on_meta(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor has a shape and no values."""
    return tensor is not None and tensor.device.type == "meta"


def has_meta_tensors(model: nn.Module) -> bool:
    """Whether any parameter or buffer of a model is on the meta device.

    Example:
        >>> has_meta_tensors(nn.Linear(2, 2, device="meta")), has_meta_tensors(nn.Linear(2, 2))
        (True, False)
    """
    return any(is_on_meta(each) for each in (*model.parameters(), *model.buffers()))


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers that a module has itself, not its children, by their names in it."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor


def tied_names(model: nn.Module) -> dict[str, str]:
    """What the models of transformers in a model say is tied: names of parameters, and of those they are tied to."""
    found = {}
    for prefix, module in model.named_modules():
        tied = getattr(module, "all_tied_weights_keys", None)
        if isinstance(tied, dict):
            start = f"{prefix}." if prefix else ""
            found.update({start + target: start + source for target, source in tied.items()})
    return found


def tie_on_meta(model: nn.Module) -> None:
    """Tie what should be tied and is not yet: accelerate's ``init_empty_weights`` makes a new parameter of each."""
    for target, source in tied_names(model).items():
        path, _, name = target.rpartition(".")
        module, parameter = model.get_submodule(path), model.get_parameter(source)
        tied = module._parameters.get(name)
        if tied is not parameter and tied is not None and is_on_meta(tied) and is_on_meta(parameter):
            module._parameters[name] = parameter


class Materialised:
    """The tensors of a model that were given memory.

    A parameter stays the same object, whoever has it: an optimizer, a module that it is tied to. A buffer is exchanged,
    as ``Module.to`` does it, in all modules that have it.

    Args:
        model: The model.

    Example:
        >>> layer = nn.Linear(2, 2, device="meta")
        >>> weight, made = layer.weight, Materialised(layer)
        >>> made.give(layer.weight, torch.ones(2, 2)) is weight
        True
        >>> layer.weight.device.type, layer.bias.device.type
        ('cpu', 'meta')
        >>> made.undo()
        >>> weight.device.type
        'meta'
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = type(model).__name__
        self._stored = 0
        self._parameters: list[nn.Parameter] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and is_on_meta(buffer):
                    self._owners.setdefault(id(buffer), []).append((module, name))

    def give(self, tensor: torch.Tensor, values: torch.Tensor, *, stored: bool = False) -> torch.Tensor:
        """Put values in the place of a meta tensor; returns what the modules have now.

        Args:
            tensor: The tensor.
            values: Memory for it.
            stored: Whether the values are from a file, and so what they are to be.

        Raises:
            WrapError: The tensor is of a kind that has no plain memory.
        """
        if isinstance(tensor, nn.Parameter):
            if type(tensor) is not nn.Parameter:
                raise WrapError(
                    f"A parameter on the meta device is a {type(tensor).__name__}, which can't be given memory "
                    "as an ordinary tensor can. Materialise it yourself before memscale.wrap."
                )
            _become(tensor, values)
            self._parameters.append(tensor)
            self._stored += tensor.nbytes if stored else 0
            return tensor
        for module, name in self._owners[id(tensor)]:
            module._buffers[name] = values
            self._buffers.append((module, name, tensor))
        return values

    def undo(self) -> None:
        """Everything on the meta device again."""
        while self._parameters:
            parameter = self._parameters.pop()
            parameter.grad = None
            _become(parameter, torch.empty_like(parameter, device="meta"))
        while self._buffers:
            module, name, tensor = self._buffers.pop()
            module._buffers[name] = tensor

    def __str__(self) -> str:
        whole = sum(parameter.nbytes for parameter in self._parameters)
        ways = [f"{format_bytes(self._stored)} from files"] if self._stored else []
        if whole > self._stored:
            ways.append(f"{format_bytes(whole - self._stored)} by the initialisation of its own modules")
        return (
            f"{self._model} was on the meta device; its parameters were made: {' and '.join(ways) or 'none'}."
        )


def _become(parameter: nn.Parameter, values: torch.Tensor) -> None:
    new = nn.Parameter(values, parameter.requires_grad)
    vars(new).update(vars(parameter))  # what others have noted on it
    try:
        swap_keeping_hooks(parameter, new)
    except RuntimeError as error:
        raise WrapError(
            f"A parameter of the shape {tuple(parameter.shape)} is on the meta device and can't be given memory: "
            f"{error}. Let go of what refers to it, a graph or a weak reference, and wrap the model again."
        ) from error
