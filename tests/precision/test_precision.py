"""Mixed precision: 16 bits inside, 32 bits for whoever looks, and a loss that is scaled without the loop's help."""

from __future__ import annotations

import copy
import logging
import pickle
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

from memscale._torch import leaves_of
from memscale.execution_plan import (
    Checkpointing,
    LayerPlan,
    LossTiling,
    Offloading,
    OptimizerPlan,
    Plan,
    Precision,
)
from memscale.executor import Executor
from memscale.hardware import virtual_hardware
from memscale.hardware.detect import CpuFeatures, cpu_device
from memscale.planner.settings import choose_precision
from memscale.precision.technique import GROWTH_INTERVAL, AutocastStage, LossScale
from memscale.simulator import simulate
from memscale.testing import executing

BF16 = Plan((), precision=Precision("bfloat16"))
FP16 = Plan((), precision=Precision("float16"))
WIDTH = 16


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """An embedding, three layers, a head; notes what its layers compute in."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.head = nn.Linear(width, 32)
        self.seen: list[torch.dtype] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        self.seen.append(logits.dtype)
        return logits


def net(width: int = WIDTH) -> Net:
    torch.manual_seed(0)
    return Net(width)


def ids(step: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    return ((torch.arange(24).reshape(2, 12) * (step + 3)) % 32).to(device)


def loss_of(model: nn.Module, step: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    batch = ids(step, device)
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.detach().cpu().clone() for p in model.parameters() if p.grad is not None]


def attached(model: nn.Module, plan: Plan) -> Executor:
    executor = Executor(model, plan)
    executor.attach()
    return executor


def layers_plan(precision: str | None, *techniques: str) -> Plan:
    layers = tuple(
        LayerPlan(
            f"layers.{index}",
            (f"layers.{index}",),
            techniques,
            "test",
            "test",
            checkpointing=Checkpointing() if "checkpointing" in techniques else None,
            offloading=Offloading() if "offloading" in techniques else None,
        )
        for index in range(3)
    )
    return Plan(layers if techniques else (), precision=None if precision is None else Precision(precision))  # type: ignore[arg-type]


def scale_of(model: nn.Module) -> Any:
    stage = vars(model)["forward"].find(AutocastStage)
    assert stage is not None
    return stage._scaling


# ---------------------------------------------------------------------- autocast


@pytest.mark.parametrize(("plan", "dtype"), [(BF16, torch.bfloat16), (FP16, torch.float16)])
def test_the_model_computes_as_under_autocast_and_answers_in_full(plan: Plan, dtype: torch.dtype) -> None:
    plain, model = net(), net()
    attached(model, plan)
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype):
        expected = plain(ids())
    torch.manual_seed(1)
    got = model(ids())
    assert model.seen == [dtype]
    assert expected.dtype is dtype
    assert got.dtype is torch.float32
    assert torch.equal(got, expected.float())
    assert not torch.is_autocast_enabled("cpu")


def test_evaluation_computes_so_too() -> None:
    model = net().eval()
    attached(model, BF16)
    with torch.no_grad():
        assert model(ids()).dtype is torch.float32
    assert model.seen == [torch.bfloat16]


def test_gradients_are_in_full_and_are_those_of_autocast() -> None:
    plain, model = net(), net()
    attached(model, BF16)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        logits = plain(ids())
    nn.functional.cross_entropy(logits.float().flatten(0, 1), ids().flatten()).backward()
    torch.manual_seed(1)
    loss_of(model).backward()
    assert {gradient.dtype for gradient in gradients(model)} == {torch.float32}
    for one, other in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(one, other)


def test_an_error_in_forward_leaves_autocast_off() -> None:
    model = net()
    attached(model, BF16)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 2))
    assert not torch.is_autocast_enabled("cpu")


def test_it_saves_memory_of_activations() -> None:
    def peak(plan: Plan) -> int:
        with simulate("4GiB") as gpu:
            model = net(256).to(gpu.device)
            attached(model, plan)
            batch = torch.zeros(64, 64, dtype=torch.long, device=gpu.device)
            gpu.tracker.reset_peak()
            model(batch).sum().backward()
            return gpu.peak_bytes

    plain, half = peak(Plan(())), peak(BF16)
    assert half < 0.75 * plain
    assert peak(FP16) < 1.02 * half  # loss scaling needs a gradient more, for a moment


def test_outputs_keep_their_containers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    attached(model, BF16)
    output = model(input_ids=ids(), labels=ids())
    assert type(output).__name__ == "CausalLMOutputWithCrossAttentions"
    assert (output.loss.dtype, output.logits.dtype) == (torch.float32, torch.float32)
    assert output["logits"] is output.logits


def test_an_output_without_16_bit_tensors_is_the_very_object() -> None:
    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, thing: Any) -> Any:
            return thing

    model = Echo()
    attached(model, BF16)
    thing = {"numbers": torch.ones(2), "rest": object()}
    assert model(thing) is thing


# ---------------------------------------------------------------------- how well it learns


def text() -> torch.Tensor:
    """Prose that ships with Python, as bytes."""
    words = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)[:40])
    return torch.tensor([min(ord(letter), 127) for letter in words])


def gpt2_on_text(plan: Plan | None, steps: int = 120) -> list[float]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()  # without dropout: what differs is the precision
    if plan is not None:
        attached(model, plan)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    corpus, draw, losses = text(), torch.Generator().manual_seed(1), []
    for _ in range(steps):
        starts = torch.randint(0, len(corpus) - 32, (8,), generator=draw)
        batch = torch.stack([corpus[start : start + 32] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_the_loss_curve_is_within_two_percent_of_fp32() -> None:
    plain = gpt2_on_text(None)
    assert plain[-1] < 0.7 * plain[0]
    for plan in (BF16, FP16):
        ours = gpt2_on_text(plan)
        assert ours != plain
        for at in range(0, 120, 20):
            mean, expected = sum(ours[at : at + 20]) / 20, sum(plain[at : at + 20]) / 20
            assert mean == pytest.approx(expected, rel=0.02)


# ---------------------------------------------------------------------- fp16


class Tiny(nn.Module):
    """A product whose gradient, in fp16, is what the test says."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.linear.weight, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_small_gradients_survive_and_are_seen_unscaled() -> None:
    tiny = 2.0**-30  # less than the least number of fp16
    scaled, unscaled = Tiny(), Tiny()
    attached(scaled, FP16)
    (scaled(torch.ones(1, 4)) * tiny).sum().backward()
    assert torch.equal(scaled.linear.weight.grad, torch.full((4, 4), tiny))
    with torch.autocast("cpu", torch.float16):
        output = unscaled(torch.ones(1, 4))
    (output.float() * tiny).sum().backward()
    assert torch.equal(unscaled.linear.weight.grad, torch.zeros(4, 4))


