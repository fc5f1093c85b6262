"""Results as tables in Markdown files.

`python -m benchmarks.tables` (`make tables`) writes the tables of README.md and docs/ from benchmarks/results;
`python -m benchmarks.tables FILE.json --into PAGE.md` writes those of one file. A table goes between two comments, each
alone on its line, the first with the name of the results' file:

    <!-- table: rtx3090_plain -->
    <!-- /table -->

Simulated results of the suite have two more: NAME_step_time, which takes their step times apart, and NAME_short, the
plain step beside what `wrap` does by default, a line for each model.

What was between them is replaced, so figures in the documentation are never typed. `--check` changes nothing
and fails if something would change.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from memscale.benchmarks.compare import tables as comparison_tables
from memscale.benchmarks.models import assumed_host, device_name, unknown_name
from memscale.benchmarks.results import Results, cells, missing, mode_text
from memscale.errors import ConfigError, MemScaleError
from memscale.units import format_bytes

__all__ = ["check_into", "main", "markdown", "replace_tables", "write_into"]

_PROGRAM = "python -m benchmarks.tables"
_OPEN = re.compile(r"<!-- table: *(.*?) *-->\s*")
_CLOSE = re.compile(r"<!-- /table -->\s*")
_ROOT = Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
_MODULES = (
    "budgets",
    "capacity",
    "integrations",
    "one_gpu",
    "policy",
    "predictions",
    "step_times",
    "truth",
    "wrap_time",
)
"""Of this package: each writes NAME.json, and its `tables` returns the tables of that document."""


def markdown(results: Results) -> str:
    """The table of these results, and below it what the figures are and the command that makes them.

    Example:
        >>> print(markdown(Results("python -m memscale.benchmarks", {"torch": "2.13.0"}, ())).splitlines()[0])
        | model | params | batch × seq | mode | peak (GiB) |
    """
    text = cells(results.rows)
    lines = [
        _line([column.header for column in text.columns]),
        _line(["---:" if column.align == "right" else "---" for column in text.columns]),
        *map(_line, text.rows),
        "",
        *(f"{remark}  " for remark in text.remarks),  # two spaces: a line break in Markdown
        _made_by(results),
    ]
    return "\n".join(lines)


def _made_by(results: Results) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    return f"Made by {_code(results.command)} ({packages})."


_PARTS = {
    "compute": "compute",
    "recomputation": "recomputation",
    "transfers": "exposed transfers",
    "device_step": "optimizer, device",
    "host_step": "optimizer, host",
    "overhead": "overhead",
}


def step_time_markdown(results: Results) -> str:
    """The step times of these results, taken apart, in milliseconds."""
    rows = [row for row in results.rows if row.step_time is not None]
    lines = [
        _line(["model", "mode", *_PARTS.values(), "step (ms)", "over none"]),
        _line(["---", "---", *["---:"] * (len(_PARTS) + 2)]),
    ]
    plain = {row.model: row.step_time for row in rows if row.mode == "none"}
    for row in rows:
        times = [*(getattr(row.step_time, part) for part in _PARTS), row.step_time.total]
        ratio = f"{times[-1] / plain[row.model].total:.2f} ×" if row.model in plain else "–"
        cell = [f"{1e3 * seconds:.1f}" if seconds else "–" for seconds in times]
        lines.append(_line([row.model, mode_text(row), *cell, ratio]))
    lines += [
        "",
        "Milliseconds of one step, estimated by the cost model; nothing was timed.  ",
        _made_by(results),
    ]
    return "\n".join(lines)


def short_markdown(results: Results) -> str:
    """Return the plain step and the default mode, a line for each model."""
    by_mode = {(row.model, row.mode): row for row in results.rows}
    models = dict.fromkeys(row.model for row in results.rows)
    lines = [
        _line(["model", "batch × seq", "plain peak", "with `wrap(model)`", "step time", "kept on the host"]),
        _line(["---", *["---:"] * 5]),
    ]
    for model in models:
        plain, planned = by_mode.get((model, "none")), by_mode.get((model, "balanced"))
        if plain is None or planned is None or planned.peak_bytes is None:
            continue
        size = missing(plain) if plain.peak_bytes is None else _gib(plain.peak_bytes)
        ratio = "–" if planned.time_ratio is None else f"{planned.time_ratio:.2f} ×"
        peak, host = _gib(planned.peak_bytes), _gib(planned.host_bytes)
        lines.append(_line([model, f"{plain.batch} × {plain.seq}", size, peak, ratio, host]))
    device = device_name(results.rows[0].on)
    lines += [
        "",
        f"{device}, {assumed_host(results.rows[0].on)}, fp32, AdamW. Peaks simulated, step times estimated; "
        "no GPU was used.  ",
        _made_by(results),
    ]
    return "\n".join(lines)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def comparison_markdown(comparison: Results) -> str:
    """The tables of a comparison, what the figures are, the machine and the command that makes them."""
    lines = []
    for title, text in comparison_tables(comparison.rows, mark="**"):
        lines += [
            f"{title}:",
            "",
            _line([column.header for column in text.columns]),
            _line(["---:" if column.align == "right" else "---" for column in text.columns]),
            *map(_line, text.rows),
            "",
            *(f"{remark}  " for remark in text.remarks),
            "",
        ]
    found = comparison.machine
    if found:
        ram = format_bytes(int(found["ram_bytes"]))
        lines.append(
            f"Machine: {found['processor']}, {found['cores']} cores, {ram} RAM, {found['threads']} threads.  "
        )
    return "\n".join([*lines, _made_by(comparison)])


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def replace_tables(
    text: str, tables: Mapping[str, str], *, others_stay: bool = False
) -> tuple[str, tuple[str, ...]]:
    """Put the tables between their markers.

    Args:
        text: A Markdown file.
        tables: What goes between the markers of each name; nothing for an empty text.
        others_stay: Whether tables of other names stay as they are; else they are an error.

    Returns:
        The new text, and the names of the tables that changed.

    Raises:
        ConfigError: A marker names no table, is not closed, or is closed without being open.

    Example:
        >>> text, changed = replace_tables("<!-- table: a -->\\nold\\n<!-- /table -->\\n", {"a": "new"})
        >>> text, changed
        ('<!-- table: a -->\\n\\nnew\\n\\n<!-- /table -->\\n', ('a',))
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    new: list[str] = []
    changed: list[str] = []
    name: str | None = None
    before: list[str] = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        opened = _OPEN.fullmatch(line)
        if opened:
            if name is not None:
                raise ConfigError(
                    f"line {number}: the table {name!r} is still open; close it with <!-- /table -->."
                )
            name, before = opened[1], []
            if name not in tables and not others_stay:
                raise unknown_name("table", name, tables)
            new.append(line)
        elif _CLOSE.fullmatch(line):
            if name is None:
                raise ConfigError(f"line {number}: <!-- /table --> without a <!-- table: NAME --> above it.")
            content = "".join(before)
            if name in tables:
                content = newline.join(["", *tables[name].split("\n"), "", ""]) if tables[name] else ""
            if content != "".join(before):
                changed.append(name)
            new += [content, line]
            name = None
        else:
            (new if name is None else before).append(line)
    if name is not None:
        raise ConfigError(f"the table {name!r} is not closed: write <!-- /table --> below it.")
    return "".join(new), tuple(changed)


