"""Parameters at home: where the plain model does not fit the wrapped one trains, with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import memscale
from memscale import Config
from memscale.execution_plan import LayerPlan, Offloading, Plan, Tier
from memscale.executor import Executor
from support.devices import accelerator
from support.families import FAMILIES, Family
from support.offloaded import attached, plan_of
from support.wrapping import Stack, lossless

STEPS = 3
QUIET = lossless("aggressive")  # tiny models gain too little for BALANCED
NAMES = ["gpt2", "bert", "llama", "t5", "vit", "tied", "lora", "frozen_embeddings", "resnet"]


def sample_of(family: Family, device: torch.device | str = "cpu") -> object:
    batch = family.batch(device=device)
    return batch if isinstance(batch, dict) else batch[:1]


def train(
    family: Family, model: nn.Module, device: torch.device | str
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and the parameters' last gradients on the CPU."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = tree_map(lambda leaf: leaf.to(device), family.batch())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = family.loss(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    gradients = [p.grad.detach().cpu() for p in model.parameters() if p.grad is not None]
    return losses, gradients


def plain_peak(family: Family) -> int:
    with accelerator() as gpu:
        train(family, family.build().to(gpu.device), gpu.device)
    return gpu.peak_bytes


def wrapped_run(family: Family, capacity: int) -> tuple[int, list[float], list[torch.Tensor], memscale.Plan]:
    with accelerator(capacity) as gpu:
        model = family.build().to(gpu.device)
        memscale.wrap(model, QUIET, sample_of(family, gpu.device))
        plan = model._memscale_executor.plan
        masters = [
            p.device.type
            for layer in plan.layers
            if "offloading" in layer.techniques
            for member in layer.members
            for p in model.get_submodule(member).parameters()
        ]
        assert masters, "nothing was offloaded"
        assert set(masters) == {"cpu"}
        gpu.tracker.reset_peak()
        losses, gradients = train(family, model, gpu.device)
        peak = gpu.peak_bytes
        memscale.detach(model)
        assert {p.device.type for p in model.parameters()} == {gpu.device.type}
    return peak, losses, gradients, plan


@pytest.mark.accelerator
@pytest.mark.virtual_only
@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", NAMES)
def test_offloaded_model_trains_like_the_plain_one(name: str) -> None:
    family = FAMILIES[name]
    expected_losses, expected_gradients = train(family, family.build(), "cpu")
    peak, losses, gradients, plan = wrapped_run(family, 1 << 34)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for expected, got in zip(expected_gradients, gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert peak < plain_peak(family)
    assert plan.host_bytes > 0
    assert peak == pytest.approx(plan.predicted_peak_bytes, rel=0.005)


def larger_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=256, n_layer=6, n_head=4, vocab_size=512, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).train()


def loop(model: nn.Module, device: torch.device | str, steps: int = 2) -> list[float]:
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(4 * 64).reshape(4, 64).to(device) % 512
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.accelerator
@pytest.mark.virtual_only
def test_where_the_plain_model_runs_out_of_memory_the_wrapped_one_trains() -> None:
    capacity = "80MiB"
    torch.manual_seed(0)
    expected = loop(larger_gpt2(), "cpu")
    with accelerator(capacity) as gpu:
        torch.manual_seed(0)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            loop(larger_gpt2().to(gpu.device), gpu.device)
    with accelerator(capacity) as gpu:
        torch.manual_seed(0)
        model = larger_gpt2().to(gpu.device)
        ids = torch.zeros(4, 64, dtype=torch.long, device=gpu.device)
        memscale.wrap(model, Config(enable_logging=False), {"input_ids": ids, "labels": ids})  # BALANCED
        assert loop(model, gpu.device) == pytest.approx(expected, rel=1e-6)
        assert model._memscale_executor.plan.host_bytes > 0


@pytest.mark.accelerator
def test_inputs_on_the_host_are_brought_to_the_device_and_evaluation_streams_too() -> None:
    family = FAMILIES["gpt2"]
    with accelerator() as gpu:
        model = family.build().to(gpu.device)
        plain = family.build().to(gpu.device).eval()
        memscale.wrap(model, QUIET, sample_of(family, gpu.device))
        batch = family.batch()  # on the host
        loss = family.loss(model, batch)
        assert loss.device.type == gpu.device.type
        loss.backward()
        model.eval()
        with torch.no_grad():
            got = family.loss(model, batch)
            expected = family.loss(plain, family.batch(device=gpu.device))
        assert float(got) == float(expected)


@pytest.mark.accelerator
def test_state_follows_its_parameter_home_and_back() -> None:
    family = FAMILIES["gpt2"]
    with accelerator() as gpu:
        model = family.build().to(gpu.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = family.batch(device=gpu.device)

        def step() -> None:
            family.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # the state is on the device, as the optimizer was made and stepped before wrap
        memscale.wrap(model, QUIET, sample_of(family, gpu.device))
        step()
        assert {state["exp_avg"].device.type for state in optimizer.state.values()} == {"cpu"}
        saved = model.state_dict()
        assert all(torch.isfinite(value).all() for value in saved.values())
        memscale.detach(model)
        assert {state["exp_avg"].device.type for state in optimizer.state.values()} == {gpu.device.type}
        step()


@pytest.mark.accelerator
def test_the_cap_on_host_memory_is_kept() -> None:
    family = FAMILIES["gpt2"]
    with accelerator() as gpu:
        model = family.build().to(gpu.device)
        config = lossless("aggressive", max_cpu_offload_gb=1e-5)
        memscale.wrap(model, config, sample_of(family, gpu.device))
        plan = model._memscale_executor.plan
        assert plan.host_bytes <= 10_000
        assert {parameter.device.type for parameter in model.parameters()} == {gpu.device.type}


@pytest.mark.accelerator
def test_recurrent_layers_stay_on_the_device() -> None:
    family = FAMILIES["lstm"]
    with accelerator() as gpu:
        model = family.build().to(gpu.device)
        memscale.wrap(model, QUIET, sample_of(family, gpu.device))
        assert {parameter.device.type for parameter in model.lstm.parameters()} == {gpu.device.type}
        family.loss(model, family.batch(device=gpu.device)).backward()


@pytest.mark.accelerator
def test_host_memory_of_a_model_that_was_built_on_the_host_is_counted() -> None:
    model = Stack(width=64)
    tiers: dict[str, Tier] = {"layers.0": "host", "layers.1": "disk"}
    layers = [
        LayerPlan(name, (name,), ("offloading",), "test", "one each", offloading=Offloading(tier))
        for name, tier in tiers.items()
    ]
    with accelerator() as gpu:
        executor = Executor(model, Plan(tuple(layers)), QUIET, device=gpu.device)
        executor.attach()
        on_disk = {id(each) for each in executor.placement.on_disk}
        on_host = [each for each in model.layers[:2].parameters() if id(each) not in on_disk]
        assert on_disk
        assert executor.placement.bytes_on_host == sum(each.nbytes for each in on_host) > 0
        executor.detach()


@pytest.mark.slow
@pytest.mark.accelerator
def test_with_too_little_host_memory_the_disk_holds_what_leaves_the_device() -> None:
    family = FAMILIES["gpt2"]
    with accelerator() as gpu:
        expected = train(family, family.build().to(gpu.device), gpu.device)
        batch = sample_of(family, gpu.device)
        # A budget that no plan fits: the smallest one is taken.
        config = QUIET.replace(memory_budget="64KiB", max_cpu_offload_gb=0)
        model = memscale.wrap(family.build().to(gpu.device), config, batch)
        executor = model._memscale_executor
        assert (executor.plan.host_bytes > 0, executor.plan.disk_bytes > 0) == (False, True)
        assert executor.placement.on_disk
        got = train(family, model, gpu.device)
        assert got[0] == expected[0]
        assert all(map(torch.equal, got[1], expected[1]))
        moved = {(each.what, each.tier) for each in executor.report().moved if each.read_bytes}
        assert {("parameters", "disk"), ("optimizer state", "disk")} <= moved
        memscale.detach(model)
        assert {parameter.device for parameter in model.parameters()} == {gpu.device}

        without = memscale.wrap(family.build().to(gpu.device), config.replace(max_disk_offload_gb=0), batch)
        assert {parameter.device for parameter in without.parameters()} == {gpu.device}


@pytest.mark.accelerator
def test_parameters_that_share_memory_share_it_on() -> None:
    """They stay on the device: moved one by one, each would have memory of its own from then on."""

    def build(device: torch.device) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)))
        model.to(device)
        model[3][0].weight.data = model[0][0].weight.data
        return model

    def weights_after(model: nn.Sequential, inputs: torch.Tensor) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    with accelerator() as gpu:
        inputs = torch.ones(2, 8, device=gpu.device)
        expected = weights_after(build(gpu.device), inputs)
        model = memscale.wrap(build(gpu.device), QUIET, inputs)
        assert model[1][0].weight.device.type == "cpu"
        assert all(map(torch.equal, weights_after(model, inputs), expected))
        assert model[3][0].weight.data_ptr() == model[0][0].weight.data_ptr()


class Attends(nn.Module):
    """A product with an input that is not contiguous: torch.matmul looks whether its weight requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x)[0]