def test_all_that_a_pass_reaches_is_divided() -> None:
    model, other = Tiny(), nn.Linear(4, 4)
    attached(model, FP16)
    scale_of(model).scale.value = 2.0**8
    x = torch.ones(1, 4, requires_grad=True)
    seen: list[float] = []
    model.linear.weight.register_hook(lambda gradient: seen.append(float(gradient[0, 0])))
    penalty = model.linear.weight.square().sum()  # beside the model's forward
    (model(x).sum() + other(torch.ones(1, 4)).sum() + penalty).backward()
    assert torch.equal(model.linear.weight.grad, torch.full((4, 4), 3.0))
    assert torch.equal(other.weight.grad, torch.ones(4, 4))
    assert torch.equal(x.grad, torch.full((1, 4), 4.0))
    assert seen == [3.0]
    other(torch.ones(1, 4)).sum().backward()  # a pass that has nothing to do with the model
    assert torch.equal(other.weight.grad, torch.full((4, 4), 2.0))


def test_accumulation_and_clipping_see_true_gradients() -> None:
    plain, model = net().eval(), net().eval()
    attached(model, FP16)
    for each in (plain, model):
        for step in range(3):
            (loss_of(each, step) / 3).backward()
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1).item() for each in (plain, model)]
    assert norms[1] == pytest.approx(norms[0], rel=0.01)
    for one, two in zip(gradients(plain), gradients(model), strict=True):
        torch.testing.assert_close(one, two, rtol=0.05, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_are_given_and_several_roots() -> None:
    model = Tiny()
    attached(model, FP16)
    scale_of(model).scale.value = 2.0**8
    output = model(torch.ones(1, 4))
    torch.autograd.backward([output, output.sum()], [torch.full((1, 4), 2.0), None])
    assert torch.equal(model.linear.weight.grad, torch.full((4, 4), 3.0))
    with pytest.raises(RuntimeError, match="scalar outputs"):
        model(torch.ones(1, 4)).backward()
    model.zero_grad()
    x = torch.ones(1, 4, requires_grad=True)
    (model(x) ** 2).sum().backward(create_graph=True, inputs=[x])
    assert torch.equal(x.grad, torch.full((1, 4), 32.0))
    x.grad.sum().backward(inputs=[model.linear.weight])  # of the gradient's own graph
    assert model.linear.weight.grad.isfinite().all()
    model.zero_grad()
    edge = torch.autograd.graph.get_gradient_edge(model(torch.ones(1, 4)))
    torch.autograd.backward(edge, torch.ones(1, 4))
    assert torch.equal(model.linear.weight.grad, torch.ones(4, 4))
    hidden = model(torch.ones(1, 4))
    hidden.sum().backward(inputs=[hidden])
    assert torch.equal(hidden.grad, torch.ones(1, 4))
    (gradient,) = torch.autograd.grad(model(torch.ones(1, 4)).sum(), [model.linear.weight])
    assert torch.equal(gradient, torch.ones(4, 4))


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_torchs_own_checkpointing(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Tiny(), Tiny()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.second, self.first(x), use_reentrant=reentrant)

    tiny = 2.0**-30
    model = Checkpointed()
    attached(model, FP16)
    x = torch.ones(1, 4, requires_grad=True)
    (model(x) * tiny).sum().backward()
    # Scaled once on the way, and divided once at each end: also at those that only the inner pass sees.
    assert torch.equal(model.second.linear.weight.grad, torch.full((4, 4), 4 * tiny))
    assert torch.equal(model.first.linear.weight.grad, torch.full((4, 4), 4 * tiny))
    assert torch.equal(x.grad, torch.full((1, 4), 16 * tiny))


def test_an_overflow_is_survived(caplog: pytest.LogCaptureFixture) -> None:
    model = Tiny()
    attached(model, FP16)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    before = model.linear.weight.detach().clone()
    scaling = scale_of(model)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        (model(torch.ones(1, 4)) * factor).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    with caplog.at_level(logging.INFO, "memscale"):
        step(8.0)  # times 65,536 it is more than fp16 holds
        assert torch.equal(model.linear.weight, before)
        assert not optimizer.state
        assert (scaling.skipped, scaling.scale.value) == (1, 2.0**15)
        for _ in range(3):
            step(8.0)
    assert scaling.skipped == 4
    assert scaling.scale.value == 2.0**12
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "overflowed" in caplog.text
    step(8.0)
    assert scaling.skipped == 4
    assert not torch.equal(model.linear.weight, before)
    assert model.linear.weight.isfinite().all()
    assert model.linear.weight.grad.isfinite().all()


def test_an_overflow_in_a_closure_and_of_two_optimizers() -> None:
    model = nn.Sequential(Tiny(), Tiny(0.25))
    attached(model, FP16)
    nothing = nn.Parameter(torch.empty(0))
    nothing.grad = torch.empty(0)
    optimizers = [optim.SGD([*part.parameters(), nothing], lr=0.1) for part in model]
    before = [p.detach().clone() for p in model.parameters()]
    for optimizer in optimizers:
        optimizer.zero_grad()
    (model(torch.ones(1, 4)) * 8).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    scaling = scale_of(model)
    assert (scaling.skipped, scaling.scale.value) == (2, 2.0**15)  # one overflow
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizers[0].zero_grad()
        loss = (model(torch.ones(1, 4)) * 8).sum()
        loss.backward()
        return loss

    assert optimizers[0].step(closure).item() == 128.0
    assert len(calls) == 1
    assert scaling.skipped == 3
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    scaling.scale.value = 1.0
    optimizers[0].step(closure)
    assert not torch.equal(model[0].linear.weight, before[0])


def test_an_overflow_where_optimizers_step_inside_backward() -> None:
    model = nn.Sequential(Tiny(), Tiny(0.25))
    attached(model, FP16)
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        optimizer = optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    (model(torch.ones(1, 4)) * 8).sum().backward()
    assert scale_of(model).skipped == 2
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def test_no_step_is_half_made_where_state_is_streamed_or_in_eight_bits() -> None:
    pytest.importorskip("bitsandbytes")
    plan = Plan((), precision=Precision("float16"), optimizer=OptimizerPlan(eight_bit=True, bucket_bytes=1))
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    attached(model, plan)
    optimizer = optim.AdamW(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 64)).sum().backward()
    model[2].weight.grad.fill_(float("inf"))
    optimizer.step()
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    assert not optimizer.state