def check_into(file: Path | None, names: Sequence[str]) -> None:
    """Before a run of minutes, not after it: raise a ConfigError if a file has no place for the tables."""
    if file is not None:
        _with_tables(file, dict.fromkeys(names, "-"))


def write_into(file: Path, tables: Mapping[str, str]) -> None:
    """Put tables between their markers in a Markdown file.

    Raises:
        ConfigError: the file can't be read, or has no such markers.
    """
    file.write_text(_with_tables(file, tables), encoding="utf-8", newline="")


def _with_tables(file: Path, tables: Mapping[str, str]) -> str:
    try:
        old = file.read_bytes().decode("utf-8")  # as bytes: reading as text would change the line ends
        for name in set(tables) - set(_marked(old)):
            raise ConfigError(f"there is no <!-- table: {name} --> in it.")
        return replace_tables(old, tables, others_stay=True)[0]
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{file}: {error}") from None


def _marked(text: str) -> list[str]:
    return [found[1] for found in map(_OPEN.fullmatch, text.splitlines(keepends=True)) if found]


def pages() -> list[Path]:
    """Return README.md and the pages of docs/ that have a table."""
    found = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
    return [page for page in found if _marked(page.read_text(encoding="utf-8"))]


def main(argv: Sequence[str] | None = None) -> int:
    """Write, check or print the tables.

    Returns:
        0; 1 if `--check` found a table that is not up to date; 2 for what cannot be read or is not allowed.
    """
    parser = argparse.ArgumentParser(prog=_PROGRAM, description="Benchmark results as tables in Markdown.")
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        metavar="RESULTS.json",
        help="written by python -m memscale.benchmarks or a module of this package (default: those of "
        "benchmarks/results, into every page)",
    )
    parser.add_argument(
        "--into",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE.md",
        help="replace what is between <!-- table: NAME --> and <!-- /table -->, NAME being the name of a "
        "results file without .json (default: print the tables)",
    )
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would change")
    options = parser.parse_args(argv)
    if options.results and options.check and not options.into:
        parser.error("--check needs --into: say which files to check")
    try:
        if options.results:
            return _run(_tables(options.results), options.into, check=options.check)
        return _run(_committed(), options.into or pages(), check=options.check)
    except MemScaleError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2


