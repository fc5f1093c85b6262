"""The technique "tiling" on blocks of models: the same training, nothing wide whole, nothing left behind."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memscale.execution_plan import LayerPlan, LossTiling, Offloading, Plan, Tiling
from memscale.executor import Executor
from memscale.profiler.blocks import Block, find_blocks
from memscale.simulator import simulate
from memscale.testing import executing
from memscale.tiling.layers import TiledMethod, find_wide_layers
from support.families import DROPOUT, FAMILIES, HIDDEN, VOCAB, Family
from support.pictures import assert_as_before, pictures
from support.tiles import Tensors, assert_close, gradients

ROWS = 5
NAMES = ("gpt2", "llama", "bert", "t5", "vit", "tied", "transformer_encoder", "lora", "shared_block")
METHODS = {"bert": "feed_forward_chunk", "transformer_encoder": "_ff_block"}


@pytest.fixture(params=NAMES, scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    found = FAMILIES[request.param]
    if found.transformers:
        pytest.importorskip("transformers")
    return found


def repeated(model: nn.Module) -> list[Block]:
    return [block for block in find_blocks(model) if block.role == "repeated"]


def plan_of(model: nn.Module, techniques: tuple[str, ...] = ("tiling",), **settings: Any) -> Plan:
    layers = tuple(
        LayerPlan(block.name, block.members, techniques, "test", "test", tiling=Tiling(ROWS), **settings)
        for block in repeated(model)
    )
    return Plan(layers)


def without_dropout(model: nn.Module) -> nn.Module:
    """Tiles draw other masks than a whole layer: to be compared with it, there must be none."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and value == DROPOUT:
                setattr(module, name, 0.0)
    return model


def step(family: Family, model: nn.Module, device: Any = "cpu") -> list[tuple[str, Tensor]]:
    batch = family.batch(device, length=None if family.name == "vit" else 16)
    return gradients(model, lambda: family.loss(model, batch))


@pytest.mark.matrix(5)
@pytest.mark.parametrize(
    "techniques", [("tiling",), ("checkpointing", "tiling")], ids=["alone", "recomputed"]
)
def test_training_is_the_plain_one(family: Family, techniques: tuple[str, ...]) -> None:
    model = without_dropout(family.build())
    plain = step(family, model)
    executor = Executor(model, plan_of(model, techniques))
    executor.attach()
    assert_close(step(family, model), plain, tolerance=2e-6)
    executor.detach()
    assert_close(step(family, model), plain, tolerance=0)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_with_dropout_recomputation_is_exact(name: str) -> None:
    """Recomputed from the same masks, a block in tiles gives what it gives if its tiles' graphs are kept."""
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    model = family.build()
    Executor(model, plan_of(model)).attach()
    once = step(family, model)
    assert_close(step(family, model), once, tolerance=0)
    model._memscale_executor.detach()
    Executor(model, plan_of(model, ("checkpointing", "tiling"))).attach()
    assert_close(step(family, model), once, tolerance=0)


def test_nothing_wide_exists_whole(family: Family) -> None:
    model = family.build()
    with Tensors() as plain:
        step(family, model)
    Executor(model, plan_of(model, ("checkpointing", "tiling"))).attach()
    with Tensors() as ours:
        step(family, model)
    wide = {2 * HIDDEN, 4 * HIDDEN} - {VOCAB}
    positions = _positions(plain, wide)
    assert max(positions) > ROWS
    # What is left of that width are weights and their gradients, and single rows.
    assert set(_positions(ours, wide)) <= {1, HIDDEN, *range(1, ROWS + 1)}
    assert ROWS in _positions(ours, wide)


def _positions(made: Tensors, widths: set[int]) -> list[int]:
    found = []
    for shape in made.shapes:
        if len(shape) > 1 and shape[-1] in widths:
            found.append(torch.Size(shape[:-1]).numel())
    return found


def test_detach_leaves_nothing_behind(family: Family) -> None:
    model = family.build()
    step(family, model)
    model.zero_grad()
    before = pictures(model)
    executor = Executor(model, plan_of(model))
    executor.attach()
    step(family, model)
    model.zero_grad()
    executor.detach()
    assert_as_before(pictures(model), before)


def test_the_mlp_is_found_in_every_block(family: Family) -> None:
    model = family.build()
    for block in repeated(model):
        (place,) = find_wide_layers(model.get_submodule(block.name))
        assert place.method == METHODS.get(family.name, "forward")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("llama", TiledMethod("mlp", "forward", ("gate_proj", "up_proj", "down_proj", "act_fn"))),
        ("bert", TiledMethod("", "feed_forward_chunk", ("intermediate", "output"))),
    ],
)
def test_what_it_uses_is_known(name: str, place: TiledMethod) -> None:
    pytest.importorskip("transformers")
    model = FAMILIES[name].build()
    assert list(find_wide_layers(model.get_submodule(repeated(model)[0].name))) == [place]


