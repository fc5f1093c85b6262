"""The executor: attaches what a plan says to a model's own modules, and undoes it exactly.

Note [Moves]
~~~~~~~~~~~~
`.to()`, `.cuda()`, `.half()` and the like all go through `nn.Module._apply`. A move to the device that the model trains
on already, as accelerate and the Trainer make, leaves offloaded parameters on their tier: the card may have no room for
them. A move to another device takes everything along. The plan was for the old device, so nothing is attached until the
next training batch makes a new one. If the other device has no room for the parameters, the layers are offloaded to the
host until then: a Trainer moves a model that is larger than its card before it sees a batch.

Note [Called parts]
~~~~~~~~~~~~~~~~~~~
A loop may call a part of the model and never the model itself: `self.net(x)` in the `training_step` of a Lightning
module. Such a model sees no batch. So calls of parts that contain layers are noted too; if the optimizer has stepped,
and the model was not called, then the executor moves to the part with the most layers of those that were: it is planned
for and attached to in the place of the model, which keeps a reference to it for `detach`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from memscale._torch import FakeTensor, outside_compiler, sharded_groups
from memscale._util.interrupts import interrupts_deferred, raise_pending_interrupt
from memscale._util.trees import Tree
from memscale.checkpointing.technique import NoCache, OwnCheckpointing, no_cache_hooks
from memscale.config import Config
from memscale.errors import WrapError
from memscale.execution_plan import LayerPlan, Offloading, Plan, Tier
from memscale.executor.copies import CopiedAsPlain
from memscale.executor.registry import LAYER_TECHNIQUES, MODEL_TECHNIQUES
from memscale.hardware import Hardware, detect
from memscale.hardware.host import process_rank
from memscale.observe.counters import Accumulation, Meter
from memscale.observe.log import open_log
from memscale.observe.report import Report
from memscale.offload.layer import bring_inputs
from memscale.offload.loading import forget_pending
from memscale.offload.materialise import Materialised, has_meta_tensors
from memscale.offload.placement import ModelPlacement, bytes_held_on_host, training_device
from memscale.profiler.sample import PlannedBatches
from memscale.techniques.base import EXECUTOR, LayerSite, LayerTechnique, ModelSite
from memscale.techniques.forward import CompileNotice, ForwardStage, is_redirected, override_of
from memscale.techniques.undo_log import UndoLog
from memscale.tiers.disk import DiskStore
from memscale.tiers.engine import PinnedMemory

if TYPE_CHECKING:
    from memscale.optimizer.needs import OptimizerNeeds
    from memscale.report.exporters import Metrics

logger = logging.getLogger("memscale")

UNSEEN_STEPS = 3  # without a call, after which that is warned of
CALLS_UNSEEN = (
    "%d optimizer steps were made without a call of the %s, or of a part of it that has layers, so no plan was made "
    "from a batch. Wrap the module that training calls, and call it rather than one of its methods."
)

# A replica has the overrides of the original, which compute with the original's weights.
ONE_DEVICE = (
    "MemScale trains one device in each process: start the training with torchrun, one process for each GPU, or on one "
    "GPU with CUDA_VISIBLE_DEVICES=0."
)

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


@dataclass
class Settings:
    """What the executor of a copy has in common with that of the original."""

    plan: Plan
    config: Config
    device: torch.device | None
    guard: type[RecoveryGuard] | None
    on_training_batch: TrainingBatch | None
    batches: PlannedBatches
    optimizer: OptimizerNeeds | None
    technique_state: dict[str, Any]
    origins: dict[str, torch.device]  # where parameters and buffers go on detach, by their names
    # Attributes of objects other than modules, and their values before.
    changed: list[tuple[object, str, object]]

    def attach_to(self, model: nn.Module) -> None:
        for owner, name, before in self.changed:
            vars(owner)[name] = before
        executor = Executor(
            model,
            self.plan,
            self.config,
            device=self.device,
            on_training_batch=self.on_training_batch,
            guard=None if self.guard is None else self.guard(),
        )
        executor.batches, executor.optimizer = self.batches, self.optimizer
        executor.technique_state.update(self.technique_state)
        try:
            executor.attach()
        except WrapError as error:  # the original has got other modules since
            logger.warning("The copy of a wrapped %s is not wrapped. %s", type(model).__name__, error)
        else:
            executor.placement.set_origins(model, self.origins)


class Executor:
    """Attaches a plan to a model, and detaches it.

    The model has its executor as `model._memscale_executor`, in its `__dict__` and not as a submodule; the executor
    refers to the model weakly. A copy of the model has an executor of its own. See Note [Copies].

    Args:
        model: The model that the plan was made for.
        plan: The plan.
        config: The settings that the plan was made with; by default those of `Config()`.
        device: Where the model trains, if that is not where it is: what is not offloaded is moved there, and so are the
            arguments of each call.
        on_training_batch: Called before each forward pass in training that it does not make itself. It may call
            `replan`, by which that pass runs. A copy of the model keeps it only if it is a module-level function.
        guard: Catches out-of-memory errors in a step.
        metrics: Serves the executor's numbers while it is attached.
        meter: Counts what is done; by default a new one.

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
        meter: Meter | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._device = device
        self.plan = plan
        self._planned_trainable = _count_trainable(model)  # when the plan was made
        self.config = config = config or Config()
        self.on_training_batch = on_training_batch
        self.metrics = metrics
        self.meter = meter or Meter()
        self.attached = False
        settings = config.async_config
        # Where the model's parameters, gradients and optimizer state are, and the disk tier.
        self.placement = ModelPlacement(
            DiskStore(config.offload_dir, config.max_disk_offload_bytes),
            self.meter,
            PinnedMemory(None if settings is None else settings.pinned_pool_bytes),
        )
        self.placement.host_capacity = config.max_cpu_offload_bytes
        self.placement.fused_host_step = config.fused_host_step
        self.technique_state: dict[str, Any] = {}  # what techniques keep from one plan to the next
        self.batches = PlannedBatches()  # that the model's plans were made for so far
        self.verified: Plan | None = None  # the plan that was compared with the plain model
        self.accumulation = Accumulation(config.warmup_steps)
        self.optimizer: OptimizerNeeds | None = None  # what plans assume of its memory; None for AdamW
        self._guard = guard
        self.is_sharded = False  # by FSDP2, when the plan was attached
        self._is_calling_back = False
        self._logs = config.enable_logging and process_rank() == 0
        notice = CompileNotice(enabled=self._logs)
        self._hooks = UndoLog(notice)  # what stays when the plan changes
        self._techniques = UndoLog(notice)
        self._materialised: Materialised | None = None  # while a plan is being attached
        self._own_checkpointing: OwnCheckpointing | None = None  # while a plan that replaces it is attached
        self._said_replaced = False
        self._was_called = False  # the model, in training
        self._called_parts: dict[str, int] = {}  # steps before their first call: Note [Called parts]
        self._around: weakref.ref[nn.Module] | None = None  # the model that was wrapped, if this is on a part

    @property
    def model(self) -> nn.Module:
        """The model; it is not kept alive by its executor."""
        model = self._model()
        if model is None:
            raise WrapError("The model of this executor is gone: nothing else referred to it any more.")
        return model

    @property
    def device(self) -> torch.device:
        """Where the model trains, wherever its parameters are."""
        return self.placement.device or self._device or training_device(self.model)

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of the model's tensors, optimizer state and activations that are on disk now."""
        return self.placement.store.bytes_used

    def report(self) -> Report:
        """Return what the plans have done so far: predicted and observed peak, bytes moved, recomputations, time lost.

        Example:
            >>> from memscale.execution_plan import Plan
            >>> Executor(nn.Linear(2, 2), Plan(())).report().bytes_read
            0
        """
        model = self._model()
        return Report.of(
            self.plan,
            self.meter,
            model="a model that is gone" if model is None else type(model).__name__,
            device="" if model is None else str(self.device),
            counts_forward=self.on_training_batch is not None,
            counts_backward=self._guard is not None,
            disk_bytes=self.bytes_on_disk,
        )

    @property
    def awaits_backward(self) -> bool:
        """Whether a graph of the attached plan waits for backward, as far as that is known."""
        return self._guard is not None and self._guard.awaits_backward

    @property
    def is_partly_frozen(self) -> bool:
        """Whether fewer parameters require gradients than when the plan was made."""
        return _count_trainable(self.model) < self._planned_trainable

    @interrupts_deferred()
    def attach(self) -> None:
        """Attach the plan to the model; if that fails, the model is as it was before.

        Tensors on the meta device get memory and values: Note [Models larger than memory].

        Raises:
            WrapError: The plan does not fit the model; the model, a part of it or a model around it is wrapped
                already; or a tensor on the meta device has no initialisation.
            WeightsError: A file with weights cannot be read.
        """
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
            self.attached = True
            _wrapped_models.add(self)
            simulated = any(isinstance(each, FakeTensor) for each in model.parameters())
            self.meter.begin(self.device, simulated=simulated)
            if self.metrics is not None:
                self.metrics.begin(self, logs=self._logs)
            raise_pending_interrupt()
            forget_pending(model)
        except BaseException:
            if self._materialised is not None:
                self._materialised.undo()  # first: there may be no room for what would be brought back
            self._end()
            self._undo(model)
            raise
        finally:
            self._materialised = None

    @interrupts_deferred()
    def detach(self) -> None:
        """Undo every change, in reverse; after an error it can be called again, and does what is left."""
        self._end()
        if self.attached or vars(self.model).get(EXECUTOR) is self:
            self._undo(self.model)
            for name in (*self._techniques.replaced, *self._hooks.replaced) if self._logs else ():
                logger.warning(
                    "%s was replaced after MemScale had set it, and stays as it is now; what MemScale had put there "
                    "has no effect any more.",
                    name,
                )

    def _end(self) -> None:
        if self.metrics is not None:
            self.metrics.end(self)
        if self.attached:
            self.meter.end()

    @interrupts_deferred()
    def replan(self, plan: Plan) -> None:
        """Replace the plan; if it does not fit the model (`WrapError`), the model keeps the old one."""
        if not self.attached:
            raise WrapError("Only an attached executor can be given another plan: call attach() first.")
        model = self.model
        self._techniques.undo()
        try:
            self._attach_techniques(model, plan)
        except BaseException:
            self._techniques.undo()
            self._attach_techniques(model, self.plan)
            raise
        self.plan = plan
        self._planned_trainable = _count_trainable(model)

    @contextlib.contextmanager
    def suspended(self, *, restore: bool = False) -> Iterator[nn.Module]:
        """Run a block with the plain model, for example to profile it; then attach the plan again.

        Parameters stay where they are, as the device may have no room for all of them; with `restore` they go back to
        where they were before `wrap`.
        """
        if not self.attached:
            yield self.model
            return
        model, placement = self.model, self.placement
        if not restore:
            self.placement = ModelPlacement()
        self.meter.end()
        self._undo(model)
        try:
            yield model
        finally:
            with interrupts_deferred():
                self.placement = placement
                self.attach()

    @contextlib.contextmanager
    def _moving_to(self, device: torch.device) -> Iterator[None]:
        model = self.model
        with interrupts_deferred():
            self._techniques.undo()
            if self.placement.device is not None:
                names = (name for name, _ in (*model.named_parameters(), *model.named_buffers()))
                self.placement.set_origins(model, dict.fromkeys(names, device))
                self.placement.restore()
            try:
                yield
            finally:
                self._device = None
                self._attach_provisional(f"the model moved to {device}")
                self.meter.begin(self.device)

    def _has_room(self, device: torch.device) -> bool:
        """Return whether all parameters and buffers fit a device, within the budget."""
        model, config = self.model, self.config
        if device.type in ("cpu", "meta") or not config.enable_offloading:
            return True
        there = detect(device, offload_dir=config.offload_dir).device
        room = min(
            there.free_bytes, there.total_bytes if there.capacity_bytes is None else there.capacity_bytes
        )
        if config.memory_budget_bytes is not None:
            room = min(room, config.memory_budget_bytes)
        needed = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
        return needed <= room * config.target_gpu_utilization

    @interrupts_deferred()
    def _offload_all(self, device: torch.device) -> None:
        """Train on another device from now on, with all layers offloaded to the host until the next plan."""
        self._techniques.undo()
        self._device = device
        self._attach_provisional(
            f"{device} has no room for the parameters", ("offloading",), Offloading("host")
        )
        self.meter.begin(device)

    @interrupts_deferred()
    def release_parameters(self, why: str) -> None:
        """Let go of parameters that others have replaced; nothing is attached until the next plan."""
        self._techniques.undo()
        self.placement.release()
        self._attach_provisional(why)

    def _attach_provisional(
        self, why: str, techniques: tuple[str, ...] = (), offloading: Offloading | None = None
    ) -> None:
        self.batches = PlannedBatches()
        note = f"{' '.join(techniques) or 'nothing'} until the next training batch makes a new plan: {why}"
        layers = tuple(
            LayerPlan(each.name, each.members, techniques, "moved", note, offloading=offloading)
            for each in self.plan.layers
        )
        plan = replace(self.plan, layers=layers, notes=(*self.plan.notes, note))
        self.plan = replace(plan, precision=None, loss=None, optimizer=None)
        self._attach_techniques(self.model, self.plan)

    def _apply(self, model: nn.Module) -> None:
        self._hooks.replaced.clear()  # what others have put there since is covered anew
        self._hooks.set_attribute(model, "_apply", functools.partial(_convert, weakref.ref(self)))
        around = None if self._around is None else self._around()
        if around is not None:
            self._hooks.set_attribute(around, EXECUTOR, self)
        copied = CopiedAsPlain(model, around)
        self._hooks.add(copied)
        copied.make(self)
        if self.on_training_batch is not None:
            self._hooks.add_forward_pre_hook(model, _before_forward)
            self._hooks.add_stage(model, _Placeholder())
            if not self._was_called and not self.batches and around is None:
                self._watch_parts(model)
        for module, hook in no_cache_hooks(model, logs=self._logs):  # after the one that may change the plan
            self._hooks.add_forward_pre_hook(module, hook)
        if self._guard is not None:
            self._guard.begin(model, self._hooks)
        self._attach_techniques(model, self.plan)

    def _watch_parts(self, model: nn.Module) -> None:
        """Note calls of the modules that contain layers of the plan. See Note [Called parts]."""
        members = [member for layer in self.plan.layers for member in layer.members]
        parts = {
            ".".join(name[:end])
            for name in (each.split(".") for each in members)
            for end in range(1, len(name))
        }
        for name in sorted(parts):
            part = model.get_submodule(name)
            if not isinstance(part, (nn.ModuleList, nn.ModuleDict, torch.jit.ScriptModule)):
                self._hooks.add_forward_pre_hook(part, _PartCall(self, name))
                self._hooks.add_stage(part, _Placeholder())

    def warn_unseen(self) -> None:
        """Warn of a model that is trained without a call that could be planned for."""
        if not self.batches and self.on_training_batch is not None:
            with open_log(self.config) as log:
                log.warning(CALLS_UNSEEN, UNSEEN_STEPS, type(self.model).__name__)

    def _note_part(self, name: str, part: nn.Module) -> bool:
        """Note the call of a part; return whether the executor has moved to it."""
        if self._was_called or not any(each.requires_grad for each in part.parameters()):
            return False
        self.accumulation.was_called = True
        steps = self.accumulation.steps
        has_stepped = self._called_parts.setdefault(name, steps) < steps

        def layers_of(part: str) -> int:
            return sum(layer.members[0].startswith(f"{part}.") for layer in self.plan.layers)

        if not has_stepped or name != max(self._called_parts, key=lambda each: (layers_of(each), -len(each))):
            return False
        others = [each for each in self._called_parts if not f"{each}.".startswith(f"{name}.")]
        with open_log(self.config) as log:
            log.info(
                "Training calls %r and not the %s itself: that is planned for.",
                name,
                type(self.model).__name__,
            )
            if others:
                log.warning(
                    "Training also calls %s, which get no plan: wrap them by themselves, and detach them so.",
                    ", ".join(others),
                )
        self._move_to(name, part)
        return True

    @interrupts_deferred()
    def _move_to(self, name: str, part: nn.Module) -> None:
        """Attach to a part of the model in its place; the next batch makes a plan for it."""
        model, prefix = self.model, f"{name}."
        layers = tuple(
            replace(
                layer,
                name=layer.name.removeprefix(prefix),
                members=tuple(each.removeprefix(prefix) for each in layer.members),
            )
            for layer in self.plan.layers
            if layer.members[0].startswith(prefix)
        )
        self._undo(model)
        self._model, self._around = weakref.ref(part), weakref.ref(model)
        self.plan = replace(self.plan, layers=layers)
        if self.optimizer is not None:
            state = {
                each.removeprefix(prefix): tensors
                for each, tensors in self.optimizer.state.items()
                if each.startswith(prefix)
            }
            self.optimizer = replace(self.optimizer, state=state)
        self.attach()

    def _attach_techniques(self, model: nn.Module, plan: Plan) -> None:
        log = self._techniques
        log.replaced.clear()
        for hook in itertools.chain.from_iterable(map(_no_cache_of, model.modules())):
            hook.is_idle = plan.does_nothing
        self._own_checkpointing = None
        recomputes = any("checkpointing" in layer.techniques for layer in plan.layers)
        if self.config.enable_checkpointing and recomputes:
            self._own_checkpointing = OwnCheckpointing(model)
            log.add(self._own_checkpointing)
            self.replace_own_checkpointing()
        self.is_sharded = bool(sharded_groups(model))
        around = (model, plan, self.device, self.config, self.placement, self.meter, self.technique_state)
        sites = [
            LayerSite(*around, layer, tuple(_find_module(model, layer, name) for name in layer.members))
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
                reason = _unsupported_reason(technique, site)
                if reason is None:
                    technique.attach(site, log)
                else:
                    unsupported.setdefault((name, reason), []).append(site.layer.name or "the model")
        for model_technique in MODEL_TECHNIQUES:
            model_technique.attach(ModelSite(*around), log)
        if self._guard is not None:
            self._guard.cover(model, log)
        if (
            moved
            and self.device.type == "cuda"
            and not any(isinstance(p, FakeTensor) for p in model.parameters())
        ):
            # What the parameters took is cached, and what an earlier plan's copy streams had: no other process, and
            # no other stream, can have it.
            torch.cuda.empty_cache()
        for (name, reason), layers in unsupported.items():
            if self._logs:
                logger.warning("No %s on %s: %s.", name, ", ".join(layers), reason)

    def replace_own_checkpointing(self) -> None:
        """Switch off what the model has switched on of its own since. See Note [Own checkpointing]."""
        replaced = 0 if self._own_checkpointing is None else self._own_checkpointing.replace()
        if replaced and self.batches and not self._said_replaced:  # a plan without a batch may be gone soon
            self._said_replaced = True
            with open_log(self.config) as log:
                log.info(
                    "The model's own gradient checkpointing (%d modules) is replaced by the plan, which may hold more "
                    "for a faster step, and is back after detach; the plain step that plans are compared with is one "
                    "without it. Config(enable_checkpointing=False) leaves it on.",
                    replaced,
                )

    def _place_parameters(self, model: nn.Module, sites: Sequence[LayerSite]) -> set[int]:
        """Move parameters to their tier or to the device; return the ids of those that are not on the device."""
        device = self.device
        wanted: dict[Tier, list[nn.Parameter]] = {"host": [], "disk": [], "device": []}
        for site in sites:
            settings = site.layer.offloading or Offloading()
            if _unsupported_reason(LAYER_TECHNIQUES["offloading"], site) is not None:
                wanted["device"] += site.parameters()
            elif "offloading" in site.layer.techniques:
                wanted[settings.to] += site.parameters()
                wanted["device"] += map(model.get_parameter, settings.resident)
        # A parameter of several layers is on the device if one has it there, else on disk.
        tiers = {id(parameter): tier for tier, found in wanted.items() for parameter in found}
        moved = {key for key, tier in tiers.items() if tier != "device"}
        if has_meta_tensors(model):
            self._materialised = self.placement.materialise(model, tiers, device)
            if self._logs:
                logger.info("%s", self._materialised)
        if moved or self._device is not None or self.placement.device is not None:
            self.placement.place_parameters(model, tiers, device)
        if device.type != "cpu":
            self._techniques.add_forward_pre_hook(model, _inputs_to_device)
        return moved

    def _undo(self, model: nn.Module) -> None:
        """Undo everything, whatever one of the parts raises; after an error it can be called again."""
        errors = []
        for undo in (self._techniques.undo, self._hooks.undo, self.placement.restore):
            try:
                undo()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        # Last: `memscale.detach` finds what is left to undo by it.
        vars(model).pop(EXECUTOR, None)
        _wrapped_models.discard(self)
        self.attached = False

    def settings(self) -> Settings:
        """Return what the executor of a copy of the model begins with. See Note [Copies]."""
        callback = self.on_training_batch
        if not isinstance(callback, types.FunctionType) or not callback.__qualname__.isidentifier():
            callback = None  # only a module-level function is sure to refer to no model
        return Settings(
            self.plan,
            self.config,
            self.placement.device or self._device,
            None if self._guard is None else type(self._guard),
            callback,
            self.batches,
            self.optimizer,
            self.technique_state,
            self.placement.origins(self.model),
            self._techniques.changed_objects(),
        )

    def __repr__(self) -> str:
        return f"<Executor ({'attached' if self.attached else 'not attached'}): {self.plan}>"


def executor_of(model: nn.Module) -> Executor | None:
    """Return the executor of a wrapped model; None if it is not wrapped."""
    found = vars(model).get(EXECUTOR)
    return found if isinstance(found, Executor) else None


def hardware_of(model: nn.Module, offload_dir: str | os.PathLike[str] | None = None) -> Hardware:
    """Describe what a model trains on; of the host, what the model has there already counts as available to it.

    That is the machine's best device for a model that is on the meta device.
    """
    executor = executor_of(model)
    if executor is not None:
        device: torch.device | None = executor.device  # its parameters may be offloaded
    else:
        device = None if all(each.is_meta for each in model.parameters()) else training_device(model)
    hardware = detect(device, offload_dir=offload_dir)
    if hardware.device.kind == "cpu":
        return hardware
    host = hardware.host
    held = bytes_held_on_host(model.parameters(), None if executor is None else executor.placement)
    # Other processes of the job have as much of their copies.
    available = min(host.total_ram_bytes, host.available_ram_bytes + host.processes * held)
    return replace(hardware, host=replace(host, available_ram_bytes=available))


_wrapped_models: weakref.WeakSet[Executor] = weakref.WeakSet()


def refuse_nested(model: nn.Module) -> None:
    """Raise a `WrapError` if a part of a model is wrapped, or a model around it: parameters would have two plans."""
    for name, module in model.named_modules():
        executor = executor_of(module)
        if module is not model and executor is not None and executor is not executor_of(model):
            raise WrapError(
                f"A part of the {type(model).__name__} is wrapped already: {name!r} ({type(module).__name__}). "
                f"Take MemScale off it first, with memscale.detach(model.get_submodule({name!r})), and wrap the "
                "whole model only."
            )
    for wrapped in list(_wrapped_models):
        around = wrapped._model()
        if around is not None and around is not model and any(each is model for each in around.modules()):
            raise WrapError(
                f"The {type(model).__name__} is a part of a {type(around).__name__} that is wrapped already. Leave it "
                "at that, or take MemScale off the whole first, with memscale.detach(model)."
            )


def _count_trainable(model: nn.Module) -> int:
    return sum(each.requires_grad for each in model.parameters())


def _unsupported_reason(technique: LayerTechnique, site: LayerSite) -> str | None:
    if any(isinstance(module, torch.jit.ScriptModule) for module in site.modules):
        return "it is a scripted module, whose forward cannot be replaced"
    return technique.unsupported_reason(site)


def _find_module(model: nn.Module, layer: LayerPlan, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise WrapError(
            f"The plan's layer {layer.name!r} has the module {name!r}, and the model "
            f"({type(model).__name__}) has none of that name. A plan fits the model that it was made for: "
            "make a new one."
        ) from None


def _convert(
    executor: weakref.ref[Executor], convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Move or convert the tensors of a wrapped model: its `_apply`. See Note [Moves]."""
    attached = executor()
    assert attached is not None, "an attribute of a model that is gone was called"
    model, device, placement = attached.model, attached.device, attached.placement
    apply: Callable[..., nn.Module] = type(model)._apply
    target = convert(torch.empty(0, device=device)).device
    if target != device and attached._has_room(target):
        with attached._moving_to(target):
            return apply(model, convert, recurse)
    if target != device:
        attached._offload_all(target)
    masters = {id(each) for each in (*placement.host_masters(), *placement.on_disk)}
    hidden = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in masters
    ]
    for parameters, name, _ in hidden:
        parameters[name] = None
    try:
        apply(model, convert, recurse)
    finally:
        for parameters, name, parameter in hidden:
            parameters[name] = parameter
    if placement.convert_masters(convert):
        attached.batches = PlannedBatches()  # of another type they need other memory
    return model


# Forward pre-hooks of the model. They find the executor by the model; the last one that was added runs first.


class _Placeholder(ForwardStage):
    """Gives a model an override, though its plan needs none yet: by it, a call follows a plan that hooks change."""

    is_opaque = False


@outside_compiler
def _before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Tell the executor of a forward pass in training, before which it may change the plan."""
    if getattr(model, "_is_replica", False):
        raise WrapError(
            f"torch.nn.DataParallel called a copy of the wrapped {type(model).__name__}. {ONE_DEVICE}"
        )
    executor = executor_of(model)
    if executor is None or kwargs is None or not torch.is_grad_enabled() or is_redirected(model):
        return None
    if not model.training and not _is_trained(model, args, kwargs):
        return None
    callback = executor.on_training_batch
    if callback is None or executor._is_calling_back:
        return None
    called, hooks = override_of(model), tuple(model._forward_pre_hooks)
    executor._was_called = True
    executor.meter.forward_pass()
    executor.accumulation.begin_batch(lambda: any(map(_has_gradient, model.parameters())))
    executor._is_calling_back = True
    try:
        callback(executor, args, kwargs)
    finally:
        executor._is_calling_back = False
    executor.replace_own_checkpointing()
    if called is not None:
        called.redirect_next_call(override_of(model))
    if tuple(model._forward_pre_hooks) == hooks:
        return None
    # The model's other hooks were replaced, and torch goes on with the old ones in this call.
    brought = _inputs_to_device(model, args, kwargs)
    args, kwargs = brought or (args, kwargs)
    return next((hook(model, args, kwargs) for hook in _no_cache_of(model)), None) or brought


def _is_trained(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call has gradients to compute: of the model, or of what it is given."""
    if any(each.requires_grad for each in model.parameters()):
        return True
    return any(each.requires_grad for each in Tree.of((args, kwargs)).tensors())


def _no_cache_of(module: nn.Module) -> list[NoCache]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, NoCache)]


class _PartCall:
    """Notes the calls of a part of the model, as a forward pre-hook. See Note [Called parts]."""

    def __init__(self, executor: Executor, name: str) -> None:
        self._executor = weakref.ref(executor)
        self._name = name

    @outside_compiler
    def __call__(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        executor = self._executor()
        if executor is None or kwargs is None or not torch.is_grad_enabled() or is_redirected(part):
            return None
        called = override_of(part)
        if not executor._note_part(self._name, part):
            return None
        changed = _before_forward(part, args, kwargs)
        if called is not None:
            called.redirect_next_call(override_of(part))
        return changed


def _has_gradient(weight: torch.Tensor) -> bool:
    return weight.is_leaf and weight.grad is not None  # torch warns of the gradient of a computed weight


def _inputs_to_device(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Copy the inputs of a call to where the model computes."""
    # torch calls it without kwargs if a hook before it has changed the plan, and so removed it; that hook has copied
    # the inputs itself.
    executor = executor_of(model)
    return None if executor is None or kwargs is None else bring_inputs(args, kwargs, executor.device)
