"""Each wait, and each reference to memory, of offloaded layers is needed: without it a check fails.

The table in `tests/fakecuda/README.md` lists the mutants with what catches each.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import AsyncOffloadConfig, Config
from memscale.executor import Executor
from memscale.offload.activations import OffloadedStorage
from memscale.offload.prefetch import Prefetcher
from memscale.tiers.engine import Engine, StreamTransfer
from support.families import FAMILIES
from support.offloaded import Tell, plan_of

WIDTH, ROWS = 64, 512  # activations of 128 KiB and more: smaller ones stay on the device
Computing = Callable[[], AbstractContextManager[None]]
Mutant = Callable[[pytest.MonkeyPatch], None]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(torch.tanh(self.up(inputs)))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(4))).cuda()


def train(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return [*losses, *(each.detach().cpu().clone() for each in model.parameters())]


def is_as_plain(*, recomputed: bool) -> bool:
    plain, model = build(), build()
    expected = train(plain)
    plan = plan_of(model, to="host", recomputed=recomputed)
    executor = Executor(model, plan, Config(enable_logging=False, async_offload=True, fused_host_step=False))
    executor.attach()
    assert executor.placement.bytes_on_host > 0
    # The thread that accumulates on the host has gone no further than the last layer when the device is at the second.
    reached = threading.Event()
    model[1].register_forward_pre_hook(lambda _, args: Tell.apply(args[0], reached))
    model[-1].down.bias.register_hook(lambda _: reached.wait(60) and None)
    ours = train(model)
    executor.detach()
    return all(map(torch.equal, ours, expected))


# ---------------------------------------------------------------------- mutants


def no_wait_for_a_loaded_copy(patch: pytest.MonkeyPatch) -> None:
    """A layer computes with weights or activations that are still on their way to the device."""
    wait = StreamTransfer.wait

    def wait_for_stored(self: StreamTransfer[Any]) -> Any:
        if self._value is None:
            return wait(self)
        _forget(self)
        return self._value

    patch.setattr(StreamTransfer, "wait", wait_for_stored)


def no_wait_for_what_was_computed(patch: pytest.MonkeyPatch) -> None:
    """A copy to the host begins before its source was computed."""
    run = Engine.run

    def run_early(self: Engine, *args: Any, outward: bool = False, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            if outward:
                inner.setattr(torch.cuda.Stream, "wait_event", lambda stream, event: None)
            return run(self, *args, outward=outward, **options)

    patch.setattr(Engine, "run", run_early)


def landing_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """A gradient is accumulated while it is on its way to the host."""
    patch.setattr(StreamTransfer, "finish", lambda self: self._value)


def gradient_not_held(patch: pytest.MonkeyPatch) -> None:
    """The memory of a gradient on the device is reused while it is copied."""
    patch.setattr(Prefetcher, "hold_gradient", lambda self, transfer, gradient: _forget(transfer))


def activation_given_back_early(patch: pytest.MonkeyPatch) -> None:
    """The memory of an activation is reused while it is copied to the host."""

    def finish_storing(self: OffloadedStorage) -> None:
        if self._source is not None:
            _forget(self._storing)
            self._source = None

    patch.setattr(OffloadedStorage, "finish_storing", finish_storing)


def awaited_by_the_current_stream_alone(patch: pytest.MonkeyPatch) -> None:
    """The stream that is current waits for a copy to the host, and not the one that has the memory next."""
    patch.setattr(StreamTransfer, "abandon", lambda self: None)


def _forget(transfer: Any) -> None:
    if isinstance(transfer, StreamTransfer):
        transfer._is_awaited = True


BY_NUMBERS = [
    no_wait_for_a_loaded_copy,
    landing_not_awaited,
    gradient_not_held,
    activation_given_back_early,
]


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_trains_as_a_plain_model(recomputed: bool, copies: str, computing: Computing) -> None:
    with computing():
        assert is_as_plain(recomputed=recomputed)


@pytest.mark.parametrize("mutate", BY_NUMBERS, ids=lambda each: each.__name__)
def test_a_mutant_is_found_by_its_numbers(
    mutate: Mutant, computing: Computing, runtime: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.fakecuda_set_copies(b"poisoned")
    mutate(monkeypatch)
    with computing():
        assert not (is_as_plain(recomputed=False) and is_as_plain(recomputed=True))


class Shift(nn.Module):
    """What it saves, it computes last, so that its stream does nothing more until its next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(inputs + self.bias)


