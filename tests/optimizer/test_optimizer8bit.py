"""The 8-bit optimizer: the user's own, with a quarter of the state, the same interface and nearly the same loss."""

from __future__ import annotations

import copy
import gc
import importlib.metadata
import io
import logging
import pickle
import pydoc_data.topics
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch import nn, optim

from memscale import Config
from memscale.execution_plan import OptimizerPlan, Plan
from memscale.executor import Executor
from memscale.optimizer.eight_bit import Bitsandbytes, Moment, moment_bytes, parameters_in_eight_bits
from memscale.simulator import simulate
from memscale.testing import executing

bitsandbytes = pytest.importorskip("bitsandbytes")

WIDTH = 64  # its square is the least that is kept in 8 bits
EIGHT_BIT = Plan((), optimizer=OptimizerPlan(eight_bit=True))


class Net(nn.Module):
    """Two layers that are large enough, an embedding, and small tensors."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.norm(x + self.second(torch.tanh(self.first(x))))


def net(seed: int = 0, device: torch.device | str = "cpu") -> Net:
    torch.manual_seed(seed)
    return Net().to(device)


def batch(step: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return (torch.arange(32) * (step + 3) % 128).to(device)


def backward(model: nn.Module, step: int, device: torch.device | str = "cpu") -> torch.Tensor:
    loss = (model(batch(step, device)) ** 2).mean() + (
        model(batch(step + 1, device)).sum(-1) - 1
    ).abs().mean()
    loss.backward()
    return loss


def train(
    model: nn.Module,
    optimizer: optim.Optimizer,
    steps: range = range(6),
    device: torch.device | str = "cpu",
) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(backward(model, step, device).item())
        optimizer.step()
    return losses


def attached(model: nn.Module, plan: Plan = EIGHT_BIT) -> Executor:
    executor = Executor(model, plan)
    executor.attach()
    return executor


def adamw(model: nn.Module, **settings: object) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), **{"lr": 1e-3, **settings})


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)


def state_bytes(optimizer: optim.Optimizer) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(dict(optimizer.state)))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


# ---------------------------------------------------------------------- how much it is


def test_moments_are_in_eight_bits_and_embeddings_and_small_tensors_are_not() -> None:
    model = net()
    attached(model)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    for parameter in (model.first.weight, model.second.weight):
        for name in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[parameter][name]
            assert isinstance(moment, Moment)
            assert moment["codes"].dtype is torch.uint8
            assert moment["codes"].numel() == parameter.numel()
            assert sum(each.nbytes for each in moment.values()) == moment_bytes(parameter.numel())
    for parameter in (model.embedding.weight, model.first.bias, model.norm.weight):
        assert optimizer.state[parameter]["exp_avg"].dtype is torch.float32


def test_state_is_at_most_2_1_bytes_a_parameter() -> None:
    # A GPT-2 of width 256, without its embeddings; everything that is in the optimizer's state is counted.
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    attached(model)
    optimizer = adamw(model)
    ids = torch.arange(16)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    embeddings = {model.transformer.wte.weight, model.transformer.wpe.weight}
    rest = [parameter for parameter in model.parameters() if parameter not in embeddings]
    counted = sum(tensor.nbytes for each in rest for tensor in tensors_of(optimizer.state[each]))
    assert counted <= 2.1 * sum(parameter.numel() for parameter in rest)
    for embedding in embeddings:
        assert sum(t.nbytes for t in tensors_of(optimizer.state[embedding])) == 8 * embedding.numel() + 4


def test_a_tied_head_is_an_embedding() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(128, WIDTH)
    model.head = nn.Linear(WIDTH, 128, bias=False)
    assert len(parameters_in_eight_bits(model)) == 1
    model.head.weight = model.embedding.weight
    assert parameters_in_eight_bits(model) == []


def test_all_of_it_is_never_in_32_bits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    in_full: list[int] = []

    plain = optim.Adam._init_group

    def watched(self: optim.Adam, *args: object) -> object:
        if self is optimizer:
            in_full.append(sum(isinstance(each["exp_avg"], torch.Tensor) for each in self.state.values()))
        return plain(self, *args)

    monkeypatch.setattr(optim.Adam, "_init_group", watched)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))
    attached(model, Plan((), optimizer=OptimizerPlan(eight_bit=True, bucket_bytes=1)))
    optimizer = optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
    assert in_full == [0] * 8 + [1] * 8  # in the first step state is made, then brought up


def test_a_large_parameter_comes_in_slices_with_the_same_numbers() -> None:
    def run(bucket_bytes: int, calls: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 1))
        plan = Plan((), optimizer=OptimizerPlan(eight_bit=True, bucket_bytes=bucket_bytes))
        executor = attached(model, plan)
        optimizer = adamw(model)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.linspace(-1, step + 1, 600).reshape(2, 300)).square().sum().backward()
            optimizer.step()
            if step == 1:  # state in 32 bits is cut as well
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert executor.placement.states.buckets_run == calls
        moments = optimizer.state[model[0].weight]
        return weights(model), [*tensors_of(moments["exp_avg"]), *tensors_of(moments["exp_avg_sq"])]

    whole, whole_moments = run(2**30, 3)
    cut, moments = run(2**19, 3 * 4)  # 90,000 elements, 1.4 MB with gradient and moments; and the others
    assert equal(whole, cut)
    assert equal(whole_moments, moments)


# ---------------------------------------------------------------------- how well it learns


def text() -> torch.Tensor:
    """Prose that ships with Python, as bytes."""
    words = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return torch.tensor([min(ord(letter), 127) for letter in words])


def gpt2_on_text(executed: Plan | None, steps: int = 300) -> float:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    if executed is not None:
        attached(model, executed)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    corpus = text()
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(0, len(corpus) - 32, (8,), generator=draw)
        ids = torch.stack([corpus[start : start + 32] for start in starts.tolist()])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


@pytest.mark.slow
def test_300_steps_on_real_text_end_within_two_percent_of_adamw() -> None:
    plain, ours = gpt2_on_text(None), gpt2_on_text(EIGHT_BIT)
    assert ours != plain
    assert ours == pytest.approx(plain, rel=0.02)
    assert plain < 3.0  # it has learned something


OPTIMIZERS = {
    "adam": lambda p: optim.Adam(p, lr=1e-3, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "amsgrad": lambda p: optim.AdamW(p, lr=1e-3, amsgrad=True),
    "maximize": lambda p: optim.AdamW(p, lr=1e-3, maximize=True),
    "foreach": lambda p: optim.AdamW(p, lr=1e-3, foreach=True),
    "fused": lambda p: optim.AdamW(p, lr=1e-3, fused=True),
    "capturable": lambda p: optim.AdamW(p, lr=torch.tensor(1e-3)),
    "momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_arithmetic_is_that_of_the_users_optimizer(name: str) -> None:
    # The first step begins from no state, and is the same to the bit; later ones differ by the rounding.
    plain, ours = net(), net()
    attached(ours)
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (plain, ours)]
    train(plain, optimizers[0], range(1))
    train(ours, optimizers[1], range(1))
    assert equal(weights(plain), weights(ours))
    for weight in (ours.first.weight, ours.second.weight):
        state = optimizers[1].state[weight]
        assert all(isinstance(value, Moment) for name, value in state.items() if name != "step")
    before = weights(plain)
    train(plain, optimizers[0], range(1, 6))
    train(ours, optimizers[1], range(1, 6))
    assert not equal(weights(plain), weights(ours))
    for start, one, other in zip(before, weights(plain), weights(ours), strict=True):
        moved = (one - start).norm()
        assert (one - other).norm() < 0.2 * moved


@pytest.mark.parametrize("name", ["adam", "momentum"])
def test_weights_without_gradient_do_not_drift(name: str) -> None:
    model = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    attached(model)
    parameters = {"params": model.parameters(), "weight_decay": 0.0}
    optimizer = OPTIMIZERS[name]([parameters])
    x = torch.ones(1, WIDTH)
    x[:, ::2] = 0  # half of the weights have a gradient of zero
    before = model.weight.detach().clone()
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert isinstance(
        next(iter(optimizer.state.values()))[("momentum_buffer" if name == "momentum" else "exp_avg")], Moment
    )
    assert torch.equal(model.weight[:, ::2], before[:, ::2])
    assert not torch.equal(model.weight[:, 1::2], before[:, 1::2])


# ---------------------------------------------------------------------- the user's loop


def test_groups_schedulers_and_closures_are_the_users() -> None:
    def run(eight_bit: bool) -> tuple[list[float], list[torch.Tensor], list[float]]:
        model = net()
        if eight_bit:
            attached(model)
        groups = [
            {"params": [model.first.weight], "lr": 0.0},
            {"params": [p for p in model.parameters() if p is not model.first.weight], "weight_decay": 0.5},
        ]
        optimizer = optim.AdamW(groups, lr=1e-3)
        schedule = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        losses, calls = [], 0

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            return backward(model, 0)

        for _ in range(3):
            losses.append(optimizer.step(closure).item())
            schedule.step()
        assert calls == 3
        return losses, weights(model), [group["lr"] for group in optimizer.param_groups]

    plain_losses, _, plain_rates = run(False)
    losses, ours, rates = run(True)
    assert losses[:2] == plain_losses[:2]  # before and after the first step
    assert rates == plain_rates == [0.0, 1e-3 / 8]
    assert torch.equal(ours[1], net().first.weight.detach())  # its group has a rate of zero


def test_an_optimizer_of_before_wrap_keeps_its_state() -> None:
    model = net()
    optimizer = adamw(model)
    train(model, optimizer, range(3))
    twin = copy.deepcopy(model)
    twin_optimizer = adamw(twin)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    attached(model)
    train(model, optimizer, range(3, 4))
    train(twin, twin_optimizer, range(3, 4))
    # The step began with the 32-bit state that was there.
    assert equal(weights(model), weights(twin))
    assert isinstance(optimizer.state[model.first.weight]["exp_avg"], Moment)


def test_parameters_without_a_gradient_are_left_as_they_are() -> None:
    model = net()
    attached(model)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    codes = optimizer.state[model.first.weight]["exp_avg"]["codes"]
    kept = codes.clone()
    optimizer.zero_grad()
    backward(model, 0)
    model.first.weight.grad = None
    optimizer.step()
    assert optimizer.state[model.first.weight]["exp_avg"]["codes"] is codes
    assert torch.equal(codes, kept)


# ---------------------------------------------------------------------- saving


def saved(value: object) -> object:
    """Through a file, read back as untrusted: plain tensors and numbers only."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_a_state_dict_is_that_of_the_plain_optimizer() -> None:
    model, plain = net(), net()
    attached(model)
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    train(model, optimizer)
    train(plain, plain_optimizer)
    ours, theirs = optimizer.state_dict(), plain_optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, entries in theirs["state"].items():
        assert ours["state"][key].keys() == entries.keys()
        for name, tensor in entries.items():
            got = ours["state"][key][name]
            assert (type(got), got.dtype, got.shape, got.stride()) == (
                torch.Tensor,
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
            )
            assert (got - tensor).norm() <= 0.1 * tensor.norm()
    # Asking changes nothing.
    assert isinstance(optimizer.state[model.first.weight]["exp_avg"], Moment)
    again = adamw(plain)
    again.load_state_dict(saved(ours))
    train(plain, again, range(1))