@pytest.mark.accelerator
@pytest.mark.parametrize("async_offload", [False, True])
def test_evaluation_takes_the_kernels_of_the_plain_model(async_offload: bool) -> None:
    torch.manual_seed(0)
    with accelerator() as gpu:
        model = nn.Sequential(*(Attends() for _ in range(3))).to(gpu.device)
        x = torch.randn(2, 5, 16).to(gpu.device)
        with torch.no_grad():
            expected = model.eval()(x).cpu()
        memscale.wrap(model.train(), QUIET.replace(async_offload=async_offload), x)
        assert all(each.device.type == "cpu" for each in model.parameters())
        with torch.no_grad():
            got = model.eval()(x).cpu()
        assert torch.equal(got, expected)
        model.train()(x).sum().backward()
        assert all(each.grad is not None for each in model.parameters())


@pytest.mark.accelerator
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.AdamW])
def test_state_of_an_optimizer_that_was_never_stepped_follows_its_parameters(kind: type) -> None:
    """Adagrad makes its state at once, others have it when it was loaded: on the host, if that is where masters are."""
    with accelerator("256MiB") as gpu:
        model = Stack(3, 16).to(gpu.device).train()
        x = torch.ones(4, 16, device=gpu.device)
        first = kind(model.parameters())
        model(x).sum().backward()
        first.step()
        with attached(model, plan_of(model, to="host", activations=False)):
            second = kind(model.parameters())
            second.load_state_dict(first.state_dict())
            states = [each for state in second.state.values() for each in state.values() if each.dim()]
            assert {each.device.type for each in states} == {"cpu"}
        second.step()


