"""Accelerate: `prepare` before or after `wrap`, mixed precision, accumulation, clipping, saved states."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from support.surfaces import Run, assert_gains, trained
from support.wrapping import Stack, lossless

accelerate = pytest.importorskip("accelerate")

QUIET = lossless("aggressive", force_optimize=True)
BATCHES = [torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    accelerate.state.AcceleratorState._reset_state(True)
    yield
    accelerate.state.AcceleratorState._reset_state(True)


class Loop:
    """A training loop as in accelerate's documentation."""

    def __init__(self, order: str, precision: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=2, **options
        )
        self.model: nn.Module = Stack(layers=4, width=16)
        if order == "wrap, prepare":
            memscale.wrap(self.model, QUIET)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        prepared = self.accelerator.prepare(self.model, optimizer, schedule)
        self.called, self.optimizer, self.schedule = prepared
        if order == "prepare, wrap":
            memscale.wrap(self.called, QUIET)

    def train(self, batches: list[torch.Tensor] = BATCHES) -> list[float]:
        losses = []
        for batch in batches:
            with self.accelerator.accumulate(self.called):
                loss = self.called(batch).float().pow(2).mean()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    losses.append(self.accelerator.clip_grad_norm_(self.called.parameters(), 0.5).item())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def run(self) -> Run:
        return trained(self.model, self.train)


# Not fp16: accelerate leaves a model on the CPU in float32 then. tests/pains has what it does on a GPU.
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("order", ["wrap, prepare", "prepare, wrap"])
def test_accumulation_and_clipping(order: str, precision: str) -> None:
    plain = Loop("plain", precision).run()
    accelerate.state.AcceleratorState._reset_state(True)
    loop = Loop(order, precision)
    assert_gains("Accelerate", f"{order}, {precision}", plain, loop.run())
    assert loop.model._memscale_executor.report().recomputations > 0
    memscale.detach(loop.model)
    assert not any("forward" in vars(each) for each in loop.model.layers)


@pytest.mark.parametrize("order", ["wrap, prepare", "prepare, wrap"])
def test_a_saved_state_is_loaded_wrapped_and_plain(order: str, tmp_path: Path) -> None:
    loop = Loop(order, "bf16")
    loop.train(BATCHES[:4])
    loop.accelerator.save_state(tmp_path)
    expected = loop.train(BATCHES[4:])
    for again in (order, "plain"):
        accelerate.state.AcceleratorState._reset_state(True)
        resumed = Loop(again, "bf16")
        resumed.train(BATCHES[:2])  # of an other state than that which is loaded
        resumed.accelerator.load_state(tmp_path)
        assert resumed.train(BATCHES[4:]) == expected


RESUME = """
import json, sys
sys.path[:0] = ["tests", "tests/integrations"]
import conftest
from test_accelerate import *

loop = Loop("wrap, prepare", "bf16")
loop.accelerator.load_state(sys.argv[1])
print(json.dumps(loop.train(BATCHES[4:])))
assert loop.model._memscale_executor.report().recomputations > 0
"""


@pytest.mark.slow
def test_a_new_process_resumes_from_a_saved_state(tmp_path: Path) -> None:
    loop = Loop("wrap, prepare", "bf16")
    loop.train(BATCHES[:4])
    loop.accelerator.save_state(tmp_path)
    expected = loop.train(BATCHES[4:])
    command = [sys.executable, "-c", RESUME, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected
