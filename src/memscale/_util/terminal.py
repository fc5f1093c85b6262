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
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

__all__ = ["Column", "Terminal", "cell_width", "clean", "table", "wrap"]

_DRAWN = "┌┬┐├┼┤└┴┘─│█▓▒░·▏▎▍▌▋▊▉▼…–×"
_ASCII = str.maketrans(_DRAWN, "+++++++++-|@%o.,'''||||v.-x")
_NUMBER = re.compile(r"[-+−~≈<>≤≥]?\s?\d[\d,._]*([eE][-+]?\d+)?\s?[^\d\s]{0,8}")
MIN_COLUMN_WIDTH = 8  # cells; where there is less room, each row becomes a paragraph of `header: cell` lines
_EMPTY = ("", "-", "–", "—", "n/a")


@dataclass(frozen=True)
class Terminal:
    """The terminal that text is made for.

    Attributes:
        width: Cells in a line.
        color: Whether to colour with escape sequences; text that goes to a file wants `False`.
        unicode: Whether box-drawing characters can be shown; plain ASCII stands in for them otherwise.
    """

    width: int = 100
    color: bool = False
    unicode: bool = True

    @classmethod
    def detect(cls, stream: TextIO | None = None) -> Terminal:
        """Return the terminal behind `stream` (standard output by default).

        `COLUMNS` gives the width, else the terminal itself, else it is 100. `NO_COLOR` and `TERM=dumb` turn
        colours off, `FORCE_COLOR` turns them on for what is not a terminal.
        """
        stream = stream or sys.stdout
        if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            color = False
        else:
            color = bool(os.environ.get("FORCE_COLOR")) or stream.isatty()
        try:
            _DRAWN.encode(getattr(stream, "encoding", None) or "utf-8")
            unicode = True
        except (UnicodeEncodeError, LookupError):
            unicode = False
        return cls(shutil.get_terminal_size(fallback=(cls.width, 24)).columns, color, unicode)

    def paint(self, text: str, code: int) -> str:
        """Return `text` in the colour or weight `code` (an SGR number), or as it is without colours."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.color and text.strip() else text

    def heading(self, text: str) -> list[str]:
        """Return the lines of a title; none if it is empty."""
        return [self.paint(line, 1) for line in wrap(clean(text), self.width)] if text else []

    def show(self, lines: Iterable[str]) -> str:
        """Join lines to text in the characters that the terminal has."""
        text = "\n".join(lines)
        if self.unicode:
            return text
        return "".join(c if c.isascii() else "?" * cell_width(c) for c in text.translate(_ASCII))


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
    """Set rows in columns, as wide as they need; a cell that is too long goes on in the next line.

    Args:
        title: The line above the table; empty for none.
        columns: The headers, or `Column`s where the alignment is to be chosen.
        rows: A cell for each column: text as it is, integers with thousands separators, `None` as a dash.
        caption: A note below the table.
        terminal: What to write for; by default what `Terminal.detect` finds.

    Raises:
        ValueError: No columns, or a row with more or fewer cells than there are columns.

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
    if not specs:
        raise ValueError("a table needs at least one column")
    headers = [_cell(column.header) for column in specs]
    cells = [[_cell(value) for value in row] for row in rows]
    for number, row in enumerate(cells):
        if len(row) != len(headers):
            raise ValueError(f"row {number} has {len(row)} cells, and the table has {len(headers)} columns")
    right = [
        column.align == "right" or (column.align == "auto" and _is_numeric(row[i] for row in cells))
        for i, column in enumerate(specs)
    ]
    if terminal.width < MIN_COLUMN_WIDTH * len(headers):
        draw = _paragraphs
    else:
        draw = _drawn_by_rich if importlib.util.find_spec("rich") is not None else _drawn_plainly
    lines = [*terminal.heading(title), *draw(headers, cells, right, terminal)]
    if caption:
        lines += wrap(clean(caption), terminal.width)
    return terminal.show(lines)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return clean(str(value)).rstrip().lstrip("\n")


