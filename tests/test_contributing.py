"""CONTRIBUTING.md is true: the files that it names exist, and its layers are those that are checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`((?:src|tests|benchmarks|examples|tools|docs)/[\w./]*)`", TEXT)))


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_named_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_each_function_of_the_walk_is_in_its_file() -> None:
    walk = TEXT.partition("## From `wrap()`")[2].partition("\n## ")[0]
    named = re.findall(r"^\d+\. `(src/[\w./]+)`: `([\w.]+)`", walk, re.MULTILINE)
    assert len(named) >= 4
    for path, name in named:
        assert re.search(rf"\b(def|class) {name.partition('.')[0]}\b", (ROOT / path).read_text()), (
            path,
            name,
        )


def test_the_layers_are_those_that_are_checked() -> None:
    checked = (ROOT / "pyproject.toml").read_text().partition("layers = [")[2].partition("\n]")[0]
    packages = [
        name.strip("() ")
        for line in re.findall(r'"([^"]+)"', checked)
        for name in line.split(":")
        if "(" not in name
    ]
    table = TEXT.partition("## Layers")[2].partition("Beside `src/`")[0]
    described = {
        name.removesuffix("/").removesuffix(".py")
        for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row)
    }
    assert described == set(packages)


def test_the_glossary_is_short() -> None:
    glossary = TEXT.partition("## Glossary")[2].partition("\n## ")[0]
    assert glossary.count("\n| ") - 1 <= 12
