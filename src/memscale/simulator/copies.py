"""A model without its data: the same modules, names, ties and flags, with parameters that take no memory."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from memscale._torch import FakeTensor, pytree
from memscale.errors import SimulationError
from memscale.simulator import known

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# Attributes of modules that are no tensors, nor hold any but those that are looked at by themselves.
_REGISTERED = {"_parameters", "_buffers", "_modules"}
_ATOMS = {bool, int, float, str, type(None)}
_CONTAINERS = {dict, OrderedDict, list, tuple, set}

# Tensors that are nothing but memory; a tensor of another class may mean more than its shape says.
PLAIN_KINDS: set[type] = {torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor}


def fake_copy(model: ModuleT, device: torch.device, without: Iterable[nn.Module] = ()) -> ModuleT:
    """Deep copy ``model`` with every tensor replaced by an empty one on ``device``.

    Must run inside a fake mode. Storage shared by several tensors (views, ties by ``.data``) stays shared.

    Args:
        model: The model.
        device: Where its copy is.
        without: Modules in whose places the copy has empty ones.
    """
    storages: dict[int, torch.Tensor] = {}
    memo: dict[int, Any] = {id(module): nn.Module() for module in without}
    for tensor in _tensors_of(model, memo.keys()):
        memo[id(tensor)] = _fake_twin(tensor, device, storages)
    twin = copy.deepcopy(model, memo)
    if type(twin) is not type(model):
        raise SimulationError(
            f"A deep copy of {type(model).__name__} is a {type(twin).__name__}; it can't be simulated."
        )
    return twin


def fake_tree(tree: Any, device: torch.device) -> Any:
    """The same nested containers with every tensor replaced by an empty one on ``device``."""
    storages: dict[int, torch.Tensor] = {}

    def twin(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        fake = _fake_twin(leaf, device, storages)
        known.remember(fake, leaf)
        return fake

    return pytree.tree_map(twin, tree)


def _tensors_of(model: nn.Module, without: Collection[int]) -> list[torch.Tensor]:
    """Every tensor the model holds outside of some modules: parameters, buffers, and those kept as plain attributes."""
    found: dict[int, torch.Tensor] = {}
    for module in _modules_of(model, without):
        if isinstance(module, torch.jit.ScriptModule):
            raise SimulationError("A scripted module can't be simulated; profile with a real run instead.")
        for value in (*module._parameters.values(), *module._buffers.values()):
            if value is not None:
                found[id(value)] = value
        for name, value in vars(module).items():
            kind = type(value)
            if name in _REGISTERED or kind in _ATOMS or (kind in _CONTAINERS and not value):
                continue  # nearly all: to look into each is felt in deep models
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    found[id(leaf)] = leaf
    return list(found.values())


def _modules_of(model: nn.Module, without: Collection[int]) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in found and id(module) not in without:
            found[module] = None
            waiting.extend(child for child in reversed(module._modules.values()) if child is not None)
    return list(found)


def _fake_twin(tensor: torch.Tensor, device: torch.device, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise SimulationError(
            f"A {tensor.layout} tensor can't be simulated; profile with a real run instead."
        )
    if type(tensor) not in PLAIN_KINDS:
        raise SimulationError(
            f"A tensor of class {type(tensor).__name__} can't be simulated; profile with a real run instead."
        )
    storage = tensor.untyped_storage()
    if storage._cdata not in storages and tensor.nbytes == storage.nbytes() and tensor.is_contiguous():
        # By far the most: tensors that are all of their storage. Each operation less is felt in deep models.
        twin = storages[storage._cdata] = torch.empty(tensor.size(), dtype=tensor.dtype, device=device)
    else:
        twin = _view(tensor, storage, device, storages)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad) if tensor.is_leaf else twin


def _view(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    device: torch.device,
    storages: dict[int, torch.Tensor],
) -> torch.Tensor:
    """A fake tensor that shares the storage of others as ``tensor`` does."""
    if storage._cdata not in storages:
        elements = storage.nbytes() // max(1, tensor.element_size())
        storages[storage._cdata] = torch.empty(elements, dtype=tensor.dtype, device=device)
    base = storages[storage._cdata].detach().view(-1)
    if base.dtype is not tensor.dtype:
        base = base.view(tensor.dtype)
    return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
