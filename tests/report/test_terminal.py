"""Tables for the terminal: the same cells with `rich` and without it."""

from __future__ import annotations

import io
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memscale._util.terminal import clean, wrap
from memscale.report import Column, Terminal, table

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
PLAIN = Terminal(width=100)
WORDS = st.text("abcXYZ019.,[]/ é\n", max_size=30)


@pytest.fixture(params=["rich", "plain"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "rich", None)
    return request.param


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.usefixtures("library")
class TestTable:
    ROWS = (
        ("embeddings [wte]", 1_234_567, None),
        ("block 0", 99, "checkpointed: activations outweigh weights"),
    )

    def draw(self, terminal: Terminal) -> str:
        return table("Layers", ["layer", "bytes", "why"], self.ROWS, caption="simulated", terminal=terminal)

    def test_numbers_are_right_aligned_and_text_left(self) -> None:
        assert self.draw(PLAIN).split("\n") == [
            "Layers",
            "┌──────────────────┬───────────┬────────────────────────────────────────────┐",
            "│ layer            │     bytes │ why                                        │",
            "├──────────────────┼───────────┼────────────────────────────────────────────┤",
            "│ embeddings [wte] │ 1,234,567 │ –                                          │",
            "│ block 0          │        99 │ checkpointed: activations outweigh weights │",
            "└──────────────────┴───────────┴────────────────────────────────────────────┘",
            "simulated",
        ]

    def test_colours_change_no_character(self) -> None:
        painted = self.draw(Terminal(60, color=True))
        assert ESCAPE.search(painted)
        assert ESCAPE.sub("", painted) == self.draw(Terminal(60))

    def test_every_cell_survives_a_narrow_terminal(self) -> None:
        rows = [[f"row {r} column {c} says something at length" for c in range(4)] for r in range(3)]
        drawn = table("", list("abcd"), rows, terminal=Terminal(60))
        assert max(map(len, drawn.split("\n"))) <= 60
        lines = [line.strip("│").split("│") for line in drawn.split("\n") if line.startswith("│")][1:]
        read = ["".join(squeezed(part) for part in column) for column in zip(*lines, strict=True)]
        assert read == ["".join(squeezed(cell) for cell in column) for column in zip(*rows, strict=True)]

    def test_numbers_stay_whole_where_text_can_give_way(self) -> None:
        drawn = table("", ["a", "b"], [("word " * 30, "10.86 GiB")], terminal=Terminal(30))
        assert "10.86 GiB" in drawn

    @pytest.mark.parametrize(
        ("cell", "line"),
        [
            ("1.5 GiB", "│  1.5 GiB │"),
            ("-3%", "│      -3% │"),
            ("≈ 2×", "│     ≈ 2× │"),
            ("4 × 512", "│ 4 × 512  │"),
            ("GPT-2", "│ GPT-2    │"),
            ("–", "│ –        │"),
            ("", "│          │"),
        ],
    )
    def test_what_counts_as_a_number(self, cell: str, line: str) -> None:
        assert table("", ["a header"], [[cell]], terminal=PLAIN).split("\n")[3] == line

    def test_alignment_can_be_chosen(self) -> None:
        columns = [Column("a header", "right"), Column("another", "left")]
        assert table("", columns, [["x", 1]], terminal=PLAIN).split("\n")[3] == "│        x │ 1       │"

    def test_markup_and_escape_sequences_of_users_are_text(self) -> None:
        drawn = table("", ["a"], [["[red]x[/red] \x1b[31my\x07"]], terminal=Terminal(color=True))
        assert "[red]x[/red] [31my" in ESCAPE.sub("", drawn)
        assert "\x1b[31m" not in drawn


@given(st.lists(st.lists(WORDS, min_size=3, max_size=3), min_size=1, max_size=4), st.integers(40, 90))
def test_nothing_is_lost_and_no_line_is_too_wide(rows: list[list[str]], width: int) -> None:
    drawn = table("Title of it", ["a", "b", "c"], rows, caption="a caption", terminal=Terminal(width))
    assert max(map(len, drawn.split("\n"))) <= width
    for cell in (cell for row in rows for cell in row):
        assert set(squeezed(cell)) <= set(drawn)


class TestTerminal:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm")

    def test_width(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "__stdout__", io.StringIO())
        assert Terminal.detect(io.StringIO()).width == 100
        monkeypatch.setenv("COLUMNS", "63")
        assert Terminal.detect(io.StringIO()).width == 63
        assert len(table("", ["a"], [["word " * 40]]).split("\n")[0]) <= 63

    def test_a_process_without_standard_output(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdout", None)
        assert not Terminal.detect().color

    def test_colour(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not Terminal.detect(io.StringIO()).color
        assert Terminal.detect(self.Screen()).color
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert Terminal.detect(io.StringIO()).color
        monkeypatch.setenv("NO_COLOR", "1")
        assert not Terminal.detect(self.Screen()).color
        assert not ESCAPE.search(table("T", ["a"], [["b"]]))


@given(WORDS, st.integers(2, 40))
def test_wrapping_keeps_every_character_but_spaces(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert squeezed("".join(lines)) == squeezed(text)
    assert all(len(line) <= width for line in lines)


def test_clean_keeps_line_ends_alone() -> None:
    assert clean("a\x1b[1mb\r\nc\u2028\x00") == "a[1mb\nc"


def test_a_terminal_too_narrow_for_columns_gets_lists() -> None:
    rows = [("transformer.h.0", "offloading to host", "1.5 GiB"), ("lm_head", None, None)]
    columns = ["layer", "technique", "saves"]
    assert table("Plan", columns, rows, terminal=Terminal(width=30)).splitlines() == [
        "Plan",
        "transformer.h.0",
        "  technique: offloading to",
        "  host",
        "  saves: 1.5 GiB",
        "lm_head",
    ]
    assert "│ transformer." in table("Plan", columns, rows, terminal=Terminal(width=60))
