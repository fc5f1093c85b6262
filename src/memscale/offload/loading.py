"""``load_safetensors``: weights from files, one tensor at a time, directly to the tier that the model has them on."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from memscale.errors import WeightsError, WrapTypeError, shown
from memscale.techniques.base import EXECUTOR

_PENDING = "_memscale_weights"  # the files that the weights of a model on the meta device will be read from
_LONGEST_LIST = 8  # names in an error message


class LoadedKeys(NamedTuple):
    """What did not match, as ``load_state_dict`` returns it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_safetensors(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> LoadedKeys:
    """Load a model's weights from safetensors files, one tensor at a time.

    Works before ``wrap`` and after it. Tensors of a wrapped model are written where they are, on disk too. Those of
    a model on the meta device are read when ``wrap`` attaches its plan, each directly to its tier, so that the whole
    model is never in memory. Values are converted to the parameter's type. What no file has, if ``strict`` allows
    that, is initialised by the model's own modules.

    Args:
        model: The model.
        path: A ``.safetensors`` file, a ``.safetensors.index.json`` of several, or a directory that has either. The
            files must stay until the model was wrapped.
        strict: Raise if anything is missing or unexpected. A tied weight has to be there once.

    Raises:
        WeightsError: A file is not there or not a safetensors file, a shape does not match, keys do not match (if
            ``strict``), or the ``safetensors`` package is not installed. The model is as it was.
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
    stored = _tensors_in(_find_files(path))
    tie_on_meta(model)
    tensors = _named_tensors(model)
    keys = _keys_in_files(model, tensors, stored)
    found = {name: stored[key] for name, key in keys.items() if key in stored}
    result = _differences(model, tensors, found, sorted(set(stored) - set(keys.values())))
    problems = [
        f"{name!r} has the shape {tuple(tensors[name].shape)}, in the file {source.shape}."
        for name, source in found.items()
        if tuple(tensors[name].shape) != source.shape
    ][:_LONGEST_LIST]
    if strict and any(result):
        missing, unexpected = map(_listed, result)
        problems += [f"Missing in the files: {missing}."] if missing else []
        problems += [f"Unexpected in the files: {unexpected}."] if unexpected else []
        problems.append("Give strict=False to load what matches.")
    if problems:
        raise WeightsError(f"The files do not fit {type(model).__name__}. {' '.join(problems)}")
    executor = vars(model).get(EXECUTOR)
    for name, source in {id(tensors[name]): (name, source) for name, source in found.items()}.values():
        if not tensors[name].is_meta:
            with torch.no_grad():
                tensors[name].copy_(source.read())
            if executor is not None:
                executor.placement.store.release_pages(tensors[name])
    pending = {name: source for name, source in found.items() if tensors[name].is_meta}
    if pending:
        vars(model)[_PENDING] = pending
    return result


def pending_tensors(model: nn.Module) -> Iterator[tuple[torch.Tensor, StoredTensor]]:
    """Yield the tensors on the meta device that :func:`load_safetensors` has files for."""
    pending: Mapping[str, StoredTensor] = vars(model).get(_PENDING, {})
    tensors = _named_tensors(model)
    by_id = {
        id(tensors[name]): (tensors[name], source) for name, source in pending.items() if name in tensors
    }
    yield from (each for each in by_id.values() if each[0].is_meta)


def forget_pending(model: nn.Module) -> None:
    """Forget the files: the model has its weights."""
    vars(model).pop(_PENDING, None)


def tie_on_meta(model: nn.Module) -> None:
    """Tie what transformers says is tied: accelerate's ``init_empty_weights`` copies each parameter."""
    for module in model.modules():
        if hasattr(module, "all_tied_weights_keys") and all(each.is_meta for each in module.parameters()):
            cast(Any, module).tie_weights()


# ---------------------------------------------------------------------- files


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    file: Path
    key: str
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Return the tensor in memory of its own, or raise a WeightsError."""
        with _opened(self.file) as file:
            tensor: torch.Tensor = file.get_tensor(self.key)
            return tensor


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise WeightsError(
            "Weights are read by the safetensors package, which is not installed: pip install safetensors."
        ) from error
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except OSError as error:
        raise WeightsError(f"{path} can't be read: {error.strerror or error}.") from error
    except Exception as error:
        raise WeightsError(
            f"{path} is not a whole safetensors file: {error}. Only safetensors files are read, never pickles."
        ) from error


def _find_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files that a path stands for: one file, an index of several, or a directory with either."""
    path = Path(path)
    if not path.exists():
        raise WeightsError(
            f"There is no {path}. Give a .safetensors file, an index of several, or a directory."
        )
    if not path.is_dir():
        return _files_of_index(path) if path.name.endswith(".json") else [path]
    for pattern in ("model.safetensors.index.json", "*.safetensors.index.json"):
        indices = sorted(path.glob(pattern))
        if len(indices) == 1:
            return _files_of_index(indices[0])
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise WeightsError(
            f"There is no .safetensors file in {path}. Pickled weights (.bin, .pt) are not read: convert them, for "
            "example with model.save_pretrained(directory) of transformers."
        )
    return [path / "model.safetensors"] if path / "model.safetensors" in files else files


def _files_of_index(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except OSError as error:
        raise WeightsError(f"{index} can't be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WeightsError(
            f"{index} is not an index of safetensors files: those have a 'weight_map' from tensors to files."
        ) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise WeightsError(f"{index} names the file {shown(name)}, which is not beside it.")
        if not (index.parent / name).exists():
            raise WeightsError(f"{index} names {name}, which is not there. Copy all of its files.")
    return [index.parent / name for name in names]


def _tensors_in(files: list[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of some files by their names; only headers are read."""
    found: dict[str, StoredTensor] = {}
    for path in files:
        with _opened(path) as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        for key, shape in shapes.items():
            if key in found:
                raise WeightsError(
                    f"The tensor {key!r} is in {found[key].file.name} and in {path.name}. Give the index of the "
                    "files that belong together, or one of the files."
                )
            found[key] = StoredTensor(path, key, shape)
    return found


# ---------------------------------------------------------------------- names


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a model's ``state_dict`` has; tied ones under each of their names."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _keys_in_files(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]
) -> dict[str, str]:
    """Return each tensor's key in the files: its name, with or without ``base_model_prefix`` (``transformer.h.0``)."""
    inner = getattr(model, "base_model_prefix", None)
    if isinstance(inner, str) and inner:
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
    unexpected: list[str],
) -> LoadedKeys:
    def unlike(keys: list[str], patterns: list[str]) -> list[str]:
        return [key for key in keys if not any(re.search(pattern, key) for pattern in patterns)]

    there = {id(tensors[name]) for name in found}
    missing = [name for name, tensor in tensors.items() if id(tensor) not in there]
    may_be_missing = list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    may_be_there = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    # Buffers that older versions of transformers saved, and newer ones compute.
    for name in ("rotary_emb.inv_freq", "position_ids"):
        if any(buffer.endswith(name) for buffer, _ in model.named_buffers()):
            may_be_there.append(rf"(^|\.){re.escape(name)}$")
    return LoadedKeys(unlike(missing, may_be_missing), unlike(unexpected, may_be_there))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LONGEST_LIST} more" if len(names) > _LONGEST_LIST else ""
    return ", ".join(map(repr, names[:_LONGEST_LIST])) + more
