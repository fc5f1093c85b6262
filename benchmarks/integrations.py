"""What works with which library, as the tests find it: a table of the rows that they record.

    MEMSCALE_MATRIX=rows.jsonl python -m pytest tests/integrations tests/pains/test_compiled_after_wrap.py
    python -m benchmarks.integrations rows.jsonl --json benchmarks/results/integrations.json --into docs/integrations.md

Each test that trains with and without MemScale adds a row: the techniques of the plan, what forward held for backward
at most, and the peak of all tensors, as measured in that test. A row is there only if its losses were equal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.tables import check_into, write_into
from memscale.benchmarks.results import check_writable, write_document
from memscale.errors import MemScaleError
from memscale.units import format_bytes

__all__ = ["main", "tables"]

LIBRARIES = ("torch", "transformers", "accelerate", "trl", "peft", "lightning", "bitsandbytes")
_PROGRAM = "python -m benchmarks.integrations"
_TESTS = (
    "`python -m pytest tests/integrations tests/pains/test_compiled_after_wrap.py` (`MEMSCALE_MATRIX` names the file "
    "that rows go to)"
)
_TABLE = "integrations"


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the table, with the versions and the command that made it."""
    lines = [
        "| library | as | techniques | held for backward, plain → wrapped | peak, plain → wrapped |",
        "|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        cells = [row["surface"], row["setting"], ", ".join(row["techniques"])]
        for measured in (row["held_bytes"], row["peak_bytes"]):
            cells.append(" → ".join(map(format_bytes, measured)) if measured else "–")
        lines.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines += ["", f"Measured on tiny models by {_TESTS}, with {versions}."]
    return {_TABLE: "\n".join(lines)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="the file that the tests have written")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the rows go")
    parser.add_argument("--into", type=Path, metavar="FILE", help="a Markdown file with this table")
    options = parser.parse_args(arguments)
    try:
        check_writable(options.json)
        check_into(options.into, [_TABLE])
    except MemScaleError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    rows = [json.loads(line) for line in options.rows.read_text(encoding="utf-8").splitlines()]
    results = {
        "versions": {name: version(name) for name in LIBRARIES},
        "rows": sorted(rows, key=lambda row: [row["surface"], row["setting"]]),
    }
    if options.json is not None:
        write_document(options.json, results)
    if options.into is not None:
        write_into(options.into, tables(results))
    print(*tables(results).values())
    return 0


if __name__ == "__main__":
    sys.exit(main())
