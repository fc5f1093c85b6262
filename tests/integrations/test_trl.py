"""TRL's trainers, whose models checkpoint themselves by default: a plan replaces that, and the numbers are the same."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import memscale
from support.surfaces import Run, assert_gains, history, trained
from support.wrapping import lossless

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

QUIET = lossless("aggressive", force_optimize=True)
WORDS = ["<pad>", "<eos>", "<unk>", *map(chr, range(97, 123))]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}


def tokenizer() -> Any:
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>")
    split = tokenizers.Tokenizer(model)
    split.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def text(count: int) -> list[str]:
    return [" ".join(random.choices(WORDS[3:], k=8)) for _ in range(count)]


def model(kind: str = "LlamaForCausalLM", **fields: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, kind)(transformers.LlamaConfig(**SIZES, **fields))


def distinct(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(each))) for each in completions]


def make(kind: str, where: Path, **options: Any) -> Any:
    random.seed(0)
    columns: dict[str, dict[str, Any]] = {
        "SFT": {"text": text(16)},
        "DPO": {"prompt": text(16), "chosen": text(16), "rejected": text(16)},
        "Reward": {"prompt": text(16), "chosen": text(16), "rejected": text(16)},
        "KTO": {"prompt": text(16), "completion": text(16), "label": [True, False] * 8},
        "GRPO": {"prompt": text(16)},
    }
    settings = {
        "output_dir": str(where),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
        "dataset_num_proc": None,
    }
    more: dict[str, Any] = {}
    if kind in ("DPO", "KTO"):
        more["ref_model"] = model()
    if kind == "GRPO":
        more["reward_funcs"] = distinct
        del settings["dataset_num_proc"]
        settings |= {"num_generations": 2, "max_completion_length": 8}
    arguments = getattr(trl, f"{kind}Config")(**settings | options)
    assert arguments.gradient_checkpointing
    trained_model = model("LlamaForSequenceClassification", num_labels=1) if kind == "Reward" else model()
    data = datasets.Dataset.from_dict(columns[kind])
    trainer = getattr(trl, f"{kind}Trainer")
    return trainer(trained_model, args=arguments, train_dataset=data, processing_class=tokenizer(), **more)


def run(trainer: Any, seed: int = 0) -> Run:
    transformers.set_seed(seed)

    def train() -> list[float]:
        trainer.train()
        return history(trainer, "loss", "grad_norm", "reward")

    return trained(trainer.model, train)


@pytest.fixture(autouse=True)
def quiet_datasets() -> None:
    datasets.disable_progress_bars()


@pytest.mark.matrix(4)
@pytest.mark.parametrize("kind", ["SFT", "GRPO", "Reward", "KTO", "DPO"])
def test_a_trainer_of_trl(kind: str, tmp_path: Path) -> None:
    own = run(make(kind, tmp_path / "own"))
    without = make(kind, tmp_path / "without")
    without.args.gradient_checkpointing = without.args.activation_checkpointing = False
    trainer = make(kind, tmp_path / "wrapped")
    memscale.wrap(trainer, QUIET)
    wrapped = run(trainer)
    assert wrapped.losses == own.losses
    assert_gains("TRL", f"{kind}Trainer (before: without gradient checkpointing)", run(without), wrapped)
    assert trainer.model._memscale_executor.report().recomputations > 0
    memscale.detach(trainer)
    assert trainer.model.is_gradient_checkpointing


def test_a_model_that_is_wrapped_before_its_trainer_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL replaces the forward of the wrapped model by its own; the first plan is put over that."""
    own = run(make("SFT", tmp_path / "own"))
    build = model
    config = QUIET.replace(enable_logging=True)
    monkeypatch.setitem(globals(), "model", lambda: memscale.wrap(build(), config))
    trainer = make("SFT", tmp_path / "wrapped")
    wrapped = run(trainer)
    assert wrapped.losses == own.losses
    assert "checkpointing" in wrapped.techniques
    assert trainer.model._memscale_executor.report().recomputations > 0
    memscale.detach(trainer.model)
    ours = [each for each in caplog.records if each.name.startswith("memscale")]
    assert ours
    assert not [each.getMessage() for each in ours if each.levelno >= logging.WARNING]


@pytest.mark.slow
def test_a_trainer_of_trl_with_adapters_and_the_callback(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from memscale.integrations.huggingface import MemScaleCallback

    def make_with_adapters(where: Path, **more: Any) -> Any:
        plain = make("SFT", where)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
        return trl.SFTTrainer(
            model(),
            args=plain.args,
            train_dataset=plain.train_dataset,
            processing_class=plain.processing_class,
            peft_config=lora,
            **more,
        )

    expected = run(make_with_adapters(tmp_path / "own"))
    seen: list[Any] = []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
            seen.append(model._memscale_executor.report())

    trainer = make_with_adapters(tmp_path / "wrapped", callbacks=[MemScaleCallback(QUIET), Look()])
    assert run(trainer).losses == expected.losses
    assert seen[-1].recomputations > 0
    assert trainer.model.is_gradient_checkpointing