@pytest.mark.parametrize("name", ["resnet"])
def test_a_block_without_such_a_layer_is_left_alone_and_it_is_said(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("transformers")
    model = FAMILIES[name].build()
    before = pictures(model)
    executor = Executor(model, plan_of(model))
    with caplog.at_level(logging.WARNING, "memscale"):
        executor.attach()
    assert "no wide layer inside is known to be position-wise" in caplog.text
    executor.detach()
    assert_as_before(pictures(model), before)


def test_a_pass_without_gradients_is_plain() -> None:
    model = FAMILIES["tied"].build()
    inputs, _ = FAMILIES["tied"].batch()
    model.eval()
    plain = model(inputs)
    Executor(model, plan_of(model)).attach()
    with Tensors() as made:
        with torch.no_grad():
            assert torch.equal(model(inputs), plain)
    assert all(ROWS not in shape for shape in made.shapes)


def test_a_copy_is_tiled_by_itself(family: Family) -> None:
    model = without_dropout(family.build())
    plain = step(family, model)
    model.zero_grad()
    Executor(model, plan_of(model)).attach()
    twin = copy.deepcopy(model)
    with Tensors() as made:
        assert_close(step(family, twin), plain, tolerance=2e-6)
    assert any(ROWS in shape for shape in made.shapes)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "techniques", [("offloading", "tiling"), ("offloading", "checkpointing", "tiling")], ids=str
)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "tied"])
def test_with_parameters_at_home(name: str, techniques: tuple[str, ...]) -> None:
    family = FAMILIES[name]
    if family.transformers:
        pytest.importorskip("transformers")
    with executing("1GiB") as gpu:
        model = without_dropout(family.build().to(gpu.device))
        plain = [(key, value.cpu()) for key, value in step(family, model, gpu.device)]
        executor = Executor(model, plan_of(model, techniques, offloading=Offloading("host")))
        executor.attach()
        ours = step(family, model, gpu.device)
        assert any(value.device.type == "cpu" for _, value in ours)
        assert_close([(key, value.cpu()) for key, value in ours], plain, tolerance=2e-6)
        executor.detach()


# Attention -----------------------------------------------------------------------------------------


def eager(name: str) -> nn.Module:
    pytest.importorskip("transformers")
    model = without_dropout(FAMILIES[name].build())
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit", "whisper"])
def test_eager_attention_is_handed_to_torch(name: str) -> None:
    family = FAMILIES[name]
    model = eager(name)
    with Tensors() as before:
        plain = step(family, model)
    model.zero_grad()
    looks = pictures(model)
    executor = Executor(model, plan_of(model, ("checkpointing", "tiling")))
    executor.attach()
    with Tensors() as after:
        ours = step(family, model)
    # The gradient of a key's bias is rounding alone: it shifts all scores of a query alike.
    known = [index for index, (key, _) in enumerate(plain) if not key.endswith(("key.bias", "k_proj.bias"))]
    assert_close([ours[index] for index in known], [plain[index] for index in known], tolerance=1e-5)
    assert before.operations.count("_softmax") >= len(repeated(model))
    assert "_softmax" not in after.operations
    model.zero_grad()
    executor.detach()
    assert_as_before(pictures(model), looks)
    assert_close(step(family, model), plain, tolerance=0)


def test_whoever_asks_for_attention_weights_gets_them() -> None:
    model = eager("llama")
    batch = FAMILIES["llama"].batch()
    plain = model(**batch, output_attentions=True).attentions
    executor = Executor(model, plan_of(model))
    executor.attach()
    assert model(**batch).loss is not None
    for one, other in zip(model(**batch, output_attentions=True).attentions, plain, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    executor.detach()
    assert model.config._attn_implementation == "eager"


def test_attention_that_torch_does_not_have_is_left_alone() -> None:
    model = eager("llama")
    model.config.attn_logit_softcapping = 30.0
    Executor(model, plan_of(model)).attach()
    assert model.config._attn_implementation == "eager"


def test_a_copy_has_an_attention_of_its_own() -> None:
    model = eager("llama")
    Executor(model, plan_of(model)).attach()
    twin = copy.deepcopy(model)
    twin._memscale_executor.detach()
    assert (model.config._attn_implementation, twin.config._attn_implementation) == ("sdpa", "eager")


# A long sequence ---------------------------------------------------------------------------------

LENGTH, WIDTH, WIDE, WORDS = 32768, 2048, 8192, 128256
LONG_ROWS, LOSS_ROWS = 1024, 512


@pytest.mark.slow
def test_a_long_sequence_has_neither_logits_nor_an_mlp_whole() -> None:
    """A Llama of 1.2 billion parameters on 32,768 tokens, in bfloat16, against checkpointing alone."""
    pytest.importorskip("transformers")
    plain, plain_peak = _long_step(("checkpointing",))
    ours, peak = _long_step(("checkpointing", "tiling"))

    def tokens(shapes: set[tuple[int, ...]], width: int) -> int:
        # Without the gradients of weights, which have these widths, too.
        rows = [shape for shape in shapes if len(shape) > 1 and shape[-1] == width and shape[0] != WIDTH]
        return max(torch.Size(shape[:-1]).numel() for shape in rows)

    assert (tokens(plain, WORDS), tokens(plain, WIDE)) == (LENGTH, LENGTH)
    assert (tokens(ours, WORDS), tokens(ours, WIDE)) == (LOSS_ROWS, LONG_ROWS)
    assert 4 * peak < plain_peak


def _long_step(techniques: tuple[str, ...]) -> tuple[set[tuple[int, ...]], int]:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDE,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    is_tiled = "tiling" in techniques
    with simulate("1TiB") as sim:
        model = transformers.LlamaForCausalLM(config).to(sim.device, torch.bfloat16).train()
        tiling = Tiling(LONG_ROWS) if is_tiled else None
        layers = tuple(
            LayerPlan(block.name, block.members, techniques, "", "", tiling=tiling)
            for block in repeated(model)
        )
        Executor(model, Plan(layers, loss=LossTiling(LOSS_ROWS) if is_tiled else None)).attach()
        ids = torch.zeros(1, LENGTH, dtype=torch.long, device=sim.device)
        sim.tracker.reset_peak()
        with Tensors() as made:
            model(input_ids=ids, labels=ids).loss.backward()
        return set(made.shapes), sim.peak_bytes
