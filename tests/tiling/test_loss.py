"""The tiled loss on models: found through their real forward, exact, without whole logits, and gone after detach."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from memscale.execution_plan import Checkpointing, LayerPlan, LossTiling, Offloading, Plan
from memscale.executor import Executor
from memscale.profiler import find_blocks, find_head
from memscale.simulator import simulate
from memscale.techniques.forward import override_of
from memscale.testing import executing
from memscale.tiling import LazyLogits
from memscale.tiling.technique import TileHeadStage
from support.families import FAMILIES, HIDDEN, VOCAB, Family
from support.pictures import assert_as_before, pictures
from support.tiles import Tensors, assert_close, gradients, tile_loss

ROWS = 5
# A causal, a masked and a sequence-to-sequence language model, one with a frozen tied head, one with adapters, and
# two whose loss is computed by the loop.
NAMES = ("gpt2", "llama", "bert", "t5", "whisper", "frozen_embeddings", "lora", "transformer_encoder", "lstm")
BATCH, LENGTH = 7, 24  # more logits than anything else


@pytest.fixture(params=NAMES, scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    found = FAMILIES[request.param]
    if found.transformers:
        pytest.importorskip("transformers")
    return found


@pytest.fixture
def llama() -> nn.Module:
    pytest.importorskip("transformers")
    return FAMILIES["llama"].build()


def step(family: Family, model: nn.Module) -> list[tuple[str, Tensor]]:
    batch = family.batch(batch_size=BATCH, length=LENGTH)
    return gradients(model, lambda: family.loss(model, batch))


def tokens_of(family: Family) -> int:
    batch = family.batch(batch_size=BATCH, length=LENGTH)
    return (batch["labels"] if isinstance(batch, dict) else batch[1]).numel()


def test_loss_and_gradients_are_the_plain_ones(family: Family) -> None:
    model = family.build()
    plain = step(family, model)
    executor = tile_loss(model, ROWS)
    assert_close(step(family, model), plain)
    executor.detach()
    assert_close(step(family, model), plain, tolerance=0)


def test_logits_never_exist_whole_in_forward_or_backward(family: Family) -> None:
    model = family.build()
    with Tensors() as plain:
        step(family, model)
    tile_loss(model, ROWS)
    with Tensors() as ours:
        step(family, model)

    def with_words(shapes: list[tuple[int, ...]]) -> list[int]:
        return [torch.Size(shape).numel() // VOCAB for shape in shapes if shape and shape[-1] == VOCAB]

    assert max(with_words(plain.shapes)) == tokens_of(family)
    tiles, weight = ROWS, model.get_submodule(find_head(model)[0]).in_features
    assert set(with_words(ours.shapes)) <= {1, tiles, tokens_of(family) % tiles, weight}
    assert tiles in with_words(ours.shapes)


def test_detach_leaves_nothing_behind(family: Family) -> None:
    model = family.build()
    step(family, model)
    model.zero_grad()
    before = pictures(model)
    executor = tile_loss(model, ROWS)
    override = override_of(model.get_submodule(find_head(model)[0]))
    assert override is not None
    assert override.find(TileHeadStage) is not None
    step(family, model)
    model.zero_grad()
    executor.detach()
    assert_as_before(pictures(model), before)


def test_a_tile_that_runs_out_of_memory_is_freed(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that saves its own output, with history, is a cycle that no garbage collector sees."""
    logits_of_tiles: list[weakref.ref[Tensor]] = []

    def fail(part: Tensor, logits: Tensor, *_: object) -> None:
        logits_of_tiles.append(weakref.ref(logits))
        raise torch.OutOfMemoryError("in backward of a tile")

    tile_loss(llama, ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", fail)
        with pytest.raises(torch.OutOfMemoryError, match="of a tile"):
            step(FAMILIES["llama"], llama)
    gc.collect()
    assert len(logits_of_tiles) == 1
    assert logits_of_tiles[0]() is None


def test_with_checkpointing_of_every_block(family: Family) -> None:
    model = family.build()
    plain = step(family, model)
    Executor(model, every_block(model, ("checkpointing",))).attach()
    assert_close(step(family, model), plain)


def every_block(model: nn.Module, techniques: tuple[str, ...], **settings: Any) -> Plan:
    layers = tuple(
        LayerPlan(block.name, block.members, techniques, "test", "test", **settings)
        for block in find_blocks(model)
    )
    return Plan(layers, loss=LossTiling(ROWS))


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Models that do something to the logits before the loss, with what this adds to the steps of a tile.
OTHERS: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": {"head_dim": 8, "final_logit_softcapping": 3.0},  # a cap
    "CohereForCausalLM": {"logit_scale": 0.5},  # a factor
    "GraniteForCausalLM": {"logits_scaling": 3.0},  # a divisor
    "BartForConditionalGeneration": {  # a bias that is not the head's
        "d_model": HIDDEN,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": HIDDEN,
        "decoder_ffn_dim": HIDDEN,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    },
}