@pytest.mark.parametrize("name", ["adamw", "amsgrad", "momentum", "rmsprop", "adagrad"])
def test_a_resumed_run_goes_on_exactly(name: str) -> None:
    model = net()
    attached(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, range(5))
    kept = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = train(model, optimizer, range(5, 10))

    resumed = net(seed=9)
    attached(resumed)
    other = OPTIMIZERS[name](resumed.parameters())
    resumed.load_state_dict(kept["model"])
    other.load_state_dict(kept["optimizer"])
    assert train(resumed, other, range(5, 10)) == expected
    assert equal(weights(resumed), weights(model))
    for one, two in zip(resumed.parameters(), model.parameters(), strict=True):
        for a, b in zip(tensors_of(other.state[one]), tensors_of(optimizer.state[two]), strict=True):
            assert torch.equal(a, b)


def test_loading_into_an_optimizer_in_mid_run() -> None:
    model = net()
    attached(model)
    optimizer = adamw(model)
    train(model, optimizer, range(3))
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, range(3, 6))
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    assert train(model, optimizer, range(3, 6)) == expected


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_of_model_and_optimizer_are_whole(duplicate: object) -> None:
    model = net()
    attached(model)
    optimizer = adamw(model)
    train(model, optimizer, range(3))
    twin, other = duplicate((model, optimizer))  # type: ignore[operator]
    assert other.state[twin.first.weight]["exp_avg"].dtype is torch.float32
    assert train(twin, other, range(3, 6)) == train(model, optimizer, range(3, 6))
    assert isinstance(other.state[twin.first.weight]["exp_avg"], Moment)  # the copy is wrapped as well


