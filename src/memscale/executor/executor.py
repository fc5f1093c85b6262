"""The executor: attaches what a plan says to a model's own modules, and undoes it exactly."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from memscale._torch import FakeTensor
from memscale._util.interrupts import interrupts_deferred, raise_pending_interrupt
from memscale.config import Config
from memscale.errors import WrapError
from memscale.execution_plan import LayerPlan, Offloading, Plan, Tier
from memscale.executor.copies import CopiedAsPlain, Settings
from memscale.executor.hooks import Placeholder, before_forward, inputs_to_device, no_cache_hooks
from memscale.executor.registry import LAYER_TECHNIQUES, MODEL_TECHNIQUES
from memscale.observe.counters import Meter
from memscale.observe.report import Report
from memscale.offload.homes import Homes, training_device
from memscale.offload.loading import forget_pending
from memscale.offload.materialise import Materialised, has_meta_tensors
from memscale.profiler.sample import PlannedBatches
from memscale.techniques.base import EXECUTOR, LayerSite, ModelSite
from memscale.techniques.forward import CompileNotice
from memscale.techniques.undo_log import UndoLog
from memscale.tiers.disk import DiskStore

if TYPE_CHECKING:
    from memscale.optimizer.needs import OptimizerNeeds
    from memscale.report.exporters import Metrics

__all__ = [
    "EXECUTOR",
    "Executor",
    "RecoveryGuard",
    "TrainingBatch",
    "disk_of",
    "executor_of",
    "refuse_nested",
]

logger = logging.getLogger("memscale")

TrainingBatch = Callable[["Executor", tuple[Any, ...], dict[str, Any]], None]
"""What is called before each forward pass in training: the executor, and the arguments of the call."""


class RecoveryGuard(Protocol):
    """Catches out-of-memory errors in a step. A copy of the model gets a new one of the same class."""

    @property
    def awaits_backward(self) -> bool:
        """Whether there is a graph of the model that backward has not been through yet."""

    def begin(self, model: nn.Module, log: UndoLog) -> None:
        """Intercept backward and the optimizer's steps, before any technique does."""

    def cover(self, model: nn.Module, log: UndoLog) -> None:
        """Add a stage to the model's forward, after all techniques are attached."""