@pytest.mark.parametrize(("name", "extra"), OTHERS.items(), ids=OTHERS.keys())
def test_what_models_do_to_logits_is_done_to_tiles(name: str, extra: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**SIZES, **extra})).train()
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH))
    call = lambda: model(input_ids=ids, labels=ids).loss  # noqa: E731
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.copy_(torch.linspace(-1, 1, VOCAB))
    plain = gradients(model, call)
    tile_loss(model, ROWS)
    with Tensors() as made:
        assert_close(gradients(model, call), plain)
    assert (ROWS, VOCAB) in made.shapes
    assert not any(
        shape[-1:] == (VOCAB,) and torch.Size(shape).numel() >= ids.numel() * VOCAB for shape in made.shapes
    )


# Asking for logits -------------------------------------------------------------------------------


def test_a_model_returns_its_logits_to_those_who_ask(llama: nn.Module) -> None:
    family = FAMILIES["llama"]
    torch.manual_seed(1)
    plain = llama(**family.batch()).logits
    tile_loss(llama, ROWS)
    torch.manual_seed(1)
    output = llama(**family.batch())
    assert isinstance(output.logits, LazyLogits)
    assert not output.logits.is_whole
    assert output.logits.shape == plain.shape
    assert torch.equal(output.logits.detach(), plain.detach())
    assert torch.equal(output[1], plain)
    output.logits.square().sum().backward()
    ours = [parameter.grad.clone() for parameter in llama.parameters()]
    llama.zero_grad()
    plain.square().sum().backward()
    for one, parameter in zip(ours, llama.parameters(), strict=True):
        assert torch.equal(one, parameter.grad)


def test_evaluation_has_plain_logits(llama: nn.Module) -> None:
    family = FAMILIES["llama"]
    tile_loss(llama, ROWS)
    for training in (True, False):
        with torch.no_grad():
            assert type(llama.train(training)(**family.batch()).logits) is Tensor


def test_without_labels_nothing_is_lost(llama: nn.Module) -> None:
    family = FAMILIES["llama"]
    batch = family.batch()
    llama.eval()
    plain = F.cross_entropy(llama(batch["input_ids"]).logits.mT, batch["labels"])
    llama.train()
    for module in llama.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    tile_loss(llama, ROWS)
    logits = llama(batch["input_ids"]).logits
    assert torch.allclose(F.cross_entropy(logits.mT, batch["labels"]), plain)
    assert not logits.is_whole


# How the loss is computed around the model ----------------------------------------------------------


def test_items_in_the_batch_as_the_trainer_passes_them(llama: nn.Module) -> None:
    batch = FAMILIES["llama"].batch()
    call = lambda: llama(**batch, num_items_in_batch=torch.tensor(37)).loss  # noqa: E731
    plain = gradients(llama, call)
    tile_loss(llama, ROWS)
    assert_close(gradients(llama, call), plain)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_under_autocast_the_loss_is_that_of_autocast(name: str) -> None:
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    model = (
        family.build().eval()
    )  # without dropout, but with gradients and the model's own training flag below

    def call() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return family.loss(model, family.batch())

    plain = gradients(model, call)
    tile_loss(model, ROWS)
    model.training = True
    with Tensors() as made:
        ours = gradients(model, call)
    assert (ROWS, VOCAB) in made.shapes
    assert_close(ours[:1], plain[:1])
    assert_close(ours, plain, tolerance=2e-2)


