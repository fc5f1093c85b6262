"""Forked children of a process whose weights are on disk: what they write is theirs alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cpu_only, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]

COMMON = """
import os, sys, torch
from torch import nn
import memscale
from memscale import Config

torch.set_num_threads(1)
CONFIG = Config(
    mode="aggressive", use_mixed_precision=False, use_8bit_optimizer=False, enable_tiling=False,
    enable_logging=False, offload_dir=sys.argv[1],
)

def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(4)))

def step(model, optimizer, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

x = torch.randn(64, 64)
plain, model = build(), build()
memscale.wrap(model, CONFIG, x)
optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]

def both(x):
    losses = [step(each, optimizer, x) for each, optimizer in zip((plain, model), optimizers)]
    assert torch.equal(*losses), losses

both(x), both(x)
executor = model._memscale_executor
assert executor.bytes_on_disk >= 2 * sum(p.nbytes for p in model.parameters() if p.nbytes >= 4096)
def values():
    state = [each for one in optimizers[1].state.values() for each in one.values()]
    return [each.detach().clone() for each in (*model.parameters(), *state)]

def in_child(work):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        work()
        sys.exit(0)  # finalizers and exit handlers run
    assert os.waitpid(child, 0)[1] == 0
"""

WRITES = """
before, used, names = values(), executor.bytes_on_disk, os.listdir(sys.argv[1])

def ruin():
    assert all(map(torch.equal, values(), before))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[1].step()  # with state that is on disk
    stepped = values()
    assert not any(torch.equal(one, other) for one, other in zip(stepped, before) if one.dim())
    model.eval()
    with torch.no_grad():
        model(x)  # gives pages back, where nothing has to be kept
        for parameter in model.parameters():
            parameter.fill_(7)
        model.load_state_dict({name: torch.full_like(value, 3) for name, value in model.state_dict().items()})
    in_child(lambda: [parameter.data.add_(1) for parameter in model.parameters()])  # a child of the child
    assert all(bool((parameter == 3).all()) for parameter in model.parameters())
    memscale.detach(model)
    assert all(bool((parameter == 3).all()) for parameter in model.parameters())

in_child(ruin)
in_child(lambda: globals().update(model=None, executor=None, optimizers=None))
assert all(map(torch.equal, values(), before))
assert executor.bytes_on_disk == used
assert os.listdir(sys.argv[1]) == names
for _ in range(3):
    both(x)
memscale.detach(model)
assert all(map(torch.equal, model.parameters(), plain.parameters()))
print("unharmed")
"""

LOADER = """
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        torch.manual_seed(index)
        return torch.randn(64)

batches = 0
for rows in DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
    both(rows)
    batches += 1
assert batches == 3 and executor.bytes_on_disk
memscale.detach(model)
print("unharmed")
"""


@pytest.mark.parametrize("script", [WRITES, LOADER], ids=["a child that writes", "workers of a DataLoader"])
@pytest.mark.matrix(2)
def test_a_forked_child_does_not_reach_its_parents_weights(script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMON + script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["unharmed"]
    assert os.listdir(tmp_path) == []