# ---------------------------------------------------------------------- on and off


def test_detach_leaves_an_ordinary_optimizer_that_goes_on() -> None:
    gc.collect()
    model = net()
    attached(model).detach()  # what earlier tests have left behind goes now
    optimizer = adamw(model)
    before = {key: value for key, value in vars(optimizer).items() if key != "state"}
    hooks = len(optimizer._optimizer_state_dict_post_hooks)
    contents = [cell.cell_contents for cell in optim.AdamW.step.__closure__]
    executor = attached(model)
    train(model, optimizer, range(3))
    state = copy.deepcopy(optimizer.state_dict()["state"])
    executor.detach()
    assert [cell.cell_contents for cell in optim.AdamW.step.__closure__] == contents
    assert len(optimizer._optimizer_state_dict_post_hooks) == hooks
    assert {key: value for key, value in vars(optimizer).items() if key != "state"} == before
    for key, entries in optimizer.state_dict()["state"].items():
        for name, tensor in entries.items():
            assert type(tensor) is torch.Tensor
            assert torch.equal(tensor, state[key][name])
    twin = copy.deepcopy(model)
    other = adamw(twin)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(twin, other, range(3, 5)) == train(model, optimizer, range(3, 5))


def test_moments_stay_in_eight_bits_while_the_plan_is_exchanged() -> None:
    model = net()
    executor = attached(model)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    moment = optimizer.state[model.first.weight]["exp_avg"]
    executor.replan(EIGHT_BIT)
    assert optimizer.state[model.first.weight]["exp_avg"] is moment
    train(model, optimizer, range(1))
    executor.replan(Plan(()))
    assert optimizer.state[model.first.weight]["exp_avg"].dtype is torch.float32
    train(model, optimizer, range(1))
    assert optimizer.state[model.first.weight]["exp_avg"].dtype is torch.float32


