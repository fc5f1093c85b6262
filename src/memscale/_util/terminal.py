"""Tables and bars as text. `rich` paints them where it is installed; what they say never depends on it."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from memscale._util.text import Terminal, cell_width, clean, pad, wrap
from memscale._util.timeline import timeline

__all__ = ["Column", "Terminal", "bar", "table", "timeline"]

_BLOCKS = " ▏▎▍▌▋▊▉█"
_NUMBER = re.compile(r"[-+−~≈<>≤≥]?\s?\d[\d,._]*([eE][-+]?\d+)?\s?[^\d\s]{0,8}")
_NOTHING = ("", "-", "–", "—", "n/a")


@dataclass(frozen=True)
class Column:
    """A column of a table: its header, and the side its cells keep to.

    `auto` is the right for a column of numbers (with or without a unit), else the left.
    """

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
    """Set rows in columns, as wide as they need and never wider than the terminal.

    A cell that is too long goes on in the next line; where there is no room for the columns beside each
    other, each row becomes a paragraph of `header: cell` lines.

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
    wanted = [Column(column) if isinstance(column, str) else column for column in columns]
    if not wanted:
        raise ValueError("a table needs at least one column")
    headers = [_cell(column.header) for column in wanted]
    cells = [[_cell(value) for value in row] for row in rows]
    for number, row in enumerate(cells):
        if len(row) != len(headers):
            raise ValueError(f"row {number} has {len(row)} cells, and the table has {len(headers)} columns")

    right = [_keeps_right(column, [row[i] for row in cells]) for i, column in enumerate(wanted)]
    widths = _column_widths([headers, *cells], right, terminal.width - 3 * len(headers) - 1)
    lines = terminal.heading(title)
    if widths is None:
        lines += _as_paragraphs(headers, cells, terminal)
    elif terminal.color and importlib.util.find_spec("rich") is not None:
        lines += _by_rich(headers, cells, right, widths, terminal)
    else:
        lines += _by_hand(headers, cells, right, widths)
    if caption:
        lines += wrap(clean(caption), terminal.width)
    return terminal.show(lines)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return clean(str(value)).rstrip().lstrip("\n")


def _keeps_right(column: Column, cells: list[str]) -> bool:
    if column.align != "auto":
        return column.align == "right"
    said = [cell for cell in cells if cell not in _NOTHING]
    return bool(said) and all(_NUMBER.fullmatch(cell) for cell in said)


def _column_widths(rows: list[list[str]], right: list[bool], room: int) -> list[int] | None:
    """The width of each column, or `None` if not even two cells for each fit into `room`."""
    columns = list(zip(*rows, strict=True))
    most = max(room, 2)  # a wide character would fit into nothing less
    widths = [min(_longest(line for cell in column for line in cell.split("\n")), most) for column in columns]
    words = [min(_longest(word for cell in column for word in cell.split()), most) for column in columns]
    # Sentences give way first, then long words; a number broken in two is hard to read, so it comes last.
    for floors in (
        [width if keep else word for width, word, keep in zip(widths, words, right, strict=True)],
        [width if keep else min(width, 8) for width, keep in zip(widths, right, strict=True)],
        [2] * len(widths),
    ):
        while sum(widths) > room:
            wide = [i for i, (width, floor) in enumerate(zip(widths, floors, strict=True)) if width > floor]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths if sum(widths) <= room else None


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_width, texts), default=0)


def _by_hand(headers: list[str], cells: list[list[str]], right: list[bool], widths: list[int]) -> list[str]:
    def rule(left: str, middle: str, end: str) -> str:
        return left + middle.join("─" * (width + 2) for width in widths) + end

    def row(texts: list[str], *, bottom: bool = False) -> list[str]:
        wrapped = [wrap(text, width) for text, width in zip(texts, widths, strict=True)]
        height = max(map(len, wrapped))
        empty = [[""] * (height - len(lines)) for lines in wrapped]
        filled = [
            rest + lines if bottom else lines + rest for lines, rest in zip(wrapped, empty, strict=True)
        ]
        columns = [
            [f" {pad(line, width, right=keep)} " for line in lines]
            for lines, width, keep in zip(filled, widths, right, strict=True)
        ]
        return ["│" + "│".join(line) + "│" for line in zip(*columns, strict=True)]

    body = [line for texts in cells for line in row(texts)]
    return [rule("┌", "┬", "┐"), *row(headers, bottom=True), rule("├", "┼", "┤"), *body, rule("└", "┴", "┘")]


def _by_rich(
    headers: list[str], cells: list[list[str]], right: list[bool], widths: list[int], terminal: Terminal
) -> list[str]:
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    # Text objects and lines broken here: rich reads no markup in what users wrote, and breaks nothing anew.
    def text(cell: str, width: int) -> rich.text.Text:
        return rich.text.Text("\n".join(wrap(cell, width)))

    grid = rich.table.Table(box=rich.box.SQUARE, header_style="bold", border_style="bright_black")
    for header, keep, width in zip(headers, right, widths, strict=True):
        justify: Literal["left", "right"] = "right" if keep else "left"
        grid.add_column(text(header, width), justify=justify, width=width, overflow="fold")
    for row in cells:
        grid.add_row(*(text(cell, width) for cell, width in zip(row, widths, strict=True)))
    out = io.StringIO()
    console = rich.console.Console(
        file=out,
        width=terminal.width,
        force_terminal=True,
        force_jupyter=False,
        color_system="standard",
        no_color=False,
        legacy_windows=False,
        safe_box=False,
    )
    console.print(grid)
    return out.getvalue().splitlines()


def _as_paragraphs(headers: list[str], cells: list[list[str]], terminal: Terminal) -> list[str]:
    lines: list[str] = []
    for row in cells or [[""] * len(headers)]:
        lines += [""] if lines else []
        for header, cell in zip(headers, row, strict=True):
            lines += wrap(f"{header}: {cell}".rstrip(), terminal.width)
    return lines


def bar(fraction: float, width: int) -> str:
    """A bar of `width` cells, filled from the left.

    A fraction above 1 looks full and one below 0 looks empty, but nothing less than 1 looks full, and
    nothing more than 0 looks empty.

    Raises:
        ValueError: `fraction` is not a number, or `width` is below 1.

    Example:
        >>> bar(0.55, 10), bar(0.0001, 3), bar(2, 3)
        ('█████▌░░░░', '▏░░', '███')
    """
    if width < 1:
        raise ValueError(f"a bar of {width} cells cannot be drawn: width must be at least 1")
    if fraction != fraction:
        raise ValueError("a bar cannot show nan")
    fraction = min(max(fraction, 0.0), 1.0)
    eighths = round(fraction * width * 8)
    if 0 < fraction < 1:
        eighths = min(max(eighths, 1), width * 8 - 1)
    full, part = divmod(eighths, 8)
    drawn = _BLOCKS[8] * full + (_BLOCKS[part] if part else "")
    return drawn + "░" * (width - len(drawn))
