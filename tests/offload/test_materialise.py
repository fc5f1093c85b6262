"""Models built on the meta device get their weights by their own initialisation: a layer at a time, and at home."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, MemoryTracker
from memscale.errors import TierFullError, WrapError
from memscale.execution_plan import LayerPlan, Offloading, Plan
from memscale.executor import EXECUTOR, Executor
from memscale.memory.process import measure_in_fresh_process, reset_peak_rss, rss_bytes
from memscale.offload.materialise import materialise
from memscale.tiers.disk import PAGE
from memscale.units import format_bytes
from support.devices import accelerator
from support.disk import QUIET, assert_same, disk_plan, on_disk, resident_bytes, train
from support.families import FAMILIES, TINY, Family
from support.wrapping import Layer, Stack

pytestmark = pytest.mark.cpu_only

NAMES = [
    "gpt2",
    "bert",
    "llama",
    "mistral",
    "t5",
    "whisper",
    "mixtral",
    "resnet",
    "cnn",
    "lstm",
    "kwargs_only",
]
NAMES += ["shared_block", "frozen_embeddings", "vit", "transformer_encoder", "unet"]


def family_of(name: str) -> Family:
    if FAMILIES[name].transformers:
        pytest.importorskip("transformers")
    return FAMILIES[name]


def on_meta(family: Family, seed: int = 0) -> nn.Module:
    """As `Family.build`, but without memory."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        return family.make(family.scale).train()


def meta_stack(layers: int = 4, width: int = 64) -> Stack:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Stack(layers, width)
    model.scale = torch.ones(1)  # a buffer that only the constructor could make
    return model


def devices(model: nn.Module) -> set[str]:
    return {each.device.type for each in (*model.parameters(), *model.buffers())}


# ---------------------------------------------------------------------- the numbers


@pytest.mark.matrix(5)
@pytest.mark.parametrize("name", NAMES)
def test_buffers_are_those_of_the_plain_model(name: str) -> None:
    family = family_of(name)
    plain, model = family.build(), on_meta(family)
    materialise(model)
    expected, got = dict(plain.named_buffers()), dict(model.named_buffers())
    assert expected.keys() == got.keys()
    for key, buffer in expected.items():
        assert torch.equal(buffer, got[key])
        assert buffer.dtype == got[key].dtype


def test_there_are_buffers_to_recompute() -> None:
    assert {name for name, _ in on_meta(family_of("llama")).named_buffers()} >= {"model.rotary_emb.inv_freq"}
    assert {name for name, _ in on_meta(family_of("bert")).named_buffers()} >= {
        "bert.embeddings.position_ids"
    }
    assert any("running_var" in name for name, _ in on_meta(family_of("resnet")).named_buffers())


@pytest.mark.matrix(5)
@pytest.mark.parametrize("name", NAMES)
def test_distributions_are_those_of_the_plain_model(name: str) -> None:
    family = family_of(name)
    plain, model = family.build(), on_meta(family, seed=3)
    parameters = list(model.parameters())
    materialise(model)
    assert [id(each) for each in model.parameters()] == [id(each) for each in parameters]
    assert [e.requires_grad for e in model.parameters()] == [e.requires_grad for e in plain.parameters()]
    for one, other in zip(plain.modules(), model.modules(), strict=True):
        assert vars(one).keys() == vars(other).keys()
    for (key, a), (other, b) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert key == other
        a, b = a.detach(), b.detach()
        spread = float(a.std(correction=0))
        assert (spread == 0) == (float(b.std(correction=0)) == 0)
        if spread == 0:  # ones and zeros
            assert torch.equal(a, b)
        elif a.numel() >= 256:
            error = 6 / math.sqrt(2 * a.numel())
            assert float(b.std()) == pytest.approx(spread, rel=2 * error)
            assert float(b.mean()) == pytest.approx(float(a.mean()), abs=12 * spread / math.sqrt(a.numel()))


