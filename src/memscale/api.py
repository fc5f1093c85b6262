"""The public functions: ``wrap``, ``optimize``, ``detach``, ``plan`` and ``find_batch_size``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._torch import forbids_graph_breaks
from memscale._util.interrupts import interrupts_deferred, raise_pending_interrupt
from memscale.config import AsyncOffloadConfig, Config
from memscale.errors import DoesNotFitError, ProfileError, WrapError, WrapTypeError, shown
from memscale.execution_plan import Plan
from memscale.executor import EXECUTOR, ONE_DEVICE, Executor, executor_of, hardware_of, refuse_nested
from memscale.hardware import Hardware, virtual_hardware
from memscale.observe.counters import Meter
from memscale.observe.log import log_plan, logger, open_log
from memscale.optimizer.needs import OptimizerNeeds, needs_of
from memscale.planner.batch_size import BatchSizes, batch_sizes
from memscale.planner.decide import room_of
from memscale.planner.make_plan import fits, make_plan, needed_bytes
from memscale.planner.ranks import Planned, shared_plan
from memscale.planner.replan import follow_batch
from memscale.profiler import Place, hinted_sample, sample_of
from memscale.profiler.sample import named_shapes
from memscale.recovery import StepGuard
from memscale.report.exporters import Metrics
from memscale.units import format_bytes

TargetT = TypeVar("TargetT")


def wrap(
    target: TargetT,
    config: Config | None = None,
    sample_input: Any = None,
    *,
    optimizer: Optimizer | None = None,
    async_offload: bool | None = None,
    async_config: AsyncOffloadConfig | None = None,
) -> TargetT:
    """Make a model train in less memory, and return the same object.

    A model that was built under ``torch.device("meta")`` gets its weights here, from the files that
    ``load_safetensors`` was given or by the initialisation of its own modules: a module at a time, directly on the tier
    that the plan names. So it may be larger than memory.

    Args:
        target: any ``nn.Module``, or a Hugging Face ``Trainer``. Of ``torch.compile(model)`` the model itself is
            wrapped, and in training what has a technique on it runs without the compiler.
        config: what to use and how far to go; the defaults of BALANCED if not given.
        sample_input: a batch as the model is called with it: a tensor, a tuple, a dict or a batch object.
            Without it the plan is made from the first training batch, and nothing is moved before.
        optimizer: the optimizer, if there is one already: the plan counts the state that it keeps for the parameters
            that it steps. AdamW over all of them if not given.
        async_offload: overrides ``config.async_offload``.
        async_config: overrides ``config.async_config``.

    Raises:
        WrapTypeError: ``target`` or another argument is of a wrong type.
        ConfigError: ``config.log_file`` can't be opened.
        HardwareError: ``config.offload_dir`` can't be a directory.
        WrapError: the model is scripted, compiled with ``fullgraph=True``, has no parameters, or some on the meta
            device that nothing initialises; the optimizer steps none of them.
        ProfileError: the model does not run on ``sample_input``.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> wrap(model, Config(enable_logging=False), torch.ones(2, 4)) is model
        True
        >>> detach(model)
    """
    settings = _settings(config, async_offload, async_config)
    _check_optimizer(optimizer)
    if isinstance(target, nn.Module):
        _wrap_module(_uncovered(target, to_wrap=True), settings, sample_input, optimizer)
        return target
    if _is_trainer(target):
        from memscale.integrations.huggingface import with_accumulation, wrap_trainer

        trainer = cast(Any, target)
        settings = with_accumulation(settings, trainer.args.gradient_accumulation_steps)
        wrap_trainer(trainer, lambda model: _wrap_module(model, settings, sample_input, optimizer))
        return target
    raise WrapTypeError(
        f"memscale.wrap takes an nn.Module or a Hugging Face Trainer, got {_kind(target)}. "
        "Pass the model itself, for example memscale.wrap(model)."
    )


def detach(model: Any) -> None:
    """Remove every trace of MemScale from a model (or a Trainer's model).

    What is on disk or on the host goes back to where it was before ``wrap``; a model that was built on the meta device
    to host memory, which must have room for it. On a model that is not wrapped it logs a warning and does nothing.
    """
    if _is_trainer(model):
        from memscale.integrations.huggingface import detach_trainer

        detach_trainer(model, detach)
        return
    executor = executor_of(_uncovered(model)) if isinstance(model, nn.Module) else None
    if executor is not None:
        executor.detach()
    parts = model.named_modules() if isinstance(model, nn.Module) else ()
    wrapped = [name for name, part in parts if executor_of(part) is not None]
    for name in wrapped:
        logger.warning(
            "detach: %r is wrapped by itself and stays so: memscale.detach(model.get_submodule(%r)).",
            name,
            name,
        )
    if executor is None and not wrapped:
        logger.warning("detach: %s is not wrapped, so that there is nothing to take off.", _kind(model))


@contextlib.contextmanager
def optimize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    config: Config | None = None,
    sample_input: Any = None,
) -> Iterator[Executor]:
    """Wrap a model, as ``wrap`` does, for the length of a block; it is detached at the end, also after an exception.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> quiet, batch = Config(enable_logging=False), torch.ones(2, 4)
        >>> with optimize(model, config=quiet, sample_input=batch) as executor:
        ...     model(batch).sum().backward()
        >>> hasattr(model, "_memscale_executor")
        False
    """
    model = _checked(model, "optimize")
    wrap(model, config, sample_input, optimizer=optimizer)
    executor: Executor = vars(model)[EXECUTOR]
    try:
        yield executor
    finally:
        if EXECUTOR in vars(model):  # the block may have detached it already
            detach(model)


def plan(
    model: nn.Module,
    sample_input: Any = None,
    config: Config | None = None,
    hardware: str | int | Hardware | None = None,
    *,
    strict: bool = False,
    optimizer: Optimizer | None = None,
) -> Plan:
    """Return what ``wrap`` would do, with its predicted peak and step-time ratio; attach nothing.

    Args:
        model: the model; its weights may be on the meta device.
        sample_input: a batch, as for ``wrap``.
        config: as for ``wrap``.
        hardware: a GPU that is not there (``"RTX 3090"``), a size in bytes, or a ``Hardware``; the machine's
            own device if not given.
        strict: Raise if no plan fits, instead of returning the smallest one with a note that says so.
        optimizer: as for ``wrap``.

    Raises:
        DoesNotFitError: ``strict``, and no plan fits the device or the budget.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4), 6)
        >>> plan(model, torch.ones(32, 8, 64), hardware="RTX 3090").predicted_peak_bytes > 0
        True
    """
    model = _checked(model, "plan")
    settings = _settings(config, None, None)
    _check_optimizer(optimizer)
    there = _hardware(model, hardware, settings)
    decided = _plan(model, sample_input, settings, there, optimizer=optimizer)
    if strict and not fits(decided, there, settings):
        raise DoesNotFitError(_what_is_missing(decided, there, settings))
    return decided


def find_batch_size(
    model: nn.Module,
    sample_input: Any,
    config: Config | None = None,
    hardware: str | int | Hardware | None = None,
    *,
    optimizer: Optimizer | None = None,
) -> BatchSizes:
    """Find the largest batch that fits, the longest sequences, and the batch that trains the most samples a second.

    By prediction: batches are profiled on fake tensors, and what is returned was simulated. Each of the three has its
    plan and the Config to give to ``wrap``.

    Args:
        model: the model; its weights may be on the meta device.
        sample_input: a batch of any size, as for ``wrap``. Its first dimension is taken for that of samples.
        config: as for ``wrap``, without its ``auto_policy``: the fastest plan is looked for here.
        hardware: as for ``plan``.
        optimizer: as for ``wrap``; AdamW if not given.

    Raises:
        ProfileError: the model does not run on ``sample_input``, or on fake tensors not at all.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
        >>> found = find_batch_size(model, torch.ones(8, 1024), hardware="RTX 3090")
        >>> found.batch_size > 8
        True
    """
    model = _checked(model, "find_batch_size")
    _check_optimizer(optimizer)
    settings = _settings(config, None, None).replace(auto_policy=False)
    there = _hardware(model, hardware, settings)
    with _without_techniques(model):
        needs = None if optimizer is None else needs_of(optimizer, model, Place.of(there.device))
        return batch_sizes(model, sample_of(sample_input, model), settings, there, needs)


# The classes that `torch.compile` and Lightning's `Fabric.setup` put around a model, and where they have it. By name:
# to import them takes a second.
_COVERS = {"OptimizedModule": "_orig_mod", "_FabricModule": "_forward_module"}


def _uncovered(model: nn.Module, *, to_wrap: bool = False) -> nn.Module:
    """Return the model that a compiled one, or Fabric's, calls: techniques go on that one."""
    while (name := _COVERS.get(type(model).__name__)) is not None:
        if to_wrap and forbids_graph_breaks(model):
            raise WrapError(
                "The model is compiled with fullgraph=True. What MemScale puts a technique on runs without the "
                "compiler, which is a graph break: compile it without fullgraph=True."
            )
        model = cast(nn.Module, getattr(model, name))
    return model


