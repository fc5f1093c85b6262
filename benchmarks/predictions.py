"""`python -m benchmarks.predictions`: predicted peaks against observed ones, family by family.

Every family of `tests/support/families.py` is wrapped and trained in every mode: on the executing virtual GPU with two
batches, on the CPU with the larger of them. Exits with 1 if a prediction is off by more than its bound.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.prediction_cases import (
    BOUNDS,
    DEVICES,
    Device,
    PredictionCase,
    PredictionRow,
    run_cases,
)
from benchmarks.tables import check_into, write_into
from memscale.benchmarks.models import unknown_name
from memscale.benchmarks.results import check_writable, command_line, write_document
from memscale.benchmarks.run import MODES
from memscale.errors import MemScaleError
from tests.support.families import SMALL_FAMILIES

__all__ = ["main", "tables"]

_PROGRAM = "python -m benchmarks.predictions"
_TABLE = "predictions"
_WRAPPED = tuple(mode for mode, config in MODES.items() if config is not None)
_BATCHES = (8, 16)
_ON: dict[Device, str] = {"vgpu": "the executing virtual GPU", "cpu": "the CPU"}
_MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, write what was asked for, and say how far off the predictions are.

    Returns:
        0; 1 if a prediction is off by more than its bound; 2 for arguments that are not allowed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    # Virtual machines that announce AMX and do not let a process use it end it at its first 16-bit product.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    os.environ["MEMSCALE_CALIBRATION"] = "none"  # plans that are the same on every machine
    try:
        check_writable(options.json)
        check_into(options.into, (_TABLE,))
        rows = _run(_cases(options))
        document = _document(rows, command_line(_PROGRAM, arguments))
        if options.json is not None:
            write_document(options.json, document)
        if options.into is not None:
            write_into(options.into, tables(document))
    except MemScaleError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    for device in DEVICES:
        if any(row.device == device for row in rows):
            print(summary(rows, device))
    broken = [row for row in rows if not row.holds]
    for row in broken:
        print(f"off by more than its bound: {_name(row)}: {row.error:+.2%}", file=sys.stderr)
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description="Predicted peaks against observed ones.")
    parser.add_argument("--families", type=_names, default=list(SMALL_FAMILIES), metavar="A,B")
    parser.add_argument("--modes", type=_names, default=list(_WRAPPED), metavar="A,B")
    parser.add_argument("--batches", type=_sizes, default=list(_BATCHES), metavar="N,M")
    parser.add_argument("--on", type=_names, default=list(DEVICES), metavar="A,B", help="vgpu, cpu or both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument(
        "--into", type=Path, metavar="FILE.md", help=f"write the table between its markers ({_TABLE})"
    )
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _sizes(text: str) -> list[int]:
    sizes = [int(name) for name in _names(text)]
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers from 1 on")
    return sizes


def _cases(options: argparse.Namespace) -> list[PredictionCase]:
    for kind, names, allowed in (
        ("family", options.families, SMALL_FAMILIES),
        ("mode", options.modes, _WRAPPED),
        ("device", options.on, DEVICES),
    ):
        for name in names:
            if name not in allowed:
                raise unknown_name(kind, name, allowed)
    return [
        PredictionCase(family, mode, batch, device)
        for device in options.on
        for family in options.families
        for mode in options.modes
        for batch in (options.batches if device == "vgpu" else [max(options.batches)])
    ]


def _run(cases: Sequence[PredictionCase]) -> list[PredictionRow]:
    rows = []
    start = time.perf_counter()
    for row in run_cases(cases):
        now = time.perf_counter()
        print(f"{_name(row)}: {row.error:+.2%} ({now - start:.1f} s)", file=sys.stderr, flush=True)
        start = now
        rows.append(row)
    return rows


def _name(row: PredictionRow) -> str:
    return f"{row.family}, {row.mode}, batch {row.batch}, {row.device}"


def _document(rows: Sequence[PredictionRow], command: str) -> dict[str, Any]:
    return {
        "schema": 1,
        "command": command,
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "rows": [row.to_dict() for row in rows],
    }


def summary(rows: Sequence[PredictionRow], device: Device) -> str:
    """One line: how many cases, and how far off."""
    there = [row for row in rows if row.device == device]
    errors = [abs(row.error) for row in there]
    under = max(row.error for row in there)
    return (
        f"{len(there)} cases on {_ON[device]} ({there[0].observation}): the prediction is off by {max(errors):.2%} at "
        f"worst and by {median(errors):.2%} in the median (bound {BOUNDS[device]:.0%}); at most "
        f"{max(0.0, under):.2%} more was needed than predicted."
    )


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Return the summary, and a table with a line for each family, mode and batch."""
    names = [field.name for field in fields(PredictionRow)]
    rows = [PredictionRow(**{name: row[name] for name in names}) for row in document["rows"]]
    devices = [device for device in DEVICES if any(row.device == device for row in rows)]
    lines = [f"- {summary(rows, device)}" for device in devices]
    heads = ["family", "mode", "batch"]
    for device in devices:
        heads += [f"{device}: predicted", "allowance", "observed", "error"]
    lines += ["", _line(heads), _line(["---", "---", "---:"] + ["---:"] * (len(heads) - 3))]
    found = {(row.family, row.mode, row.batch, row.device): row for row in rows}
    for family, mode, batch in dict.fromkeys((row.family, row.mode, row.batch) for row in rows):
        cells = [family, mode, str(batch)]
        for device in devices:
            cells += _cells(found.get((family, mode, batch, device)))
        lines.append(_line(cells))
    lines += [
        "",
        "MiB. Predictions without a mark are simulated; `*`: of a model whose shapes depend on data, measured by a "
        f"guarded real step. Made by `{document['command']}` (torch {document['torch']}, transformers "
        f"{document['transformers']}).",
    ]
    return {_TABLE: "\n".join(lines)}


def _cells(row: PredictionRow | None) -> list[str]:
    if row is None:
        return ["–"] * 4
    mark = "" if row.prediction == "simulated" else " \\*"
    return [
        f"{row.predicted_bytes / _MIB:.2f}{mark}",
        f"{row.allowance_bytes / _MIB:.2f}",
        f"{row.observed_bytes / _MIB:.2f}",
        f"{row.error:+.2%}",
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
