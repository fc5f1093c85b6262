"""Hugging Face ``Trainer``: a callback, and what ``wrap(trainer)`` does: the plan and the peak go to its loggers."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback

import memscale
from memscale.config import Config
from memscale.errors import WrapError, WrapTypeError
from memscale.execution_plan import Plan
from memscale.executor import ONE_DEVICE, Executor, executor_of
from memscale.hardware import detect
from memscale.memory.process import peak_rss_bytes
from memscale.observe.log import open_log
from memscale.optimizer.needs import needs_of
from memscale.profiler import Place
from memscale.profiler.sample import PlannedBatches

GIB = 2**30
PREFIX = "memscale/"


class MemScaleCallback(TrainerCallback):
    """Wraps the model when training begins, and detaches it when training ends.

    The plan is made from the first training batch, for the Trainer's optimizer and accumulation. A callback has no way
    to the Trainer's loggers: to have the plan and its measurements there, use ``memscale.wrap(trainer)`` instead.
    Nor does it learn of an error in training: call ``memscale.detach(model)`` after one.

    Args:
        config: as for ``memscale.wrap``.

    Example:
        >>> MemScaleCallback(Config(mode="aggressive")).config.mode.value  # Trainer(..., callbacks=[this])
        'aggressive'
    """

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        config = with_accumulation(self.config, args.gradient_accumulation_steps)
        model = kwargs["model"]
        _refuse_data_parallel(args, model)
        memscale.wrap(model, config, optimizer=_optimizer_of(model, kwargs["optimizer"], config))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        memscale.detach(kwargs["model"])


class PlanInLog(TrainerCallback):
    """Passes predictions and measurements to the callbacks that log (TensorBoard, W&B, printer).

    They are log events of their own: the plan after the step that made it, the rest before the Trainer's last entry.
    Samples per second are those of steps alone: without planning, evaluation and saving, which the Trainer's include.
    `state.log_history` stays as it would be without MemScale, since training code reads and compares it.

    A Trainer with `model_init` makes a new model for each training: that one is wrapped when training begins.
    """

    def __init__(self, trainer: Trainer, wrap_model: Callable[[torch.nn.Module], None]) -> None:
        self._trainer = weakref.ref(trainer)  # the Trainer holds its callbacks
        self._wrap_model = wrap_model
        self._logged: Plan | None = None
        self._last_step_end: float | None = None  # None where something else than a step came after it
        self._steps, self._seconds = 0, 0.0  # since there is a plan

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._logged = self._last_step_end = None
        self._steps, self._seconds = 0, 0.0
        trainer = self._trainer()
        if trainer is not None and trainer.model_init is not None and self._executor() is None:
            self._wrap_model(_model_of(trainer))
        self._plan_for(kwargs.get("optimizer"))
        device = args.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        executor = self._executor()
        if executor is None:
            return
        before, now = self._last_step_end, time.perf_counter()
        self._last_step_end = None if control.should_evaluate or control.should_save else now
        if executor.plan is self._logged:
            if before is not None:
                self._steps, self._seconds = self._steps + 1, self._seconds + now - before
            return
        plan = self._logged = executor.plan  # the first batch may have made a new plan
        values = _named(
            baseline_peak_gib=plan.baseline_peak_bytes / GIB,
            predicted_peak_gib=plan.predicted_peak_bytes / GIB,
            predicted_time_ratio=plan.predicted_time_ratio,
            layers_optimized=sum(bool(layer.techniques) for layer in plan.layers),
        )
        self._log(args, state, control, values)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        executor = self._executor()
        if executor is None or not (control.should_training_stop or state.global_step >= state.max_steps):
            return
        if args.device.type == "cuda":
            measured = _named(measured_peak_gib=torch.cuda.max_memory_allocated(args.device) / GIB)
        else:
            measured = _named(measured_process_peak_gib=peak_rss_bytes() / GIB)
        if self._steps:
            samples = state.train_batch_size * args.gradient_accumulation_steps * args.world_size
            measured |= _named(samples_per_second=self._steps * samples / self._seconds)
        report = executor.report()
        counted = _named(
            read_gib=report.bytes_read / GIB,
            written_gib=report.bytes_written / GIB,
            recomputations=report.recomputations,
            recompute_tflops=report.recompute_flops / 1e12,
        )
        seconds = {
            name: value for name, value in report.scalars().items() if name.startswith("seconds_lost/")
        }
        lost = _named(**{name.replace("/", "_"): value for name, value in seconds.items()})
        self._log(args, state, control, {**measured, **counted, **lost})

    def _plan_for(self, given: object) -> None:
        """Have plans made for the Trainer's optimizer, which is there only when training begins."""
        executor = self._executor()
        if executor is None or executor.optimizer is not None:
            return
        optimizer = _optimizer_of(executor.model, given, executor.config)
        if optimizer is None:
            return
        hardware = detect(executor.device, offload_dir=executor.config.offload_dir)
        executor.optimizer = needs_of(optimizer, executor.model, Place.of(hardware.device))
        if executor.optimizer.kind != "AdamW":  # which plans that were made before are for
            executor.batches = PlannedBatches()

    def _log(self, args: Any, state: Any, control: Any, values: dict[str, float]) -> None:
        trainer = self._trainer()
        if trainer is None:
            return
        should_log = control.should_log
        trainer.callback_handler.on_log(args, state, control, values)
        control.should_log = should_log  # an event of ours must not make the Trainer leave out its next entry

    def _executor(self) -> Executor | None:
        trainer = self._trainer()
        model = None if trainer is None else trainer.model
        return executor_of(model) if isinstance(model, torch.nn.Module) else None


