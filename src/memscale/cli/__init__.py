"""The command `memscale`: plans, fits, benchmarks and reports from a terminal."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command; return its exit code.

    0: done; 1: it failed; 2: wrong arguments; 3: nothing fits the device; 130: interrupted.
    """
    # A command's errors and tables are its own: models here have no trained weights, of which transformers warns.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        from memscale.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "click", "rich"):
            raise
        print(
            f"memscale: error: the command line needs {error.name}, which is not installed: "
            "pip install typer rich",
            file=sys.stderr,
        )
        return 1
    return run(sys.argv[1:])
