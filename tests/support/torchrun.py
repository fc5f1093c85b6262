"""Start processes of a module under `tests/` with torchrun, over gloo on the loopback device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(module: str, *arguments: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    options = ["--standalone", "--nproc-per-node", str(processes), "--module", module]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
