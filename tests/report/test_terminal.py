import io
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memscale._util.text import cell_width, clean, wrap
from memscale.report import Column, Terminal, bar, table, timeline
from memscale.units import format_bytes

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
PLAIN = Terminal(width=100)
# Latin letters, markup, wide characters, and one that is a letter and an accent.
WORDS = st.lists(st.sampled_from([*"abcXYZ019.,[]/ é显存한글\n", "e\u0301"]), max_size=30).map("".join)
TABLES = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        st.lists(WORDS, min_size=n, max_size=n),
        st.lists(st.lists(WORDS, min_size=n, max_size=n), max_size=4),
    )
)
SERIES = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 2**40), min_size=n, max_size=n), min_size=1, max_size=300).map(
        lambda events: {f"category {i}": list(values) for i, values in enumerate(zip(*events, strict=True))}
    )
)


def squeezed(text: str) -> str:
    return "".join(text.split())


def cells(text: str) -> list[list[str]]:
    """The cells of a drawn table: continuation lines joined, white space gone."""
    rows: list[list[str]] = []
    fresh = True
    for line in ESCAPE.sub("", text).split("\n"):
        if not line.startswith("│"):
            fresh = True
            continue
        parts = [squeezed(part) for part in line.strip("│").split("│")]
        if fresh:
            rows.append(parts)
        else:
            rows[-1] = [a + b for a, b in zip(rows[-1], parts, strict=True)]
        fresh = False
    return rows


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

    @pytest.mark.parametrize("width", [100, 60, 40])
    def test_rich_and_plain_say_the_same(self, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
        painted = self.draw(Terminal(width, color=True))
        assert "rich.table" in sys.modules
        assert ESCAPE.search(painted)
        assert ESCAPE.sub("", painted) == self.draw(Terminal(width))
        monkeypatch.setitem(sys.modules, "rich", None)
        assert ESCAPE.sub("", self.draw(Terminal(width, color=True))) == self.draw(Terminal(width))

    @given(TABLES, st.integers(40, 90))
    def test_rich_and_plain_carry_the_same_cells(
        self, content: tuple[list[str], list[list[str]]], width: int
    ) -> None:
        headers, rows = content
        plain = table("", headers, rows, terminal=Terminal(width))
        painted = table("", headers, rows, terminal=Terminal(width, color=True))
        assert [line.rstrip() for line in ESCAPE.sub("", painted).split("\n")] == plain.split("\n")

    @given(TABLES, st.integers(4, 90))
    def test_no_line_is_wider_than_the_terminal_and_nothing_is_lost(
        self, content: tuple[list[str], list[list[str]]], width: int
    ) -> None:
        headers, rows = content
        drawn = table("Title of it", headers, rows, caption="a caption", terminal=Terminal(width))
        assert max(map(cell_width, drawn.split("\n"))) <= width
        for text in ("Titleofit", "acaption"):
            assert text in squeezed(drawn)
        for cell in [*headers, *(cell for row in rows for cell in row)]:
            assert set(squeezed(cell)) <= set(drawn)

    def test_every_cell_survives_wrapping(self) -> None:
        rows = [[f"row {r} column {c} says something at length" for c in range(4)] for r in range(3)]
        drawn = table("", list("abcd"), rows, terminal=Terminal(60))
        assert max(map(cell_width, drawn.split("\n"))) <= 60
        assert cells(drawn)[0] == list("abcd")
        # The rows have no rule between them: each column, read downwards, is its cells in order.
        read = ["".join(column) for column in zip(*cells(drawn)[1:], strict=True)]
        assert read == ["".join(squeezed(cell) for cell in column) for column in zip(*rows, strict=True)]

    def test_wide_characters_keep_the_right_edge_straight(self) -> None:
        drawn = table(
            "", ["层", "MiB"], [("注意力", 12), ("attention", 3), ("e\u0301tage", 4)], terminal=PLAIN
        )
        assert {cell_width(line) for line in drawn.split("\n")} == {19}

    def test_columns_that_do_not_fit_beside_each_other_become_paragraphs(self) -> None:
        drawn = table("", list("abcdefgh"), [range(8), range(8)], terminal=Terminal(20))
        assert drawn.split("\n")[:2] == ["a: 0", "b: 1"]
        assert drawn.count("h: 7") == 2

    def test_numbers_stay_whole_where_text_can_give_way(self) -> None:
        drawn = table("", ["a", "b"], [("word " * 30, "10.86 GiB")], terminal=Terminal(30))
        assert "10.86 GiB" in drawn

    @pytest.mark.parametrize(
        ("cell", "line"),
        [
            ("1.5 GiB", "│  1.5 GiB │"),
            ("-3%", "│      -3% │"),
            ("≈ 2×", "│     ≈ 2× │"),
            ("1e-5", "│     1e-5 │"),
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

    def test_one_word_among_numbers_makes_a_column_of_text(self) -> None:
        drawn = table("", ["a header"], [[12], ["GPT-2"], [None]], terminal=PLAIN)
        assert drawn.split("\n")[3:6] == ["│ 12       │", "│ GPT-2    │", "│ –        │"]

    def test_markup_and_escape_sequences_of_users_are_text(self) -> None:
        drawn = table("", ["a"], [["[red]x[/red] \x1b[31my\x07"]], terminal=Terminal(color=True))
        assert "[red]x[/red] [31my" in ESCAPE.sub("", drawn)
        assert "\x1b[31m" not in drawn

    def test_no_rows(self) -> None:
        assert cells(table("", ["a", "b"], [], terminal=PLAIN)) == [["a", "b"]]

    def test_bad_shapes(self) -> None:
        with pytest.raises(ValueError, match="at least one column"):
            table("", [], [])
        with pytest.raises(ValueError, match="row 1 has 1 cells, and the table has 2 columns"):
            table("", ["a", "b"], [("x", "y"), ("x",)])


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
        assert cell_width(table("", ["a"], [["word " * 40]]).split("\n")[0]) <= 63

    def test_colour(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not Terminal.detect(io.StringIO()).color
        assert Terminal.detect(self.Screen()).color
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert Terminal.detect(io.StringIO()).color
        monkeypatch.setenv("NO_COLOR", "1")
        assert not Terminal.detect(self.Screen()).color
        assert not ESCAPE.search(table("T", ["a"], [["b"]]) + timeline({"a": [1]}, title="T"))

    def test_ascii(self) -> None:
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        terminal = Terminal.detect(stream)
        assert not terminal.unicode
        drawn = table("", ["a"], [["显存"], [bar(0.5, 4)]], terminal=terminal)
        assert drawn.isascii()
        assert len({len(line) for line in drawn.split("\n")}) == 1
        assert timeline({"a": [1, 2]}, [(1, "…")], title="×", terminal=terminal).isascii()


class TestBar:
    @given(st.floats(allow_nan=False), st.integers(1, 80))
    def test_fills_its_width_and_never_overstates(self, fraction: float, width: int) -> None:
        drawn = bar(fraction, width)
        assert cell_width(drawn) == width
        assert (drawn == "█" * width) == (fraction >= 1)
        assert (drawn == "░" * width) == (fraction <= 0)

    def test_bad_input(self) -> None:
        with pytest.raises(ValueError, match="nan"):
            bar(float("nan"), 3)
        with pytest.raises(ValueError, match="at least 1"):
            bar(0.5, 0)


def picture(drawn: str) -> list[str]:
    """The rows of the plot itself, from the top."""
    return [line.partition("┤")[2] for line in drawn.split("\n") if "┤" in line]


def column_of_arrow(drawn: str) -> int:
    first, second = drawn.split("\n")[:2]
    return first.index("▼") - second.index("┤") - 1


class TestTimeline:
    @given(SERIES, st.integers(40, 120), st.integers(1, 12))
    def test_the_peak_is_never_lost(self, series: dict[str, list[int]], width: int, height: int) -> None:
        totals = [sum(values) for values in zip(*series.values(), strict=True)]
        drawn = timeline(series, height=height, width=width, terminal=Terminal(200))
        assert f"peak {format_bytes(max(totals))}" in drawn
        rows = picture(drawn)
        assert len(rows) == height
        if max(totals) > 0:
            assert all(row[column_of_arrow(drawn)] != " " for row in rows)
        at_peak = [values[totals.index(max(totals))] for values in series.values()]
        legend = squeezed(drawn[drawn.index("at the peak:") :])
        for name, value in zip(series, at_peak, strict=True):
            assert squeezed(f"{name} {format_bytes(value)}") in legend

    @given(st.integers(2, 5000), st.integers(0, 4999), st.integers(40, 100))
    def test_one_short_spike_is_seen(self, count: int, where: int, width: int) -> None:
        values = [1] * count
        values[where % count] = 1000
        drawn = timeline({"spike": values}, height=5, width=width, terminal=Terminal(200))
        top = picture(drawn)[0]
        assert set(top) <= {" ", "█"}
        if count >= width:
            assert top.count("█") == 1
        assert top[column_of_arrow(drawn)] == "█"
        assert not top[: column_of_arrow(drawn)].strip()

    @given(SERIES, st.integers(40, 100), st.lists(st.tuples(st.integers(0, 400), WORDS), max_size=8))
    def test_width_is_respected(
        self, series: dict[str, list[int]], width: int, marks: list[tuple[int, str]]
    ) -> None:
        named = {f"{name} 显存 with a long name": values for name, values in series.items()}
        drawn = timeline(named, marks, width=width, title="A title " * 8, terminal=Terminal(200))
        assert max(map(cell_width, drawn.split("\n"))) <= width
        painted = timeline(
            named, marks, width=width, title="A title " * 8, terminal=Terminal(200, color=True)
        )
        assert ESCAPE.search(painted)
        assert ESCAPE.sub("", painted) == drawn

    def test_a_narrower_terminal_wins(self) -> None:
        drawn = timeline({"a": [1, 2, 3]}, [(0, "forward")], title="t " * 40, terminal=Terminal(40))
        assert max(map(cell_width, drawn.split("\n"))) <= 40

    def test_categories_are_told_apart_without_colour(self) -> None:
        series = {name: [10, 10] for name in ("weights", "gradients", "optimizer", "activations", "other")}
        rows = picture(timeline(series, height=5, terminal=PLAIN))
        assert [set(row) for row in rows] == [{"·"}, {"░"}, {"▒"}, {"▓"}, {"█"}]

    def test_a_cell_shows_the_category_that_has_most_of_it(self) -> None:
        drawn = timeline({"most": [9], "little": [1]}, height=1, terminal=PLAIN)
        assert set(picture(drawn)[0]) == {"█"}
        drawn = timeline({"little": [1], "most": [9]}, height=1, terminal=PLAIN)
        assert set(picture(drawn)[0]) == {"▓"}

    def test_phases_stand_below_their_first_event(self) -> None:
        marks = [(0, "forward"), (40, "backward"), (80, "optimizer")]
        lines = timeline({"a": list(range(100))}, marks, width=108, unit=str, terminal=Terminal(200)).split(
            "\n"
        )
        axis = next(line for line in lines if "┼" in line)
        origin = axis.index("┼") + 1
        names = lines[lines.index(axis) + 1]
        ticks = [i for i, character in enumerate(axis) if character == "┬"]
        assert [names.index(name) for _, name in marks] == ticks
        assert ticks[0] == origin
        assert abs((ticks[1] - origin) / (len(axis) - origin) - 0.4) < 0.02

    def test_names_too_close_for_one_line_go_on_the_next(self) -> None:
        # One event for each column: "backward" would begin where "forward" ends.
        marks = [(0, "forward"), (7, "backward"), (8, "optimizer"), (59, "the end")]
        drawn = timeline({"a": [1] * 60}, marks, width=63, unit=str, terminal=PLAIN)
        below = drawn[drawn.index("┼") :].split("\n")[1:3]
        assert below == ["   forward optimizer" + " " * 36 + "the end", " " * 10 + "backward"]

    def test_nothing_recorded(self) -> None:
        assert timeline({}, title="Step", terminal=PLAIN) == "Step\n(nothing recorded)"
        assert timeline({"weights": []}, [(0, "forward")], terminal=PLAIN) == "(nothing recorded)"

    def test_all_zero(self) -> None:
        drawn = timeline({"weights": [0, 0, 0]}, [(0, "forward")], terminal=PLAIN)
        assert "peak 0 B" in drawn
        assert "weights 0 B" in drawn
        assert all(not row.strip() for row in picture(drawn))

    def test_bad_input(self) -> None:
        with pytest.raises(ValueError, match=r"differ: \{'a': 1, 'b': 2\}"):
            timeline({"a": [1], "b": [1, 2]})
        with pytest.raises(ValueError, match="'a' has -3 bytes"):
            timeline({"a": [1, -3]})
        with pytest.raises(ValueError, match="no room"):
            timeline({"a": [1]}, width=10)
        with pytest.raises(ValueError, match="no room"):
            timeline({"a": [1]}, height=0)


class TestText:
    @given(WORDS, st.integers(2, 40))
    def test_wrap_keeps_every_character(self, text: str, width: int) -> None:
        lines = wrap(text, width)
        assert all(cell_width(line) <= width for line in lines)
        assert squeezed("".join(lines)) == squeezed(text)

    @given(st.text())
    def test_clean_leaves_no_control_characters(self, text: str) -> None:
        assert not set(clean(text)) & set(map(chr, [*range(10), *range(11, 32), *range(127, 160)]))