def test_residual_weights_are_scaled_as_gpt2_has_them() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=128, n_layer=8, n_head=4)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    materialise(model)
    block = model.transformer.h[3]
    for weight in (block.attn.c_proj.weight, block.mlp.c_proj.weight):
        assert float(weight.detach().std()) == pytest.approx(0.02 / math.sqrt(2 * 8), rel=0.05)
    assert float(block.mlp.c_fc.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_tensors_that_have_values_keep_them() -> None:
    family = family_of("gpt2")
    model = on_meta(family)
    block = model.transformer.h[1]
    given = {"weight": torch.full((32, 96), 7.0), "bias": torch.full((96,), 8.0)}
    block.attn.c_attn.load_state_dict(given, assign=True)
    block.attn.c_proj.weight = nn.Parameter(torch.full((32, 32), 9.0))  # its block scales it
    materialise(model)
    assert bool((block.attn.c_attn.weight == 7).all())
    assert bool((block.attn.c_attn.bias == 8).all())
    assert bool((block.attn.c_proj.weight == 9).all())
    assert bool((block.attn.c_proj.bias == 0).all())
    assert devices(model) == {"cpu"}


def test_half_a_module_of_torch_keeps_its_values() -> None:
    attention = nn.MultiheadAttention(8, 2, device="meta")
    attention.out_proj.bias = nn.Parameter(torch.full((8,), 3.0))  # which its reset would set to 0
    materialise(attention)
    assert bool((attention.out_proj.bias == 3).all())
    assert float(attention.in_proj_weight.detach().abs().max()) <= math.sqrt(6 / 32)  # Xavier's bound


def test_types_are_those_of_the_model() -> None:
    family = family_of("llama")
    model = on_meta(family).to(torch.bfloat16)
    materialise(model)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert float(model.lm_head.weight.float().std()) == pytest.approx(0.02, rel=0.1)


def test_models_of_users_that_say_how() -> None:
    class Titan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4))
            self.register_buffer("table", torch.arange(4.0), persistent=False)
            self.out = nn.Linear(4, 4)

        def init_weights(self) -> None:
            nn.init.constant_(self.scale, 5.0)
            nn.init.zeros_(self.out.weight)
            with torch.no_grad():
                self.table.copy_(torch.arange(4.0))

    class Nano(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(64, 64), nn.Embedding(64, 64))
            self.apply(self._init_weights)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, (nn.Linear, nn.Embedding)):
                torch.nn.init.normal_(module.weight, mean=0.0, std=0.25)

    with torch.device("meta"):
        titan, nano = Titan(), Nano()
    materialise(titan)
    assert titan.scale.tolist() == [5.0] * 4
    assert titan.table.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert float(titan.out.weight.abs().max()) == 0.0
    assert float(titan.out.bias.abs().max()) > 0.0
    materialise(nano)
    for weight in (nano.inner[0].weight, nano.inner[1].weight):
        assert float(weight.detach().std()) == pytest.approx(0.25, rel=0.1)


def test_inside_of_a_block_for_the_meta_device() -> None:
    with torch.device("meta"):
        model = family_of("llama").make(TINY)
        materialise(model)
    assert devices(model) == {"cpu"}


