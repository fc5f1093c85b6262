"""Masters on the host are stepped on the device: to the bit as the plain model, in the memory of two buckets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, optim

import memscale
from memscale import Config
from memscale.execution_plan import OptimizerPlan, Plan
from memscale.executor import Executor
from memscale.testing import executing
from support.offloaded import plan_of

KIB = 1024
WIDTH, STEPS = 128, 4
QUIET = Config(enable_logging=False)
KINDS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "Adam, amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW, foreach=False": lambda p: optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW, lr in a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.01)),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.01, t0=2),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "RMSprop, centered": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "SGD": lambda p: optim.SGD(p, lr=0.01),
    "SGD, momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
}
ADAMW = KINDS["AdamW"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)  # 256 KiB
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MASTERS = sum(each.nbytes for name, each in Model().named_parameters() if "unused" not in name)
LARGEST = 4 * WIDTH * WIDTH * 4
Loop = Callable[[nn.Module, optim.Optimizer, Callable[[int], torch.Tensor]], None]


def plain_loop(model: nn.Module, optimizer: optim.Optimizer, loss: Callable[[int], torch.Tensor]) -> None:
    for step in range(STEPS):
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(
    make: Callable[[Any], optim.Optimizer] = ADAMW,
    planned: OptimizerPlan | None = None,
    loop: Loop = plain_loop,
    *,
    build: Callable[[], nn.Module] = Model,
    layers: int | None = None,
    config: Config = QUIET,
    seen: Callable[[Executor, optim.Optimizer], object] | None = None,
    extra: list[int] | None = None,
) -> list[torch.Tensor]:
    """Train on the virtual GPU, with a plan the first layers offloaded; return parameters and state after `detach`."""
    with executing("64MiB") as gpu:
        torch.manual_seed(0)
        model = build().to(gpu.device)
        executor = None
        if planned is not None:
            plan = plan_of(model, to="host", activations=False, optimizer=planned)
            executor = Executor(model, replace(plan, layers=plan.layers[:layers]), config)
            executor.attach()
            assert executor.placement.bytes_on_host > 0
        optimizer = make(model.parameters())
        if extra is not None:  # what each step needs above what is there
            optimizer.register_step_pre_hook(lambda *_: gpu.tracker.reset_peak())
            optimizer.register_step_pre_hook(lambda *_: extra.append(-gpu.tracker.live_bytes(gpu.device)))
            optimizer.register_step_post_hook(lambda *_: extra.append(extra.pop() + gpu.peak_bytes))

        def loss(step: int) -> torch.Tensor:
            torch.manual_seed(step)
            return model(torch.randn(4, WIDTH).to(gpu.device)).square().mean()

        loop(model, optimizer, loss)
        if executor is not None:
            if seen is not None:
                seen(executor, optimizer)
            executor.detach()
        assert all(each in set(model.parameters()) for each in optimizer.state)  # no twin is left
        states = [optimizer.state.get(each, {}) for each in model.parameters()]
        values = [state[name] for state in states for name in sorted(state) if torch.is_tensor(state[name])]
        assert {each.device.type for each in values if each.dim()} <= {"vgpu"}
        return [each.detach().cpu().clone() for each in (*model.parameters(), *values)]


def on_device(bucket_bytes: int, **fields: Any) -> OptimizerPlan:
    return OptimizerPlan(bucket_bytes=bucket_bytes, host_step="device", **fields)


def assert_equal(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(ours) == len(expected)
    assert all(map(torch.equal, ours, expected))


@pytest.mark.matrix(4)
@pytest.mark.parametrize("bucket", [300 * KIB, 2**24], ids=["slices", "one bucket"])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_plain_model(kind: str, bucket: int) -> None:
    def seen(executor: Executor, optimizer: optim.Optimizer) -> None:
        steps = executor.placement.device_steps
        assert steps is not None
        assert steps.buckets_run == STEPS if bucket == 2**24 else steps.buckets_run > 6 * STEPS
        moved = executor.meter.totals().moved
        # Two copies for forward and backward; and down to the host once.
        assert moved["parameters", "host"][0] > (STEPS + 1) * MASTERS
        assert moved["parameters", "host"][1] == STEPS * MASTERS
        tensors = [each for state in optimizer.state.values() for each in state.values()]
        assert {each.device.type for each in tensors if torch.is_tensor(each)} <= {"cpu"}

    ours = train(KINDS[kind], on_device(bucket), seen=seen)
    assert_equal(ours, train(KINDS[kind]))


def test_bytes_moved() -> None:
    """Adam's masters, gradients and moments to the device; masters and moments back."""

    def moved(planned: OptimizerPlan) -> dict[Any, tuple[int, int]]:
        found: dict[Any, tuple[int, int]] = {}
        train(planned=planned, seen=lambda executor, _: found.update(executor.meter.totals().moved))
        return found

    on_cpu = moved(OptimizerPlan(bucket_bytes=2**20))
    by_step = {
        what: (read - on_cpu.get(what, (0, 0))[0], written - on_cpu.get(what, (0, 0))[1])
        for what, (read, written) in moved(on_device(2**20)).items()
    }
    assert by_step == {
        ("parameters", "host"): (STEPS * MASTERS, STEPS * MASTERS),
        ("gradients", "host"): (STEPS * MASTERS, 0),
        ("optimizer state", "host"): (2 * (STEPS - 1) * MASTERS, 2 * STEPS * MASTERS),
    }


