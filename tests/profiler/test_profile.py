"""The profile of a step: what each block needs, the same by fake tensors and by a real run, and nothing changed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memscale.errors import ProfileError
from memscale.profiler import ModelProfile, Place, Sample, profile_model, sample_of
from memscale.profiler.run import profile_empirical
from support.families import FAMILIES, Family
from support.pictures import assert_as_before, pictures
from support.wrapping import Layer, Stack

CPU, GPU = Place("cpu"), Place("vgpu")


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> Family:
    if request.param.transformers:
        pytest.importorskip("transformers")
    return request.param


def sample_for(family: Family, model: nn.Module) -> Sample:
    return sample_of(family.batch(), model)


def profile_of(family: Family, place: Place = CPU, **options: bool) -> ModelProfile:
    model = family.build()
    return profile_model(model, sample_for(family, model), place, **options)


def needs(profile: ModelProfile) -> dict[str, tuple[Any, ...]]:
    """What the engine decides on, block by block."""
    return {
        block.name: (
            block.order,
            block.calls,
            block.saved_bytes,
            block.output_bytes,
            block.dropped_bytes,
            block.boundary_bytes,
            block.parameter_bytes,
            block.gradient_bytes,
            block.forward_flops,
            block.backward_flops,
            block.ops,
        )
        for block in profile.blocks
    }


# Two ways, one result ------------------------------------------------------------------------------------


@pytest.mark.matrix(5)
def test_fake_tensors_and_a_real_run_agree_to_the_byte(family: Family) -> None:
    if family.data_dependent:
        pytest.skip("fake tensors cannot follow it")
    static, empirical = profile_of(family), profile_of(family, static=False)
    assert (static.source, empirical.source) == ("static", "empirical")
    if family.name == "lstm":
        # The workspace of the CPU's kernel depends on the CPU.
        saved = empirical.block("lstm").saved_bytes
        assert static.block("lstm").saved_bytes == pytest.approx(saved, rel=0.01)
        return
    assert needs(static) == needs(empirical)
    assert any(block.saved_bytes for block in static.blocks)
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "other_saved_bytes", "batch"):
        assert getattr(static, name) == getattr(empirical, name), name


def test_a_gpu_counts_in_blocks_of_its_allocator() -> None:
    profile = profile_model(Stack(), Sample((torch.ones(4, 6, 8),), {}), GPU)
    assert profile.source == "static"
    assert all(block.saved_bytes % 512 == 0 for block in profile.blocks)
    assert profile.block("head").parameter_bytes == 2 * 512  # 128 and 16 bytes


def test_data_dependent_shapes_need_a_real_run_and_it_says_why() -> None:
    pytest.importorskip("transformers")
    profile = profile_of(FAMILIES["mixtral"])
    assert profile.source == "empirical"
    assert profile.reason.startswith("a real run (fake tensors failed: DynamicOutputShapeException: ")
    assert profile.block("model.layers.1").saved_bytes > 0


def test_the_profile_says_which_way_it_went() -> None:
    model, sample = Stack(layers=5), Sample((torch.ones(4, 6, 8),), {})
    assert profile_model(model, sample, CPU).reason == "3 of 6 blocks run on fake tensors"
    by_run = profile_model(model, sample, CPU, static=False)
    assert by_run.reason == "a real run (use_static_profiling=False)"
    assert profile_model(nn.Linear(8, 2), sample, CPU).reason == "run on fake tensors"


class Skipping(nn.Module):
    """Its last layer is called by its number, so that it does not run without the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(4):
            x = self.layers[index](x)
        return x


def test_a_model_that_does_not_run_shortened_is_run_whole() -> None:
    profile = profile_model(Skipping(), Sample((torch.ones(4, 8),), {}), CPU)
    assert profile.reason == "run on fake tensors, whole, as it does not run shortened (IndexError)"
    assert len({block.saved_bytes for block in profile.blocks}) == 1


def test_the_cost_does_not_grow_with_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    forward, calls = GPT2Block.forward, Counter()

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls[depth] += 1
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(GPT2Block, "forward", counted)
    ids = torch.zeros(2, 16, dtype=torch.long)
    profiles = {}
    for depth in (4, 48):
        with torch.device("meta"):
            config = transformers.GPT2Config(n_layer=depth, n_embd=64, n_head=4, vocab_size=97)
            model = transformers.GPT2LMHeadModel(config)
        profiles[depth] = profile_model(model, Sample((), {"input_ids": ids, "labels": ids}), GPU)
    assert calls == {4: 2, 48: 2}
    short, deep = profiles[4], profiles[48]
    assert len(deep.blocks) == len(short.blocks) + 44
    assert deep.block("transformer.h.47").saved_bytes == short.block("transformer.h.3").saved_bytes
    orders = [deep.block(f"transformer.h.{i}").order for i in range(48)]
    assert orders == list(range(orders[0], orders[0] + 48))


