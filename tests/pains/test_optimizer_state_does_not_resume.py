"""A run that is killed goes on from its checkpoint in a new process as if nothing had happened.

Reported as bitsandbytes#782, bitsandbytes#1381, transformers#30822: 8-bit or offloaded optimizer state is lost, or of
the wrong type, when training is resumed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import json, os, signal, sys
sys.path.insert(0, "tests")
import conftest
import torch
import memscale
from support.wrapping import Stack, lossless

where, kind, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
model = Stack(layers=3, width=64)
eight_bit = {"use_8bit_optimizer": True} if kind == "8-bit" else {}
memscale.wrap(model, lossless("aggressive", force_optimize=True, **eight_bit), torch.ones(8, 64))
plan = model._memscale_executor.plan
assert any("offloading" in layer.techniques for layer in plan.layers)
assert plan.optimizer.eight_bit is (kind == "8-bit")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
start, losses = 0, []
if os.path.exists(where):
    saved = torch.load(where, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start, losses = saved["step"], saved["losses"]
for step in range(start, 6):
    torch.manual_seed(step)
    loss = model(torch.randn(8, 64)).pow(2).mean()
    if step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1, "losses": losses}
    torch.save(state, where + ".new")
    os.replace(where + ".new", where)
print(json.dumps(losses))
"""


def run(where: Path, kind: str, kill_at: int = -1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TRAIN, str(where), kind, str(kill_at)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["offloaded", "8-bit"])
def test_a_run_that_is_killed_goes_on(kind: str, tmp_path: Path) -> None:
    if kind == "8-bit":
        pytest.importorskip("bitsandbytes")
    whole = run(tmp_path / "whole", kind)
    assert whole.returncode == 0, whole.stderr
    assert run(tmp_path / "killed", kind, kill_at=3).returncode == -signal.SIGKILL
    resumed = run(tmp_path / "killed", kind)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout.splitlines()[-1]) == json.loads(whole.stdout.splitlines()[-1])
