"""Steps that are computed in backward and committed by `step()`: the numbers of the plain loop, whatever it does."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn, optim

import memscale
from memscale.config import Config
from memscale.execution_plan import LayerPlan, Offloading, OptimizerPlan, Plan
from memscale.executor import Executor
from memscale.optimizer.interceptor import leaves_gradients
from memscale.optimizer.overlap import ACCUMULATED, GRADIENTS_CHANGE, RUN_ELEMENTS, SAMPLING_PERIOD, _sums_of
from memscale.testing import executing

WIDTH = 64
OPTIMIZERS = {
    "adamw": lambda params: optim.AdamW(params, lr=1e-2),
    "adam, amsgrad": lambda params: optim.Adam(params, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "sgd": lambda params: optim.SGD(params, lr=1e-2),
    "sgd, momentum": lambda params: optim.SGD(params, lr=1e-2, momentum=0.9),
    "sgd, nesterov": lambda params: optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda params: optim.RMSprop(params, lr=1e-3, momentum=0.5),
    "nadam": lambda params: optim.NAdam(params, lr=1e-2),
    "adagrad": lambda params: optim.Adagrad(params, lr=1e-2),
}


class Model(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))
        self.used = 4  # of the layers, the first

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: self.used]:
            inputs = torch.tanh(layer(inputs))
        return inputs.square().mean()


def overlapped(model: nn.Module, warmup_steps: int = 1, offloaded: int = 0, bucket: int = 2) -> Executor:
    """Attach a plan with the state of all layers on the host, and so many of them there themselves."""
    # The matrices of so many layers, with gradients and two moments, are a bucket.
    step = OptimizerPlan("host", bucket_bytes=bucket * 4 * 4 * WIDTH**2, host_step="device", overlapped=True)
    names = [f"layers.{index}" for index in range(offloaded)]
    layers = [
        LayerPlan(name, (name,), ("offloading",), "", "", offloading=Offloading("host")) for name in names
    ]
    config = Config(enable_logging=False, warmup_steps=warmup_steps, overlap_optimizer=True)
    executor = Executor(model, Plan(tuple(layers), optimizer=step), config)
    executor.attach()
    return executor


def batches(device: torch.device, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, WIDTH, generator=generator).to(device) for _ in range(count)]


def numbers(model: nn.Module, optimizer: optim.Optimizer) -> list[torch.Tensor]:
    states = sorted(optimizer.state_dict()["state"].items())
    state = [value for _, each in states for _, value in sorted(each.items())]
    tensors = [*model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
    return [each.detach().cpu().clone() for each in tensors]


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def both(train, *, bias=True, **settings):
    """Train plainly and with overlapped steps; return what made the latter, detached."""
    with executing("64MiB") as gpu:
        plain = Model(bias=bias).to(gpu.device)
        expected = numbers(plain, train(plain, gpu.device))
        model = Model(bias=bias).to(gpu.device)
        executor = overlapped(model, **settings)
        optimizer = train(model, gpu.device)
        assert_equal(numbers(model, optimizer), expected)
        executor.detach()
        assert_equal(numbers(model, optimizer), expected)
        assert all(each._post_accumulate_grad_hooks is None for each in model.parameters())
    return executor.placement.states.overlap


@pytest.mark.matrix(2)
@pytest.mark.parametrize("offloaded", [0, 2, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_step_after_the_warmup_is_committed(kind, offloaded):
    def train(model, device):
        optimizer = OPTIMIZERS[kind](model.parameters())
        for batch in batches(device, 5):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    overlap = both(train, offloaded=offloaded)
    # The first step is observed, and makes the state. That of biases on the device is smaller than a page, and stays.
    # The steps of two kinds compute in the memory of gradients; without state only parameters on the host are copied.
    early = 0 if kind in ("sgd, nesterov", "adagrad") else 2 * offloaded if kind == "sgd" else 4 + offloaded
    assert overlap.meter.steps_committed == 4 * early
    assert overlap.meter.steps_dropped == 0
    assert overlap.obstacle is None


@pytest.mark.parametrize("offloaded", [0, 2, 4])
def test_state_stays_on_the_host_if_every_parameter_is_stepped_early(offloaded, caplog):
    """Without biases nothing is left for `step()`."""

    def train(model, device):
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        for batch in batches(device, 5):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if hasattr(model, "_memscale_executor"):
                states = [state["exp_avg"] for state in optimizer.state.values()]
                assert {each.device.type for each in states} == {"cpu"}
        return optimizer

    overlap = both(train, bias=False, offloaded=offloaded)
    assert (overlap.meter.steps_committed, overlap.meter.steps_dropped) == (4 * 4, 0)
    assert not caplog.records


class WithoutBiases(nn.Module):
    """A stack without biases over words that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(512, 512)
        self.words.weight.requires_grad_(False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 512, bias=False))
            for _ in range(8)
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        inputs = self.words(words)
        for layer in self.layers:
            inputs = inputs + layer(inputs)
        return inputs.square().mean()


