"""All techniques together: each of the 32 combinations trains as it promises to, and comes off without a trace."""

from __future__ import annotations

import functools
import gc
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from memscale import Config
from memscale.execution_plan import (
    Checkpointing,
    LayerPlan,
    LossTiling,
    Offloading,
    OptimizerPlan,
    Plan,
    Precision,
    Tiling,
)
from memscale.executor import Executor
from memscale.testing import executing

transformers = pytest.importorskip("transformers")

STEPS = 3
BLOCKS = ("transformer.h.0", "transformer.h.1")
NAMES = ("checkpointing", "offloading", "tiling", "precision", "eight_bit")
SETS = [
    frozenset(name for name, on in zip(NAMES, bits, strict=True) if on) for bits in product((0, 1), repeat=5)
]


def gpt2(dropout: float) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=4,
        vocab_size=96,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).train()


def plan_of(names: frozenset[str]) -> Plan:
    # In the order in which they go on: what is inside first.
    techniques = tuple(name for name in ("tiling", "offloading", "checkpointing") if name in names)
    layers = tuple(
        LayerPlan(
            block,
            (block,),
            techniques,
            "test",
            "test",
            checkpointing=Checkpointing() if "checkpointing" in names else None,
            offloading=Offloading() if "offloading" in names else None,
            tiling=Tiling(rows=5) if "tiling" in names else None,
        )
        for block in BLOCKS
    )
    return Plan(
        layers,
        precision=Precision("bfloat16") if "precision" in names else None,
        optimizer=OptimizerPlan(eight_bit=True) if "eight_bit" in names else None,
        loss=LossTiling(rows=7) if "tiling" in names else None,
    )


def train(names: frozenset[str], dropout: float) -> list[float]:
    """The losses of a few steps on the device; the model is as it was afterwards."""
    with executing() as gpu:
        torch.manual_seed(1)
        model = gpt2(dropout).to(gpu.device)
        before = {name: looks_of(module) for name, module in model.named_modules()}
        executor = Executor(model, plan_of(names), Config(enable_logging=False, fused_host_step=False))
        executor.attach()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        gpu.manual_seed(5)
        losses = []
        for step in range(STEPS):
            ids = (torch.arange(32, device=gpu.device).reshape(2, 16) * (step + 3)) % 96
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
        assert_is_on(names, model, optimizer)
        executor.detach()
        assert {name: looks_of(module) for name, module in model.named_modules()} == before
        for parameter, state in optimizer.state.items():
            assert parameter.device == parameter.grad.device == gpu.device
            for moment in ("exp_avg", "exp_avg_sq"):
                assert (state[moment].dtype, state[moment].device) == (torch.float32, gpu.device)
    gc.collect()
    return losses


def looks_of(module: nn.Module) -> dict[str, Any]:
    """What detach must leave as it was; of hooks only how many, as torch may replace an empty dict by another."""
    return {
        key: len(value) if "hooks" in key else sorted(value) if isinstance(value, dict) else value
        for key, value in vars(module).items()
    }


def assert_is_on(names: frozenset[str], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weight = model.transformer.h[0].mlp.c_fc.weight
    assert (weight.device.type == "cpu") == ("offloading" in names)
    assert isinstance(optimizer.state[weight]["exp_avg"], dict) == ("eight_bit" in names)
    assert ("forward" in vars(model)) == ("precision" in names)
    assert ("forward" in vars(model.lm_head)) == ("tiling" in names)
    assert ("forward" in vars(model.transformer.h[0].mlp)) == ("tiling" in names)
    assert ("forward" in vars(model.transformer.h[0])) == bool({"offloading", "checkpointing"} & names)


@functools.lru_cache(maxsize=4)
def plain(dropout: float) -> list[float]:
    return train(frozenset(), dropout)


@pytest.mark.matrix(9)
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["", "dropout"])
@pytest.mark.parametrize("names", SETS, ids=lambda names: "+".join(sorted(names)) or "nothing")
def test_losses_are_as_promised_and_detach_is_exact(names: frozenset[str], dropout: float) -> None:
    if "eight_bit" in names:
        pytest.importorskip("bitsandbytes")
    tolerance = 1e-6
    if names & {"precision", "eight_bit"}:
        tolerance = 0.02
    if dropout and "tiling" in names:
        tolerance = 0.1  # each tile draws its own masks
    assert train(names, dropout) == pytest.approx(plain(dropout), rel=tolerance)
