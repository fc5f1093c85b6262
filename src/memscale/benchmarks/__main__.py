"""`python -m memscale.benchmarks`: the command line of the suite."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from memscale._util.terminal import progress, table
from memscale.benchmarks.compare import compare, is_own, tables, versions, ways_of
from memscale.benchmarks.models import DEFAULT_MODELS, MODELS, device_name, find_device
from memscale.benchmarks.peers import PEERS
from memscale.benchmarks.results import (
    Results,
    Row,
    cells,
    check_resumable,
    check_writable,
    command_line,
    machine,
    missing,
)
from memscale.benchmarks.run import BUDGET, MODES, Case, run_suite
from memscale.errors import ConfigError, ConfigTypeError, HardwareError, MemScaleError
from memscale.units import format_bytes

_PROGRAM = "python -m memscale.benchmarks"


def main(argv: Sequence[str] | None = None, *, program: str = _PROGRAM) -> int:
    """Run the suite as the arguments say, and print its table; return its exit code.

    0: done; 1: a case failed, other than a peer's; 2: wrong arguments; 3: nothing fits the device.

    Args:
        argv: The arguments; those of the process by default.
        program: What help and errors call it. Results name `python -m memscale.benchmarks` always.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser(program).parse_args(arguments)
    try:
        check_writable(options.json)
        if options.peers is not None and not options.compare:
            raise ConfigError("--peers names what to compare with: give --compare as well.")
        rows = _run(options, command_line(_PROGRAM, arguments))
    except MemScaleError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, ConfigTypeError, HardwareError)) else 1
    print(_comparison(rows) if options.compare else _table(rows, options.on))
    if options.json is not None:
        print(f"Written to {options.json}.")
    return _exit_code([row for row in rows if is_own(row)] if options.compare else rows)


def _exit_code(rows: Sequence[Row]) -> int:
    """Return 1 if a row failed, 3 if none of them fits, else 0."""
    without = [row for row in rows if row.peak_bytes is None]
    if any(missing(row) in ("failed", "killed") for row in without):
        return 1
    return 3 if without and len(without) == len(rows) else 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with one line, as all errors do; `--help` has the usage."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def _parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program,
        description="Train the models of the suite for a few steps, and show the memory that takes.",
        epilog="A case that fails or does not fit gets a row that says so. With --json, rows are written as they come, "
        "and a case that the file has is not run again: remove the file to begin anew. Examples: "
        f'{program} --on "RTX 3090"; {program} --on cpu --compare --models bert-base',
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
        metavar="A,B",
        help=f"of {', '.join(MODES)}, and {BUDGET}: the published peak as memory_budget (default: none,balanced; "
        "with --compare all but none and budget)",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="side by side with other ways to train in less memory",
    )
    parser.add_argument(
        "--peers",
        type=_names,
        metavar="A,B",
        help=f"what to compare with, of {', '.join(PEERS)} (default: all)",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="samples in a batch (default: the model's)")
    parser.add_argument("--seq", type=int, metavar="N", help="tokens in a sample (default: the model's)")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="training steps (default: 2; with --compare 3)"
    )
    parser.add_argument(
        "--no-overlap",
        dest="overlap",
        action="store_false",
        help="as in a loop that changes gradients between backward and step(), by clipping say",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file as well")
    return parser


def option_names() -> list[str]:
    """Return the names of all options, for a shell to complete."""
    return re.findall(r"--[a-z-]+", _parser(_PROGRAM).format_usage())


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    return list(dict.fromkeys(name for name in names if name)) or [text]


def _run(options: argparse.Namespace, command: str) -> list[Row]:
    """Run the suite or the comparison, writing its file after each case, and return the rows."""
    if options.compare:
        names = ways_of(options.peers or list(PEERS), options.modes or list(MODES))
    else:
        names = options.modes or ["none", "balanced"]
    where = {} if find_device(options.on) is not None else machine()  # simulated: the same on every machine
    document = Results(command, versions(names), (), where, is_comparison=options.compare)
    kept: tuple[Row, ...] = ()
    if options.json is not None and options.json.exists():
        old = Results.read(options.json)
        if old.is_comparison != options.compare:
            raise ConfigError(f"{options.json} is of another kind: give another file, or remove this one.")
        check_resumable({**old.versions, **old.machine}, {**document.versions, **where}, options.json)
        kept = old.rows
    steps = (3 if options.compare else 2) if options.steps is None else options.steps
    sizes = {"batch": options.batch, "seq": options.seq, "steps": steps, "overlap": options.overlap}
    if options.compare:
        rows = compare([Case.of(model, **sizes) for model in options.models], names, options.on, kept)
    else:
        rows = run_suite(options.models, names, on=options.on, known=kept, **sizes)
    found: list[Row] = []

    def write() -> None:
        if options.json is not None:
            done = {each.key for each in found}
            others = tuple(each for each in kept if each.key not in done)
            replace(document, rows=(*found, *others)).write(options.json)

    write()
    with progress([f"{model}, {name}" for model in options.models for name in names]) as advance:
        for row in rows:
            peak = row.note if row.peak_bytes is None else format_bytes(row.peak_bytes)
            found.append(row)
            write()
            advance(f"{row.model}, {row.mode}: {'already there' if row in kept else peak}")
    return found


def _comparison(rows: Sequence[Row]) -> str:
    shown = [
        table(title, text.columns, text.rows, caption="\n".join(text.remarks)) for title, text in tables(rows)
    ]
    return "\n\n".join(shown)


def _table(rows: Sequence[Row], on: str) -> str:
    text = cells(rows, brief=True)
    title = f"Peak memory of training on {device_name(on)} ({rows[0].source})"
    return table(title, text.columns, text.rows, caption="\n".join(text.remarks))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted", file=sys.stderr)
        sys.exit(130)
