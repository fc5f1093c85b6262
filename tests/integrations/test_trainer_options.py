"""What a Hugging Face Trainer can be told to do, wrapped: optimizers, precision, evaluation, callbacks, resuming."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memscale
from memscale.executor import executor_of
from support.surfaces import Run, assert_gains, history, trained
from support.trainers import build, make_seq2seq, make_trainer
from support.wrapping import lossless

transformers = pytest.importorskip("transformers")

from memscale.integrations.huggingface import MemScaleCallback  # noqa: E402

QUIET = lossless("aggressive")
FEW = {"max_steps": 3, "eval_strategy": "no", "save_strategy": "no"}


def run(trainer: Any) -> Run:
    def train() -> list[float]:
        trainer.train()
        return history(trainer, "loss", "grad_norm", "eval_loss")

    return trained(trainer.model, train)


def plain_and_wrapped(where: Path, **options: Any) -> tuple[Run, Run]:
    plain = run(make_trainer("gpt2", where / "plain", **FEW | options))
    trainer = make_trainer("gpt2", where / "wrapped", **FEW | options)
    memscale.wrap(trainer, QUIET)
    return plain, run(trainer)


_NAMES = transformers.TrainingArguments.__dataclass_fields__
_GROUPED: dict[str, Any] = {"group_by_length": True}  # its name in transformers 5.0
if "train_sampling_strategy" in _NAMES:
    _GROUPED = {"train_sampling_strategy": "group_by_length"}
OPTIONS: dict[str, dict[str, Any]] = {
    "float32, accumulation, clipping": {},
    "bf16": {"bf16": True},
    "group_by_length": _GROUPED,
    "load_best_model_at_end": {
        "load_best_model_at_end": True,
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    },
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_the_trainer(option: str, tmp_path: Path) -> None:
    assert_gains("Trainer", option, *plain_and_wrapped(tmp_path, **OPTIONS[option]))


def test_its_own_gradient_checkpointing(tmp_path: Path) -> None:
    own, wrapped = plain_and_wrapped(tmp_path, gradient_checkpointing=True)
    without = run(make_trainer("gpt2", tmp_path / "without", **FEW))
    assert own.losses == without.losses
    assert_gains("Trainer", "gradient_checkpointing (replaced; before: without it)", without, wrapped)


def test_auto_find_batch_size(tmp_path: Path) -> None:
    """The first batches run out of memory, on the way to those that the plan is made for."""

    def limited(where: Path) -> Any:
        options = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
        trainer = make_trainer("gpt2", where, **FEW | options)
        step = trainer.training_step

        def training_step(model: Any, inputs: dict[str, Any], *args: Any) -> Any:
            if len(inputs["input_ids"]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return step(model, inputs, *args)

        trainer.training_step = training_step
        return trainer

    plain, trainer = run(limited(tmp_path / "plain")), limited(tmp_path / "wrapped")
    memscale.wrap(trainer, QUIET)
    wrapped = run(trainer)
    assert "int64[2," in wrapped.batch
    assert_gains("Trainer", "auto_find_batch_size, from 4 down to 2", plain, wrapped)


@pytest.mark.parametrize("way", ["wrap(trainer)", "MemScaleCallback"])
def test_an_optimizer_that_stands_for_one_of_each_parameter(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of GaLore, layer by layer: `train()` raised, since it steps none of the parameters itself."""

    def layer_wise(where: Path) -> Any:
        trainer = make_trainer("gpt2", where, **FEW | {"max_grad_norm": 0.0})
        each_own = {each: torch.optim.SGD([each], lr=0.1) for each in trainer.model.parameters()}

        def step(parameter: torch.nn.Parameter) -> None:
            each_own[parameter].step()
            each_own[parameter].zero_grad()

        for parameter in each_own:
            parameter.register_post_accumulate_grad_hook(step)
        trainer.optimizer = transformers.trainer_pt_utils.LayerWiseDummyOptimizer(each_own)
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda _: 1.0)
        return trainer

    plain, trainer = run(layer_wise(tmp_path / "plain")), layer_wise(tmp_path / "wrapped")
    config = QUIET.replace(enable_logging=True)
    memscale.wrap(trainer, config) if way == "wrap(trainer)" else trainer.add_callback(
        MemScaleCallback(config)
    )
    wrapped = run(trainer)
    assert wrapped.losses == plain.losses
    assert wrapped.activation_bytes < plain.activation_bytes
    (warning,) = (each for each in caplog.messages if "steps none of the model's parameters" in each)
    assert warning.startswith("LayerWiseDummyOptimizer")


