"""Weights in safetensors files, read tensor by tensor into memory of our own.

The files are read here, and not by the `safetensors` package: that maps a file, whose pages then count as the memory
of this process for as long as the file is open. The format is a length, a JSON header, and the bytes of the tensors.
Files of other formats (pickles) are never read.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memscale.errors import WeightsError, shown
from memscale.tiers.disk import read_into

__all__ = ["StoredTensor", "find_files", "tensors_in"]

_LARGEST_HEADER = 100_000_000  # as the safetensors package has it
_LENGTH = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        file: The file.
        offset: Where its bytes begin there.
        dtype: Its type.
        shape: Its shape.
    """

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """The tensor, in memory of its own.

        Raises:
            WeightsError: The file can't be read, or ends early.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        if tensor.numel():
            try:
                with open(self.file, "rb", buffering=0) as file:
                    read_into(file.fileno(), tensor, self.offset)
            except OSError as error:
                raise WeightsError(f"{self.file} can't be read: {error.strerror or error}.") from error
        return tensor


def find_files(path: str | os.PathLike[str]) -> list[Path]:
    """The safetensors files that a path stands for: one file, an index of several, or a directory with either.

    Raises:
        WeightsError: There are none.
    """
    place = Path(path)
    if place.is_dir():
        for pattern in ("model.safetensors.index.json", "*.safetensors.index.json"):
            indices = sorted(place.glob(pattern))
            if len(indices) == 1:
                return _files_of_index(indices[0])
        files = sorted(place.glob("*.safetensors"))
        if place / "model.safetensors" in files:
            return [place / "model.safetensors"]
        if files:
            return files
        raise WeightsError(
            f"There is no .safetensors file in {place}. Pickled weights (.bin, .pt) are not read: convert them, for "
            "example with model.save_pretrained(directory) of transformers."
        )
    if not place.exists():
        raise WeightsError(
            f"There is no {place}. Give a .safetensors file, an index of several, or their directory."
        )
    if place.name.endswith(".json"):
        return _files_of_index(place)
    return [place]


def tensors_in(files: list[Path]) -> dict[str, StoredTensor]:
    """The tensors of some files by their names; only headers are read.

    Raises:
        WeightsError: A file is not a safetensors file, or two have the same tensor.
    """
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _header_of(file).items():
            if name in found:
                raise WeightsError(
                    f"The tensor {name!r} is in {found[name].file.name} and in {file.name}. Give the index of the "
                    "files that belong together, or one of the files."
                )
            found[name] = tensor
    return found


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
            raise WeightsError(
                f"{index} names the file {shown(name)}, which is not beside it. Check the index."
            )
        if not (index.parent / name).exists():
            raise WeightsError(
                f"{index} names {name}, which is not there. Download or copy all of its files."
            )
    return [index.parent / name for name in names]


def _header_of(path: Path) -> dict[str, StoredTensor]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH), "little")
            if size < _LENGTH or length > min(_LARGEST_HEADER, size - _LENGTH):
                raise WeightsError(_not_safetensors(path, "its header is longer than the file"))
            header = json.loads(file.read(length))
    except OSError as error:
        raise WeightsError(f"{path} can't be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError):
        raise WeightsError(_not_safetensors(path, "its header is not JSON")) from None
    if not isinstance(header, dict):
        raise WeightsError(_not_safetensors(path, "its header is not an object"))
    start = _LENGTH + length
    return {
        name: _entry(path, name, entry, start, size)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _entry(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
        whole = isinstance(kind, str) and all(type(each) is int and each >= 0 for each in numbers)
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise WeightsError(_not_safetensors(path, f"the entry of {name!r} is broken"))
    if kind not in _DTYPES:
        raise WeightsError(f"The tensor {name!r} in {path} is of type {shown(kind)}, which is not supported.")
    tensor = StoredTensor(path, start + begin, _DTYPES[kind], shape)
    if end - begin != tensor.nbytes or start + end > size:
        raise WeightsError(
            _not_safetensors(path, f"the bytes of {name!r} are not those of its shape, or the file was cut")
        )
    return tensor


def _not_safetensors(path: Path, why: str) -> str:
    return f"{path} is not a whole safetensors file: {why}. Only safetensors files are read, never pickles."
