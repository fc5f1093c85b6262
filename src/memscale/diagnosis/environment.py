"""What of MemScale can be used on this machine, and why the rest can't: a row for each thing that was looked at."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import platform
import re
import shutil
import subprocess
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch

from memscale.hardware import Hardware, detect
from memscale.optimizer.eight_bit import find_quantizer
from memscale.units import format_bytes
from memscale.version import __version__

Status = Literal["pass", "fail", "skip"]
Found = str | tuple[str, dict[str, float]]
"""What a check returns: the detail of its row, and figures."""


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, whether it works, and the numbers or the reason.

    Attributes:
        name: what was looked at.
        status: "skip" if it is not installed, or there is no such thing on this machine.
        detail: numbers in words, or what is wrong and what to do.
        figures: the numbers in bytes, bytes per second and seconds.
    """

    name: str
    status: Status
    detail: str
    figures: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


class Skipped(Exception):
    """There is no such thing here."""


class Failed(Exception):
    """A check failed, with the reason."""


def make_row(name: str, check: Callable[[], Found]) -> Finding:
    """Return the row of a check: what it returned, or why it failed."""
    try:
        found = check()
    except Skipped as reason:
        return Finding(name, "skip", without_paths(str(reason)))
    except Failed as reason:
        return Finding(name, "fail", without_paths(str(reason)))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return Finding(name, "fail", without_paths(f"{type(error).__name__} at {where}: {error}"))
    detail, figures = found if isinstance(found, tuple) else (found, {})
    return Finding(name, "pass", without_paths(detail), MappingProxyType(figures))


_PATHS = re.compile(r"(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\'\":,;()]+)+[/\\]([^\s/\\'\":,;()]+)")


def without_paths(text: str) -> str:
    """Return text with only the last name of each path in it.

    Example:
        >>> without_paths("No such file: '/home/someone/models/weights.bin'")
        "No such file: '.../weights.bin'"
    """
    return _PATHS.sub(r".../\1", text.replace(str(Path.home()), "~"))


def torch_device(hardware: Hardware) -> torch.device:
    """Return the device that a description is of."""
    kind, index = hardware.device.kind, hardware.device.index
    return torch.device(kind) if index is None else torch.device(kind, index)


@dataclass(frozen=True)
class _Library:
    module: str
    distribution: str
    oldest: tuple[int, ...]  # as in pyproject.toml
    use: str


LIBRARIES = (
    _Library("transformers", "transformers", (5, 0), "the Hugging Face Trainer"),
    _Library("accelerate", "accelerate", (1, 10), "Accelerate"),
    _Library("lightning", "lightning", (2, 6), "Lightning"),
    _Library("trl", "trl", (1, 16), "TRL's trainers"),
    _Library("peft", "peft", (0, 21), "adapters such as LoRA"),
    _Library("bitsandbytes", "bitsandbytes", (0, 49), "8-bit optimizer state"),
    _Library("safetensors", "safetensors", (0, 5), "weights read from files"),
    _Library("prometheus_client", "prometheus-client", (0, 20), "metrics for Prometheus"),
    _Library("rich", "rich", (13,), "tables that are drawn by rich"),
    _Library("typer", "typer", (0, 16), "the command memscale"),
    _Library("torchao", "torchao", (0, 15), "memscale bench --compare"),
    _Library("deepspeed", "deepspeed", (0,), "memscale bench --compare"),
)


def doctor(
    device: torch.device | str | None = None, *, offload_dir: str | os.PathLike[str] | None = None
) -> tuple[Finding, ...]:
    """Describe what MemScale finds on this machine: the device, torch and libraries, page-locked memory, disk.

    Optional libraries are imported, which may take some seconds. Of one that is not installed, or can't be used, the
    row says why, and what it would be for.

    Args:
        device: The device, as of `hardware.detect`: the machine's best one by default.
        offload_dir: The directory of the disk tier, if `Config(offload_dir=...)` names one.

    Raises:
        HardwareError: There is no such device, or the directory can't be one.

    Example:
        >>> rows = doctor("cpu")
        >>> rows[0].name, rows[0].status
        ('device', 'pass')
    """
    hardware = detect(device, offload_dir=offload_dir)
    where = torch_device(hardware)
    notes = "; ".join(hardware.device.notes)
    rows = [Finding("device", "pass", f"{hardware.describe()}{f' ({notes})' if notes else ''}")]
    build = "no CUDA" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    rows.append(
        Finding("torch", "pass", f"{torch.__version__} ({build}), Python {platform.python_version()}")
    )
    rows += [make_row(each.module, partial(_library, each, where)) for each in LIBRARIES]
    rows.append(make_row("page-locked memory", lambda: _page_locking(where)))
    rows.append(make_row("disk tier", lambda: _disk(hardware)))
    return tuple(rows)


def _library(library: _Library, device: torch.device) -> str:
    package = library.distribution
    try:
        version = importlib.metadata.version(library.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise Skipped(f"not installed; pip install {package} for {library.use}") from None
    found = tuple(int(part) if part.isdecimal() else 0 for part in version.split("."))
    if found < library.oldest:
        oldest = ".".join(map(str, library.oldest))
        raise Failed(
            f"{version} is too old for {library.use}: pip install --upgrade {package} (at least {oldest})"
        )
    warnings = logging.getLogger("bitsandbytes")  # peft imports it, too
    before = warnings.level
    warnings.setLevel(logging.ERROR)  # it warns of kernels that nothing here uses
    try:
        importlib.import_module(library.module)
    finally:
        warnings.setLevel(before)
    if library.module == "bitsandbytes":
        find_quantizer([torch.zeros(1, device=device), torch.zeros(1)])  # tried on the device and on its host
    return f"{version}: {library.use}"


def _page_locking(device: torch.device) -> str:
    if device.type != "cuda":
        raise Skipped(f"of no use on {device.type}")
    try:
        torch.empty(2**20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise Failed(f"refused, so that copies run at the rate of pageable memory: {error}") from error
    return "can be had"


def _disk(hardware: Hardware) -> str:
    disk = hardware.disk
    if not disk.writable:
        raise Failed("the directory can't be written to: set MEMSCALE_OFFLOAD_DIR or Config(offload_dir=...)")
    if disk.ram_backed:
        raise Failed(
            "the directory is in RAM, so that offloading frees none: set MEMSCALE_OFFLOAD_DIR to a disk"
        )
    return f"{format_bytes(disk.free_bytes)} free"


def versions() -> dict[str, str]:
    """Return the versions that a bug report needs."""
    found = {"memscale": __version__, "python": platform.python_version(), "system": platform.platform()}
    found["torch"] = torch.__version__
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["driver"] = _driver_version()
    for library in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[library.module] = importlib.metadata.version(library.distribution)
    return found


def _driver_version() -> str:
    """Return the version of NVIDIA's driver, by the program that comes with it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "not known: nvidia-smi is not there"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: nvidia-smi failed ({type(error).__name__})"
    return said.partition("\n")[0].strip()
