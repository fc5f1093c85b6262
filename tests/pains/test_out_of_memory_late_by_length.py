"""A run whose longest batch comes late (Search-R1#112): the plan of its first batch is not the plan for that one.

`tests/planner/test_follow_batch.py` runs the plain model out of memory so; this is the same in a Trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import memscale
from memscale.executor import executor_of
from support.surfaces import Run, history, trained
from support.trainers import LENGTH, VOCAB, build
from support.wrapping import lossless

transformers = pytest.importorskip("transformers")


def run(where: Path, *, wrap: bool) -> tuple[Run, list[str]]:
    """Train with batches of 4 tokens each, then one of the longest; the plans' batches, in order."""
    model = memscale.wrap(build("gpt2"), lossless("aggressive")) if wrap else build("gpt2")
    planned: list[str] = []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if wrap and executor_of(model).plan.batch not in planned:
                planned.append(executor_of(model).plan.batch)

    lengths = [4] * 12 + [LENGTH] * 4
    ids = [torch.arange(length) * 7 % VOCAB for length in lengths]
    settings: dict[str, Any] = {"logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(
        str(where), max_steps=4, per_device_train_batch_size=4, save_strategy="no", **settings
    )

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    data = [{"input_ids": each, "labels": each} for each in ids]
    trainer = InOrder(model, arguments, train_dataset=data, callbacks=[Look()])

    def train() -> list[float]:
        trainer.train()
        return history(trainer, "loss", "grad_norm")

    return trained(model, train), planned


def test_a_trainer_plans_for_the_longest_batch_when_it_comes(tmp_path: Path) -> None:
    plain, _ = run(tmp_path / "plain", wrap=False)
    wrapped, planned = run(tmp_path / "wrapped", wrap=True)
    assert wrapped.losses == plain.losses
    assert len(planned) == 2
    assert "[4, 4]" in planned[0]
    assert f"[4, {LENGTH}]" in planned[1]
    assert wrapped.activation_bytes < 0.6 * plain.activation_bytes