@pytest.mark.accelerator
def test_a_bias_that_is_used_twice_under_autocast_is_off_by_the_sum_in_sixteen_bits() -> None:
    """The plain model adds up in 16 bits what is added up here in 32: see Note [Home and working copy]."""

    def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        return [each.grad.cpu() for each in model.parameters()]

    def build(device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        linear = nn.Linear(16, 16)
        return nn.Sequential(nn.Sequential(linear, nn.Tanh(), linear), nn.Linear(16, 4)).to(device)

    with accelerator("256MiB") as gpu:
        x = torch.linspace(-1, 1, 64).reshape(4, 16).to(gpu.device)
        plain = gradients(build(gpu.device), x)
        model = build(gpu.device)
        layer = LayerPlan("0", ("0",), ("offloading",), "-", "-", offloading=Offloading("host", False))
        with attached(model, Plan((layer,))):
            weight, bias, *head = gradients(model, x)
    assert all(map(torch.equal, (weight, *head), (plain[0], *plain[2:])))
    assert (bias - plain[1]).abs().max() <= torch.finfo(torch.bfloat16).eps * plain[1].abs().max()


@pytest.mark.accelerator
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.ASGD, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.AdamW, {"foreach": True}),
    ],
)
def test_state_without_dimensions_follows_its_parameters(kind: type, options: dict[str, Any]) -> None:
    """ASGD keeps a count, a rate and a weight on the device: `foreach` refuses them beside parameters elsewhere."""

    def train(wrapped: bool) -> list[torch.Tensor]:
        with accelerator("256MiB") as gpu:
            torch.manual_seed(0)
            model = Stack(3, 16).to(gpu.device).train()
            x = torch.ones(4, 16, device=gpu.device)
            optimizer = kind(model.parameters(), **options)

            def step() -> None:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

            step()
            if wrapped:
                with attached(model, plan_of(model, to="host", activations=False)):
                    assert any(each.device.type == "cpu" for each in model.parameters())
                    step()
            else:
                step()
            step()
            return [each.detach().cpu() for each in model.parameters()]

    assert all(map(torch.equal, train(wrapped=True), train(wrapped=False)))
