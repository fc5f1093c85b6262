"""CONTRIBUTING.md is true: the files that it names exist, its layers are those that are checked, its habits hold."""

from __future__ import annotations

import ast
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


# Attributes that others than `_torch.py` read of torch's objects: a storage's, a tensor's, an operator's, a module's.
# `_initialize_weights` is a method of transformers' models.
PRIVATE_ATTRIBUTES = {
    "_cdata",
    "_forward_pre_hooks",
    "_indices",
    "_initialize_weights",
    "_is_view",
    "_overloadpacket",
    "_schema",
    "_values",
}


def test_private_apis_of_torch_are_in_one_file() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py")}
    nodes = [(path.name, node) for path, tree in trees.items() for node in ast.walk(tree)]
    own = {node.name for _, node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for _, node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
    read: set[str] = set()
    for name, node in nodes:
        if name == "_torch.py":
            continue
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
            names = [*str(node.module).split("."), *(each.name for each in node.names)]
            assert not any(each.startswith("_") and each != "__future__" for each in names), (name, names)
        if isinstance(node, ast.Attribute) and re.match("_(?!_|memscale_)", node.attr):
            owner = ast.unparse(node.value)
            assert not re.match(r"torch\b(?!\.ops)", owner), (name, owner, node.attr)
            if node.attr not in own and not re.search(r"\baten$", owner):
                read.add(node.attr)
    assert read == PRIVATE_ATTRIBUTES


def test_no_package_is_too_large() -> None:
    lines: Counter[str] = Counter()
    for path in (ROOT / "src" / "memscale").rglob("*.py"):
        lines[path.parent.name] += len(path.read_text(encoding="utf-8").splitlines())
    assert max(lines.values()) <= 4000