def test_other_models_and_parameters_are_left_alone() -> None:
    ours, theirs = net(), net()
    attached(ours)
    optimizer = adamw(theirs)
    train(theirs, optimizer, range(1))
    assert optimizer.state[theirs.first.weight]["exp_avg"].dtype is torch.float32
    both = optim.AdamW([*ours.parameters(), *theirs.parameters()])
    backward(ours, 0)
    both.step()
    assert both.state[theirs.first.weight]["exp_avg"].dtype is torch.float32
    assert isinstance(both.state[ours.first.weight]["exp_avg"], Moment)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: optim.Adamax(p), "known to bear"),
        (lambda p: optim.RMSprop(p, centered=True), "centered"),
        (lambda p: optim.NAdam(p), "known to bear"),
        (lambda p: bitsandbytes.optim.AdamW8bit(p), "itself"),
    ],
)
def test_what_can_not_be_done_is_left_alone_with_one_reason(
    make: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = net(), net()
    attached(model)
    with caplog.at_level(logging.INFO, "memscale"):
        losses = train(model, make(model.parameters()))  # type: ignore[operator]
    assert [reason in record.message for record in caplog.records] == [True]
    assert losses == train(plain, make(plain.parameters()))  # type: ignore[operator]


def test_sgd_without_momentum_has_nothing_to_keep(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = net(), net()
    attached(model)
    losses = train(model, optim.SGD(model.parameters(), lr=0.1))
    assert losses == train(plain, optim.SGD(plain.parameters(), lr=0.1))
    assert not caplog.records


# ---------------------------------------------------------------------- without bitsandbytes


def _too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.41.3")


def _missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)


def _broken(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = types.SimpleNamespace(create_dynamic_map=lambda signed: 1 / 0)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", broken)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(_missing, "can't be imported"), (_too_old, "0.41.3"), (_broken, "does not run on cpu")],
)
def test_without_bitsandbytes_there_is_one_notice_and_the_standard_optimizer(
    spoil: object, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(monkeypatch)  # type: ignore[operator]
    model, plain = net(), net()
    with caplog.at_level(logging.INFO, "memscale"):
        executor = attached(model)
        executor.replan(EIGHT_BIT)
        assert train(model, adamw(model)) == train(plain, adamw(plain))
    assert [reason in record.message for record in caplog.records] == [True]
    caplog.clear()
    Executor(plain, EIGHT_BIT, Config(enable_logging=False)).attach()
    assert not caplog.records


def test_a_failure_in_mid_run_leaves_state_in_32_bits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    attached(model)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    monkeypatch.setattr(Bitsandbytes, "quantize", lambda *_, **__: 1 / 0)
    with caplog.at_level(logging.INFO, "memscale"):
        losses = train(model, optimizer, range(2, 5))
    assert len(caplog.records) == 1
    assert len(losses) == 3
    assert optimizer.state[model.first.weight]["exp_avg"].dtype is torch.float32


# ---------------------------------------------------------------------- devices


def test_on_a_device_state_is_as_small_there_and_the_numbers_are_those_of_the_cpu() -> None:
    model = net()
    attached(model)
    expected = train(model, adamw(model))
    with executing() as gpu:
        on_device = net(device=gpu.device)
        attached(on_device)
        optimizer = adamw(on_device)
        assert train(on_device, optimizer, device=gpu.device) == pytest.approx(expected, rel=1e-6)
        codes = optimizer.state[on_device.first.weight]["exp_avg"]["codes"]
        assert codes.device == gpu.device


def test_the_simulator_counts_the_same_bytes() -> None:
    def state_and_peak(plan: Plan) -> tuple[int, int]:
        with simulate("1GiB") as gpu:
            model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8))).to(gpu.device)
            attached(model, plan)
            optimizer = adamw(model)
            x = torch.ones(1, 512, device=gpu.device)
            for _ in range(2):
                gpu.tracker.reset_peak()
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return sum(t.nbytes for t in tensors_of(dict(optimizer.state))), gpu.peak_bytes

    bucket = OptimizerPlan(eight_bit=True, bucket_bytes=2**20)
    plain_state, plain_peak = state_and_peak(Plan(()))
    state, peak = state_and_peak(Plan((), optimizer=bucket))
    elements = 8 * 512 * 512
    assert plain_state == 8 * (elements + 4)
    assert state == 8 * (2 * moment_bytes(512 * 512) + 4)
    assert plain_peak - peak > 0.8 * (plain_state - state)