def _named(**values: float) -> dict[str, float]:
    return {f"{PREFIX}{name}": round(value, 4) for name, value in values.items()}


def with_accumulation(config: Config, steps: int) -> Config:
    """Return the Config with the number of batches for each optimizer step, unless it has one itself."""
    if "gradient_accumulation_steps" in config.explicit_fields:
        return config
    return config.replace(gradient_accumulation_steps=steps)


def _optimizer_of(model: torch.nn.Module, optimizer: object, config: Config) -> Optimizer | None:
    """Return the optimizer in accelerate's wrapper; None if it does not step the model's parameters itself."""
    inside = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inside, Optimizer):
        return None
    trained = {id(each) for each in model.parameters() if each.requires_grad}
    if any(id(each) in trained for group in inside.param_groups for each in group["params"]):
        return inside
    with open_log(config) as log:
        log.warning(
            "%s steps none of the model's parameters itself, as one that stands for an optimizer of each parameter: "
            "planned as for AdamW.",
            type(inside).__name__,
        )
    return None


def wrap_trainer(trainer: Trainer, wrap_model: Callable[[torch.nn.Module], None]) -> None:
    """Wrap the Trainer's model, and log its plan through the Trainer."""
    model = _model_of(trainer)
    _refuse_data_parallel(trainer.args, model)
    wrap_model(model)
    trainer.remove_callback(PlanInLog)
    trainer.add_callback(PlanInLog(trainer, wrap_model))


def detach_trainer(trainer: Trainer, detach_model: Callable[[torch.nn.Module], None]) -> None:
    """Undo :func:`wrap_trainer`."""
    trainer.remove_callback(PlanInLog)
    detach_model(_model_of(trainer))


def _refuse_data_parallel(args: Any, model: torch.nn.Module) -> None:
    is_quantised = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
    if args.n_gpu > 1 and not is_quantised:
        raise WrapError(f"The Trainer uses torch.nn.DataParallel on {args.n_gpu} GPUs. {ONE_DEVICE}")


def _model_of(trainer: Trainer) -> torch.nn.Module:
    model = trainer.model
    if not isinstance(model, torch.nn.Module):
        raise WrapTypeError(
            f"The Trainer has no model to wrap (trainer.model is {type(model).__name__}). Give it one first."
        )
    return model