@pytest.mark.parametrize("bucket", [300 * KIB, 2**20, 2**21])
def test_two_buckets_are_on_the_device_at_most(bucket: int) -> None:
    extra: list[int] = []
    train(planned=on_device(bucket), extra=extra)
    # A quarter of a bucket are parameters, as large are the temporaries of foreach; small tensors are rounded up.
    assert max(extra) <= 2 * bucket + max(bucket, 4 * 64 * KIB) / 4 + 16 * KIB
    assert min(extra[1:]) > bucket


def clipped(model: nn.Module, optimizer: optim.Optimizer, loss: Callable[[int], torch.Tensor]) -> None:
    for step in range(STEPS):
        loss(step).backward()
        if step % 2:
            nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def accumulated(model: nn.Module, optimizer: optim.Optimizer, loss: Callable[[int], torch.Tensor]) -> None:
    for step in range(STEPS):
        for part in range(step % 3 + 1):
            loss(10 * step + part).backward()
        optimizer.step()
        optimizer.zero_grad()


def scaled(model: nn.Module, optimizer: optim.Optimizer, loss: Callable[[int], torch.Tensor]) -> None:
    scaler = torch.amp.GradScaler("vgpu", init_scale=8.0)
    for step in range(STEPS):
        scaler.scale(loss(step) * (float("inf") if step == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)  # not the second
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 4.0


def scheduled(model: nn.Module, optimizer: optim.Optimizer, loss: Callable[[int], torch.Tensor]) -> None:
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS)
    for step in range(STEPS):
        loss(step).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def with_a_closure(model: nn.Module, optimizer: optim.Optimizer, loss: Callable[[int], torch.Tensor]) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(step)
            value.backward()
            return value

        assert optimizer.step(closure) is not None


def with_gradients_now_and_then(
    model: nn.Module, optimizer: optim.Optimizer, loss: Callable[[int], torch.Tensor]
) -> None:
    for step in range(STEPS):
        loss(step).backward()
        for number, parameter in enumerate(model.parameters()):
            if (number + step) % 3 == 0:
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()


def restarted(model: nn.Module, optimizer: optim.Optimizer, loss: Callable[[int], torch.Tensor]) -> None:
    """From a checkpoint of the second step, which the third must not change."""
    for step in range(2):
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    loss(2).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(state))
    assert all(
        torch.equal(one.cpu(), other.cpu())
        for number in state["state"]
        for one, other in zip(
            state["state"][number].values(),
            optimizer.state_dict()["state"][number].values(),
            strict=True,
        )
    )
    plain_loop(model, optimizer, loss)


