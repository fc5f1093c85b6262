"""A real Hugging Face Trainer, wrapped: the same losses, checkpoints that resume anywhere, less memory."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import memscale
from memscale import MemoryTracker
from memscale.execution_plan import Precision
from memscale.memory.record import Category
from support.trainers import LENGTH, STEPS, Tokens, build, losses, make_trainer
from support.wrapping import lossless

transformers = pytest.importorskip("transformers")

QUIET = lossless("aggressive")  # so that a tiny model gets techniques, too


@pytest.fixture(autouse=True)
def on_device(device: torch.device) -> None:
    """A Trainer finds CUDA by itself."""
    if device.type not in ("cpu", "cuda"):
        pytest.skip("a Trainer does not know the virtual GPU")


def eval_losses(trainer: Any) -> list[float]:
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_wrapped_trainer_trains_like_a_plain_one(family: str, tmp_path: Path) -> None:
    plain = make_trainer(family, tmp_path / "plain")
    plain.train()
    trainer = make_trainer(family, tmp_path / "wrapped")
    callbacks = list(map(type, trainer.callback_handler.callbacks))
    assert memscale.wrap(trainer, QUIET) is trainer
    trainer.train()

    assert len(losses(trainer)) == STEPS
    assert losses(trainer) == losses(plain)
    assert eval_losses(trainer) == eval_losses(plain)
    for (name, expected), (_, got) in zip(
        plain.model.named_parameters(), trainer.model.named_parameters(), strict=True
    ):
        assert torch.equal(expected, got), name

    assert trainer.model._memscale_executor.report().forward_passes == 2 * STEPS  # accumulated
    plan = trainer.model._memscale_executor.plan
    assert any(layer.techniques for layer in plan.layers)
    assert f"[2, {LENGTH}]" in plan.batch  # made from the first training batch

    # The checkpoint in the middle resumes in a plain Trainer, and the rest of the run is the same.
    resumed = make_trainer(family, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "wrapped" / "checkpoint-5"))
    assert losses(resumed)[-5:] == losses(plain)[-5:]

    memscale.detach(trainer)
    assert list(map(type, trainer.callback_handler.callbacks)) == callbacks
    assert "_memscale_executor" not in vars(trainer.model)


def test_the_plan_knows_how_many_batches_a_trainer_accumulates(tmp_path: Path) -> None:
    trainer = make_trainer("gpt2", tmp_path, gradient_accumulation_steps=4)
    for config, steps in ((QUIET, 4), (QUIET.replace(gradient_accumulation_steps=1), 1)):
        memscale.wrap(trainer, config)
        assert trainer.model._memscale_executor.config.gradient_accumulation_steps == steps
        memscale.detach(trainer)


class Heard(transformers.TrainerCallback):
    """What loggers such as TensorBoard's are given."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.entries.append(dict(logs))


def without_times(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in each.items() if "runtime" not in k and "per_second" not in k} for each in history
    ]


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_the_log_history_is_that_of_a_plain_trainer(strategy: str, tmp_path: Path) -> None:
    options = {"max_steps": -1, "num_train_epochs": 1, "logging_strategy": strategy, "save_strategy": "no"}
    plain = make_trainer("gpt2", tmp_path / "plain", **options)
    plain.train()
    trainer = make_trainer("gpt2", tmp_path / "wrapped", **options)
    memscale.wrap(trainer, QUIET)
    heard = Heard()
    trainer.add_callback(heard)
    trainer.train()
    history = trainer.state.log_history
    assert "train_loss" in history[-1]
    assert without_times(history) == without_times(plain.state.log_history)

    ours = [entry for entry in heard.entries if any(key.startswith("memscale/") for key in entry)]
    assert [set(entry) for entry in heard.entries if entry not in ours] == [
        set(entry) - {"step", "total_flos"} for entry in history
    ]
    assert heard.entries[0] == ours[0], "the plan, after the step that brought it"
    assert "train_loss" in heard.entries[-1]
    logged = set().union(*ours)
    assert all(key.startswith("memscale/") for key in logged)
    assert {"memscale/predicted_peak_gib", "memscale/baseline_peak_gib"} <= logged
    assert any("measured" in key for key in logged)
    assert {"memscale/recomputations", "memscale/recompute_tflops", "memscale/read_gib"} <= logged


