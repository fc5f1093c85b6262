"""Every example runs, as a person starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SAYS = {
    "huggingface_trainer.py": "peak",
    "larger_than_memory.py": "on disk: ",
    "lightning_module.py": "planned from the first training batch",
    "lora.py": "step 2: loss",
    "plain_loop.py": "Report: Sequential",
}
ELSEWHERE = {"demo.py", "observe.py"}  # have tests of their own


def test_each_has_a_test() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == SAYS.keys() | ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout + done.stderr


def test_the_plain_loop_is_short() -> None:
    assert len((EXAMPLES / "plain_loop.py").read_text().splitlines()) <= 40