def in_groups(parameters: Any) -> optim.Optimizer:
    every = list(parameters)
    groups = [
        {"params": [each for each in every if each.dim() != 2], "weight_decay": 0.0},
        {"params": every[:0]},
        {"params": [each for each in every if each.dim() == 2], "lr": 0.02, "amsgrad": True},
    ]
    return optim.AdamW(groups, lr=0.01)


LOOPS = [clipped, accumulated, scaled, scheduled, with_a_closure, with_gradients_now_and_then, restarted]


@pytest.mark.parametrize("make", [ADAMW, in_groups], ids=["AdamW", "groups"])
@pytest.mark.parametrize("loop", LOOPS)
def test_in_loops_as_people_write_them(loop: Loop, make: Callable[[Any], optim.Optimizer]) -> None:
    assert_equal(train(make, on_device(300 * KIB), loop), train(make, None, loop))


@pytest.mark.parametrize("state", ["device", "host"])
def test_beside_parameters_on_the_device(state: Any) -> None:
    """Which are stepped in buckets of their own, and whose state may be on the host."""
    ours = train(planned=on_device(300 * KIB, state=state), layers=2)
    assert_equal(ours, train())


def test_in_16_bits() -> None:
    def build() -> nn.Module:
        return Model().to(torch.bfloat16)

    def loop(model: nn.Module, optimizer: optim.Optimizer, loss: Callable[[int], torch.Tensor]) -> None:
        inner = model.forward
        model.forward = lambda x: inner(x.to(torch.bfloat16)).float()  # type: ignore[method-assign]
        plain_loop(model, optimizer, loss)
        del model.forward

    assert_equal(train(planned=on_device(100 * KIB), loop=loop, build=build), train(loop=loop, build=build))