def test_the_scale_grows_again() -> None:
    scale = LossScale()
    for _ in range(GROWTH_INTERVAL - 1):
        scale.note_step()
    assert scale.value == 2.0**16
    scale.note_step()
    assert scale.value == 2.0**17
    scale.back_off()
    for _ in range(GROWTH_INTERVAL):
        scale.note_step()
    assert scale.value == 2.0**17
    for _ in range(400):
        scale.back_off()
    assert scale.value > 0


def test_leaves_of_a_deep_graph() -> None:
    weights = [torch.ones(1, requires_grad=True) for _ in range(3)]
    value = weights[0]
    for _ in range(5000):
        value = value * weights[1] + 1
    frozen = torch.ones(1)
    assert {id(leaf) for leaf in leaves_of([value * frozen])} == {id(weights[0]), id(weights[1])}
    assert leaves_of([weights[2]]) == [weights[2]]


# ---------------------------------------------------------------------- stepping back


@pytest.mark.parametrize("plan", [BF16, FP16])
def test_in_the_loops_own_autocast_nothing_is_changed(plan: Plan) -> None:
    plain, model = net(), net()
    attached(model, plan)
    for each in (plain, model):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            batch = ids()
            logits = each(batch)
            assert logits.dtype is torch.bfloat16
            nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()
    for one, two in zip(gradients(plain), gradients(model), strict=True):
        assert torch.equal(one, two)


