"""A Hugging Face Trainer of a tiny model, for the tests that train with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from support import devices

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH, STEPS = 97, 16, 10


class Tokens(Dataset):
    """Random tokens, the same each time."""

    def __init__(self, count: int) -> None:
        self._ids = torch.randint(1, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def build(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32,
            n_layer=3,
            n_head=2,
            vocab_size=VOCAB,
            n_positions=LENGTH,
            bos_token_id=0,
            eos_token_id=0,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, vocab_size=VOCAB
    )
    return transformers.BertForMaskedLM(config)


def make_trainer(family: str, where: Path, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "output_dir": str(where),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_steps": 5,
        "report_to": [],
        "use_cpu": devices.chosen != "cuda",
        "disable_tqdm": True,
        "seed": 3,
        "lr_scheduler_type": "linear",
    }
    return transformers.Trainer(
        model=build(family),
        args=transformers.TrainingArguments(**(arguments | options)),
        train_dataset=Tokens(64),
        eval_dataset=Tokens(8),
    )


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def make_seq2seq(where: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=32,
        d_ff=64,
        d_kv=16,
        num_layers=3,
        num_heads=2,
        vocab_size=VOCAB,
        decoder_start_token_id=0,
    )
    arguments: dict[str, Any] = {
        "output_dir": str(where),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "predict_with_generate": True,
        "generation_max_length": 6,
    }
    return transformers.Seq2SeqTrainer(
        model=transformers.T5ForConditionalGeneration(config),
        args=transformers.Seq2SeqTrainingArguments(**arguments | options),
        train_dataset=Tokens(16),
        eval_dataset=Tokens(4),
    )