class Executor:
    """Attaches a plan to a model, and detaches it.

    The model has its executor as `model._memscale_executor`, in its `__dict__` and not as a submodule; the
    executor refers to the model weakly. A copy of the model, by `deepcopy` or pickle, has an executor of its
    own. See Note [Copies].

    Args:
        model: The model that the plan was made for.
        plan: What to do.
        config: The settings that the plan was made with.
        device: Where the model trains, if that is not where it is: what is not offloaded is brought there,
            and so are the arguments of each call.
        on_training_batch: Called before each forward pass of the model in training, as
            `on_training_batch(executor, args, kwargs)`. It may call `replan`: the pass that is about to begin
            runs by the new plan. It is not called for passes that it makes itself. A copy of the model
            keeps it only if it is a module-level function: others may refer to the original model.
        guard: Catches out-of-memory errors in a step.
        metrics: Serves the executor's numbers while it is attached.
        disk: The disk tier; by default the one that `config` describes.
        meter: Counts what is done; by default a new one.

    Attributes:
        batches: The batches that the model's plans were made for so far.
        optimizer: What the plans assume of the optimizer's memory; None for AdamW.

    Example:
        >>> from memscale.execution_plan import LayerPlan, Plan, Tier
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
        >>> plan = Plan((LayerPlan("0", ("0",), ("checkpointing",), "all", "as an example"),))
        >>> executor = Executor(model, plan)
        >>> executor.attach()
        >>> model._memscale_executor is executor
        True
        >>> executor.detach()
        >>> "forward" in vars(model[0])
        False
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        config: Config | None = None,
        *,
        device: torch.device | None = None,
        on_training_batch: TrainingBatch | None = None,
        guard: RecoveryGuard | None = None,
        metrics: Metrics | None = None,
        disk: DiskStore | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._device = device
        self._plan = plan
        self.config = config
        self.batches = PlannedBatches()
        self._guard = guard
        self._on_training_batch = on_training_batch
        self._is_calling_back = False
        self._attached = False
        notice = CompileNotice(enabled=self._logs)
        self._hooks = UndoLog(notice)  # what stays when the plan changes
        self._batch_hook = UndoLog()
        self._meter = meter or Meter()
        self.metrics = metrics
        self._homes = Homes(disk or disk_of(config), self._meter)
        self._homes.host_capacity = None if config is None else config.max_cpu_offload_bytes
        self._homes.fused_host_step = config is None or config.fused_host_step
        self._techniques = UndoLog(notice)
        self.technique_state: dict[str, Any] = {}
        self.optimizer: OptimizerNeeds | None = None
        self._materialised: Materialised | None = None  # while a plan is being attached

    @property
    def model(self) -> nn.Module:
        """The model; it is not kept alive by its executor."""
        model = self._model()
        if model is None:
            raise WrapError("The model of this executor is gone: nothing else referred to it any more.")
        return model

    @property
    def plan(self) -> Plan:
        """The plan that is attached, or is to be."""
        return self._plan

    @property
    def device(self) -> torch.device:
        """Where the model trains, wherever its parameters are at home."""
        return self._homes.device or self._device or training_device(self.model)

    @property
    def homes(self) -> Homes:
        """Where the model's parameters, gradients and optimizer state are, and the disk below them."""
        return self._homes

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of the model's tensors, optimizer state and activations that are on disk now."""
        return self._homes.store.bytes_used

    @property
    def meter(self) -> Meter:
        """Counts what the plans do."""
        return self._meter

    def report(self) -> Report:
        """Return what the plans have done so far: predicted and observed peak, bytes moved, recomputations, time lost.

        Example:
            >>> from memscale.execution_plan import Plan
            >>> Executor(nn.Linear(2, 2), Plan(())).report().bytes_read
            0
        """
        model = self._model()
        return Report.of(
            self._plan,
            self._meter,
            model="a model that is gone" if model is None else type(model).__name__,
            device="" if model is None else str(self.device),
            counts_forward=self._on_training_batch is not None,
            counts_backward=self._guard is not None,
            disk_bytes=self.bytes_on_disk,
        )

    @property
    def attached(self) -> bool:
        """Whether the plan is on the model."""
        return self._attached

    @property
    def awaits_backward(self) -> bool:
        """Whether a graph of the attached plan waits for backward, as far as that is known."""
        return self._guard is not None and self._guard.awaits_backward

    @property
    def on_training_batch(self) -> TrainingBatch | None:
        """The function that is called before each forward pass in training."""
        return self._on_training_batch

    @on_training_batch.setter
    def on_training_batch(self, callback: TrainingBatch | None) -> None:
        self._on_training_batch = callback
        if self._attached:
            self._batch_hook.undo()
            self._attach_batch_hook(self.model)

    def attach(self) -> None:
        """Attach the plan to the model; if that fails, the model is as it was before.

        Tensors on the meta device get memory and values. See Note [Models larger than memory].

        Raises:
            WrapError: The plan does not fit the model; the model, a part of it or a model around it is wrapped
                already; or a tensor on the meta device has no initialisation.
            WeightsError: A file with weights cannot be read.
        """
        with interrupts_deferred():
            self._attach()

    def _attach(self) -> None:
        model = self.model
        if EXECUTOR in vars(model):
            raise WrapError(
                "The model already has an executor. Take that off first with memscale.detach(model), or give "
                "it another plan with model._memscale_executor.replan(plan)."
            )
        refuse_nested(model)
        vars(model)[EXECUTOR] = self
        try:
            self._apply(model)
            raise_pending_interrupt()
        except BaseException:
            if self._materialised is not None:
                self._materialised.undo()  # first: there may be no room for what would be brought back
            self._undo(model)
            raise
        finally:
            self._materialised = None
        forget_pending(model)
        self._attached = True
        _wrapped_models.add(self)
        self._meter.begin(
            self.device, simulated=any(isinstance(each, FakeTensor) for each in model.parameters())
        )
        if self.metrics is not None:
            self.metrics.begin(self, logs=self._logs)

    def detach(self) -> None:
        """Undo every change, in reverse; do nothing if the plan is not attached.

        Ctrl-C is deferred until it is done. After any other interrupt it can be called again, and continues.
        """
        with interrupts_deferred():
            if self.metrics is not None:
                self.metrics.end(self)
            self._detach()

    def _detach(self) -> None:
        if self._attached:
            self._meter.end()
            try:
                self._undo(self.model)
            except Exception:
                self._attached = False
                raise
            self._attached = False

    def replan(self, plan: Plan) -> None:
        """Replace the plan; if that fails, the model keeps the old one.

        Raises:
            WrapError: The plan does not fit the model, or no plan is attached.
        """
        if not self._attached:
            raise WrapError("Only an attached executor can be given another plan: call attach() first.")
        model = self.model
        with interrupts_deferred():
            self._techniques.undo()
            try:
                self._attach_techniques(model, plan)
            except BaseException:
                self._techniques.undo()
                self._attach_techniques(model, self._plan)
                raise
            self._plan = plan

    @contextlib.contextmanager
    def suspended(self) -> Iterator[nn.Module]:
        """Run a block with the plain model, for example to profile it; then attach the plan again."""
        if not self._attached:
            yield self.model
            return
        model = self.model
        # Parameters stay where they are: the device may have no room for all of them.
        homes, self._homes = self._homes, Homes()
        self._detach()
        try:
            yield model
        finally:
            with interrupts_deferred():
                self._homes = homes
                self.attach()

    def _apply(self, model: nn.Module) -> None:
        self._hooks.add(CopiedAsPlain(self, model))
        for module, hook in no_cache_hooks(model, logs=self._logs):
            self._hooks.add_forward_pre_hook(module, hook)
        self._attach_batch_hook(model)
        if self._on_training_batch is not None and not isinstance(model, torch.jit.ScriptModule):
            self._hooks.add_stage(model, Placeholder())
        if self._guard is not None:
            self._guard.begin(model, self._hooks)
        self._attach_techniques(model, self._plan)

    def _attach_batch_hook(self, model: nn.Module) -> None:
        if self._on_training_batch is not None:
            self._batch_hook.add_forward_pre_hook(model, before_forward)

    def _attach_techniques(self, model: nn.Module, plan: Plan) -> None:
        log = self._techniques
        around = (model, plan, self.device, self.config, self._homes, self._meter, self.technique_state)
        sites = [
            LayerSite(*around, layer, tuple(find_module(model, layer, name) for name in layer.members))
            for layer in plan.layers
        ]
        moved = self._place_parameters(model, sites)
        unsupported: dict[tuple[str, str], list[str]] = {}
        for site in sites:
            techniques = site.layer.techniques
            if "offloading" not in techniques and any(id(each) in moved for each in site.parameters()):
                techniques = ("offloading", *techniques)  # it shares a parameter with an offloaded layer
            for name in techniques:
                technique = LAYER_TECHNIQUES.get(name)
                if technique is None:
                    raise WrapError(
                        f"The plan wants {name!r} on the layer {site.layer.name!r}; this version of MemScale has "
                        f"{', '.join(LAYER_TECHNIQUES)}. Make the plan with the version that is to attach it."
                    )
                reason = technique.unsupported_reason(site)
                if reason is None:
                    technique.attach(site, log)
                else:
                    unsupported.setdefault((name, reason), []).append(site.layer.name or "the model")
        for model_technique in MODEL_TECHNIQUES:
            model_technique.attach(ModelSite(*around), log)
        if self._guard is not None:
            self._guard.cover(model, log)
        for (name, reason), layers in unsupported.items():
            if self._logs:
                logger.warning("No %s on %s: %s.", name, ", ".join(layers), reason)

    def _place_parameters(self, model: nn.Module, sites: Sequence[LayerSite]) -> set[int]:
        """Move the parameters of offloaded layers to the host or to disk, all others to the device.

        Returns:
            The ids of the parameters that are not on the device.
        """
        device = self.device
        tiers: dict[Tier, list[nn.Parameter]] = {"device": [], "host": [], "disk": []}
        for site in sites:
            settings = site.layer.offloading or Offloading()
            if LAYER_TECHNIQUES["offloading"].unsupported_reason(site) is not None:
                tiers["device"] += site.parameters()
            elif "offloading" in site.layer.techniques:
                tiers[settings.to] += site.parameters()
                tiers["device"] += map(model.get_parameter, settings.resident)
        staying = {id(parameter) for parameter in tiers["device"]}
        on_host = [parameter for parameter in tiers["host"] if id(parameter) not in staying]
        on_disk = [parameter for parameter in tiers["disk"] if id(parameter) not in staying]
        if has_meta_tensors(model):
            self._materialised = self._homes.materialise(model, on_host, device, on_disk=on_disk)
            if self._logs:
                logger.info("%s", self._materialised)
        if on_host or on_disk or self._device is not None or self._homes.device is not None:
            self._homes.arrange(model, on_host, device, on_disk=on_disk)
            self._techniques.add_forward_pre_hook(model, inputs_to_device)
        return {id(parameter) for parameter in (*on_host, *on_disk)}

    def _undo(self, model: nn.Module) -> None:
        """Undo everything, whatever one of the parts raises; after an interrupt it can be called again."""
        errors = []
        for undo in (self._techniques.undo, self._batch_hook.undo, self._hooks.undo, self._homes.restore):
            try:
                undo()
            except Exception as error:
                errors.append(error)
        # Last: `memscale.detach` finds what is left to undo by it.
        vars(model).pop(EXECUTOR, None)
        _wrapped_models.discard(self)
        if errors:
            raise errors[0]

    def call_back(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call `on_training_batch`, unless that is what called the model."""
        if self._on_training_batch is None or self._is_calling_back:
            return
        self._meter.forward_pass()
        self._is_calling_back = True
        try:
            self._on_training_batch(self, args, kwargs)
        finally:
            self._is_calling_back = False

    @property
    def _logs(self) -> bool:
        return self.config is None or self.config.enable_logging

    def plain_attributes(self, module: nn.Module) -> dict[str, Any]:
        """Return what a module's `__dict__` would be without the plan."""
        attributes = {name: value for name, value in vars(module).items() if name != EXECUTOR}
        for log in (self._techniques, self._batch_hook, self._hooks):
            log.undo_in(module, attributes)
        return attributes

    def settings(self) -> Settings:
        """Return what the executor of a copy of the model begins with. See Note [Copies]."""
        return Settings(
            self._plan,
            self.config,
            self._homes.device or self._device,
            None if self._guard is None else type(self._guard),
            self._on_training_batch,
            self.batches,
            self.optimizer,
            self.technique_state,
            self._homes.origins(self.model),
            self._techniques.changed_objects(),
        )

    def __repr__(self) -> str:
        return f"<Executor ({'attached' if self._attached else 'not attached'}): {self._plan}>"


def executor_of(model: nn.Module) -> Executor | None:
    """Return the executor of a wrapped model; None if it is not wrapped."""
    found = vars(model).get(EXECUTOR)
    return found if isinstance(found, Executor) else None


_wrapped_models: weakref.WeakSet[Executor] = weakref.WeakSet()


def refuse_nested(model: nn.Module) -> None:
    """Check that no part of a model is wrapped, and no model around it: parameters would have two plans.

    Raises:
        WrapError: There is one.
    """
    for name, module in model.named_modules():
        if module is not model and executor_of(module) is not None:
            raise WrapError(
                f"A part of the {type(model).__name__} is wrapped already: {name!r} ({type(module).__name__}). "
                f"Take MemScale off it first, with memscale.detach(model.get_submodule({name!r})), and wrap the "
                "whole model only."
            )
    for executor in list(_wrapped_models):
        around = executor._model()
        if around is not None and around is not model and any(each is model for each in around.modules()):
            raise WrapError(
                f"The {type(model).__name__} is a part of a {type(around).__name__} that is wrapped already. Leave it "
                "at that, or take MemScale off the whole first, with memscale.detach(model)."
            )


def find_module(model: nn.Module, layer: LayerPlan, name: str) -> nn.Module:
    """Return a module of a plan's layer, by its name.

    Raises:
        WrapError: The model has none of that name.
    """
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise WrapError(
            f"The plan's layer {layer.name!r} has the module {name!r}, and the model "
            f"({type(model).__name__}) has none of that name. A plan fits the model that it was made for: "
            "make a new one."
        ) from None


def disk_of(config: Config | None) -> DiskStore:
    """Return the empty disk tier that a Config describes."""
    return DiskStore() if config is None else DiskStore(config.offload_dir, config.max_disk_offload_bytes)
