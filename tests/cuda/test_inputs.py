"""Inputs of a call: on the device all of them, or those that the caller has put there; and when they may be changed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import memscale
from memscale import Config
from memscale.executor import Executor
from memscale.profiler.run import profile_empirical
from memscale.profiler.sample import Sample
from memscale.simulator import simulate
from support.offloaded import plan_of

Computing = Callable[[], AbstractContextManager[None]]
QUIET = Config(enable_logging=False, fused_host_step=False)
LENGTHS = torch.tensor([5, 12, 7, 3])


class Recurrent(nn.Module):
    """A layer that wants the lengths of its sequences on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 32, batch_first=True)

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(values, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Recurrent() for _ in range(3))

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        values = self.words(ids)
        for layer in self.layers:
            values = layer(values, lengths)
        return values


def tagger() -> Tagger:
    torch.manual_seed(0)
    return Tagger().cuda()


def train_tagger(model: nn.Module) -> list[torch.Tensor]:
    ids = torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(ids, LENGTHS).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return [*losses, *(each.detach().cpu() for each in model.parameters())]


@pytest.mark.parametrize("how", ["resident", "offloaded", "by the first batch"])
def test_lengths_on_the_host_stay_there(how: str, computing: Computing) -> None:
    with computing():
        expected, model = train_tagger(tagger()), tagger()
        if how == "by the first batch":
            memscale.wrap(model, QUIET.replace(mode="aggressive", force_optimize=True))
        else:
            to = "host" if how == "offloaded" else "device"
            Executor(model, plan_of(model, to=to), QUIET).attach()
        found = train_tagger(model)
        memscale.detach(model)
    assert all(map(torch.equal, found, expected))


def test_a_real_profiling_run_leaves_lengths_on_the_host(computing: Computing) -> None:
    sample = Sample((torch.zeros(4, 12, dtype=torch.long, device="cuda"),), {"lengths": LENGTHS})
    with computing():
        profile = profile_empirical(tagger(), sample, reason="for a test")
    assert profile.calls_blocks


class Keeping(nn.Module):
    """A model that shows what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.called_with = values
        return self.layers(values)


@pytest.mark.parametrize("to", ["device", "host"])
def test_a_page_locked_batch_may_be_filled_anew_after_forward(to: Any, runtime: ctypes.CDLL) -> None:
    """A loop that loads into a buffer of its own: a copy of it that is late must be over when forward returns."""
    model = Keeping().cuda()
    executor = Executor(model, plan_of(model, to=to), QUIET.replace(async_offload=True))
    executor.attach()
    runtime.fakecuda_set_copies(b"late")
    buffer = torch.ones(4, 8, pin_memory=True)
    model(buffer)
    buffer.zero_()
    torch.cuda.synchronize()
    assert model.called_with.is_cuda
    assert bool((model.called_with.cpu() == 1).all())
    executor.detach()
    del model.called_with


def test_a_simulated_batch_is_where_the_real_one_is() -> None:
    on_host = torch.zeros(4, 12, dtype=torch.long)
    on_card = on_host.cuda()
    with simulate("RTX 3090") as simulation:
        beside = simulation.batch_of((on_card, {"lengths": LENGTHS}))
        alone = simulation.batch_of((on_host, {"lengths": LENGTHS}))
    assert [beside[0].device.type, beside[1]["lengths"].device.type] == ["cuda", "cpu"]
    assert [alone[0].device.type, alone[1]["lengths"].device.type] == ["cuda", "cuda"]