def test_after_accelerates_empty_weights() -> None:
    accelerate = pytest.importorskip("accelerate")
    family = family_of("gpt2")
    with accelerate.init_empty_weights():
        model = family.make(family.scale)
    assert all(each.is_meta for each in model.parameters())
    materialise(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert float(model.transformer.wte.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_an_optimizer_from_before_steps_the_same_parameters() -> None:
    model = meta_stack()
    model.layers[0].up.weight.note = "mine"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    materialise(model)
    assert model.layers[0].up.weight.note == "mine"
    before = model.layers[0].up.weight.detach().clone()
    model(torch.randn(3, 64)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.layers[0].up.weight, before)


# ---------------------------------------------------------------------- memory


def largest_layer(model: nn.Module) -> int:
    plan = disk_plan(model)
    return max(
        sum(p.nbytes for member in layer.members for p in model.get_submodule(member).parameters())
        for layer in plan.layers
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit", "whisper", "stack"])
def test_a_layer_is_in_memory_at_a_time(name: str) -> None:
    model = meta_stack() if name == "stack" else on_meta(family_of(name))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    tracker = MemoryTracker(model)
    executor = Executor(model, disk_plan(model), QUIET)
    with tracker:
        executor.attach()
    small = sum(each.nbytes for each in model.parameters() if each.nbytes < PAGE)  # these stay
    small += sum(buffer.nbytes for buffer in model.buffers())
    assert tracker.live_bytes("cpu") <= small
    assert tracker.peak_bytes("cpu") <= largest_layer(model) + small
    assert 2 * tracker.peak_bytes("cpu") < whole
    kept = sum(parameter.nbytes for parameter in executor.placement.on_disk)
    assert kept >= whole - small
    executor.detach()
    assert devices(model) == {"cpu"}


def test_no_page_is_left_in_memory() -> None:
    model = meta_stack(width=128)
    with on_disk(model):
        assert resident_bytes(*(each for each in model.parameters() if each.nbytes >= PAGE)) <= 4 * 16 * PAGE


def test_resident_layers_stay_in_memory() -> None:
    model = meta_stack()
    layers = tuple(
        LayerPlan(
            f"layers.{i}", (f"layers.{i}",), ("offloading",), "test", "half", offloading=Offloading("disk")
        )
        for i in (0, 2)
    )
    executor = Executor(model, Plan(layers), QUIET)
    executor.attach()
    held = {name for name, each in model.named_parameters() if executor.placement.store.holds(each)}
    assert held == {
        "layers.0.up.weight",
        "layers.0.down.weight",
        "layers.2.up.weight",
        "layers.2.down.weight",
    }
    executor.detach()


@pytest.mark.accelerator
@pytest.mark.virtual_only
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_on_a_device_what_is_offloaded_never_goes_there(tier: Any) -> None:
    model = meta_stack()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    layers = tuple(
        LayerPlan(
            f"layers.{i}", (f"layers.{i}",), ("offloading",), "test", "most", offloading=Offloading(tier)
        )
        for i in range(3)
    )
    with accelerator(2**26) as gpu:
        executor = Executor(model, Plan(layers), QUIET, device=torch.device(gpu.device))
        executor.attach()
        peak = gpu.peak_bytes
        assert {each.device.type for each in model.layers[:3].parameters()} == {"cpu"}
        assert {each.device.type for each in model.layers[3].parameters()} == {gpu.device.type}
        assert peak < whole / 2
        out = model(torch.randn(2, 64))
        assert out.device.type == gpu.device.type
        out.square().mean().backward()
        executor.detach()
        assert devices(model) == {"cpu"}  # ordinary tensors, whole
    assert all(torch.isfinite(each).all() for each in model.parameters())


@pytest.mark.accelerator
@pytest.mark.virtual_only
def test_what_was_on_the_device_before_is_there_with_the_rest_after_detach() -> None:
    model = meta_stack()
    layer = LayerPlan(
        "layers.1", ("layers.1",), ("offloading",), "test", "one", offloading=Offloading("host")
    )
    with accelerator(2**26) as gpu:
        model.head.to_empty(device=gpu.device)
        model.head.reset_parameters()
        executor = Executor(model, Plan((layer,)), QUIET)
        executor.attach()
        assert {each.device.type for each in model.layers[1].parameters()} == {"cpu"}
        executor.detach()
        assert {each.device for each in model.parameters()} == {gpu.device}


def wide_model(*, on_meta: bool) -> nn.Module:
    """600 MB of parameters in 36 layers."""
    with torch.device("meta" if on_meta else "cpu"):
        layers = [nn.Sequential(nn.Linear(1024, 2048), nn.Tanh(), nn.Linear(2048, 1024)) for _ in range(36)]
        return nn.Sequential(*layers)


def build_and_step(on_meta: bool) -> dict[str, int]:
    model = wide_model(on_meta=on_meta)
    size = sum(parameter.nbytes for parameter in model.parameters())
    layers = tuple(
        LayerPlan(name, (name,), ("offloading",), "test", "all", offloading=Offloading("disk"))
        for name, _ in model.named_children()
    )
    reset_peak_rss()
    before = rss_bytes()
    Executor(model, Plan(layers), Config(enable_logging=False)).attach()
    attached = rss_bytes() - before
    with torch.no_grad():
        total = float(model(torch.ones(1, 1024)).sum())
    assert math.isfinite(total)
    return {"size": size, "attached": attached}


@pytest.mark.slow
def test_a_process_stays_far_below_the_size_of_its_model() -> None:
    measured = measure_in_fresh_process(build_and_step, True, imports=["memscale.executor"])
    size = measured.result["size"]
    assert size > 600_000_000
    grown = measured.peak_bytes - measured.baseline_bytes
    assert grown < size / 6
    assert measured.result["attached"] < size / 10


# ---------------------------------------------------------------------- training


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "resnet", "cnn", "lstm"])
def test_trains_on_disk_as_the_same_weights_in_memory_do(name: str) -> None:
    family = family_of(name)
    model = on_meta(family)
    with on_disk(model) as executor:
        assert executor.placement.on_disk
        twin = family.build()
        twin.load_state_dict(model.state_dict())
        assert_same(train(family, model), train(family, twin))


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit", "transformer_encoder", "cnn"])
@pytest.mark.parametrize("with_sample", [True, False])
def test_wrap_takes_a_model_on_the_meta_device(name: str, with_sample: bool) -> None:
    family = family_of(name)
    model, batch = on_meta(family), family.batch()
    sample = batch if isinstance(batch, dict) else batch[0]
    memscale.wrap(model, QUIET, sample if with_sample else None)
    twin = family.build()
    twin.load_state_dict(model.state_dict())
    assert train(family, model).losses == pytest.approx(train(family, twin).losses, rel=1e-5)
    memscale.detach(model)
    assert EXECUTOR not in vars(model)
    assert devices(model) == {"cpu"}


def test_the_log_says_what_was_made(caplog: pytest.LogCaptureFixture) -> None:
    model = meta_stack(width=64)
    size = format_bytes(sum(parameter.nbytes for parameter in model.parameters()))
    with caplog.at_level("INFO", logger="memscale"):
        Executor(model, Plan(()), Config()).attach()
    assert [each.message for each in caplog.records if "meta device" in each.message] == [
        f"Stack was on the meta device; its parameters were made: {size} by the initialisation of its own modules.",
    ]


def test_detach_leaves_ordinary_tensors() -> None:
    model = meta_stack()
    with on_disk(model) as executor:
        values = [each.detach().clone() for each in model.parameters()]
    gc.collect()
    assert executor.placement.store.bytes_used == 0
    for parameter, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    plain = Stack(4, 64)
    for one, other in zip(plain.modules(), model.modules(), strict=True):
        assert vars(one).keys() == vars(other).keys()


# ---------------------------------------------------------------------- what can't be done


class Gate(nn.Module):
    """A module that only its constructor can initialise."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(8) * 0.1)


class Masked(nn.Module):
    """A buffer that only its constructor can make, beside a parameter that can be initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)), persistent=False)