def _checked(model: nn.Module, function: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise WrapTypeError(f"memscale.{function} takes an nn.Module, got {_kind(model)}.")
    model = _uncovered(model)
    _check_scripted(model)
    return model


def _check_scripted(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise WrapError(
            f"{model.original_name} is a scripted module (torch.jit), which takes neither hooks nor another forward. "
            "Train the Python module that it was made from."
        )


def _check_devices(model: nn.Module) -> None:
    """Raise a `WrapError` for a model that several devices share, each with some of its layers or samples."""
    if any(isinstance(each, nn.DataParallel) and len(each.device_ids) > 1 for each in model.modules()):
        raise WrapError(f"torch.nn.DataParallel copies the model to several devices. {ONE_DEVICE}")
    accelerators = {each.device for each in model.parameters() if each.device.type not in ("cpu", "meta")}
    spread: set[object] = {*getattr(model, "hf_device_map", {}).values()}  # of Hugging Face's `device_map`
    spread = {*accelerators} if len(accelerators) > 1 else spread
    if len(spread) > 1:
        raise WrapError(
            f"The layers of the {type(model).__name__} are spread over {', '.join(sorted(map(str, spread)))}, and "
            "MemScale trains a model on one device. Load it onto one (without device_map, or with "
            "device_map={'': 0}): MemScale keeps on the host what that has no room for."
        )


def _wrap_module(model: nn.Module, config: Config, sample_input: Any, optimizer: Optimizer | None) -> None:
    _check_scripted(model)
    if next(model.parameters(), None) is None:
        raise WrapError(
            f"{type(model).__name__} has no parameters, so that there is nothing to train. "
            "Wrap the model that the optimizer steps."
        )
    refuse_nested(model)
    _check_devices(model)
    hardware = _hardware(model, None, config)
    meter = Meter()
    with meter.planning():
        needs = None if optimizer is None else needs_of(optimizer, model, Place.of(hardware.device))
        # Nothing is moved on a guess; a model on the meta device needs a place for its weights now.
        is_provisional = sample_input is None and not any(each.is_meta for each in model.parameters())
        if is_provisional:
            decided = make_plan(model, None, config, hardware)
        else:
            shapes = {} if sample_input is None else named_shapes(model, sample_of(sample_input, model))

            def make(settings: Config) -> Planned:
                return _plan(model, sample_input, settings, hardware, optimizer=needs), shapes

            decided, shapes = shared_plan(model, config, hardware, make)
    executor = Executor(
        model,
        decided,
        config,
        device=_new_device(model, hardware),
        on_training_batch=follow_batch,
        guard=StepGuard(),
        metrics=Metrics(config.observability_port),
        meter=meter,
    )
    executor.optimizer = needs
    if sample_input is not None:
        executor.batches.add(shapes)
    # The log comes first: if its file cannot be opened, the model stays as it is.
    with open_log(config, strict=True) as log:
        _attach(executor, lambda: log_plan(log, None if is_provisional else decided, config, hardware))


def _attach(executor: Executor, say: Callable[[], None]) -> None:
    """Attach an executor in place of the one that the model may have, which stays if that fails; then log it."""
    before = executor_of(executor.model)
    with interrupts_deferred():
        if before is not None:
            before.detach()
        try:
            executor.attach()
            say()
            raise_pending_interrupt()
        except BaseException:
            executor.detach()
            if before is not None:
                before.attach()
            raise


def _without_techniques(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    executor = executor_of(model)
    return contextlib.nullcontext() if executor is None else executor.suspended()


def _plan(
    model: nn.Module,
    sample_input: Any,
    config: Config,
    hardware: Hardware,
    *,
    optimizer: Optimizer | OptimizerNeeds | None = None,
) -> Plan:
    """Plan a model as it is without MemScale, whether or not it is wrapped now."""
    with _without_techniques(model):
        if sample_input is not None:
            return make_plan(model, sample_of(sample_input, model), config, hardware, optimizer=optimizer)
        try:
            return make_plan(model, hinted_sample(model), config, hardware, optimizer=optimizer)
        except ProfileError:
            # The model's hints were a guess of ours, and a wrong one.
            return make_plan(model, None, config, hardware)


def _what_is_missing(plan: Plan, hardware: Hardware, config: Config) -> str:
    """Return the numbers of a plan that does not fit, and what to do."""
    needs, room = needed_bytes(plan, hardware, config) + plan.allowance_bytes, room_of(hardware, config)
    notes = "; ".join(plan.notes)
    return (
        f"no plan fits: the smallest needs {format_bytes(needs)} (peak {format_bytes(plan.predicted_peak_bytes)} "
        f"{plan.prediction_source}, what torch reserves beside it, and an allowance), and there is "
        f"{format_bytes(room)} on {plan.device} for "
        f"{plan.batch or 'a batch that is not known'}. {notes or 'Give a smaller batch, or another mode.'}"
    )


def _hardware(model: nn.Module, hardware: str | int | Hardware | None, config: Config) -> Hardware:
    if isinstance(hardware, Hardware):
        return hardware
    if hardware is not None:
        return virtual_hardware(hardware)
    return hardware_of(model, config.offload_dir)


def _new_device(model: nn.Module, hardware: Hardware) -> torch.device | None:
    """Return the accelerator on which a model from the meta device will train; None for the CPU or any other model."""
    kind, index = hardware.device.kind, hardware.device.index
    if kind == "cpu" or not all(each.is_meta for each in model.parameters()):
        return None
    return torch.device(kind) if index is None else torch.device(kind, index)


def _settings(
    config: Config | None, async_offload: bool | None, async_config: AsyncOffloadConfig | None
) -> Config:
    if config is None:
        config = Config()
    if not isinstance(config, Config):
        hint = " Write memscale.Config(**your_dict)." if isinstance(config, dict) else ""
        raise WrapTypeError(f"config must be a memscale.Config, got {_kind(config)}.{hint}")
    if async_offload is not None:
        config = config.replace(async_offload=async_offload)
    if async_config is not None:
        config = config.replace(async_config=async_config)
    return config


def _check_optimizer(optimizer: Optimizer | None) -> None:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise WrapTypeError(f"optimizer must be a torch.optim.Optimizer, got {_kind(optimizer)}.")


def _is_trainer(target: object) -> bool:
    """Return whether this is a Hugging Face Trainer or shaped like one: it holds a model and trains it."""
    return (
        not isinstance(target, (nn.Module, type))
        and isinstance(getattr(target, "model", None), nn.Module)
        and all(callable(getattr(target, name, None)) for name in ("train", "add_callback", "log"))
    )


def _kind(value: object) -> str:
    if value is None or isinstance(value, nn.Module):
        return "None" if value is None else type(value).__name__
    return f"{shown(value, 60)} ({type(value).__name__})"