def test_outputs_converted_to_32_bits_stay_lazy(llama: nn.Module) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils.operations import convert_to_fp32

    assert accelerate
    tile_loss(llama, ROWS)
    with torch.autocast("cpu", torch.bfloat16):
        output = convert_to_fp32(llama(**FAMILIES["llama"].batch()))
    assert output.logits.dtype is torch.float32
    assert not output.logits.is_whole


def test_a_scaled_loss_is_scaled(llama: nn.Module) -> None:
    family = FAMILIES["llama"]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    call = lambda: scaler.scale(family.loss(llama, family.batch()))  # noqa: E731
    plain = gradients(llama, call)
    tile_loss(llama, ROWS)
    assert_close(gradients(llama, call), plain)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_tiled_by_itself(llama: nn.Module, how: Callable[[nn.Module], nn.Module]) -> None:
    family = FAMILIES["llama"]
    plain = step(family, llama)
    tile_loss(llama, ROWS)
    llama.zero_grad()
    twin = how(llama)
    with Tensors() as made:
        ours = step(family, twin)
    assert_close(ours, plain)
    assert (ROWS, VOCAB) in made.shapes
    assert all(parameter.grad is None for parameter in llama.parameters())
    twin._memscale_executor.detach()
    assert "forward" not in vars(twin.lm_head)
    assert "forward" in vars(llama.lm_head)


class Tokens(Dataset):
    def __init__(self, count: int) -> None:
        self._ids = torch.randint(3, VOCAB, (count, 16), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def trained(model: nn.Module, where: Path, **options: Any) -> list[float]:
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(where),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **options,
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Tokens(32), eval_dataset=Tokens(4)
    )
    trainer.train()
    history = trainer.state.log_history
    return [entry[key] for entry in history for key in ("loss", "eval_loss", "grad_norm") if key in entry]


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}], ids=["plain", "smoothed"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_trainer_that_accumulates(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    family = FAMILIES[name]
    plain = trained(family.build(), tmp_path, **options)
    model = family.build()
    tile_loss(model, ROWS)
    with Tensors() as made:
        ours = trained(model, tmp_path, **options)
    assert (ROWS, VOCAB) in made.shapes
    assert ours == pytest.approx(plain, rel=1e-5)


# On a device ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "transformer_encoder"])
def test_on_a_device_it_is_the_same(name: str) -> None:
    family = FAMILIES[name]
    if family.transformers:
        pytest.importorskip("transformers")
    steps = []
    for tiled in (False, True):
        with executing("1GiB") as gpu:
            model = family.build().to(gpu.device)
            if tiled:
                tile_loss(model, ROWS)
            batch = family.batch(gpu.device)
            gpu.manual_seed(1)
            found = gradients(model, lambda: family.loss(model, batch))  # noqa: B023
            steps.append([(key, value.cpu()) for key, value in found])
    assert_close(steps[1], steps[0])


def at_home(model: nn.Module, techniques: tuple[str, ...]) -> Plan:
    return every_block(
        model,
        techniques,
        offloading=Offloading("host"),
        **({"checkpointing": Checkpointing()} if "checkpointing" in techniques else {}),
    )


@pytest.mark.parametrize("techniques", [("offloading",), ("offloading", "checkpointing")], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "transformer_encoder"])
def test_a_head_at_home_is_on_the_device_while_the_loss_is_computed(
    name: str, techniques: tuple[str, ...]
) -> None:
    family = FAMILIES[name]
    if family.transformers:
        pytest.importorskip("transformers")
    steps, heads = [], []
    for tiled in (False, True):
        with executing("1GiB") as gpu:
            model = family.build().to(gpu.device)
            if tiled:
                executor = Executor(model, at_home(model, techniques))
                executor.attach()
                assert model.get_submodule(find_head(model)[0]).weight.device.type == "cpu"
            batch = family.batch(gpu.device)
            gpu.manual_seed(1)
            model.zero_grad()
            loss = family.loss(model, batch)
            heads.append(_of_the_size_of_the_head(gpu))
            loss.backward()
            heads.append(_of_the_size_of_the_head(gpu))
            grads = [(key, p.grad.cpu()) for key, p in model.named_parameters() if p.grad is not None]
            steps.append([("loss", loss.detach().cpu()), *grads])
            if tiled:
                assert all(p.grad is None or p.grad.device == p.device for p in model.parameters())
                executor.detach()
                assert all(p.device == gpu.device for p in model.parameters())
    assert_close(steps[1], steps[0], tolerance=3e-6)
    # Between forward and backward the head's gradient waits on the device, and after backward nothing of its size.
    assert heads[2:] == [1, 0]


def _of_the_size_of_the_head(gpu: Any) -> int:
    nbytes = VOCAB * HIDDEN * 4
    return sum(nbytes <= each < nbytes + 512 for each in gpu.tracker.alive_since(-1, gpu.device).values())


@pytest.mark.parametrize("techniques", [("offloading",), ("offloading", "checkpointing")], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "bert", "transformer_encoder"])
def test_a_head_at_home_on_disk(name: str, techniques: tuple[str, ...]) -> None:
    family = FAMILIES[name]
    if family.transformers:
        pytest.importorskip("transformers")
    model = family.build()
    plain = step(family, model)
    executor = Executor(model, every_block(model, techniques, offloading=Offloading("disk")))
    executor.attach()
    with Tensors() as made:
        assert_close(step(family, model), plain)
    assert (ROWS, VOCAB) in made.shapes
    executor.detach()


