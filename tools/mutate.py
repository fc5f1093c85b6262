"""Change one thing in the source at a time and see whether a test fails: a mutant that lives shows what no test pins.

    python tools/mutate.py --mutants 15 --seed 0 --json mutants.json    # of each package
    python tools/mutate.py --show mutants.json                          # the survivors

Mutants are drawn at random from all that can be made; each runs in a copy of the tree, so the tree itself stays as it
is. With --json a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMON = ["tests/test_wrap.py", "tests/techniques", "tests/properties/test_random_models.py"]
TESTS = {
    package: [f"tests/{package}", *COMMON] for package in ("checkpointing", "executor", "offload", "planner")
}
SECONDS = 1200  # a mutant that takes longer hangs
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    """A change of one expression or statement."""

    file: str
    line: int
    before: str
    after: str
    start: int  # bytes of the file
    end: int


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    skipped = {id(each) for node in ast.walk(tree) for each in _without_effect(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        for after in _changed(node):
            start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
            end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            before = source[start:end].decode()
            yield Mutant(str(path.relative_to(ROOT)), node.lineno, before, after, start, end)  # type: ignore[attr-defined]


def _without_effect(node: ast.AST) -> Iterator[ast.AST]:
    """Annotations, and what says something to people: messages of errors, logs and notes."""
    if isinstance(node, ast.AnnAssign):
        yield from ast.walk(node.annotation)
    if isinstance(node, ast.arg) and node.annotation is not None:
        yield from ast.walk(node.annotation)
    if isinstance(node, ast.FunctionDef) and node.returns is not None:
        yield from ast.walk(node.returns)
    if isinstance(node, (ast.Raise, ast.JoinedStr)):
        yield from (each for each in ast.walk(node) if each is not node)
    if isinstance(node, ast.Expr) and "logger" in ast.unparse(node):
        yield from ast.walk(node)


def _changed(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = COMPARISONS[type(node.ops[0])]()
        yield f"({ast.unparse(ast.Compare(node.left, [other], node.comparators))})"
    elif isinstance(node, ast.BoolOp):
        joint = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield f"({ast.unparse(ast.BoolOp(joint, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield f"({ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))})"
    elif isinstance(node, ast.IfExp):
        yield f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield str(node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "pass"
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "return None"


def run(mutant: Mutant, tests: list[str], tree: Path) -> str:
    """Return "killed", "survived" or "hung"."""
    target = tree / mutant.file
    source = target.read_bytes()
    target.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree / 'src'}",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return "killed" if process.wait(SECONDS) else "survived"
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        target.write_bytes(source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--packages", default=",".join(TESTS), help="with commas between (default: %(default)s)"
    )
    parser.add_argument("--mutants", type=int, default=15, help="of each package (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--show", type=Path, help="print the survivors of this file, and run none")
    options = parser.parse_args()
    if options.show is not None:
        print(report(json.loads(options.show.read_text())))
        return 0
    rows = json.loads(options.json.read_text()) if options.json is not None and options.json.exists() else []
    done = {(row["file"], row["start"], row["after"]) for row in rows}
    with tempfile.TemporaryDirectory(prefix="memscale-mutants-") as directory:
        tree = Path(directory) / "tree"
        shutil.copytree(
            ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "site", "__pycache__", ".*_cache")
        )
        for package in options.packages.split(","):
            files = sorted((ROOT / "src/memscale" / package).rglob("*.py"))
            found = [mutant for path in files for mutant in mutants_of(path)]
            for mutant in random.Random(options.seed).sample(found, min(options.mutants, len(found))):
                if (mutant.file, mutant.start, mutant.after) in done:
                    continue
                outcome = run(mutant, TESTS[package], tree)
                rows.append({"package": package, "outcome": outcome, **asdict(mutant)})
                print(
                    f"{outcome}: {mutant.file}:{mutant.line}: {mutant.before!r} -> {mutant.after!r}",
                    flush=True,
                )
                if options.json is not None:
                    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(report(rows))
    return 0


def report(rows: list[dict[str, object]]) -> str:
    """Return the counts of each package and the survivors, a line each."""
    counts = Counter((row["package"], row["outcome"]) for row in rows)
    lines = [
        f"{package}: {counts[package, 'killed']} killed, {counts[package, 'hung']} hung, "
        f"{counts[package, 'survived']} survived"
        for package in sorted({str(row["package"]) for row in rows})
    ]
    lines += [
        f"- {row['file']}:{row['line']}: `{row['before']}` -> `{row['after']}`"
        for row in rows
        if row["outcome"] == "survived"
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
