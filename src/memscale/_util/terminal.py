"""Tables as text: laid out by `rich` where it is installed, else plainly. The cells are the same either way."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import random
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TextIO

_NUMBER = re.compile(r"[-+−~≈<>≤≥]?\s?\d[\d,._]*([eE][-+]?\d+)?\s?[^\d\s]{0,8}")
_NOTHING = "–"
_EMPTY = ("", "-", _NOTHING, "—", "n/a")
_WORD = 12  # characters that a column of text has at least, or its longest word if that is shorter


@dataclass(frozen=True)
class Terminal:
    """The terminal that text is made for: its width in characters, and whether to colour with escape sequences."""

    width: int = 100
    color: bool = False

    @classmethod
    def detect(cls, stream: TextIO | None = None) -> Terminal:
        """Return the terminal behind `stream` (standard output by default)."""
        # `COLUMNS` overrides the width; `NO_COLOR`, `TERM=dumb` and `FORCE_COLOR` decide on colours.
        width = shutil.get_terminal_size(fallback=(cls.width, 24)).columns
        if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            return cls(width)
        screen = stream or sys.stdout  # None in a process without a console
        return cls(width, bool(os.environ.get("FORCE_COLOR")) or (screen is not None and screen.isatty()))

    def paint(self, text: str, code: int) -> str:
        """Return `text` in the colour or weight `code` (an SGR number), or as it is without colours."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.color and text.strip() else text

    def heading(self, text: str) -> list[str]:
        """Return the lines of a title; none if it is empty."""
        return [self.paint(line, 1) for line in wrap(clean(text), self.width)] if text else []


@dataclass(frozen=True)
class Column:
    """A column of a table: its header and alignment. `auto` aligns a column of numbers (and units) to the right."""

    header: str
    align: Literal["auto", "left", "right"] = "auto"


