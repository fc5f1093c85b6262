"""What the command lines of the benchmarks share."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from memscale.errors import ConfigError

__all__ = ["check_writable", "command_line"]

_FILES = ("--json", "--into")


def check_writable(path: Path | None) -> None:
    """Before a run of minutes, not after it: raise a ConfigError if a results file can't be written."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--json {path} is a directory: give the name of a file.")
    if not path.parent.is_dir():
        raise ConfigError(f"--json {path}: there is no directory {path.parent}, make it first.")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--json {path}: the directory {path.parent} cannot be written to.")


def command_line(program: str, arguments: Sequence[str]) -> str:
    """The command line for others: a file by its place in this directory, or by its name alone.

    Example:
        >>> command_line("python -m memscale.benchmarks", ["--on", "RTX 3090", "--json", "/nowhere/a.json"])
        "python -m memscale.benchmarks --on 'RTX 3090' --json a.json"
    """
    shown = []
    before = ""
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if before in _FILES:
            argument = _without_machine(argument)
        elif equals and option in _FILES:
            argument = f"{option}={_without_machine(value)}"
        before = argument
        shown.append(argument)
    return " ".join([program, *map(shlex.quote, shown)])


def _without_machine(file: str) -> str:
    path = Path(os.path.normpath(Path.cwd() / file))
    try:
        return path.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.name