def test_a_simulation_does_not_import_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Inside a simulation its import would find a GPU, and leave tables without data behind.
    for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    with simulate("1GiB") as gpu:
        model = net(device=gpu.device)
        attached(model)
        optimizer = adamw(model)
        backward(model, 0, gpu.device)
        optimizer.step()
        assert isinstance(optimizer.state[model.first.weight]["exp_avg"], Moment)
    assert "bitsandbytes" not in sys.modules


def test_a_large_parameter_is_cut_by_the_one_who_knows_its_moments() -> None:
    plan = Plan((), optimizer=OptimizerPlan(eight_bit=True, state="host", bucket_bytes=2**19))
    with executing() as gpu:
        model = nn.Sequential(nn.Embedding(300, 300), nn.Linear(300, 300)).to(gpu.device)
        attached(model, plan)
        optimizer = adamw(model)
        for _ in range(2):
            model(torch.arange(30, device=gpu.device)).sum().backward()
            optimizer.step()
        assert isinstance(optimizer.state[model[1].weight]["exp_avg"], Moment)
        assert optimizer.state[model[0].weight]["exp_avg"].device.type == "cpu"


def test_the_plan_may_say_both() -> None:
    plan = Plan((), optimizer=OptimizerPlan(eight_bit=True, state="host", bucket_bytes=2**16))
    model = net()
    attached(model)
    expected = train(model, adamw(model))
    with executing() as gpu:
        on_device = net(device=gpu.device)
        executor = attached(on_device, plan)
        optimizer = adamw(on_device)
        assert train(on_device, optimizer, device=gpu.device) == pytest.approx(expected, rel=1e-6)
        assert optimizer.state[on_device.first.weight]["exp_avg"]["codes"].device.type == "cpu"
        saved_state = optimizer.state_dict()["state"][1]["exp_avg"]
        assert saved_state.dtype is torch.float32
        executor.detach()
        back = optimizer.state[on_device.first.weight]["exp_avg"]
        assert (back.dtype, back.device) == (torch.float32, gpu.device)
        assert torch.equal(back.cpu(), saved_state)
