"""Training loops as people write them, on CUDA: the plan is for the card, and the card holds what the plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, Plan

transformers = pytest.importorskip("transformers")

CONFIG = Config(mode="aggressive", enable_logging=False, use_mixed_precision=False, use_8bit_optimizer=False)
IDS = torch.randint(500, (4, 64))


def build() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=4, n_embd=128, n_head=4, vocab_size=500, n_positions=64, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config).train()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_as_planned(model: nn.Module) -> None:
    """The plan does something on the card, which holds no more than it says."""
    executor = model._memscale_executor
    plan: Plan = executor.plan
    assert executor.device.type == "cuda"
    assert any(layer.techniques for layer in plan.layers)
    peak = torch.cuda.max_memory_allocated()
    assert 0 < peak <= plan.predicted_peak_bytes + plan.allowance_bytes
    assert peak < plan.baseline_peak_bytes


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("mode", ["balanced", "aggressive"])
def test_the_card_holds_what_was_predicted(mode: str, is_async: bool) -> None:
    model = build().cuda()
    ids = IDS.cuda()
    memscale.wrap(model, CONFIG.replace(mode=mode, async_offload=is_async), {"input_ids": ids, "labels": ids})
    optimizer = torch.optim.AdamW(model.parameters())
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step(model, optimizer, ids)
    assert_as_planned(model)


@pytest.mark.parametrize("sample", [None, {"input_ids": IDS, "labels": IDS}], ids=["no-sample", "sample"])
def test_the_model_moves_to_the_card_after_wrap(sample: dict[str, torch.Tensor] | None) -> None:
    model = memscale.wrap(build(), CONFIG, sample)
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, IDS.cuda())
    model.to("cuda")  # as accelerate does once more
    torch.cuda.reset_peak_memory_stats()
    step(model, optimizer, IDS.cuda())
    assert_as_planned(model)


@pytest.mark.parametrize("offloads", [False, True], ids=["resident", "offloaded"])
def test_inputs_come_from_the_host(offloads: bool) -> None:
    config = CONFIG.replace(enable_offloading=offloads)
    model = memscale.wrap(build().cuda(), config, {"input_ids": IDS, "labels": IDS})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        step(model, optimizer, IDS)
    assert_as_planned(model)


@pytest.mark.parametrize("before", [0, 2], ids=["new", "with-state"])
def test_a_fused_optimizer_before_during_and_after(before: int) -> None:
    model, ids = build().cuda(), IDS.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(before):
        step(model, optimizer, ids)
    memscale.wrap(model, CONFIG, {"input_ids": ids, "labels": ids})
    for _ in range(2):
        step(model, optimizer, ids)
    memscale.detach(model)
    step(model, optimizer, ids)
    assert all(value.is_cuda for state in optimizer.state.values() for value in state.values())


def test_a_gradient_scaler_with_clipping() -> None:
    model, ids = build().cuda(), IDS.cuda()
    memscale.wrap(model, CONFIG, {"input_ids": ids, "labels": ids})
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_as_planned(model)


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True}], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("wrapped", ["model", "trainer"])
def test_the_hugging_face_trainer(
    wrapped: str, precision: dict[str, bool], tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS.repeat(4, 1)]
    model = build()
    if wrapped == "model":
        memscale.wrap(model, CONFIG)
    make: Callable[..., Any] = transformers.TrainingArguments
    arguments = make(
        str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **precision,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    if wrapped == "trainer":
        memscale.wrap(trainer, CONFIG)
    trainer.train()
    assert_as_planned(model)
    on_host = {name for name, each in model.named_parameters() if each.device.type == "cpu"}
    assert on_host
    trainer.evaluate()
    assert {name for name, each in model.named_parameters() if each.device.type == "cpu"} == on_host