def _committed() -> dict[str, str]:
    """Return every table of benchmarks/results; a module whose file is not there yet has an empty one."""
    missing = dict.fromkeys((name for name in _MODULES if not (_RESULTS / f"{name}.json").exists()), "")
    return _tables([file for file in sorted(_RESULTS.glob("*.json")) if _has_tables(file)]) | missing


def _has_tables(file: Path) -> bool:
    if file.stem in _MODULES:
        return True
    document = json.loads(file.read_text(encoding="utf-8"))
    is_suite = isinstance(document, dict) and "rows" in document
    return is_suite and ("transformers" in document or "versions" in document)


def _tables(files: Sequence[Path]) -> dict[str, str]:
    tables: dict[str, str] = {}
    for file in files:
        if file.stem in tables:
            raise ConfigError(f"{file}: there is another results file with the name {file.stem!r}.")
        tables.update(_tables_of(file))
    return tables


def _tables_of(file: Path) -> Iterator[tuple[str, str]]:
    if file.stem in _MODULES:
        module = importlib.import_module(f"benchmarks.{file.stem}")
        yield from module.tables(json.loads(file.read_text(encoding="utf-8"))).items()
    elif (results := Results.read(file)).is_comparison:
        yield file.stem, comparison_markdown(results)
    else:
        yield file.stem, markdown(results)
        if any(row.step_time for row in results.rows):
            yield f"{file.stem}_step_time", step_time_markdown(results)
            yield f"{file.stem}_short", short_markdown(results)


def _run(tables: Mapping[str, str], into: Sequence[Path], *, check: bool) -> int:
    if not into:
        for name, text in tables.items():
            print(f"<!-- table: {name} -->\n\n{text}\n\n<!-- /table -->\n")
    stale = False
    for file in into:
        try:
            # As bytes: reading as text would change the line ends.
            old = file.read_bytes().decode("utf-8")
            new, changed = replace_tables(old, tables)
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"{file}: {error}") from None
        for name in changed:
            print(f"{file}: table {name} {'is not up to date' if check else 'written'}")
        if changed and not check:
            file.write_text(new, encoding="utf-8", newline="")
        stale = stale or bool(changed)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
