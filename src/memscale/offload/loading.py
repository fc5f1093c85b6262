"""``load_safetensors``: weights from files, straight to where the model has them at home."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from memscale.errors import WeightsError, WrapTypeError, shown
from memscale.offload.materialised import Materialised, is_on_meta, tie_on_meta
from memscale.offload.safetensors_files import StoredTensor, find_files, tensors_in
from memscale.tiers.store import DiskStore

__all__ = ["LoadedKeys", "fill_pending", "has_pending", "load_safetensors", "pending_is_done"]

_PENDING = (
    "_memscale_weights"  # where a model on the meta device has the files that its weights will come from
)
_SHOWN = 8


class LoadedKeys(NamedTuple):
    """What did not match, as ``load_state_dict`` returns it.

    Attributes:
        missing_keys: Tensors of the model that are in no file.
        unexpected_keys: Tensors of the files that the model does not have.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_safetensors(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> LoadedKeys:
    """Load a model's weights from safetensors files, one tensor at a time.

    Before ``wrap`` and after it. Tensors of a wrapped model are written where they are at home, on disk too. Those of
    a model on the meta device stay there: they are read when ``wrap`` attaches its plan, each straight to its home, so
    that the model is never in memory as a whole. Values are converted to the type that the parameter has. What no
    file has, if ``strict`` allows that, is initialised as the model does it itself.

    Args:
        model: The model.
        path: A ``.safetensors`` file, a ``.safetensors.index.json`` of several, or a directory that has either. The
            files must stay until the model was wrapped.
        strict: Raise if anything is missing or unexpected. A tied weight has to be there once.

    Raises:
        WeightsError: A file is not there or not a safetensors file, a shape does not match, or, if ``strict``, keys do
            not. The model is as it was.
        WrapTypeError: `model` is not a module.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> with torch.device("meta"):
        ...     model = nn.Linear(3, 1)
        >>> with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        ...     save_file({"weight": torch.ones(1, 3), "bias": torch.zeros(1)}, file.name)
        ...     keys = load_safetensors(model, file.name)
        ...     import memscale
        ...     _ = memscale.wrap(model, memscale.Config(enable_logging=False), torch.ones(2, 3))
        >>> model(torch.ones(1, 3)).item()
        3.0
        >>> memscale.detach(model)
    """
    if not isinstance(model, nn.Module):
        raise WrapTypeError(f"memscale.load_safetensors takes an nn.Module, got {shown(model, 60)}.")
    stored = tensors_in(find_files(path))
    tie_on_meta(model)
    tensors = _named_tensors(model)
    keys = _matching_keys(model, tensors, stored)
    found = {name: stored[key] for name, key in keys.items() if key in stored}
    result = _differences(model, tensors, found, set(stored) - set(keys.values()))
    _check(model, tensors, found, result, strict=strict)
    later = Pending({name: each for name, each in found.items() if is_on_meta(tensors[name])})
    store = _store_of(model)
    written: set[int] = set()
    for name, source in found.items():
        tensor = tensors[name]
        if is_on_meta(tensor) or id(tensor) in written:
            continue
        written.add(id(tensor))
        with torch.no_grad():
            tensor.copy_(source.read())
        if store is not None:
            store.rest(tensor)
    if later.tensors:
        vars(model)[_PENDING] = later
    return result


@dataclass(frozen=True)
class Pending:
    """What a model on the meta device will be given: tensors of files, by their names in the model."""

    tensors: Mapping[str, StoredTensor]


def fill_pending(model: nn.Module, made: Materialised, settle: Callable[[nn.Parameter], None]) -> None:
    """Read what :func:`load_safetensors` has noted for tensors that are on the meta device, and settle each at once.

    Raises:
        WeightsError: A file can't be read any more.
    """
    pending = vars(model).get(_PENDING)
    if not isinstance(pending, Pending):
        return
    for name, tensor in _named_tensors(model).items():
        source = pending.tensors.get(name)
        if source is None or not is_on_meta(tensor) or not is_on_meta(_tensor_of(model, name)):
            continue  # a tied one is filled under its first name
        given = made.give(tensor, _read_as(tensor, source), stored=True)
        if isinstance(given, nn.Parameter):
            settle(given)


def has_pending(model: nn.Module) -> bool:
    """Whether weights for a model on the meta device are to come from files."""
    return isinstance(vars(model).get(_PENDING), Pending)


def pending_is_done(model: nn.Module) -> None:
    """The model has what was noted for it."""
    vars(model).pop(_PENDING, None)


def _read_as(tensor: torch.Tensor, source: StoredTensor) -> torch.Tensor:
    values = source.read().to(tensor.dtype)
    if values.stride() == tensor.stride():
        return values
    return torch.empty_like(tensor, device=values.device, requires_grad=False).copy_(values)


def _store_of(model: nn.Module) -> DiskStore | None:
    from memscale.executor import executor_of  # the executor needs this module

    executor = executor_of(model)
    return None if executor is None else executor.homes.store


# ---------------------------------------------------------------------- names


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model's ``state_dict`` has; tied ones under each of their names."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own: dict[str, Any] = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def _tensor_of(model: nn.Module, name: str) -> torch.Tensor | None:
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    return module._parameters[own] if own in module._parameters else module._buffers[own]


def _matching_keys(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]
) -> dict[str, str]:
    """Where each tensor of the model is looked for in the files: under its name, or as transformers' own loading does,
    with or without the name of the model inside (``transformer.h.0`` and ``h.0``)."""
    inner = getattr(model, "base_model_prefix", None)
    if not isinstance(inner, str) or not inner:
        return {name: name for name in tensors}
    prefix = f"{inner}."
    in_model = any(name.startswith(prefix) for name in tensors)
    in_files = any(key.startswith(prefix) for key in stored)
    if in_model and not in_files:
        return {name: name.removeprefix(prefix) for name in tensors}
    if in_files and not in_model:
        return {name: prefix + name for name in tensors}
    return {name: name for name in tensors}