class Tokens(nn.Module):
    """An embedding with sparse gradients, and a convolution in another order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH, sparse=True)
        self.convolution = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.embedding((x[:, 0].abs() * 10).long() % 64)
        return self.convolution((rows + x).view(-1, 4, 4, 8)).mean((1, 2, 3))


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_sparse_gradients_are_stepped_on_the_cpu(kind: str) -> None:
    def seen(executor: Executor, optimizer: optim.Optimizer) -> None:
        steps = executor.placement.device_steps
        assert steps is not None
        assert steps.buckets_run == STEPS
        written = executor.meter.totals().moved["parameters", "host"][1]
        assert written == STEPS * sum(each.nbytes for each in Tokens().convolution.parameters())

    config = QUIET.replace(fused_host_step=False)
    ours = train(KINDS[kind], on_device(2**20), build=Tokens, config=config, seen=seen)
    assert_equal(ours, train(KINDS[kind], build=Tokens))


@pytest.mark.parametrize("setting", ["fused", "capturable"])
def test_what_counts_on_the_device_is_stepped_on_the_cpu(setting: str) -> None:
    def make(parameters: Any) -> optim.Optimizer:
        optimizer = ADAMW(parameters)
        for group in optimizer.param_groups:
            group[setting] = True
        return optimizer

    def seen(executor: Executor, optimizer: optim.Optimizer) -> None:
        steps = executor.placement.device_steps
        assert steps is not None
        assert not steps.buckets_run

        assert all(group[setting] for group in optimizer.param_groups)

    ours = train(make, on_device(2**20), seen=seen)
    if setting == "capturable":  # which torch takes on accelerators only
        assert_equal(ours, train(ADAMW))


def test_without_room_for_the_buffers_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def short(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dtype") is torch.uint8:
            raise torch.OutOfMemoryError("no room")
        return empty(*args, **kwargs)

    def seen(executor: Executor, optimizer: optim.Optimizer) -> None:
        steps = executor.placement.device_steps
        assert steps is not None
        assert not steps.buckets_run

    monkeypatch.setattr(torch, "empty", short)
    ours = train(planned=on_device(2**20), config=QUIET.replace(fused_host_step=False), seen=seen)
    monkeypatch.undo()
    assert_equal(ours, train())


def test_a_step_that_raises_changes_nothing_of_its_bucket() -> None:
    def loop(model: nn.Module, optimizer: optim.Optimizer, loss: Callable[[int], torch.Tensor]) -> None:
        plain_loop(model, optimizer, loss)
        loss(STEPS).backward()
        before = copy.deepcopy((list(model.state_dict().values()), optimizer.state_dict()["state"]))
        groups = [dict(group) for group in optimizer.param_groups]
        square = torch._foreach_sqrt

        def failing(*args: Any) -> Any:  # after both moments were changed
            raise KeyError("interrupted")

        torch._foreach_sqrt = failing
        try:
            with pytest.raises(KeyError, match="interrupted"):
                optimizer.step()
        finally:
            torch._foreach_sqrt = square
        assert [dict(group) for group in optimizer.param_groups] == groups
        after = list(model.state_dict().values()), optimizer.state_dict()["state"]
        assert all(map(torch.equal, before[0], after[0]))
        for number, state in before[1].items():
            assert all(torch.equal(value, after[1][number][name]) for name, value in state.items())
        optimizer.step()
        optimizer.zero_grad()

    def once_more(model: nn.Module, optimizer: optim.Optimizer, loss: Callable[[int], torch.Tensor]) -> None:
        plain_loop(model, optimizer, loss)
        loss(STEPS).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert_equal(train(planned=on_device(2**24), loop=loop), train(loop=once_more))


def test_moments_in_8_bits_are_stepped_on_the_cpu() -> None:
    pytest.importorskip("bitsandbytes")

    def seen(executor: Executor, optimizer: optim.Optimizer) -> None:
        moved = executor.meter.totals().moved
        assert moved["parameters", "host"][1] < STEPS * MASTERS - 3 * LARGEST

    train(planned=on_device(2**20, eight_bit=True), seen=seen)


def test_another_plan_steps_on_the_cpu_again() -> None:
    def run(planned: bool) -> list[torch.Tensor]:
        with executing("64MiB") as gpu:
            torch.manual_seed(0)
            model = Model().to(gpu.device)
            optimizer = ADAMW(model.parameters())
            batch = torch.randn(4, WIDTH).to(gpu.device)
            for number in range(4):
                if planned:
                    step = on_device(300 * KIB) if number % 2 == 0 else None
                    plan = plan_of(model, to="host", activations=False, optimizer=step)
                    executor = Executor(model, plan, QUIET.replace(fused_host_step=False))
                    executor.attach()
                    assert (executor.placement.device_steps is not None) == (number % 2 == 0)
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if planned:
                    executor.detach()
            return [each.detach().cpu() for each in model.parameters()]

    assert_equal(run(planned=True), run(planned=False))


# ---------------------------------------------------------------------- plans


def planned(hardware: str, optimizer: optim.Optimizer | None = None, **fields: Any) -> Plan:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=768, n_head=12)).train()
    tokens = torch.zeros(4, 256, dtype=torch.long)
    settings = {"enable_logging": False, "memory_budget": "900MiB", **fields}
    given = None if optimizer is None else type(optimizer)(model.parameters(), **optimizer.defaults)
    return memscale.plan(
        model, {"input_ids": tokens, "labels": tokens}, Config(**settings), hardware=hardware, optimizer=given
    )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.matrix(2)
def test_a_plan_reaches_it_where_the_link_is_faster_than_the_cpu(fused: bool) -> None:
    plan = planned("RTX 3090", fused_host_step=fused)
    assert any(layer.offloading is not None for layer in plan.layers)
    assert plan.optimizer is not None
    assert plan.optimizer.host_step == "device"
    assert "stepped on the device" in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_a_plan_leaves_it_to_the_cpu_where_that_is_faster() -> None:
    """PCIe 3: 1.2 ns a parameter over the link, 0.9 by fused Adam, 2.5 by the loop."""
    plans = [planned("RTX 2080 Ti", fused_host_step=fused) for fused in (True, False)]
    assert [plan.optimizer and plan.optimizer.host_step for plan in plans] == ["cpu", "device"]
    no_fused = planned("RTX 2080 Ti", optim.RMSprop([nn.Parameter(torch.ones(1))]))
    assert no_fused.optimizer is not None
    assert no_fused.optimizer.host_step == "device"
