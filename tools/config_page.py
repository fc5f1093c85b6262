"""Write docs/config.md from the fields of Config and their descriptions: python tools/config_page.py"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from pathlib import Path

from memscale.config import _MODE_DEFAULTS, AsyncOffloadConfig, Config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
HEAD = """\
# Config

<!-- Made by tools/config_page.py from memscale/config.py. -->

`memscale.Config(...)` takes keywords only, checks each, and cannot be changed; `config.replace(...)` returns
another one. A field that is set wins over the default of its mode. Sizes named `..._gb` are in GB (10⁹ bytes).
"""


def descriptions(kind: type) -> dict[str, str]:
    """Return what the docstring of a class says of each of its arguments."""
    text = inspect.getdoc(kind) or ""
    section = re.search(r"^(?:Args|Attributes):\n(.*?)(?=^\S)", text, re.DOTALL | re.MULTILINE)
    assert section is not None
    entries = re.split(r"^    (?=\w+: )", section[1], flags=re.MULTILINE)
    pairs = (entry.partition(": ") for entry in entries if entry.strip())
    return {name: " ".join(said.split()) for name, _, said in pairs}


def rows(kind: type) -> list[str]:
    """Return the lines of a table with every field of a class."""
    said = descriptions(kind)
    lines = ["| field | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        default = field.default.value if hasattr(field.default, "value") else field.default
        modes = [
            f"{mode.name}: `{values[field.name]!r}`"
            for mode, values in _MODE_DEFAULTS.items()
            if field.name in values
        ]
        shown = "<br>".join([f"`{default!r}`", *modes]) if kind is Config else f"`{default!r}`"
        meaning = re.sub(r":class:`(\w+)`", r"`\1`", said[field.name]).replace("|", "\\|")
        lines.append(f"| `{field.name}` | {shown} | {meaning} |")
    return lines


def page() -> str:
    """Return the whole page."""
    parts = [HEAD, *rows(Config), "", "## AsyncOffloadConfig", ""]
    parts += [
        "`Config(async_config=memscale.AsyncOffloadConfig(...))`: how transfers overlap with compute.",
        "",
    ]
    return "\n".join([*parts, *rows(AsyncOffloadConfig), ""])


if __name__ == "__main__":
    PAGE.write_text(textwrap.dedent(page()), encoding="utf-8")