def test_a_grad_scaler_of_the_loop_is_the_one_that_scales() -> None:
    def run(model: nn.Module) -> tuple[list[torch.Tensor], float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaled = gradients(model)
            scaler.step(optimizer)
            scaler.update()
        return scaled, scaler.get_scale()

    plain, model = net().eval(), net().eval()
    attached(model, FP16)
    expected, _ = run(plain)
    got, scale = run(model)
    assert scale == 1024.0
    for one, two in zip(expected, got, strict=True):
        torch.testing.assert_close(one, two, rtol=0.1, atol=0.5)
    assert scale_of(model).skipped == 0


def test_a_grad_scaler_of_another_model_changes_nothing() -> None:
    model, other = Tiny(), nn.Linear(4, 4)
    attached(model, FP16)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(other(torch.ones(1, 4)).sum()).backward()
    assert torch.equal(other.weight.grad, torch.full((4, 4), 4.0))
    model(torch.ones(1, 4))
    assert scale_of(model).is_wanted


def test_accelerates_precision_is_the_one_that_counts() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of a Trainer before
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    try:
        model = net()
        attached(model, FP16)
        scaling = scale_of(model)
        prepared, optimizer = accelerator.prepare(model, optim.AdamW(model.parameters()))
        accelerator.backward(loss_of(prepared))
        optimizer.step()
        assert model.seen == [torch.bfloat16]
        assert not scaling.is_wanted
        model._memscale_executor.detach()  # prepared by accelerate, a model is a cycle, and is not dropped at once
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_model_in_16_bits_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = net().to(torch.bfloat16)
    with caplog.at_level(logging.INFO, "memscale"):
        attached(model, FP16)
    assert "no parameters in 32 bits" in caplog.text
    assert "forward" not in vars(model)


# ---------------------------------------------------------------------- on and off


@pytest.mark.parametrize("plan", [BF16, FP16])
def test_detach_leaves_nothing(plan: Plan) -> None:
    model = net()
    optimizer = optim.AdamW(model.parameters())
    before = dict(vars(model))
    hooks = [p._backward_hooks for p in model.parameters()]
    functions = (torch.autograd.backward, torch.amp.GradScaler.scale)
    executor = attached(model, plan)
    loss_of(model).backward()
    optimizer.step()
    executor.detach()
    assert {**vars(model), "seen": []} == {**before, "seen": []}
    assert (torch.autograd.backward, torch.amp.GradScaler.scale) == functions
    assert [p._backward_hooks or None for p in model.parameters()] == hooks
    model.seen.clear()
    assert loss_of(model).dtype is torch.float32
    assert model.seen == [torch.float32]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_has_a_scale_of_its_own(duplicate: Callable[[Any], Any]) -> None:
    model = net()
    attached(model, FP16)
    twin = duplicate(model)
    scale_of(model).scale.back_off()
    for each in (model, twin):
        torch.manual_seed(1)
        loss_of(each).backward()
    for one, two in zip(gradients(model), gradients(twin), strict=True):
        torch.testing.assert_close(one, two, rtol=0.01, atol=1e-5)
    assert scale_of(twin) is not scale_of(model)
    assert (scale_of(model).scale.value, scale_of(twin).scale.value) == (2.0**15, 2.0**16)
    twin._memscale_executor.detach()
    assert "forward" not in vars(twin)
    assert scale_of(model).scale.value == 2.0**15


def test_the_scale_outlives_a_plan() -> None:
    model = net()
    executor = attached(model, FP16)
    scale_of(model).scale.back_off()
    executor.replan(FP16)
    assert scale_of(model).scale.value == 2.0**15
    with executor.suspended():
        pass
    assert scale_of(model).scale.value == 2.0**15
    executor.detach()
    attached(model, FP16)
    assert scale_of(model).scale.value == 2.0**16


def test_a_dropped_model_leaves_no_patch_behind() -> None:
    before = torch.autograd.backward
    model = net()
    attached(model, FP16)
    assert torch.autograd.backward is not before
    del model
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    assert torch.autograd.backward is before


# ---------------------------------------------------------------------- with other techniques


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_recomputed_layers_are_bit_equal(dtype: str) -> None:
    runs = []
    for techniques in ((), ("checkpointing",)):
        model = net()
        attached(model, layers_plan(dtype, *techniques))
        torch.manual_seed(1)
        loss = loss_of(model)
        loss.backward()
        runs.append((loss.item(), gradients(model)))
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("techniques", [("offloading",), ("offloading", "checkpointing")])
@pytest.mark.parametrize("ahead", [False, True])
def test_offloaded_layers_compute_the_same_with_16_bit_copies(
    dtype: str, techniques: tuple[str, ...], ahead: bool
) -> None:
    def run(plan: Plan) -> tuple[float, list[torch.Tensor], list[str], set[torch.dtype]]:
        with executing() as gpu:
            model = net().to(gpu.device)
            attached(model, plan)
            optimizer = optim.AdamW(model.parameters())
            copies: set[torch.dtype] = set()
            up = model.layers[0].up
            up.register_forward_pre_hook(lambda module, _: copies.add(module.weight.dtype))
            norms: set[torch.dtype] = set()
            model.layers[0].norm.register_forward_pre_hook(lambda module, _: norms.add(module.weight.dtype))
            torch.manual_seed(1)
            loss = loss_of(model, 0, gpu.device)
            loss.backward()
            devices = [p.device.type for p in model.layers.parameters()]
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
            assert {p.grad.device.type for p in model.layers.parameters()} == set(devices)
            assert norms == {torch.float32}
            optimizer.step()
            optimizer.zero_grad()
            loss = loss_of(model, 1, gpu.device)
            loss.backward()
            return loss.item(), gradients(model), devices, copies

    resident = run(layers_plan(dtype))
    streamed = run(replace(layers_plan(dtype, *techniques), async_offload=ahead))
    assert set(streamed[2]) == {"cpu"}
    assert set(resident[2]) != {"cpu"}
    assert streamed[3] == {getattr(torch, dtype)}
    assert streamed[0] == resident[0]
    for one, two in zip(resident[1], streamed[1], strict=True):
        assert torch.equal(one, two)


def test_16_bit_copies_are_half_the_bytes_on_the_device() -> None:
    def peak(precision: str | None) -> int:
        with simulate("1GiB") as gpu:
            model = net(512).to(gpu.device)
            attached(model, layers_plan(precision, "offloading", "checkpointing"))
            batch = torch.zeros(1, 2, dtype=torch.long, device=gpu.device)
            gpu.tracker.reset_peak()
            model(batch).sum().backward()
            return gpu.peak_bytes

    matrices = 2 * 512 * 4 * 512  # of one layer
    # Forward and backward have a layer's weights there, and gradients of one of them.
    assert peak(None) - peak("bfloat16") > 2 * matrices


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_with_a_tiled_loss(dtype: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16)
    runs = []
    for loss in (None, LossTiling(rows=5)):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()
        attached(model, replace(layers_plan(dtype), loss=loss))
        output = model(input_ids=ids(), labels=ids())
        output.loss.backward()
        assert output.logits.dtype is torch.float32
        runs.append((output.loss.item(), gradients(model)))
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-3)
    for one, two in zip(runs[0][1], runs[1][1], strict=True):
        torch.testing.assert_close(one, two, rtol=0.05, atol=1e-3)