def test_a_simulation_sees_that_logits_are_not_there() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50257, n_positions=512, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    peaks = []
    for rows in (None, 64):
        with simulate("24GiB") as sim:
            model = transformers.GPT2LMHeadModel(config).to(sim.device)
            if rows:
                tile_loss(model, rows)
            ids = torch.zeros(4, 512, dtype=torch.long, device=sim.device)
            sim.tracker.reset_peak()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            peaks.append(sim.peak_bytes)
    logits = 4 * 512 * 50257 * 4
    assert peaks[0] > 2 * logits
    assert peaks[1] < logits


# Where it cannot be ----------------------------------------------------------------------------------


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Conv2d(1, 1, 1)), "no linear layer"),
        (nn.Sequential(nn.Embedding(9, 4), OwnLinear(4, 9)), "computes in a way of its own"),
    ],
    ids=["no head", "its own"],
)
def test_a_model_without_such_a_head_is_left_alone_with_a_notice(
    model: nn.Module, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = pictures(model)
    with caplog.at_level(logging.WARNING, "memscale"):
        executor = tile_loss(model, ROWS)
    assert [record for record in caplog.records if reason in record.getMessage()]
    assert len(caplog.records) == 1
    executor.detach()
    assert_as_before(pictures(model), before)


def test_a_head_with_somebody_elses_forward_is_left_alone(
    llama: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    llama.lm_head.forward = functools.partial(nn.Linear.forward, llama.lm_head)
    with caplog.at_level(logging.WARNING, "memscale"):
        tile_loss(llama, ROWS)
    assert "put there by others" in caplog.text
    assert type(llama(**FAMILIES["llama"].batch()).logits) is Tensor


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("gpt2", "lm_head"),
        ("llama", "lm_head"),
        ("bert", "cls.predictions.decoder"),
        ("t5", "lm_head"),
        ("whisper", "proj_out"),
        ("transformer_encoder", "head"),
        ("lstm", "head"),
        ("cnn", "11"),
    ],
)
def test_heads_are_found(name: str, head: str) -> None:
    if FAMILIES[name].transformers:
        pytest.importorskip("transformers")
    assert find_head(FAMILIES[name].build())[0] == head