class Careless(nn.Module):
    """Its reset forgets a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.empty(8))
        self.two = nn.Parameter(torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.one)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Checks that a model has the same tensors and attributes after the block as before."""
    parameters = [(id(each), each.device, vars(each).copy()) for each in model.parameters()]
    buffers = [id(each) for each in model.buffers()]
    attributes = [set(vars(module)) for module in model.modules()]
    yield
    assert parameters == [(id(each), each.device, vars(each)) for each in model.parameters()]
    assert buffers == [id(each) for each in model.buffers()]
    assert attributes == [set(vars(module)) for module in model.modules()]


@pytest.mark.parametrize(
    ("inner", "name"),
    [(Gate, r"parameter '1\.gate'"), (Masked, r"buffer '1\.mask'"), (Careless, r"parameter '1\.two'")],
)
def test_a_module_without_initialisation_is_named(inner: type[nn.Module], name: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), inner())
    with untouched(model), pytest.raises(WrapError, match=name) as raised:
        Executor(model, Plan(()), QUIET).attach()
    assert inner.__name__ in str(raised.value)
    assert "load_safetensors" in str(raised.value)
    assert EXECUTOR not in vars(model)


def test_it_works_once_the_tensor_is_set() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Masked())
    model[1].mask = torch.tril(torch.ones(8, 8))
    Executor(model, Plan(()), QUIET).attach()
    assert torch.equal(model[1].mask, torch.tril(torch.ones(8, 8)))


def test_an_adapter_on_the_meta_device_is_refused() -> None:
    class Adapted(nn.Module):  # as peft's layers look
        adapter_layer_names = ("lora_A",)

        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(8, 8)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2)})

    with torch.device("meta"):
        model = nn.Sequential(Adapted())
    with untouched(model), pytest.raises(WrapError, match=r"0\.lora_A is an adapter"):
        materialise(model)


def test_what_accelerate_has_offloaded_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(nn.Linear(8, 8))
    accelerate.cpu_offload(model)
    assert model[0].weight.is_meta
    with pytest.raises(WrapError, match="accelerate has offloaded"):
        materialise(model)


def test_a_full_disk_leaves_the_model_on_the_meta_device(tmp_path: Path) -> None:
    model = meta_stack(width=128)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    config = Config(enable_logging=False, offload_dir=str(tmp_path), max_disk_offload_gb=whole / 2 / 2**30)
    executor = Executor(model, disk_plan(model), config)
    with untouched(model), pytest.raises(TierFullError):
        executor.attach()
    gc.collect()
    assert executor.placement.store.bytes_used == 0
    assert EXECUTOR not in vars(model)
    with on_disk(model):  # and there is a second time
        assert devices(model) == {"cpu"}


def test_a_plan_that_does_not_fit_leaves_the_model_on_the_meta_device() -> None:
    model = meta_stack()
    layers = disk_plan(model).layers
    broken = LayerPlan("layers.0.up", ("layers.0.up",), ("sorcery",), "test", "as an example")
    tracker = MemoryTracker(model)
    with untouched(model), tracker, pytest.raises(WrapError, match="sorcery"):
        Executor(model, Plan((*layers, broken)), QUIET).attach()
    assert 2 * tracker.peak_bytes("cpu") < sum(parameter.nbytes for parameter in model.parameters())


def test_layers_of_lists_are_modules_of_their_own() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"a": Layer(), "b": nn.ModuleList([Layer(), nn.Identity()])})
    made = materialise(model)
    assert devices(model) == {"cpu"}
    made.undo()
    assert devices(model) == {"meta"}
