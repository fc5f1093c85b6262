"""`python -m memscale.benchmarks`: the command line of the suite."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from memscale._util.terminal import table
from memscale.benchmarks.models import DEFAULT_MODELS, MODELS, device_name
from memscale.benchmarks.results import Results, Row, cells, check_writable, command_line
from memscale.benchmarks.run import BUDGET, MODES, run_suite
from memscale.errors import ConfigError, ConfigTypeError, HardwareError, MemScaleError
from memscale.units import format_bytes

_PROGRAM = "python -m memscale.benchmarks"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite as the arguments say, and print its table; return 2 for wrong ones, 1 for a run that failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        check_writable(options.json)
        rows = _run(options)
        if options.json is not None:
            Results(
                command=command_line(_PROGRAM, arguments),
                torch=torch.__version__,
                transformers=importlib.metadata.version("transformers"),
                rows=tuple(rows),
            ).write(options.json)
    except MemScaleError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, ConfigTypeError, HardwareError)) else 1
    print(_table(rows, options.on))
    if options.json is not None:
        print(f"Written to {options.json}.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Train the models of the suite for a few steps, and show the memory that takes.",
        epilog="A case that does not fit is a result too: it gets a row that says so.",
    )
    parser.add_argument(
        "--on",
        default="RTX 3090",
        metavar="DEVICE",
        help='a GPU to simulate ("RTX 3090"), a size of one ("24GiB"), or cpu to train and measure for real '
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--models",
        type=_names,
        default=list(DEFAULT_MODELS),
        metavar="A,B",
        help=f"of {', '.join(MODELS)} (default: {','.join(DEFAULT_MODELS)})",
    )
    parser.add_argument(
        "--modes",
        type=_names,
        default=["none"],
        metavar="A,B",
        help=f"of {', '.join(MODES)}, and {BUDGET}: the published peak as memory_budget (default: none)",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="samples in a batch (default: the model's)")
    parser.add_argument("--seq", type=int, metavar="N", help="tokens in a sample (default: the model's)")
    parser.add_argument(
        "--steps", type=int, default=2, metavar="N", help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--no-overlap",
        dest="overlap",
        action="store_false",
        help="as in a loop that changes gradients between backward and step(), by clipping say",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file as well")
    return parser


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    return list(dict.fromkeys(name for name in names if name)) or [text]


def _run(options: argparse.Namespace) -> list[Row]:
    found: list[Row] = []
    start = time.perf_counter()
    for row in run_suite(
        options.models,
        options.modes,
        on=options.on,
        batch=options.batch,
        seq=options.seq,
        steps=options.steps,
        overlap=options.overlap,
    ):
        now = time.perf_counter()
        peak = row.note if row.peak_bytes is None else format_bytes(row.peak_bytes)
        print(f"{row.model}, {row.mode}: {peak} ({now - start:.1f} s)", file=sys.stderr, flush=True)
        start = now
        found.append(row)
    return found


def _table(rows: Sequence[Row], on: str) -> str:
    text = cells(rows)
    title = f"Peak memory of training on {device_name(on)} ({rows[0].source})"
    return table(title, text.columns, text.rows, caption="\n".join(text.remarks))


if __name__ == "__main__":
    sys.exit(main())
