"""CONTRIBUTING.md is true: the files that it names exist, its layers are those that are checked, its habits hold."""

from __future__ import annotations

import re
from collections import Counter
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


def test_a_class_name_has_one_meaning() -> None:
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    names = Counter(name for text in sources for name in re.findall(r"^class ([A-Z]\w+)", text, re.MULTILINE))
    # The integrations' callback has the name that each framework's users import.
    assert {name for name, count in names.items() if count > 1} <= {"MemScaleCallback"}


def test_private_apis_of_torch_are_in_one_file() -> None:
    private = re.compile(
        r"^(?:from|import) torch[\w.]*\._(?!_)|\btorch(?:\.\w+)*\._(?!_)\w+[.(]", re.MULTILINE
    )
    for path in (ROOT / "src").rglob("*.py"):
        if path.name != "_torch.py":
            assert not private.search(path.read_text(encoding="utf-8")), path


def test_no_package_is_too_large() -> None:
    lines: Counter[str] = Counter()
    for path in (ROOT / "src" / "memscale").rglob("*.py"):
        lines[path.parent.name] += len(path.read_text(encoding="utf-8").splitlines())
    assert max(lines.values()) <= 4000
