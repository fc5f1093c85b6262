"""The documentation: its code runs, its commands run, every error and setting is in it, and the site builds."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memscale
from memscale.errors import MemScaleError

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?^```(?P<kind>python|sh)\n(?P<code>.*?)^```$", re.DOTALL | re.M
)


def blocks(page: Path, kind: str) -> Iterator[tuple[int, str]]:
    """The code of a page that is to be run, with its line."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        if found["kind"] == kind and found["why"] is None:
            yield text[: found.start("code")].count("\n"), found["code"]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.matrix(5)
@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page, "python"))], ids=name_of)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for line, code in blocks(page, "python"):
        exec(compile("\n" * line + code, str(page), "exec"), names)


def commands() -> list[object]:
    return [
        pytest.param(command, id=command)
        for command in dict.fromkeys(
            line
            for page in PAGES
            for _, code in blocks(page, "sh")
            for line in code.splitlines()
            if line.strip()
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memscale.cli.app import run

    program, *arguments = shlex.split(command, comments=True)
    assert program == "memscale", f"mark it `<!-- not run: why -->`: {command}"
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 0


def test_the_config_page_is_that_of_the_code() -> None:
    script = ROOT / "tools" / "config_page.py"
    code = f"import runpy; print(runpy.run_path({str(script)!r})['page'](), end='')"
    made = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == made.stdout, (
        "run python tools/config_page.py"
    )


def test_every_error_has_its_row() -> None:
    for found in pkgutil.walk_packages(memscale.__path__, "memscale."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)

    def below(kind: type) -> Iterator[type]:
        for each in kind.__subclasses__():
            yield each
            yield from below(each)

    errors = {each.__name__ for each in below(MemScaleError) if each.__module__.startswith("memscale.")}
    table = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("## Errors")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", table, re.M))
    assert set(rows) == errors
    assert all(len([cell for cell in row.split("|") if cell.strip()]) == 2 for row in rows.values())


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "api" / "index.html").stat().st_size > 10_000