class OnStreams(nn.Module):
    """Three stacks of layers, in turns, each on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(nn.ModuleList(Shift() for _ in range(5)) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        here = torch.cuda.current_stream()
        streams = [torch.cuda.Stream() for _ in self.stacks]
        values = [inputs for _ in streams]
        for stream in streams:
            stream.wait_stream(here)
        for layers in zip(*self.stacks, strict=True):
            for index, (layer, stream) in enumerate(zip(layers, streams, strict=True)):
                with torch.cuda.stream(stream):
                    values[index] = layer(values[index])
        for stream in streams:
            here.wait_stream(stream)
        return sum(values[1:], values[0])


@pytest.mark.parametrize("mutate", [None, awaited_by_the_current_stream_alone])
@pytest.mark.parametrize("to", ["device", "host"])  # activations, or gradients
def test_layers_on_several_streams(
    to: Any,
    mutate: Mutant | None,
    computing: Computing,
    runtime: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime.fakecuda_set_copies(b"poisoned")
    found = []
    with computing():
        for wrapped in (False, True):
            torch.manual_seed(0)
            model: Any = OnStreams().cuda()
            if wrapped:
                plan = plan_of(model, to=to, activations=to == "device")
                # The sources of five layers stay: when the sixth saves, it is on another stream than the first.
                settings = AsyncOffloadConfig(prefetch_depth=4)
                config = Config(enable_logging=False, async_offload=True, async_config=settings)
                executor = Executor(model, plan, config.replace(fused_host_step=False))
                executor.attach()
                # The host's thread waits for no gradient until the device is at the second layers.
                if to == "host":
                    reached = threading.Event()
                    second, last = model.stacks[0][1], model.stacks[-1][-1]
                    second.register_forward_pre_hook(lambda _, args, at=reached: Tell.apply(args[0], at))
                    last.bias.register_hook(lambda _, at=reached: at.wait(60) and None)
                if mutate is not None:
                    mutate(monkeypatch)
            found.append(train(model))
            if wrapped:
                executor.detach()
    assert all(map(torch.equal, *found)) == (mutate is None)


# ---------------------------------------------------------------------- torch's own sanitizer, which is for a process


def run_sanitized(mutant: str, mode: str, is_async: bool) -> None:
    """Train GPT-2 as the planner has it; the sanitizer raises at the first access that is in no order."""
    from torch.cuda._sanitizer import enable_cuda_sanitizer

    from fakecuda.computing import computing

    enable_cuda_sanitizer()
    if mutant:
        globals()[mutant](pytest.MonkeyPatch())
    family = FAMILIES["gpt2"]
    batch = {name: each.cuda() for name, each in family.batch().items()}
    config = Config(mode=mode, force_optimize=True, enable_logging=False, async_offload=is_async)
    with computing() if "libfakecuda" in os.environ.get("LD_PRELOAD", "") else contextlib.nullcontext():
        model: Any = family.build().cuda()
        memscale.wrap(model, config, batch)
        assert any("offloading" in layer.techniques for layer in model._memscale_executor.plan.layers)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            family.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        memscale.detach(model)


@pytest.mark.parametrize(
    ("mutant", "mode", "is_async"),
    [
        *((None, mode, is_async) for mode in ("balanced", "aggressive") for is_async in (False, True)),
        (no_wait_for_a_loaded_copy, "aggressive", True),
        (no_wait_for_what_was_computed, "aggressive", True),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_the_sanitizer_finds_races_of_mutants_only(mutant: Mutant | None, mode: str, is_async: bool) -> None:
    arguments = (mutant.__name__ if mutant else "", mode, is_async)
    code = f"import test_mutants as tests; tests.run_sanitized(*{arguments!r})"
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ("CSAN detected" in done.stderr) == (mutant is not None), done.stderr
    assert (done.returncode == 0) == (mutant is None), done.stderr
