"""Write a JSON file with all that is known of an out-of-memory error that is raised in the end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from memscale.execution_plan import Plan
from memscale.memory.record import Snapshot
from memscale.version import __version__

if TYPE_CHECKING:
    from memscale.executor import Executor

__all__ = ["MAX_FILES", "dump_out_of_memory"]

MAX_FILES = 3
"""For one model: a loop that goes on after such errors must not fill the disk."""


def dump_out_of_memory(
    executor: Executor, where: str, tried: Sequence[Plan], why: str, peak: Snapshot | None
) -> str:
    """Write a file to the offload directory, or else to that for temporary files; return a line that says where.

    It never raises: the error that it is about matters more. If the file can't be written, the line says why.
    """
    written = executor.meter.dumps
    if len(written) >= MAX_FILES:
        return f"dumps of earlier such errors: {', '.join(written)}"
    try:
        path = _written(
            _directory(executor), json.dumps(_contents(executor, where, tried, why, peak), indent=1)
        )
    except Exception as error:
        return f"a dump of this could not be written: {type(error).__name__}: {error}"
    written.append(path)
    return f"all of this and more, as JSON: {path}"


def _contents(
    executor: Executor, where: str, tried: Sequence[Plan], why: str, peak: Snapshot | None
) -> dict[str, Any]:
    return {
        "schema": 1,
        "what": "out of memory",
        "where": where,
        "why_not_repeated": why,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "memscale": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": _device(executor.device),
        "plan": json.loads(executor.plan.to_json()),
        "plans_tried": [json.loads(plan.to_json()) for plan in tried],
        "report": dataclasses.asdict(executor.report()),
        "simulated_peak": None if peak is None else _peak(peak),
    }


def _device(device: torch.device) -> dict[str, Any]:
    about: dict[str, Any] = {"name": str(device)}
    if device.type == "cpu":
        return about
    module = torch.get_device_module(device)
    for figure in ("get_device_name", "memory_allocated", "memory_reserved", "max_memory_allocated"):
        ask = getattr(module, figure, None)
        if ask is not None:
            about[figure] = ask(device)
    return about


def _peak(peak: Snapshot) -> dict[str, Any]:
    return {
        "total_bytes": peak.total,
        "phase": str(peak.phase),
        "by_category": {str(category): size for category, size in peak.by_category},
        "largest": [
            {
                "bytes": top.nbytes,
                "category": str(top.category),
                "tensor": top.description,
                "module": top.module,
            }
            for top in peak.top
        ],
    }


def _directory(executor: Executor) -> str:
    config = executor.config
    directory = None if config is None else config.offload_dir
    if directory is None:
        return tempfile.gettempdir()
    os.makedirs(directory, exist_ok=True)
    return directory


def _written(directory: str, text: str) -> str:
    """Write a new file that only its owner can read, as the directory may be shared; return its path."""
    stem = f"memscale-oom-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbers = itertools.count()
    path = os.path.join(directory, f"{stem}.json")
    while os.path.lexists(path):
        path = os.path.join(directory, f"{stem}-{next(numbers)}.json")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except BaseException:
        os.unlink(path)
        raise
    return path