OPTIMIZERS = [
    "adamw_torch_fused",
    "adamw_torch",
    "sgd",
    "adafactor",
    "adamw_bnb_8bit",
    "lion_8bit",
    "rmsprop",
    "schedule_free_adamw",
    "adagrad",
    "ademamix",
    "paged_adamw_8bit",
]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_optimizers(optim: str, tmp_path: Path) -> None:
    if "bit" in optim or optim == "ademamix":
        pytest.importorskip("bitsandbytes")
    options: dict[str, Any] = {"optim": optim}
    if optim == "schedule_free_adamw":  # it has other weights in evaluation
        pytest.importorskip("schedulefree")
        options |= {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    plain, wrapped = plain_and_wrapped(tmp_path, **options)
    assert_gains("Trainer", f'optim="{optim}"', plain, wrapped)


@pytest.mark.parametrize("way", ["wrap(trainer)", "MemScaleCallback"])
def test_the_planner_knows_the_optimizer(way: str, tmp_path: Path) -> None:
    trainer = make_trainer("gpt2", tmp_path, optim="sgd", **FEW)
    if way == "MemScaleCallback":
        trainer.add_callback(MemScaleCallback(QUIET))
    else:
        memscale.wrap(trainer, QUIET)
    seen: list[Any] = []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
            seen.append(executor_of(model))

    trainer.add_callback(Look())
    trainer.train()
    assert seen[-1].optimizer.kind == "SGD"
    assert seen[-1].config.gradient_accumulation_steps == 2


def test_the_callback_wraps_for_the_time_of_training(tmp_path: Path) -> None:
    plain = run(make_trainer("gpt2", tmp_path / "plain", **FEW))
    trainer = make_trainer("gpt2", tmp_path / "wrapped", **FEW)
    before = [dict(vars(module)) for module in trainer.model.modules()]
    seen: list[tuple[tuple[str, ...], str]] = []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
            plan = executor_of(model).plan
            seen.append(
                (tuple(sorted({name for layer in plan.layers for name in layer.techniques})), plan.batch)
            )

    trainer.add_callback(MemScaleCallback(QUIET))
    trainer.add_callback(Look())
    wrapped = run(trainer)
    assert executor_of(trainer.model) is None
    for old, module in zip(before, trainer.model.modules(), strict=True):
        new = vars(module).keys() - old.keys()
        assert new <= {"_is_accelerate_prepared"}
        assert all(vars(module)[key] is value for key, value in old.items() if key != "training")
    wrapped = dataclasses.replace(wrapped, techniques=seen[-1][0], batch=seen[-1][1])
    assert_gains("Trainer", "MemScaleCallback", plain, wrapped)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_model_wrapped_before_the_trainer_is_built(bf16: bool, tmp_path: Path) -> None:
    plain = run(make_trainer("gpt2", tmp_path / "plain", bf16=bf16, **FEW))
    trainer = make_trainer("gpt2", tmp_path / "wrapped", bf16=bf16, **FEW)
    model = memscale.wrap(build("gpt2"), QUIET)
    trainer = transformers.Trainer(model=model, args=trainer.args, train_dataset=trainer.train_dataset)
    setting = f"wrap(model) before it is built{', bf16' if bf16 else ''}"
    assert_gains("Trainer", setting, plain, run(trainer))


@pytest.mark.slow
def test_seq2seq_with_generation_in_evaluation(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    plain = make_seq2seq(tmp_path / "plain", **options)
    expected = run(plain)
    trainer = make_seq2seq(tmp_path / "wrapped", **options)
    memscale.wrap(trainer, QUIET)
    assert_gains("Seq2SeqTrainer", "predict_with_generate", expected, run(trainer))
    before, after = (each.predict(each.eval_dataset).predictions for each in (plain, trainer))
    assert (before == after).all()


RESUME = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tests")
import conftest
import memscale
from memscale.integrations.huggingface import MemScaleCallback
from support.steps import counted_regions
from support.trainers import make_seq2seq, make_trainer
from support.surfaces import history
from support.wrapping import lossless

kind, where, way, resume = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
options = dict(max_steps=6, eval_strategy="no", save_steps=3, seed=3)
if "compiled" in kind:
    kind = kind.split()[0]
    options |= dict(torch_compile=True, torch_compile_backend="aot_eager")
if kind in ("SFT", "DPO"):
    sys.path.insert(0, "tests/integrations")
    from test_trl import make
    del options["eval_strategy"]
    trainer = make(kind, where, save_strategy="steps", **options)
else:
    trainer = make_seq2seq(where, **options) if kind == "seq2seq" else make_trainer(kind, where, **options)
config = lossless("aggressive", force_optimize=True)
if way == "wrapped":
    memscale.wrap(trainer, config)
elif way == "callback":
    trainer.add_callback(MemScaleCallback(config))
with counted_regions() as regions:
    trainer.train(resume_from_checkpoint=resume[0] if resume else None)
assert (regions[0] > 0) == (way != "plain")
print(json.dumps(history(trainer, "loss", "grad_norm")))
"""


def in_new_process(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", RESUME, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [
        ("gpt2", "wrapped", "wrapped"),
        ("gpt2", "plain", "wrapped"),
        ("seq2seq", "wrapped", "wrapped"),
        ("gpt2", "callback", "callback"),
        ("gpt2 compiled", "wrapped", "wrapped"),
        ("SFT", "wrapped", "wrapped"),
        ("DPO", "wrapped", "wrapped"),
    ],
)
def test_a_new_process_resumes_from_a_checkpoint(kind: str, first: str, then: str, tmp_path: Path) -> None:
    if kind in ("SFT", "DPO"):
        pytest.importorskip("trl")
    expected = in_new_process(kind, tmp_path / "a", first)
    resumed = in_new_process(kind, tmp_path / "b", then, tmp_path / "a" / "checkpoint-3")
    assert resumed == expected
    assert len(json.loads(expected)) == 12
