"""How many files a reader has to hold for one block's forward, and for one optimizer step."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).parents[2]


def test_a_forward_and_a_step_pass_through_few_files() -> None:
    # In a process of its own: after a simulation torch asks the simulated device in each step, too.
    command = [sys.executable, "-m", "benchmarks.trace_files"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    forward, step = (int(count) for count in re.findall(r": (\d+) files", shown))
    assert 5 <= forward <= 12, shown
    assert 5 <= step <= 8, shown