@pytest.mark.parametrize(
    ("budget", "early", "peak_at"), [("195MiB", 16, "backward"), ("240MiB", 14, "optimizer step")]
)
def test_a_plan_for_a_model_without_biases_needs_what_it_predicts(budget, early, peak_at):
    """In the step itself two buckets are still there, on their way back, while other parameters are stepped."""
    with executing("1GiB") as gpu:
        model, words = WithoutBiases().to(gpu.device), torch.zeros(4, 16, dtype=torch.long, device=gpu.device)
        config = Config(
            overlap_optimizer=True,
            force_optimize=True,
            memory_budget=budget,
            enable_logging=False,
            warmup_steps=1,
        )
        model = memscale.wrap(model, config, sample_input=(words,))
        plan, placement = model._memscale_executor.plan, model._memscale_executor.placement
        optimizer = optim.AdamW([each for each in model.parameters() if each.requires_grad])
        gpu.tracker.reset_peak()
        for _ in range(4):
            model(words).backward()
            optimizer.step()
            optimizer.zero_grad()
            states = [state["exp_avg"] for state in optimizer.state.values()]
            assert sum(each.device.type == "cpu" for each in states) == early
        assert placement.states.overlap.meter.steps_committed == 3 * early
        assert plan.peak_at == peak_at
        assert plan.predicted_peak_bytes == pytest.approx(gpu.peak_bytes, rel=0.002)
        memscale.detach(model)


@pytest.mark.parametrize("offloaded", [0, 4])
def test_a_backward_that_raises_leaves_nothing_for_the_next(offloaded):
    """Its bucket was not full yet; the next batch does not reach the layers in it."""

    def train(model, device):
        optimizers = [optim.AdamW(model.parameters(), lr=1e-2)]
        for number, batch in enumerate(batches(device, 8)):
            (interrupted_in_backward if number == 3 else usual)(model, optimizers, batch)
            model.used = 2 if number == 3 else 4
        return optimizers[0]

    assert both(train, offloaded=offloaded, bucket=8).meter.steps_committed > 0


def test_steps_wait_for_the_warmup():
    def train(model, device):
        optimizer = optim.AdamW(model.parameters())
        for batch in batches(device, 5):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    assert both(train, warmup_steps=3).meter.steps_committed == 2 * 4
    assert both(train, warmup_steps=0).meter.steps_committed == 4 * 4


def test_memory_on_the_host_changes_places_unless_there_are_views_of_it():
    with executing("64MiB") as gpu:
        model = Model().to(gpu.device)
        executor = overlapped(model, offloaded=4)
        optimizer = optim.AdamW(model.parameters())
        kept, other = model.layers[0].weight, model.layers[1].weight
        view = None
        for number, batch in enumerate(batches(gpu.device, 5)):
            before = kept.data_ptr(), other.data_ptr()
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                view = other.detach()  # as in a state dict, which follows the parameter
            elif number > 1:
                assert kept.data_ptr() != before[0]
                assert other.data_ptr() == before[1] == view.data_ptr()
        assert torch.equal(view, other)
        assert executor.placement.states.overlap.meter.steps_committed == 4 * 8
        executor.detach()


def change_by_data(parameter: nn.Parameter) -> None:
    parameter.grad.data.clamp_(-1e-5, 1e-5)


def change_sign_by_data(parameter: nn.Parameter) -> None:
    parameter.grad.data.neg_()


def replace_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad / 2


def decay_by_data(parameter: nn.Parameter) -> None:
    parameter.data.mul_(0.999)


@pytest.mark.parametrize("change", [change_by_data, change_sign_by_data, replace_gradient, decay_by_data])
@pytest.mark.matrix(3)
@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("offloaded", [0, 4])
def test_changes_between_backward_and_step(change, always, offloaded):
    def train(model, device):
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        for number, batch in enumerate(batches(device, 8)):
            model(batch).backward()
            if always or number == 4:
                for parameter in model.parameters():
                    change(parameter)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    overlap = both(train, offloaded=offloaded)
    if always and change is not decay_by_data:
        assert overlap.meter.steps_committed == 0
        assert overlap.obstacle == GRADIENTS_CHANGE
    else:
        assert overlap.meter.steps_dropped > 0
        assert always or overlap.meter.steps_committed > 0