def _is_numeric(cells: Iterable[str]) -> bool:
    filled = [cell for cell in cells if cell not in _EMPTY]
    return bool(filled) and all(_NUMBER.fullmatch(cell) for cell in filled)


def _paragraphs(
    headers: list[str], cells: list[list[str]], right: list[bool], terminal: Terminal
) -> list[str]:
    return [
        line
        for row in cells or [[""] * len(headers)]
        for header, cell in zip(headers, row, strict=True)
        for line in wrap(f"{header}: {cell}".rstrip(), terminal.width)
    ]


def _drawn_by_rich(
    headers: list[str], cells: list[list[str]], right: list[bool], terminal: Terminal
) -> list[str]:
    state = random.getstate()
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    random.setstate(state)  # rich draws from the user's generator when it is imported
    # Text objects: rich reads no markup in what users wrote.
    grid = rich.table.Table(box=rich.box.SQUARE, header_style="bold", border_style="bright_black")
    for header, is_right in zip(headers, right, strict=True):
        justify: Literal["left", "right"] = "right" if is_right else "left"
        grid.add_column(rich.text.Text(header), justify=justify, overflow="fold")
    for row in cells:
        grid.add_row(*(rich.text.Text(cell) for cell in row))
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
    columns = list(zip(headers, *cells, strict=True))
    widths = [max(cell_width(line) for cell in column for line in cell.split("\n")) for column in columns]
    room = max(terminal.width - 3 * len(widths) - 1, 2 * len(widths))
    while sum(widths) > room:  # text gives way before numbers
        narrowable = [i for i, width in enumerate(widths) if width > 8 and not right[i]]
        widest = max(narrowable or range(len(widths)), key=widths.__getitem__)
        widths[widest] -= 1

    def rule(left: str, middle: str, end: str) -> str:
        return left + middle.join("─" * (width + 2) for width in widths) + end

    def lines_of(row: Sequence[str]) -> list[str]:
        wrapped = [wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        height = max(map(len, wrapped))
        drawn = []
        for number in range(height):
            texts = [lines[number] if number < len(lines) else "" for lines in wrapped]
            spaces = [" " * (width - cell_width(text)) for text, width in zip(texts, widths, strict=True)]
            padded = [
                space + text if is_right else text + space
                for text, space, is_right in zip(texts, spaces, right, strict=True)
            ]
            drawn.append("│ " + " │ ".join(padded) + " │")
        return drawn

    body = [line for row in cells for line in lines_of(row)]
    return [rule("┌", "┬", "┐"), *lines_of(headers), rule("├", "┼", "┤"), *body, rule("└", "┴", "┘")]


def wrap(text: str, width: int) -> list[str]:
    """Break `text` into lines of at most `width` characters, between words where that is possible.

    Example:
        >>> wrap("keep the matmul outputs", 10)
        ['keep the', 'matmul', 'outputs']
    """
    return [
        line
        for paragraph in text.split("\n")
        for line in ([paragraph] if len(paragraph) <= width else textwrap.wrap(paragraph, max(width, 1)))
    ]


def cell_width(text: str) -> int:
    """Return the number of terminal cells that `text` takes: a Chinese character takes two, an accent none.

    Example:
        >>> cell_width("GiB"), cell_width("显存"), cell_width("e\u0301")
        (3, 4, 1)
    """
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.category(c) in ("Mn", "Me", "Cf") for c in text)


def clean(text: str) -> str:
    r"""Return `text` without what would move the cursor or change the colours; line ends stay.

    Example:
        >>> clean("red: \x1b[31m\tend\r\n")
        'red: [31m end\n'
    """
    text = text.replace("\r\n", "\n").replace("\t", " ")
    return "".join(c for c in text if c == "\n" or unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp"))