class Telling(Layer):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), x.detach() * 2


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Telling() for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        told = []
        for layer in self.layers:
            x, side = layer(x)
            told.append(side)
        return {"loss": x.square().mean(), "told": told}


@pytest.mark.parametrize("static", [True, False], ids=["fake", "real"])
def test_what_lives_only_until_the_model_returns_is_not_saved(static: bool) -> None:
    x = torch.ones(4, 6, 8)
    profile = profile_model(Collecting(), Sample((x,), {}), CPU, static=static)
    layer = profile.block("layers.1")
    assert layer.dropped_bytes == x.nbytes
    assert layer.output_bytes == x.nbytes
    assert profile.other_saved_bytes < x.nbytes


class Asking(Layer):
    """Asks where its weight is, as models of transformers do in each call."""

    times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            assert x.device == self.up.weight.device
        return super().forward(x)


def test_reading_where_a_tensor_is_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(model: nn.Module, args: Any) -> None:
        for _ in range(Asking.times):
            assert args[0].device == model.layers[1].up.weight.device

    profiles = []
    for times in (0, 10):
        monkeypatch.setattr(Asking, "times", times)
        model = Stack()
        model.layers = nn.ModuleList(Asking() for _ in range(3))
        model.register_forward_pre_hook(ask)
        profiles.append(profile_model(model, Sample((torch.ones(4, 6, 8),), {}), CPU))
    assert profiles[0] == profiles[1]


# A guarded run -------------------------------------------------------------------------------------------