def zero_smallest_element(model: Model, optimizer: optim.Optimizer) -> None:
    gradient = model.layers[0].weight.grad.data.view(-1)
    gradient[gradient.abs().argmin()] = 0


def negate_smallest_element(model: Model, optimizer: optim.Optimizer) -> None:
    gradient = model.layers[0].weight.grad.data.view(-1)
    gradient[gradient.abs().argmin()] *= -1


def change_one_weight(model: Model, optimizer: optim.Optimizer) -> None:
    model.layers[0].weight.data[0, 1] += 0.01


def reverse_rows(model: Model, optimizer: optim.Optimizer) -> None:
    model.layers[0].weight.data.copy_(model.layers[0].weight.data.flip(0))


def zero_momentum(model: Model, optimizer: optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].data.zero_()


def reset_counter(model: Model, optimizer: optim.Optimizer) -> None:
    optimizer.state[model.layers[0].weight]["step"].data.fill_(1)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("offloaded", [0, 4])
@pytest.mark.parametrize(
    "change",
    [
        zero_smallest_element,
        negate_smallest_element,
        change_one_weight,
        reverse_rows,
        zero_momentum,
        reset_counter,
    ],
)
def test_small_changes_through_data_after_the_warmup(change, offloaded):
    def train(model, device):
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        for number, batch in enumerate(batches(device, 6)):
            model(batch).backward()
            if number >= 4:
                change(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    overlap = both(train, offloaded=offloaded)
    assert overlap.meter.steps_committed > 0
    assert overlap.meter.steps_dropped > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_of_bits_change_with_each_element(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2 * RUN_ELEMENTS + 7, generator=generator).to(dtype)
    before = _sums_of(values)
    for index in range(0, values.numel(), 97):
        kept = values[index].clone()
        values[index] = torch.nextafter(kept, kept + 1)
        assert not torch.equal(_sums_of(values), before)
        values[index] = kept
    assert torch.equal(_sums_of(values), before)
    assert not torch.equal(_sums_of(-values), before)
    assert not torch.equal(_sums_of(values.flip(0)), before)


def test_samples_of_state_change_with_all_of_it():
    state = torch.rand(40 * RUN_ELEMENTS, generator=torch.Generator().manual_seed(0))
    sampled = _sums_of(state, SAMPLING_PERIOD)
    assert sampled.numel() == 3 + 2  # runs, the first word and the rest
    for changed in (state * 0.9, -state, torch.zeros_like(state), state.flip(0)):
        assert not torch.equal(_sums_of(changed, SAMPLING_PERIOD), sampled)


def test_clipping_and_accumulation_do_not_overlap():
    def clip(model, device):
        optimizer = optim.AdamW(model.parameters())
        for batch in batches(device, 4):
            model(batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    def accumulate(model, device):
        optimizer = optim.AdamW(model.parameters())
        for number, batch in enumerate(batches(device, 8)):
            model(batch).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return optimizer

    for train, obstacle in ((clip, GRADIENTS_CHANGE), (accumulate, ACCUMULATED)):
        overlap = both(train)
        assert (overlap.meter.steps_committed, overlap.meter.steps_dropped, overlap.obstacle) == (
            0,
            0,
            obstacle,
        )


class Loop:
    """A training loop that does one of many things in each step, by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __call__(self, model: nn.Module, device: torch.device) -> optim.Optimizer:
        draw = self.random
        kind = draw.choice(list(OPTIMIZERS))
        halves = list(model.layers[:2].parameters()), list(model.layers[2:].parameters())
        two = draw.random() < 0.3
        optimizers = (
            [OPTIMIZERS[kind](each) for each in halves] if two else [OPTIMIZERS[kind](model.parameters())]
        )
        for batch in batches(device, 10):
            action = draw.choice(ACTIONS)
            action(model, optimizers, batch)
        joined = optimizers[0]
        for each in optimizers[1:]:
            joined.state.update(each.state)
            joined.param_groups.extend(each.param_groups)
        return joined


def usual(model, optimizers, batch):
    model(batch).backward()
    for each in optimizers:
        each.step()
    model.zero_grad()


def clipped(model, optimizers, batch):
    model(batch).backward()
    # By value: a norm of gradients on two devices is added up in another order.
    nn.utils.clip_grad_value_(model.parameters(), 1e-5)
    for each in optimizers:
        each.step()
    model.zero_grad()


def other_rate(model, optimizers, batch):
    model(batch).backward()
    for each in optimizers:
        each.param_groups[0]["lr"] *= 0.5
        each.step()
    model.zero_grad()


def skipped(model, optimizers, batch):
    model(batch).backward()
    model.zero_grad()


def accumulated(model, optimizers, batch):
    for _ in range(2):
        model(batch).backward()
    for each in optimizers:
        each.step()
    model.zero_grad()


def only_one(model, optimizers, batch):
    model(batch).backward()
    optimizers[0].step()
    model.zero_grad()


def frozen(model, optimizers, batch):
    model.layers[1].requires_grad_(False)
    usual(model, optimizers, batch)
    model.layers[1].requires_grad_(True)


def another_group(model, optimizers, batch):
    group = optimizers[0].param_groups[0]
    if len(group["params"]) > 2:
        moved = group["params"].pop()
        optimizers[0].add_param_group({"params": [moved], "lr": group["lr"] / 3})
    usual(model, optimizers, batch)


def loaded(model, optimizers, batch):
    model(batch).backward()
    for each in optimizers:
        earlier = vars(each).setdefault("earlier", copy.deepcopy(each.state_dict()))
        each.load_state_dict(copy.deepcopy(earlier))
        each.step()
    model.zero_grad()


def other_weights(model, optimizers, batch):
    model(batch).backward()
    model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
    for each in optimizers:
        each.step()
    model.zero_grad()


def decayed(model, optimizers, batch):
    model(batch).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)
    for each in optimizers:
        each.step()
    model.zero_grad(set_to_none=False)


def left_over(model, optimizers, batch):
    model(batch).backward()  # neither stepped nor zeroed: the next batch accumulates


class Interruption(Exception):
    pass


def interrupt(*_: object) -> None:
    raise Interruption


def interrupted_in_backward(model, optimizers, batch):
    hook = model.layers[1].weight.register_hook(interrupt)
    with pytest.raises(Interruption):
        model(batch).backward()
    hook.remove()
    model.zero_grad()


def interrupted_before_the_step(model, optimizers, batch):
    model(batch).backward()
    hook = optimizers[0].register_step_pre_hook(interrupt)
    with pytest.raises(Interruption):
        optimizers[0].step()
    hook.remove()
    with torch.no_grad():
        model(batch)


def fewer_layers(model, optimizers, batch):
    model.used = 1
    usual(model, optimizers, batch)
    model.used = 4


def zeroed_state(model, optimizers, batch):
    model(batch).backward()
    for each in optimizers:
        for state in each.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.dim():
                    value.zero_()
        each.step()
    model.zero_grad()


def one_gradient_less(model, optimizers, batch):
    model(batch).backward()
    model.layers[2].weight.grad = None
    for each in optimizers:
        each.step()
    model.zero_grad()


def other_gradients(model, optimizers, batch):
    model(batch).backward()
    for parameter in model.parameters():
        parameter.grad = 2 * parameter.grad
    for each in optimizers:
        each.step()
    model.zero_grad()


def other_settings(model, optimizers, batch):
    model(batch).backward()
    for each in optimizers:
        for group in each.param_groups:
            group["weight_decay"] = 0.05
            if "betas" in group:
                group["betas"] = (0.8, 0.9)
        each.step()
    model.zero_grad()


def by_closure(model, optimizers, batch):
    def closure():
        model.zero_grad()
        loss = model(batch)
        loss.backward()
        return loss

    for each in optimizers:
        each.step(closure)
    model.zero_grad()


def stepped_twice(model, optimizers, batch):
    model(batch).backward()
    for each in optimizers:
        each.step()
        if leaves_gradients(each):  # else what torch leaves in them depends on the implementation
            each.step()
    model.zero_grad()


ACTIONS = [
    *[usual] * 20,
    clipped,
    other_rate,
    skipped,
    accumulated,
    only_one,
    frozen,
    another_group,
    loaded,
    other_weights,
    decayed,
    left_over,
    interrupted_in_backward,
    interrupted_before_the_step,
    fewer_layers,
    zeroed_state,
    one_gradient_less,
    other_gradients,
    other_settings,
    by_closure,
    stepped_twice,
]


@pytest.mark.matrix(10)
@pytest.mark.parametrize("seeds", [range(start, start + 5) for start in range(0, 50, 5)], ids=str)
def test_random_loops(seeds):
    commits = rollbacks = 0
    for seed in seeds:
        overlap = both(
            lambda model, device, seed=seed: Loop(seed)(model, device),
            bias=seed % 2 == 0,
            offloaded=seed % 5,
            bucket=(2, 8)[seed % 3 == 0],
        )
        commits += overlap.meter.steps_committed
        rollbacks += overlap.meter.steps_dropped
    assert commits > 0
    assert rollbacks > 0
