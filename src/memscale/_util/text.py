"""The terminal that text is written for, and text measured in its cells.

A Chinese character takes two cells and an accent takes none, so `len` is not the width of a string.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TextIO

__all__ = ["Terminal", "cell_width", "clean", "pad", "wrap"]

_LINES_AND_BLOCKS = "┌┬┐├┼┤└┴┘─│█▓▒░·▏▎▍▌▋▊▉▼…–×"
_ASCII = str.maketrans(_LINES_AND_BLOCKS, "+++++++++-|@%o.,'''||||v.-x")


@dataclass(frozen=True)
class Terminal:
    """What the text is made for.

    Attributes:
        width: Cells in a line.
        color: Whether to paint with escape sequences; text that goes to a file wants `False`.
        unicode: Whether lines and blocks can be shown; plain ASCII stands in for them otherwise.
    """

    width: int = 100
    color: bool = False
    unicode: bool = True

    @classmethod
    def detect(cls, stream: TextIO | None = None) -> Terminal:
        """The terminal behind `stream` (standard output by default).

        `COLUMNS` gives the width, else the terminal itself, else it is 100. `NO_COLOR` and `TERM=dumb` turn
        colours off, `FORCE_COLOR` turns them on for what is not a terminal.
        """
        stream = stream or sys.stdout
        if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            color = False
        else:
            color = bool(os.environ.get("FORCE_COLOR")) or stream.isatty()
        try:
            _LINES_AND_BLOCKS.encode(getattr(stream, "encoding", None) or "utf-8")
            unicode = True
        except (UnicodeEncodeError, LookupError):
            unicode = False
        return cls(shutil.get_terminal_size(fallback=(cls.width, 24)).columns, color, unicode)

    def paint(self, text: str, code: int) -> str:
        """`text` in the colour or weight `code` (an SGR number), or as it is without colours."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.color and text.strip() else text

    def heading(self, text: str, width: int | None = None) -> list[str]:
        """The lines of a title; none if it is empty."""
        return [self.paint(line, 1) for line in wrap(clean(text), width or self.width)] if text else []

    def show(self, lines: Iterable[str]) -> str:
        """The finished text, in the characters that the terminal has."""
        text = "\n".join(lines)
        if self.unicode:
            return text
        return "".join(c if c.isascii() else "?" * _character_width(c) for c in text.translate(_ASCII))


def cell_width(text: str) -> int:
    """The number of terminal cells that `text` takes, as far as the Unicode tables of Python know.

    Example:
        >>> cell_width("GiB"), cell_width("显存"), cell_width("e\u0301")
        (3, 4, 1)
    """
    return len(text) if text.isascii() else sum(map(_character_width, text))


@lru_cache(maxsize=4096)
def _character_width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def clean(text: str) -> str:
    r"""`text` without what would move the cursor or change the colours; line ends stay.

    Example:
        >>> clean("red: \x1b[31m\tend\r\n")
        'red: [31m end\n'
    """
    text = text.replace("\r\n", "\n").replace("\t", " ")
    return "".join(c for c in text if c == "\n" or unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp"))


def pad(text: str, width: int, *, right: bool = False) -> str:
    """`text` filled up with spaces to `width` cells, on its left if it is aligned to the right."""
    spaces = " " * (width - cell_width(text))
    return spaces + text if right else text + spaces


def wrap(text: str, width: int) -> list[str]:
    """Break `text` into lines of at most `width` cells, between words where it can.

    Nothing is dropped but the spaces at a break. A `width` below 2 is taken as 2, as a wide character would
    fit into nothing less.

    Example:
        >>> wrap("keep the matmul outputs", 10)
        ['keep the', 'matmul', 'outputs']
    """
    lines: list[str] = []
    for paragraph in text.split("\n"):
        lines += [paragraph] if cell_width(paragraph) <= width else _fill(paragraph, max(width, 2))
    return lines


def _fill(paragraph: str, width: int) -> list[str]:
    lines = [""]
    for word in paragraph.split():
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_width(joined) <= width:
            lines[-1] = joined
        elif lines[-1]:
            lines += _fold(word, width)
        else:
            lines[-1:] = _fold(word, width)
    return lines


def _fold(word: str, width: int) -> list[str]:
    pieces = [""]
    room = width
    for character in word:
        needed = _character_width(character)
        if needed > room:
            pieces.append("")
            room = width
        pieces[-1] += character
        room -= needed
    return pieces
