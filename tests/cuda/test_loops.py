"""Training loops as people write them, on CUDA: the plan is for the card, and the card holds what the plan says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, Plan
from memscale.memory.allocator import LARGE_SEGMENT
from memscale.simulator.device import CUBLAS_WORKSPACE
from support.devices import IS_STAND_IN

transformers = pytest.importorskip("transformers")

CONFIG = Config(mode="aggressive", enable_logging=False, use_mixed_precision=False, use_8bit_optimizer=False)
IDS = torch.randint(500, (4, 64))


def build(layers: int = 4, width: int = 128) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, vocab_size=500, n_positions=64, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config).train()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_as_planned(model: nn.Module, least: float = 0.8) -> None:
    """The plan does something on the card, which holds no more than it says, and at least that share of it."""
    executor = model._memscale_executor
    plan: Plan = executor.plan
    assert executor.device.type == "cuda"
    assert any(layer.techniques for layer in plan.layers)
    peak = torch.cuda.max_memory_allocated()
    missing = CUBLAS_WORKSPACE if IS_STAND_IN else 0  # a card has one for each thread that multiplies
    assert peak > 0
    assert (
        least * (plan.predicted_peak_bytes - missing)
        <= peak
        <= plan.predicted_peak_bytes + plan.allowance_bytes
    )
    assert peak < plan.baseline_peak_bytes
    reserved = torch.cuda.max_memory_reserved()
    assert reserved <= plan.predicted_reserved_bytes + max(plan.allowance_bytes, LARGE_SEGMENT)


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


def tensor_lr(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-3, device="cuda"), capturable=True, foreach=True)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "capturable": lambda parameters: torch.optim.AdamW(parameters, capturable=True),
    "fused, lr on the card": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(1e-3, device="cuda"), fused=True
    ),
    "capturable, lr on the card": tensor_lr,
}


def trained(model: nn.Module, ids: torch.Tensor, make: Any, events: dict[int, Callable[[], object]]) -> Any:
    """Return the losses of eight steps; before some of them something happens."""
    optimizer, losses = make(model.parameters()), []
    for number in range(8):
        if number in events:
            events[number]()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [value.device for state in optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_counters_and_rates_follow_their_parameters(name: str, computing: Any) -> None:
    """State of before wrap, another plan, and the time after detach: counters and `lr` are where a step wants them."""
    make, ids = OPTIMIZERS[name], IDS.cuda()
    sample = {"input_ids": ids, "labels": ids}
    with computing():
        torch.manual_seed(0)
        plain = build().cuda().eval()
        model = build().cuda().eval()
        model.load_state_dict(plain.state_dict())
        expected, _ = trained(plain, ids, make, {})
        events = {
            2: lambda: memscale.wrap(model, CONFIG.replace(force_optimize=True), sample),
            4: lambda: memscale.wrap(model, CONFIG.replace(mode="balanced", force_optimize=True), sample),
            6: lambda: memscale.detach(model),
        }
        found, devices = trained(model, ids, make, events)
    assert found == pytest.approx(expected, rel=1e-4)
    assert {each.type for each in devices} == {"cuda"}


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
    assert_as_planned(model, least=0.75)


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
        max_grad_norm=0.5,
        max_steps=2,
        logging_steps=1,
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
    assert trainer.optimizer.param_groups[0]["fused"], "the Trainer's default"
    assert sum("grad_norm" in entry for entry in trainer.state.log_history) == 2, "of each clipped step"
    on_host = {name for name, each in model.named_parameters() if each.device.type == "cpu"}
    assert on_host
    trainer.evaluate()
    assert {name for name, each in model.named_parameters() if each.device.type == "cpu"} == on_host


def log_of_a_trainer(precision: dict[str, bool], output: Any, *, wraps: bool) -> list[dict[str, float]]:
    """Return loss, gradient norm and rate of each step."""
    torch.manual_seed(0)
    model = build(layers=2, width=64)
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS.repeat(4, 1)]
    make: Callable[..., Any] = transformers.TrainingArguments
    options: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, **precision}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    arguments = make(str(output), max_grad_norm=0.5, logging_steps=1, learning_rate=1e-2, **sizes, **options)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    if wraps:
        memscale.wrap(trainer, CONFIG.replace(enable_tiling=False))  # tiles round otherwise
    trainer.train()
    if wraps:
        assert any(each.device.type == "cpu" for each in model.parameters())
    names = ("loss", "grad_norm", "learning_rate")
    return [{name: entry[name] for name in names} for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("precision", [{"bf16": True}, {"fp16": True}], ids=["bf16", "fp16"])
def test_a_clipping_trainer_has_the_numbers_of_a_plain_one(
    precision: dict[str, bool], tmp_path: Any, computing: Any
) -> None:
    with computing():
        expected = log_of_a_trainer(precision, tmp_path / "plain", wraps=False)
        found = log_of_a_trainer(precision, tmp_path / "wrapped", wraps=True)
    assert len(expected) == 4
    assert expected[-1]["loss"] < expected[0]["loss"]
    assert found == expected


def train_accelerated(model: nn.Module, precision: str, order: str, config: Config = CONFIG) -> list[float]:
    """Return the losses of four batches, of which two make a step."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
    if order == "wrap, prepare":
        memscale.wrap(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader([{"input_ids": ids, "labels": ids} for ids in IDS.repeat(4, 1)], 4)
    called, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if order == "prepare, wrap":
        memscale.wrap(called, config)
    losses = []
    for batch in loader:
        with accelerator.accumulate(called):
            loss = called(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(called.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerate.state.AcceleratorState._reset_state(True)
    return losses


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("order", ["wrap, prepare", "prepare, wrap"])
def test_accelerate(order: str, precision: str) -> None:
    model = build()
    train_accelerated(model, precision, order)
    assert_as_planned(model)
    assert any(each.device.type == "cpu" for each in model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("order", ["wrap, prepare", "prepare, wrap"])
def test_accelerate_has_the_numbers_of_a_plain_loop(order: str, precision: str, computing: Any) -> None:
    plain = build(layers=2, width=64)
    model = copy.deepcopy(plain)
    rounds_alike = CONFIG.replace(enable_tiling=False, fused_host_step=False)
    with computing():
        torch.manual_seed(0)
        expected = train_accelerated(plain, precision, "plain")
        torch.manual_seed(0)
        found = train_accelerated(model, precision, order, rounds_alike)
    assert any(each.device.type == "cpu" for each in model.parameters())
    assert found == expected


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_the_trainer_with_a_model_larger_than_the_card(precision: dict[str, bool], tmp_path: Any) -> None:
    """The model is wrapped before the Trainer, which moves it to the card, is made."""
    model = build(layers=24, width=256)
    room = sum(each.nbytes for each in model.parameters()) * 2 // 3
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS.repeat(4, 1)]
    make: Callable[..., Any] = transformers.TrainingArguments
    options: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, **precision}
    arguments = make(str(tmp_path), per_device_train_batch_size=4, max_steps=3, **options)
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(torch.OutOfMemoryError):
            transformers.Trainer(model, arguments, train_dataset=rows)
        model.cpu()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        memscale.wrap(model, CONFIG)
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        assert torch.cuda.max_memory_reserved() <= room
        assert_as_planned(model)
        memscale.detach(model)
        assert all(each.device.type == "cpu" for each in model.parameters()), "there is no room elsewhere"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
