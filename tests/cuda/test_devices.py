"""Where things are on a machine with CUDA: the default device, one card of several, models over several cards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import AsyncOffloadConfig, Config
from memscale.errors import WrapError
from support.families import FAMILIES

IS_STAND_IN = "libfakecuda" in os.environ.get("LD_PRELOAD", "")
Computing = Callable[[], AbstractContextManager[None]]
CONFIG = Config(
    mode="aggressive", force_optimize=True, enable_logging=False, use_8bit_optimizer=False, async_offload=True
)
EXACT = CONFIG.replace(use_mixed_precision=False, enable_tiling=False, fused_host_step=False)


def batch() -> dict[str, torch.Tensor]:
    return {name: each.cuda() for name, each in FAMILIES["gpt2"].batch().items()}


def train(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[float]:
    torch.manual_seed(3)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(2):
        loss = FAMILIES["gpt2"].loss(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_cuda_as_the_default_device(computing: Computing) -> None:
    build, inputs = FAMILIES["gpt2"].build, batch()
    model, plain = build().cuda(), build().cuda()
    with computing():
        expected = train(plain, inputs)
        torch.set_default_device("cuda")
        try:
            memscale.wrap(model, EXACT, inputs)
            assert any(each.is_pinned() for each in model.parameters())
            assert train(model, inputs) == expected
            memscale.detach(model)
        finally:
            torch.set_default_device(None)


def run_on_two_cards(function: Callable[..., None], *arguments: object) -> None:
    """Run a function of this module in a process with two cards, of the stand-in if there are no others."""
    if not IS_STAND_IN and torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    # A process that ends just after backward may be aborted by torch's own thread: pytorch#38228.
    code = f"import test_devices, time; test_devices.{function.__name__}(*{arguments!r}); time.sleep(0.2)"
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "FAKECUDA_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def train_on_the_second(by_workers: bool) -> None:
    torch.cuda.set_device(1)
    # Worker threads copy what is not page-locked.
    settings = AsyncOffloadConfig(pinned_pool_gb=1e-9 if by_workers else None)
    model: Any = FAMILIES["gpt2"].build().cuda()
    memscale.wrap(model, CONFIG.replace(async_config=settings), batch())
    executor = model._memscale_executor
    assert executor.device == torch.device("cuda", 1)
    assert by_workers != any(each.is_pinned() for each in model.parameters())
    train(model, batch())
    memscale.detach(model)
    assert {each.device for each in model.parameters()} == {torch.device("cuda", 1)}
    if IS_STAND_IN:
        from fakecuda.computing import library

        assert [library().fakecuda_has_context(index) for index in range(2)] == [0, 1]
    assert torch.cuda.memory_reserved(0) == 0


@pytest.mark.parametrize("by_workers", [False, True])
def test_a_process_of_the_second_card_has_no_context_on_the_first(by_workers: bool) -> None:
    run_on_two_cards(train_on_the_second, by_workers)


def wrap_over_both() -> None:
    model = nn.Sequential(nn.Linear(4, 4).to("cuda:0"), nn.Linear(4, 4).to("cuda:1"))
    with pytest.raises(WrapError, match=r"over cuda:0, cuda:1.* one device"):
        memscale.wrap(model, CONFIG)
    assert [each.weight.device.index for each in model] == [0, 1]


def test_a_model_over_two_cards_is_refused() -> None:
    run_on_two_cards(wrap_over_both)


def recompute_on_the_second() -> None:
    """Read random state of this card alone, and compute with the switches of forward."""
    torch.cuda.init()
    torch.cuda.set_device(1)
    model: Any = FAMILIES["gpt2"].build().cuda()
    memscale.wrap(model, CONFIG.replace(enable_offloading=False), batch())
    asked: list[Any] = []
    switches: list[tuple[bool, bool, bool]] = []
    get_rng_state = torch.cuda.get_rng_state

    def noted(device: Any = "cuda") -> torch.Tensor:
        asked.append(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))
        return get_rng_state(device)

    def note(*_: Any) -> None:
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        switches.append((cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32))

    torch.cuda.get_rng_state = noted
    layers = [each for each in model.modules() if type(each).__name__ == "GPT2MLP"]
    for layer in layers:
        layer.register_forward_pre_hook(note)
    torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32 = True, True
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        loss = FAMILIES["gpt2"].loss(model, batch())
    torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32 = False, False
    before = len(switches)
    loss.backward()
    assert before == len(layers)
    assert len(switches) > before, "recomputed"
    assert set(switches) == {(True, False, True)}
    note()
    assert switches[-1] == (False, True, False), "and as they were"
    assert asked
    assert {each.index for each in asked} <= {1, None}
    if IS_STAND_IN:
        from fakecuda.computing import library

        assert not library().fakecuda_has_context(0)


def test_a_recomputation_finds_its_card_as_forward_left_it() -> None:
    run_on_two_cards(recompute_on_the_second)