def test_the_throughput_is_that_of_steps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock by which a step takes a second, and one with an evaluation or a checkpoint behind it a hundred."""
    huggingface = pytest.importorskip("memscale.integrations.huggingface")
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(huggingface, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))

    class Ticks(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.now += 1.0

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            clock.now += 100.0

        on_save = on_evaluate

    trainer = make_trainer("gpt2", tmp_path)
    memscale.wrap(trainer, QUIET)
    heard = Heard()
    trainer.add_callback(heard)
    trainer.add_callback(Ticks())
    trainer.train()
    assert clock.now > 100.0, "something else than steps took time"
    (logged,) = [each for each in heard.entries if "memscale/samples_per_second" in each]
    samples = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    assert logged["memscale/samples_per_second"] == samples


def test_activations_are_fewer(tmp_path: Path) -> None:
    peaks = []
    for wrapped in (False, True):
        trainer = make_trainer(
            "gpt2", tmp_path / str(wrapped), eval_strategy="no", save_strategy="no", max_steps=3
        )
        if wrapped:
            sample = {key: value[None].repeat(2, 1) for key, value in Tokens(1)[0].items()}
            memscale.wrap(trainer, QUIET, sample)
        with MemoryTracker(trainer.model) as tracker:
            trainer.train()
        line = dict(tracker.timeline(trainer.args.device).series)
        peaks.append(max(line[Category.ACTIVATIONS]))
    assert peaks[1] < peaks[0] / 2


@pytest.mark.parametrize("ours", [True, False])
def test_gradient_checkpointing_of_its_own_is_replaced_unless_ours_is_off(ours: bool, tmp_path: Path) -> None:
    """The Trainer switches it on when training begins, after `wrap`: nothing is recomputed twice."""
    options = {"eval_strategy": "no", "save_strategy": "no", "max_steps": 2, "gradient_checkpointing": True}
    plain = make_trainer("gpt2", tmp_path / "plain", **options)
    plain.train()
    trainer = make_trainer("gpt2", tmp_path / "wrapped", **options)
    memscale.wrap(trainer, QUIET.replace(enable_offloading=False, enable_checkpointing=ours))
    forwards: list[int] = []

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if type(inputs[0]) is torch.Tensor:  # not a rehearsal with fake tensors
            forwards.append(1)

    # Inside of the layer: where transformers checkpoints its `forward` (5.23), hooks of the layer itself run once.
    trainer.model.transformer.h[1].mlp.register_forward_pre_hook(count)
    trainer.train()
    assert len(forwards) == 2 * 2 * 2  # steps, accumulated batches, forward and once again in backward
    assert losses(trainer) == losses(plain)
    layer = trainer.model._memscale_executor.plan.layer("transformer.h.1")
    assert layer.techniques == (("checkpointing",) if ours else ())
    assert (trainer.model._memscale_executor.report().recomputations > 0) is ours
    assert trainer.model.is_gradient_checkpointing is not ours
    memscale.detach(trainer)
    assert trainer.model.is_gradient_checkpointing


def test_precision_of_its_own_wins(tmp_path: Path) -> None:
    """A Trainer with `bf16=True` computes in that, whatever the plan says."""
    plain = make_trainer("gpt2", tmp_path / "plain", bf16=True, max_steps=4)
    plain.train()
    wrapped = make_trainer("gpt2", tmp_path / "wrapped", bf16=True, max_steps=4)
    memscale.wrap(wrapped, QUIET)
    executor = wrapped.model._memscale_executor
    executor.on_training_batch = None  # the plan stays as it is now
    executor.replan(dataclasses.replace(executor.plan, precision=Precision("float16")))
    wrapped.train()
    assert losses(wrapped) == losses(plain)
    exact = make_trainer("gpt2", tmp_path / "exact", max_steps=4)
    exact.train()
    assert losses(plain) != losses(exact)


def test_each_model_that_model_init_makes_is_wrapped(tmp_path: Path) -> None:
    made: list[torch.nn.Module] = []

    def init() -> torch.nn.Module:
        made.append(build("gpt2"))
        return made[-1]

    def trainer_with_init(where: Path) -> Any:
        trainer = make_trainer("gpt2", where, max_steps=3, eval_strategy="no", save_strategy="no")
        return transformers.Trainer(args=trainer.args, train_dataset=trainer.train_dataset, model_init=init)

    plain = trainer_with_init(tmp_path / "plain")
    plain.train()
    trainer = trainer_with_init(tmp_path / "wrapped")
    memscale.wrap(trainer, QUIET)
    for _ in range(2):
        trainer.train()
        assert trainer.model is made[-1]
        assert losses(trainer) == losses(plain)
        assert trainer.model._memscale_executor.report().recomputations > 0
    memscale.detach(trainer)
    trainer.train()
    assert "_memscale_executor" not in vars(trainer.model)


def test_with_mixed_precision_of_its_own_layers_are_planned(tmp_path: Path) -> None:
    plain = make_trainer("gpt2", tmp_path / "plain", bf16=True, max_steps=4)
    plain.train()
    trainer = make_trainer("gpt2", tmp_path / "wrapped", bf16=True, max_steps=4)
    memscale.wrap(trainer, QUIET)
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert eval_losses(trainer) == eval_losses(plain)
    executor = trainer.model._memscale_executor
    assert f"[2, {LENGTH}]" in executor.plan.batch
    assert all(executor.plan.layer(f"transformer.h.{index}").techniques for index in range(3))
    assert executor.report().recomputations > 0
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    memscale.detach(trainer)
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
