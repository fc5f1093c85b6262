"""Memory over time as a stacked picture in characters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from memscale._util.text import Terminal, cell_width, clean, pad, wrap
from memscale.units import format_bytes

__all__ = ["timeline"]

_FILLS = "█▓▒░·#=+:x*&"
_COLOURS = (34, 32, 35, 33, 36, 31)
_NARROWEST = 40


def timeline(
    series: Mapping[str, Sequence[int]],
    marks: Sequence[tuple[int, str]] = (),
    *,
    height: int = 10,
    width: int = 78,
    title: str = "",
    unit: Callable[[int], str] = format_bytes,
    terminal: Terminal | None = None,
) -> str:
    """Draw memory over time: the categories stacked, the peak named, the phases below.

    Each character column stands for a run of events and shows the one of them with the highest sum, as it
    was then; so the peak is always in the picture. A cell shows the category that has most of it.

    Args:
        series: For each category its bytes at every event; the first one is drawn at the bottom.
        marks: `(event, name)` for each phase that begins.
        height: Rows of the picture.
        width: Cells in a line, labels included; a narrower terminal wins.
        title: The line above; empty for none.
        unit: How to write a number of bytes.
        terminal: What to write for; by default what `Terminal.detect` finds.

    Raises:
        ValueError: Categories of different lengths, negative bytes, or no room to draw in.

    Example:
        >>> step = {"weights": [4, 4, 4, 4], "activations": [0, 4, 8, 2]}
        >>> marks = [(0, "forward"), (2, "backward")]
        >>> print(timeline(step, marks, height=3, width=42, terminal=Terminal()))
                                ▼ peak 12 B
        12 B ┤                  ▓▓▓▓▓▓▓▓▓
             ┤         ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
             ┤████████████████████████████████████
         0 B ┼┬─────────────────┬─────────────────
              forward           backward
        at the peak: █ weights 4 B
                     ▓ activations 8 B
    """
    terminal = terminal or Terminal.detect()
    if height < 1 or width < _NARROWEST:
        raise ValueError(f"no room for a timeline of {width} × {height} cells: it needs {_NARROWEST} × 1")
    width = max(min(width, terminal.width), _NARROWEST)
    heading = terminal.heading(title, width)
    stacks = _stacks(series)
    totals = [sum(stack) for stack in stacks]
    if not stacks:
        return terminal.show([*heading, "(nothing recorded)"])

    peak = max(totals)
    peak_event = totals.index(peak)
    labels = _axis_labels(peak, height, unit)
    margin = max(cell_width(label) for label in labels)
    columns = max(width - margin - 2, 1)

    shown = [stacks[event] for event in _events(totals, columns)]
    arrow = margin + 2 + _column(peak_event, len(totals), columns)
    lines = _pointer(arrow, f"peak {unit(peak)}", width)
    for row in reversed(range(height)):
        fills = [_category(stack, row * peak, (row + 1) * peak, height) for stack in shown]
        lines.append(f"{pad(labels[row + 1], margin, right=True)} ┤{_draw(fills, terminal)}")
    ticks = [(_column(event, len(totals), columns), clean(name)) for event, name in marks]
    axis = "".join("┬" if column in {place for place, _ in ticks} else "─" for column in range(columns))
    lines.append(f"{pad(labels[0], margin, right=True)} ┼{axis}")
    lines += [" " * (margin + 2) + line for line in _names_below(ticks, columns)]
    legend = [
        f"{clean(name)} {unit(bytes_)}" for name, bytes_ in zip(series, stacks[peak_event], strict=True)
    ]
    lines += _legend(legend, width, terminal)
    return terminal.show([*heading, *(line.rstrip() for line in lines)])


def _stacks(series: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:
    """The bytes of every category at each event."""
    lengths = {name: len(values) for name, values in series.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"every category needs a value for every event, and their numbers differ: {lengths}")
    for name, values in series.items():
        if values and min(values) < 0:
            raise ValueError(
                f"category {name!r} has {min(values)} bytes at some event: memory is not negative"
            )
    return list(zip(*series.values(), strict=True))


def _events(totals: Sequence[int], columns: int) -> list[int]:
    """The event that each column shows: the highest of its run, or the same one in several columns."""
    count = len(totals)
    if count <= columns:
        return [column * count // columns for column in range(columns)]
    runs = (range(column * count // columns, (column + 1) * count // columns) for column in range(columns))
    return [max(run, key=totals.__getitem__) for run in runs]


def _column(event: int, count: int, columns: int) -> int:
    """The first column in which `event` has a part."""
    event = min(max(event, 0), count - 1)
    return -(-event * columns // count) if count <= columns else ((event + 1) * columns - 1) // count


def _axis_labels(peak: int, height: int, unit: Callable[[int], str]) -> list[str]:
    """What is written beside the axis, from the bottom to the top: a label is the upper edge of its row."""
    middle = (height + 1) // 2 if 3 < height <= peak else 0
    return [unit(peak * row // height) if row in (0, middle, height) else "" for row in range(height + 1)]


def _category(stack: Sequence[int], low: int, high: int, scale: int) -> int | None:
    """Which category has most of the bytes between `low` and `high`, both in 1/`scale` of a byte."""
    best, most, bottom = None, 0, 0
    for category, size in enumerate(stack):
        top = bottom + size * scale
        overlap = min(top, high) - max(bottom, low)
        if overlap > most:
            best, most = category, overlap
        bottom = top
    return best


def _fill(category: int) -> str:
    return _FILLS[category % len(_FILLS)]


def _draw(categories: Sequence[int | None], terminal: Terminal) -> str:
    """The cells of one row; neighbours of one category share one change of colour."""
    drawn, start = "", 0
    for end in range(1, len(categories) + 1):
        if end == len(categories) or categories[end] != categories[start]:
            category = categories[start]
            length = end - start
            drawn += (
                " " * length if category is None else _painted(_fill(category) * length, category, terminal)
            )
            start = end
    return drawn


def _painted(text: str, category: int, terminal: Terminal) -> str:
    return terminal.paint(text, _COLOURS[category % len(_COLOURS)])


def _pointer(column: int, text: str, width: int) -> list[str]:
    """An arrow over `column`, with `text` on the side where there is room for it, or else above."""
    needed = cell_width(text) + 1
    if column + 1 + needed <= width:
        return [" " * column + f"▼ {text}"]
    if needed <= column:
        return [" " * (column - needed) + f"{text} ▼"]
    return [*wrap(text, width), " " * column + "▼"]


def _names_below(ticks: Sequence[tuple[int, str]], columns: int) -> list[str]:
    """Each name under its tick, on the first line where it is clear of the others."""
    lines: list[str] = []
    for column, name in ticks:
        name = name if cell_width(name) <= columns else wrap(name, columns - 1)[0] + "…"
        start = max(min(column, columns - cell_width(name)), 0)
        free = next((number for number, line in enumerate(lines) if cell_width(line) < start), None)
        if free is None:
            lines.append(" " * start + name)
        else:
            lines[free] = pad(lines[free], start) + name
    return lines


def _legend(entries: Sequence[str], width: int, terminal: Terminal) -> list[str]:
    """As many entries in a line as fit, each in the colour of its category."""
    lead, gap = "at the peak: ", "   "
    room = width - len(lead)
    lines: list[list[tuple[int, str]]] = [[]]
    for category, entry in enumerate(entries):
        for number, piece in enumerate(wrap(f"{_fill(category)} {entry}", room)):
            used = sum(cell_width(text) + len(gap) for _, text in lines[-1])
            if used and (number or used + cell_width(piece) > room):
                lines.append([])
            lines[-1].append((category, piece))
    painted = [gap.join(_painted(text, category, terminal) for category, text in line) for line in lines]
    return [lead + painted[0], *(" " * len(lead) + line for line in painted[1:])]