# ---------------------------------------------------------------------- which type


@pytest.mark.parametrize(
    ("gpu", "dtype", "why"),
    [
        ("GTX 1080", "float16", "1/64 of the rate"),
        ("RTX 2080", "float16", "no fast bf16"),
        ("V100", "float16", "no fast bf16"),
        ("A100", "bfloat16", "range of fp32"),
        ("RTX 3090", "bfloat16", "range of fp32"),
    ],
)
def test_which_type_a_gpu_gets_and_why(gpu: str, dtype: str, why: str) -> None:
    precision, reason = choose_precision(virtual_hardware(gpu).device)
    assert precision is not None
    assert precision.dtype == dtype
    assert why in reason == precision.reason


def cpu(*flags: str) -> Any:
    hardware = virtual_hardware("A100")
    features = CpuFeatures("a CPU", frozenset(flags), 32)
    return cpu_device(features, hardware.host, hardware.disk)


def test_a_cpu_gets_bf16_only_if_it_is_fast() -> None:
    precision, reason = choose_precision(cpu("avx512f"))
    assert precision is None
    assert "does not compute bf16 fast" in reason
    assert "no bf16 instructions" in reason
    precision, _ = choose_precision(cpu("avx512f", "avx512_bf16"))
    assert precision is not None
    assert precision.dtype == "bfloat16"