def table(
    title: str,
    columns: Sequence[Column | str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str | None = None,
    terminal: Terminal | None = None,
) -> str:
    """Return rows as a table with a title and a caption, wrapped to the width of the terminal.

    A cell is text as it is, an integer with thousands separators, or `None` as a dash.

    Example:
        >>> rows = [("weights", 1024), ("gradients", 512)]
        >>> print(table("Memory", ["what", "bytes"], rows, terminal=Terminal(width=40)))
        Memory
        ┌───────────┬───────┐
        │ what      │ bytes │
        ├───────────┼───────┤
        │ weights   │ 1,024 │
        │ gradients │   512 │
        └───────────┴───────┘
    """
    terminal = terminal or Terminal.detect()
    specs = [Column(column) if isinstance(column, str) else column for column in columns]
    headers = [clean(column.header) for column in specs]
    cells = [[_cell(value) for value in row] for row in rows]
    right = []
    for place, column in enumerate(specs):
        filled = [row[place] for row in cells if row[place] not in _EMPTY]
        is_numeric = bool(filled) and all(map(_NUMBER.fullmatch, filled))
        right.append(column.align == "right" or (column.align == "auto" and is_numeric))
    if _least_width(headers, cells, right) > terminal.width:
        draw = _drawn_as_lists
    elif importlib.util.find_spec("rich") is not None:
        draw = _drawn_by_rich
    else:
        draw = _drawn_plainly
    lines = [*terminal.heading(title), *draw(headers, cells, right, terminal)]
    return "\n".join([*lines, *(wrap(clean(caption), terminal.width) if caption else [])])


def _least_width(headers: list[str], cells: list[list[str]], right: list[bool]) -> int:
    """Return the width of a table whose words and numbers stay whole, but for words of over `_WORD` characters."""
    widths = []
    for column, is_right in zip(zip(headers, *cells, strict=True), right, strict=True):
        words = [word for cell in column[1:] for word in (cell.split("\n") if is_right else cell.split())]
        longest = max(map(len, [*words, *column[0].split(), ""]))
        widths.append(longest if is_right else min(longest, _WORD))
    return sum(widths) + 3 * len(widths) + 1


def _cell(value: object) -> str:
    if value is None:
        return _NOTHING
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_integer else clean(str(value)).strip("\n")


def _drawn_by_rich(
    headers: list[str], cells: list[list[str]], right: list[bool], terminal: Terminal
) -> list[str]:
    state = random.getstate()
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    random.setstate(state)  # rich draws from the user's generator when it is imported
    grid = rich.table.Table(box=rich.box.SQUARE, header_style="bold", border_style="bright_black")
    for header, is_right in zip(headers, right, strict=True):
        # Text objects: rich reads no markup in what users wrote.
        grid.add_column(rich.text.Text(header), justify="right" if is_right else "left", overflow="fold")
    for row in cells:
        grid.add_row(*map(rich.text.Text, row))
    out = io.StringIO()
    console = rich.console.Console(
        file=out,
        width=terminal.width,
        force_terminal=True,
        force_jupyter=False,
        color_system="standard" if terminal.color else None,
        no_color=not terminal.color,
        legacy_windows=False,
        safe_box=False,
    )
    console.print(grid)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _drawn_as_lists(
    headers: list[str], cells: list[list[str]], right: list[bool], terminal: Terminal
) -> list[str]:
    """Draw each row as a list, for terminals that are too narrow for its columns."""
    lines = []
    for first, *others in cells:
        lines += [terminal.paint(line, 1) for line in wrap(first, terminal.width)]
        for header, cell in zip(headers[1:], others, strict=True):
            if cell not in ("", _NOTHING):
                text = f"{header}: {' '.join(cell.split())}"
                lines += [f"  {line}" for line in wrap(text, max(terminal.width - 2, 1))]
    return lines


def _drawn_plainly(
    headers: list[str], cells: list[list[str]], right: list[bool], terminal: Terminal
) -> list[str]:
    widths = [
        max(len(line) for cell in column for line in cell.split("\n"))
        for column in zip(headers, *cells, strict=True)
    ]
    while sum(widths) + 3 * len(widths) + 1 > terminal.width and max(widths) > 4:
        narrowable = [i for i, width in enumerate(widths) if width > 8 and not right[i]]
        widths[max(narrowable or range(len(widths)), key=widths.__getitem__)] -= 1  # text before numbers
    lines = []
    for row in (headers, *cells):
        wrapped = [wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, wrapped))):
            parts = [each[number] if number < len(each) else "" for each in wrapped]
            padded = (
                part.rjust(width) if is_right else part.ljust(width)
                for part, width, is_right in zip(parts, widths, right, strict=True)
            )
            lines.append(f"│ {' │ '.join(padded)} │")
        if row is headers:
            lines.append("├" + "┼".join("─" * (width + 2) for width in widths) + "┤")
    top, bottom = (
        left + middle.join("─" * (width + 2) for width in widths) + end
        for left, middle, end in ("┌┬┐", "└┴┘")
    )
    return [top, *lines, bottom]


def wrap(text: str, width: int) -> list[str]:
    """Break `text` into lines of at most `width` characters, between words where that is possible."""
    return [
        line
        for paragraph in text.split("\n")
        for line in ([paragraph] if len(paragraph) <= width else textwrap.wrap(paragraph, max(width, 1)))
    ]


def clean(text: str) -> str:
    """Return `text` without control characters, which would move the cursor or change colours; line ends stay."""
    return "".join(c for c in text.replace("\t", " ") if c == "\n" or c.isprintable())


@contextlib.contextmanager
def progress(cases: Sequence[str], stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """Show which of the cases is running, and the time left, on standard error; yield what to call after each.

    On a terminal with `rich` that is a bar below the lines; else each line says the time left.
    """
    screen = stream or sys.stderr
    start = time.perf_counter()
    total, done = len(cases), 0
    has_bar = screen.isatty() and importlib.util.find_spec("rich") is not None

    def running() -> str:
        return f"{cases[done]} ({done + 1} of {total})" if done < total else ""

    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(bars()) if has_bar else None
        task = shown and shown.add_task(running(), total=total)

        def advance(text: str) -> None:
            nonlocal done
            done += 1
            left = (time.perf_counter() - start) / done * (total - done)
            if shown is not None:
                shown.console.print(text, markup=False, highlight=False)
                shown.update(task, advance=1, description=running())
            else:
                rest = f", {left:.0f} s left" if done < total else ""
                print(f"{text} ({done} of {total}{rest})", file=screen, flush=True)

        yield advance


def bars() -> Any:
    """Return rich's bars of progress on standard error, with what runs and the time left; none if it is no terminal."""
    state = random.getstate()
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    random.setstate(state)  # rich draws from the user's generator when it is imported
    console = Console(stderr=True)
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
