"""What messages advise is possible: the settings that they name exist."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import memscale
from memscale import Config

SOURCE = Path(memscale.__file__).parent


def messages() -> Iterator[tuple[str, str]]:
    """Every text in the package that is no docstring, with the values in it left out."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [each.value for each in node.values if isinstance(each, ast.Constant)]
                yield f"{path.name}:{node.lineno}", "".join(map(str, parts))
            elif (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
            ):
                yield f"{path.name}:{node.lineno}", node.value


def test_settings_that_messages_name_exist() -> None:
    fields = {field.name for field in dataclasses.fields(Config)}
    named = [
        (where, setting)
        for where, text in messages()
        for arguments in re.findall(r"\bConfig\(([^)]*)\)", text)
        for setting in re.findall(r"(\w+)=", arguments)
    ]
    assert len(named) > 5
    assert [(where, setting) for where, setting in named if setting not in fields] == []


def test_no_message_speaks_of_leaving_single_modules_out() -> None:
    """There is no setting for one module."""
    assert [where for where, text in messages() if "this module out" in text] == []
