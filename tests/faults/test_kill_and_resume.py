"""`kill -9` at random moments with parameters and optimizer state on disk: training goes on from its checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.kills import PHASES

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize(
    ("kills", "seed", "way"),
    [
        (4, 0, "--async-offload"),
        pytest.param(10, 1, "--async-offload", marks=pytest.mark.slow),
        pytest.param(10, 2, "", marks=pytest.mark.slow),
    ],
)
def test_a_training_that_is_killed_again_and_again(kills: int, seed: int, way: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "faults.kills", str(tmp_path), str(kills), str(seed), way]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(filter(None, command)), capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["kills"]) == kills
    assert set(found["kills"]) == set(PHASES)
    assert found["killed"] == found["plain"]
    assert found["neighbour"] == found["plain"][:3]  # a living process with its layers in the same directory
