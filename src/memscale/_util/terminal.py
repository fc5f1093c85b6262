"""Tables as text: laid out by `rich` where it is installed, else plainly. The cells are the same either way."""

from __future__ import annotations

import importlib.util
import io
import os
import random
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

_NUMBER = re.compile(r"[-+−~≈<>≤≥]?\s?\d[\d,._]*([eE][-+]?\d+)?\s?[^\d\s]{0,8}")
_EMPTY = ("", "-", "–", "—", "n/a")


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
    draw = _drawn_by_rich if importlib.util.find_spec("rich") is not None else _drawn_plainly
    lines = [*terminal.heading(title), *draw(headers, cells, right, terminal)]
    return "\n".join([*lines, *(wrap(clean(caption), terminal.width) if caption else [])])


def _cell(value: object) -> str:
    if value is None:
        return "–"
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
