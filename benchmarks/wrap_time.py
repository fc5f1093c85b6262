"""How long `plan`, `wrap` and `find_batch_size` take: `python -m benchmarks.wrap_time`.

Each figure is of a fresh process, in which nothing has been planned yet. Weights that are there have been written to,
as real ones are; in BALANCED on a CPU `wrap` takes them to disk, mostly while it plans. What plain writes to the same
disk reach is measured beside it. Batches are looked for on a simulated GPU.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.tables import check_into, write_into
from memscale.api import find_batch_size, plan, wrap
from memscale.benchmarks.models import find_model, quiet_transformers
from memscale.benchmarks.results import check_writable, command_line, write_document
from memscale.config import Config
from memscale.errors import ConfigError, MemScaleError
from memscale.executor import executor_of
from memscale.hardware import detect
from memscale.memory.process import measure_in_fresh_process
from memscale.units import format_bytes

__all__ = ["Row", "main", "tables"]

GPU = "RTX 3090"
WAYS = ("plan, on meta", "wrap, on meta", "wrap, with weights", f"find_batch_size, {GPU}")
PROBE_BYTES = 2**29
PIECE_BYTES = 2**20
_PROGRAM = "python -m benchmarks.wrap_time"
_TABLE = "wrap_time"


@dataclass(frozen=True)
class Row:
    """One way to begin with one model.

    Attributes:
        model: By its name in the registry.
        way: What was called, and on what.
        mode: Of the Config.
        seconds: Of each run.
        moved_bytes: What `wrap` has written to disk.
        write_rates: Bytes a second of plain writes to that disk, after each run.
    """

    model: str
    way: str
    mode: str
    seconds: tuple[float, ...]
    moved_bytes: int
    write_rates: tuple[float, ...]


def _run(model: str, way: str, mode: str, batch: int | None, seq: int | None) -> dict[str, Any]:
    """In a process of its own."""
    case = find_model(model)
    for name in case.modules:
        importlib.import_module(name)
    with quiet_transformers():
        inputs = case.inputs(batch or case.batch, seq or case.seq)
        with torch.device("meta"):
            built = case.build().train()
        if way == "wrap, with weights":
            built.to_empty(device="cpu")
            for tensor in (*built.parameters(), *built.buffers()):
                tensor.data.fill_(1)
        config = Config(mode=mode, enable_logging=False)
        start = time.perf_counter()
        if way == "plan, on meta":
            plan(built, inputs, config)
        elif way.startswith("find_batch_size"):
            find_batch_size(built, inputs, config, GPU)
        else:
            wrap(built, config, inputs)
        seconds = time.perf_counter() - start
    executor = executor_of(built)
    moved = executor.bytes_on_disk if executor is not None and way == "wrap, with weights" else 0
    return {"seconds": seconds, "moved": moved, "rate": _write_rate() if moved else 0.0}


def _write_rate() -> float:
    """Bytes a second of plain writes to the disk that parameters go to."""
    piece = bytes(PIECE_BYTES)
    directory = detect().disk.directory
    with tempfile.TemporaryFile(dir=directory if directory.is_dir() else directory.parent) as file:
        start = time.perf_counter()
        for _ in range(PROBE_BYTES // PIECE_BYTES):
            os.write(file.fileno(), piece)
        return PROBE_BYTES / (time.perf_counter() - start)


def _measured(model: str, way: str, options: argparse.Namespace) -> Row:
    runs = [
        measure_in_fresh_process(_run, model, way, options.mode, options.batch, options.seq).result
        for _ in range(options.rounds)
    ]
    return Row(
        model,
        way,
        options.mode,
        tuple(round(run["seconds"], 3) for run in runs),
        runs[0]["moved"],
        tuple(round(run["rate"]) for run in runs if run["rate"]),
    )


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Return the table of a file of results, with the command that made it."""
    rows = [Row(**row) for row in document["rows"]]
    lines = ["| model | | seconds | written to disk | plain writes there |", "|---|---|---|---|---|"]
    for row in rows:
        moved, rates = "–", "–"
        if row.moved_bytes:
            moved = format_bytes(row.moved_bytes)
            rates = f"{_spread([rate / 1e9 for rate in row.write_rates])} GB/s"
        lines.append(f"| {row.model} | {row.way} | {_spread(row.seconds)} | {moved} | {rates} |")
    made_by = f"Measured by `{document['command']}`: medians of fresh processes, with the least and the most."
    return {_TABLE: "\n".join([*lines, "", made_by])}


def _spread(numbers: Sequence[float]) -> str:
    middle = f"{median(numbers):.2g}" if median(numbers) < 1 else f"{median(numbers):.1f}"
    return middle if len(numbers) == 1 else f"{middle} ({min(numbers):.1f} to {max(numbers):.1f})"


def _check(options: argparse.Namespace) -> None:
    """Before a run of minutes, not after it."""
    for model in options.models:
        find_model(model)
    Config(mode=options.mode)
    for name in ("rounds", "batch", "seq"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value} is not allowed: give a number from 1 on.")
    check_writable(options.json)
    check_into(options.into, (_TABLE,))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="How long plan, wrap and find_batch_size take."
    )
    parser.add_argument("--models", nargs="+", default=["bert-base", "gpt2-xl"], metavar="NAME")
    parser.add_argument("--mode", default="balanced", help="of the Config (default: balanced)")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes for each figure (default: 3)")
    parser.add_argument("--batch", type=int, help="samples in a batch (default: the model's)")
    parser.add_argument("--seq", type=int, help="tokens in a sample (default: the model's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--into", type=Path, metavar="FILE.md", help=f"write the table ({_TABLE})")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    try:
        _check(options)
        command = command_line(_PROGRAM, given)
        rows = [_measured(model, way, options) for model in options.models for way in WAYS]
        document = {
            "schema": 1,
            "command": command,
            "source": "measured",
            "torch": torch.__version__,
            "rows": [asdict(row) for row in rows],
        }
        print(*tables(document).values())
        if options.json is not None:
            write_document(options.json, document)
        if options.into is not None:
            write_into(options.into, tables(document))
    except MemScaleError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
