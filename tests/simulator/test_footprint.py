"""Simulating GPT-2 XL takes little memory. (How long it takes is in docs/simulator.md, with its command.)"""

import json
import subprocess
import sys

import pytest

GIB = 2**30

SCRIPT = """
import json, os, torch
from transformers import GPT2Config, GPT2LMHeadModel
from memscale.memory.process import peak_rss_bytes
from memscale.simulator import simulate

with simulate("64GiB") as simulation:
    model = GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25)).to(simulation.device)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 50257, (1, 512), device=simulation.device)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(json.dumps({"rss": peak_rss_bytes(), "peak": simulation.peak_bytes}))
"""


@pytest.mark.slow
def test_two_steps_of_gpt2_xl_in_less_than_a_gibibyte():
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["rss"] < GIB
    assert 29 * GIB < result["peak"] < 30 * GIB