class Guarded(nn.Module):
    """All that a careless run would change: running statistics, a counter, gradients, hooks that step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.eval()  # a model that forgets to switch back
        for layer in self.layers:
            layer.train()
            x = layer(x)
        return self.dropout.train()(self.frozen(x))


def test_a_real_run_changes_nothing() -> None:
    model = Guarded()
    model.layers[1].eval()
    model(torch.randn(4, 8)).sum().backward()
    model.train()
    model.layers[1].eval()
    heard: list[str] = []
    weight = model.layers[0][0].weight
    weight.register_post_accumulate_grad_hook(lambda each: heard.append("accumulated"))
    model.layers[0].register_forward_hook(lambda *_: heard.append("forward"))
    sample = Sample((torch.randn(4, 8),), {})
    before, random, gradient = pictures(model), torch.get_rng_state(), weight.grad.clone()

    profile = profile_empirical(model, sample, reason="as a test")
    assert profile.block("layers.0").saved_bytes > 0
    assert profile.block("layers.0").backward_flops > 0
    assert_as_before(pictures(model), before)
    assert torch.equal(weight.grad, gradient)
    assert torch.equal(torch.get_rng_state(), random)
    assert heard == ["forward"]


def test_a_real_run_that_fails_changes_nothing() -> None:
    model = Guarded()
    before, random = pictures(model), torch.get_rng_state()
    with pytest.raises(RuntimeError):
        profile_empirical(model, Sample((torch.ones(4, 9),), {}), reason="as a test")
    assert_as_before(pictures(model), before)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("name", ["resnet", "mixtral"])
def test_a_profile_of_any_kind_changes_nothing(name: str) -> None:
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    model = family.build()
    family.loss(model, family.batch()).backward()
    before, random = pictures(model), torch.get_rng_state()
    for static in (True, False):
        profile_model(model, sample_for(family, model), CPU, static=static)
        assert_as_before(pictures(model), before)
        assert torch.equal(torch.get_rng_state(), random)


# What cannot be profiled ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "on_meta", "message"),
    [
        ({}, False, "Stack does not run on the sample: RuntimeError: .*The sample was: float32\\[4, 9\\]"),
        ({"empirical": False}, False, "a real run is switched off by use_empirical_fallback=False"),
        ({"static": False, "empirical": False}, False, "\\(use_static_profiling=False\\)"),
        ({}, True, "weights are on the meta device"),
    ],
    ids=["both ways", "no real run", "neither", "no weights"],
)
def test_what_does_not_run_says_why(options: dict[str, bool], on_meta: bool, message: str) -> None:
    model = Stack().to("meta") if on_meta else Stack()
    with pytest.raises(ProfileError, match=message):
        profile_model(model, Sample((torch.ones(4, 9),), {}), CPU, **options)


# Parts of it ---------------------------------------------------------------------------------------------


def test_the_cache_of_generation_is_no_part_of_training() -> None:
    pytest.importorskip("transformers")
    family = FAMILIES["gpt2"]
    with_cache, without = family.build(), family.build()
    without.config.use_cache = False
    found = [profile_model(model, sample_for(family, model), CPU) for model in (with_cache, without)]
    assert found[0] == found[1]
    assert with_cache.config.use_cache is True


def test_the_gradient_of_a_tied_weight_is_made_by_the_head() -> None:
    profile = profile_of(FAMILIES["tied"])
    tokens, head = profile.block("tokens"), profile.block("head")
    assert tokens.parameter_bytes > 0 == head.parameter_bytes
    assert head.gradient_bytes == tokens.parameter_bytes
    assert tokens.gradient_bytes == 0
    assert head.used_bytes == tokens.parameter_bytes
    assert sum(block.gradient_bytes for block in profile.blocks) + 64 * 32 * 4 == profile.gradient_bytes


def test_checkpointing_of_its_own_is_seen() -> None:
    pytest.importorskip("transformers")
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    family = FAMILIES["gpt2"]
    model = family.build()
    model.gradient_checkpointing_enable()
    blocks = profile_model(model, sample_for(family, model), CPU).blocks
    assert {block.name for block in blocks if block.has_own_checkpointing} >= {
        f"transformer.h.{index}" for index in range(3)
    }
    stack = Stack()
    stack.layers[1] = checkpoint_wrapper(stack.layers[1])
    profile = profile_model(stack, Sample((torch.ones(4, 6, 8),), {}), CPU)
    assert {block.name: block.has_own_checkpointing for block in profile.blocks} == {
        "layers.0": False,
        "layers.1": True,
        "layers.2": False,
        "head": False,
    }


def test_targets_that_a_model_does_not_take_are_beside_its_call():
    model, x, y = nn.Linear(4, 2), torch.ones(3, 4), torch.zeros(3, dtype=torch.long)
    sample = sample_of((x, y), model)
    assert sample.args == (x,)
    assert sample.beside == (y,)
    assert sample_of((x,), model).beside == ()
    moved = sample.on(torch.device("meta"))
    assert [each.device.type for each in (*moved.args, *moved.beside)] == ["meta", "meta"]


# Reentrant checkpoints ------------------------------------------------------------------------------------


class Reentrant(nn.Module):
    """Recomputes its layers by `torch.utils.checkpoint`, the reentrant way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def test_reentrant_checkpoints_are_profiled_by_a_real_run_as_on_fake_tensors() -> None:
    model, sample = Reentrant(), Sample((torch.ones(64, 32),), {})
    model(*sample.args).sum().backward()
    before = pictures(model)
    profile = profile_model(model, sample, CPU, static=False)
    assert profile.source == "empirical"
    assert needs(profile) == needs(profile_model(model, sample, CPU))
    assert profile.gradient_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert_as_before(pictures(model), before)


def test_hooks_that_wait_for_stored_gradients_are_not_called_by_a_profile() -> None:
    model, sample = Reentrant(), Sample((torch.ones(64, 32),), {})
    calls: list[object] = []
    model.first.weight.register_post_accumulate_grad_hook(calls.append)
    with pytest.raises(ProfileError, match=r"Reentrant can't be profiled by a real run.*use_reentrant=False"):
        profile_model(model, sample, CPU, static=False)
    assert not calls


class Distilled(nn.Module):
    """Has a teacher in inference mode, of which each layer is a block."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = (nn.ModuleList(Layer(64) for _ in range(3)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        with torch.inference_mode():
            for layer in self.teacher:
                y = layer(y)
        for layer in self.student:
            x = layer(x)
        return (x - y.clone()).square().mean()


@pytest.mark.parametrize(("static", "place"), [(True, CPU), (True, GPU), (False, CPU)])
def test_a_part_in_inference_mode_is_profiled(static: bool, place: Place) -> None:
    profile = profile_model(Distilled(), Sample((torch.ones(8, 64),), {}), place, static=static)
    assert profile.source == ("static" if static else "empirical")
    assert {block.name for block in profile.blocks if block.backward_flops} == {
        f"student.{number}" for number in range(3)
    }