def _differences(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    found: Mapping[str, StoredTensor],
    unused: set[str],
) -> LoadedKeys:
    there = {id(tensors[name]) for name in found}
    missing = [name for name, tensor in tensors.items() if id(tensor) not in there]
    unexpected = sorted(unused)
    expected_by_model = [*_patterns(model, "_keys_to_ignore_on_load_unexpected")]
    # Buffers that older versions of transformers saved, and newer ones compute.
    if any(name.endswith("rotary_emb.inv_freq") for name, _ in model.named_buffers()):
        expected_by_model.append(r"rotary_emb\.inv_freq$")
    if any(name.endswith("position_ids") for name, _ in model.named_buffers()):
        expected_by_model.append(r"(^|\.)position_ids$")
    return LoadedKeys(
        _unlike(missing, _patterns(model, "_keys_to_ignore_on_load_missing")),
        _unlike(unexpected, expected_by_model),
    )


def _patterns(model: nn.Module, attribute: str) -> list[str]:
    return sorted(getattr(model, attribute, None) or ())


def _unlike(keys: list[str], patterns: Iterable[str]) -> list[str]:
    searches = [re.compile(pattern).search for pattern in patterns]
    return [key for key in keys if not any(search(key) for search in searches)]


def _check(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    found: Mapping[str, StoredTensor],
    keys: LoadedKeys,
    *,
    strict: bool,
) -> None:
    problems = []
    if strict and keys.missing_keys:
        problems.append(f"Missing in the files: {_listed(keys.missing_keys)}.")
    if strict and keys.unexpected_keys:
        problems.append(f"Unexpected in the files: {_listed(keys.unexpected_keys)}.")
    for name, source in found.items():
        if tuple(tensors[name].shape) != source.shape:
            problems.append(
                f"{name!r} has the shape {tuple(tensors[name].shape)}, in the file {source.shape}."
            )
    if problems:
        hint = " Give strict=False to load what matches." if strict and any(keys) else ""
        shown_problems = " ".join(problems[:_SHOWN])
        raise WeightsError(f"The files do not fit {type(model).__name__}. {shown_problems}{hint}")


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(map(repr, keys[:_SHOWN])) + more
