"""Pieces of HTML: escaped text, labels, tables, bars. What is no `Html` is text, and is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from memscale.units import format_bytes


class Html(str):
    """Text that is HTML already."""


def _html(value: object) -> str:
    return value if isinstance(value, Html) else escape("–" if value is None else str(value))


def chip(label: str) -> Html:
    """Return how a number is known."""
    return Html(f'<span class="how">{escape(label)}</span>')


def labelled(value: object, label: str) -> Html:
    """Return a value and how it is known."""
    return Html(f"{_html(value)} {chip(label)}")


def code(text: str) -> Html:
    """Return a name in the code."""
    return Html(f'<span class="name">{escape(text)}</span>')


def swatch(name: str) -> Html:
    """Return a name with its colour in the charts."""
    color = (
        f'<span class="swatch" style="--c:var(--{escape(name.replace(" ", "-"))})" aria-hidden="true"></span>'
    )
    return Html(f'<span class="use">{color}{escape(name)}</span>')


def section(key: str, heading: str, lead: str, *body: str) -> str:
    """Return a section; all of its parts are HTML."""
    return (
        f'<section id="{key}" aria-labelledby="{key}-heading"><h2 id="{key}-heading">{heading}</h2>\n<p>{lead}</p>\n'
        + "\n".join(body)
        + "</section>"
    )


def html_table(
    caption: str,
    columns: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    numbers: int = 0,
    last_is_total: bool = False,
) -> str:
    """Return a table whose first column names its rows, and whose last `numbers` columns are aligned as numbers."""
    first_number = len(columns) - numbers

    def cell(kind: str, index: int, value: object) -> str:
        right = ' class="number"' if index >= first_number else ""
        scope = "" if kind == "td" else ' scope="col"' if kind == "col" else ' scope="row"'
        tag = "td" if kind == "td" else "th"
        return f"<{tag}{scope}{right}>{_html(value)}</{tag}>"

    head = "".join(cell("col", index, column) for index, column in enumerate(columns))
    listed = [
        "".join(cell("td" if index else "row", index, value) for index, value in enumerate(row))
        for row in rows
    ]
    if last_is_total:
        *listed, total = listed
    body = "".join(f"<tr>{row}</tr>" for row in listed)
    if last_is_total:
        body += f'<tr class="total">{total}</tr>'
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def folded(summary: str, table: str) -> str:
    """Return a table that scrolls by itself and is shown on request."""
    inside = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(summary)}">{table}</div>'
    return f'<details class="data"><summary>{escape(summary)}</summary>{inside}</details>'


def meters(rows: Iterable[tuple[str, float, str]], whole: int | None = None, of_what: str = "") -> str:
    """Return bars with names and values, as shares of the largest, or of `whole` unless they would hardly be seen."""
    bars = list(rows)
    scale = max(size for _, size, _ in bars) or 1
    if whole and 50 * scale < whole:
        whole = None
    if whole is None and len(bars) == 1:
        return ""
    scale = whole or scale
    cells = "".join(
        f'<span>{name}</span><span class="meter"><i style="width:{100 * size / scale:.2f}%"></i></span>'
        f"<span>{text}</span>"
        for name, size, text in bars
    )
    if whole:
        cells += f"<span></span><small>of {format_bytes(whole)}{of_what}</small><span></span>"
    return f'<div class="meters">{cells}</div>'
