"""The optimizer technique: state where the plan has it, and steps of parameters that are on the host.

It finds the optimizers of a model's parameters by itself, those that are built later included (``interceptor.py``).

Note [Steps of host masters]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch steps parameters on an accelerator by its ``foreach`` implementation, and those on a CPU, or some of each, by its
loop over them. So the master copies on the host of a model that computes on an accelerator are stepped in calls of
their own, and the parameters on the device keep their implementation. For the masters it is

- that of the device, with ``OptimizerPlan(host_step="device")`` (Note [Device twins]);
- else torch's *fused* CPU implementation for 32-bit parameters where the class has one (:data:`FUSED_ON_CPU`) and the
  user has set neither ``foreach`` nor ``fused``: one pass over memory, no temporaries, and about 4 times as fast as
  the loop (``benchmarks/host_step.py``). It rounds in other places: a step differs from the loop's by 2e-7 of the
  weights (their norms; ``tests/optimizer/test_host_steps.py`` compares both with 64 bits);
- else, or with ``Config(fused_host_step=False)``, what rounds as the device would have: ``foreach`` for the classes of
  :data:`FOREACH_DIFFERS`, with 16-bit parameters for those of :data:`FOREACH_DIFFERS_IN_16_BITS`, the loop for all
  others. In 16 bits a CPU's ``foreach`` itself rounds what CUDA's does not: :func:`memscale._torch.foreach_mul_`.

torch takes ``capturable=True`` on accelerators only, where it computes step sizes on the device, and so rounds in other
places. Masters of such groups are stepped as if it were not set, with ``lr`` as a number.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memscale._torch import (
    FOREACH_MUL,
    FUSED_CHECK,
    GRAD_SCALER_COPY,
    LightDispatchMode,
    foreach_mul_,
    takes_foreach,
    wait_for_copy,
)
from memscale.config import Config
from memscale.errors import TierFullError
from memscale.execution_plan import Plan, Tier
from memscale.optimizer.bucketed_steps import bytes_of_gradient
from memscale.optimizer.device_steps import DeviceSteps
from memscale.optimizer.eight_bit import is_dense, parameters_in_eight_bits, stored_layout
from memscale.optimizer.interceptor import (
    FOREACH_DIFFERS,
    FOREACH_DIFFERS_IN_16_BITS,
    STATE_NAMES,
    Member,
    NewState,
    StepOrder,
    StepSubscriber,
    arithmetic_of,
    is_fused_on_cpu,
    members_of,
    split_step,
    why_whole,
)
from memscale.optimizer.state_stores import DiskStateStore, HostStateStore, StateStore
from memscale.techniques.base import ModelSite
from memscale.tiers.disk import HOST
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.offload.placement import ModelPlacement
    from memscale.techniques.undo_log import UndoLog

DEFAULT_BUCKET_BYTES = 64 * 2**20
"""What is loaded at once where the plan does not say: large enough to be read and written in long runs."""

_SPARE_TIMES = 7  # a master with its gradient, two moments, and spare memory for all but the gradient
_SCALING = ("grad_scale", "found_inf")  # a `GradScaler` gives them to a fused optimizer, which does not wait
_STORES: dict[Tier, type[StateStore]] = {"device": StateStore, "host": HostStateStore, "disk": DiskStateStore}


class OptimizerState:
    """Keeps optimizer state as ``plan.optimizer`` says.

    Parameters on disk are stepped in buckets wherever their state is: their pages must not be in memory all at once.
    """

    def attach(self, site: ModelSite, log: UndoLog) -> None:
        states, wanted = site.placement.states, site.plan.optimizer
        bucket_bytes = (wanted.bucket_bytes if wanted else 0) or DEFAULT_BUCKET_BYTES
        on_device = wanted is not None and wanted.host_step == "device" and site.device.type != "cpu"
        site.placement.device_steps = (
            DeviceSteps(site.device, bucket_bytes, site.placement.pinned, site.meter) if on_device else None
        )
        eight_bit = parameters_in_eight_bits(site.model) if wanted is not None and wanted.eight_bit else []
        tier: Tier = "device" if wanted is None else wanted.state
        # Not masters on the host: their state is with them, and the step needs no memory of the device.
        on_disk = {id(each) for each in site.placement.on_disk}
        every = site.model.parameters()
        stepped = [each for each in every if each.device == site.device or id(each) in on_disk]
        if site.device.type == "cpu":
            in_buckets = tier == "disk" and takes_all_state(tier, site.config)
            in_buckets = in_buckets or (tier == "device" and wanted is not None and wanted.bucket_bytes > 0)
            beside: list[nn.Parameter] = []
        else:
            in_buckets = wanted is not None and (tier == "host" or wanted.bucket_bytes > 0)
            elsewhere = ids_with_state_on_host(site.model, site.plan) | on_disk
            beside = [each for each in stepped if id(each) not in elsewhere]
        if not in_buckets:
            stepped, beside = [each for each in stepped if id(each) in on_disk], []
        if not stepped and not eight_bit:
            states.restore()  # of a plan before this one
            self._overlap(site, log, [], bucket_bytes)
            return
        capacity = site.config.max_cpu_offload_bytes
        if capacity is not None:
            capacity = max(0, capacity - site.placement.bytes_on_host)
        store = states.store
        if type(store) is not _STORES[tier] or store.capacity != capacity:
            store = _STORES[tier](site.placement.store, capacity, site.placement.pinned)
        log.add(states)  # which keeps state where it is until the next plan, or `restore`
        states.attach(stepped, store, bucket_bytes, eight_bit=eight_bit, beside=beside, logs=site.logs)
        apart = {id(each) for each in beside} | on_disk
        stored = [each for each in stepped if id(each) not in apart] if tier == "host" else []
        self._overlap(site, log, stored, bucket_bytes)

    def _overlap(self, site: ModelSite, log: UndoLog, stored: list[nn.Parameter], bucket_bytes: int) -> None:
        """Have steps overlap with backward, or observe whether they could: of parameters with state on the host."""
        wanted, overlap = site.plan.optimizer, site.placement.states.overlap
        is_allowed = site.config.overlap_optimizer is not False and site.device.type != "cpu"
        masters = site.placement.host_masters(with_disk_bound=False)
        if masters and sum(_SPARE_TIMES * each.nbytes for each in masters) > site.placement.host_room():
            masters = []
        if wanted is None or not is_allowed or not (stored or masters):
            overlap.detach()
            return
        overlap.attach(
            [*stored, *masters],
            site.device,
            bucket_bytes,
            site.config.warmup_steps,
            computes=wanted.overlapped,
        )
        log.add_forward_pre_hook(site.model, overlap.before_forward)


def ids_with_state_on_host(model: nn.Module, plan: Plan) -> set[int]:
    """Return the ids of the parameters on an accelerator whose state the plan has in host memory."""
    wanted = plan.optimizer
    if wanted is None or wanted.state != "host":
        return set()
    modules = [model]
    if wanted.layers:
        members = [name for layer in plan.layers if layer.name in wanted.layers for name in layer.members]
        modules = [model.get_submodule(name) for name in members]
    return {id(parameter) for module in modules for parameter in module.parameters()}


def takes_all_state(tier: Tier, config: Config) -> bool:
    """Return whether the state of all parameters is kept on a tier, or only of those that are there themselves.

    Under a cap on the disk, only what the planner counts goes there.
    """
    return tier != "disk" or config.max_disk_offload_bytes is None


class PlacementSteps(StepSubscriber):
    """Makes the optimizers of placed parameters follow them."""

    order = StepOrder.PLACEMENT

    def __init__(self, placement: ModelPlacement) -> None:
        self._placement = weakref.ref(placement)
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that have stepped the parameters

    def subscribe(self) -> None:
        super().subscribe()
        GRAD_SCALER_COPY.subscribe(wait_for_copy, self)

    def unsubscribe(self) -> None:
        GRAD_SCALER_COPY.unsubscribe(wait_for_copy, self)
        super().unsubscribe()

    def find_optimizers(self) -> None:
        """Note the optimizers of the parameters that have not made a step yet.

        Adagrad has state when it is built, others when it was loaded: both where the parameters were then. torch has
        no list of optimizers, so that the garbage collector's is searched, once, when parameters move back.
        """
        for each in gc.get_objects():
            # `param_groups`: not one whose `__init__` has raised.
            if issubclass(type(each), Optimizer) and "param_groups" in vars(each) and self.concerns(each):
                self.optimizers.add(each)

    def parameter_ids(self) -> Container[int]:
        placement = self._placement()
        return () if placement is None else placement.parameter_ids()

    def before_step(self, optimizer: Optimizer) -> None:
        self.optimizers.add(optimizer)
        self.follow(optimizer)
        placement = self._placement()
        if placement is not None:
            check_room(optimizer, placement)

    def around_arithmetic(self, call: Callable[[], Any], optimizer: Optimizer) -> None:
        placement = self._placement()
        if placement is None or placement.device is None:
            call()
            return
        calls, twins = defaultdict[tuple[str, bool], list[Member]](list), list[Member]()
        on_device, states = placement.device_steps, placement.states
        masters = {id(each) for each in placement.host_masters()} if on_device else set()
        for member in members_of(optimizer):
            if (
                on_device is not None
                and id(member.parameter) in masters
                and not states.quantizes(optimizer, member.parameter)
                and on_device.can_step(optimizer, member)
            ):
                twins.append(member)
            else:
                calls[self._implementation_of(member, optimizer, placement)].append(member)
        with split_step(optimizer) as split:
            if on_device and twins and not on_device.run(optimizer, twins, split, call):
                for member in twins:
                    calls[self._implementation_of(member, optimizer, placement)].append(member)
            for (implementation, _), members in calls.items():
                if twins or len(calls) > 1:
                    split.show(members)
                with _implementation(implementation, optimizer, placement.device):
                    call()

    def _implementation_of(
        self, member: Member, optimizer: Optimizer, placement: ModelPlacement
    ) -> tuple[str, bool]:
        """Return by what to step a parameter where it is, and what else must be equal of those in one call."""
        parameter = member.parameter
        is_placed = id(placement.states.whole_of(parameter)) in placement.parameter_ids()
        if not is_placed or parameter.device != HOST or placement.device == HOST:
            return "device", False
        group = optimizer.param_groups[member.group]
        if not (placement.fused_host_step and _takes_fused(optimizer, group, parameter)):
            return "host", False
        # Fused SGD takes momentum of all parameters, or of none.
        return "fused", optimizer.state.get(parameter, {}).get("momentum_buffer") is None

    def follow(self, optimizer: Optimizer, *, unlock: bool = False) -> None:
        """Move an optimizer's state to where its parameters are now, with `unlock` out of page-locked memory.

        As in `Optimizer.load_state_dict`, counters follow to an accelerator only where the implementation wants them
        there. They never stay on one that their parameter has left.
        """
        placement = self._placement()
        if placement is None:
            return
        ids = placement.parameter_ids()
        for member in members_of(optimizer):
            parameter, group = member.parameter, optimizer.param_groups[member.group]
            state = optimizer.state.get(parameter, {}) if id(parameter) in ids else {}
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                if value.device == parameter.device:
                    if unlock and value.device == HOST and value.is_pinned():
                        state[name] = value.clone()
                    continue
                counts_on_device = group.get("fused") or group.get("capturable")
                is_counter = name in ("step", "mu_product")
                stays = is_counter and parameter.device != HOST and not counts_on_device
                if not stays and not placement.states.is_stored(value):
                    state[name] = value.to(parameter.device)


def _takes_fused(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> bool:
    """Return whether a parameter on the host can be stepped by torch's fused implementation.

    On a CPU that goes through the memory of all operands in the same order, whatever their strides are, and computes
    something else in 16 bits (SGD; tried on 2.13).
    """
    state = optimizer.state.get(parameter, {})
    moments = [value for name, value in state.items() if name in STATE_NAMES and isinstance(value, Tensor)]
    operands = [parameter, *moments] if parameter.grad is None else [parameter, parameter.grad, *moments]
    return (
        is_fused_on_cpu(optimizer, group)
        and parameter.dtype in (torch.float32, torch.float64)
        and all(each.layout is torch.strided and each.dtype is parameter.dtype for each in operands)
        and all(each.stride() == parameter.stride() for each in operands)
        and is_dense(parameter)
    )


@contextlib.contextmanager
def _implementation(kind: str, optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Step what the groups hold by an implementation, "device", "fused" or "host": Note [Steps of host masters]."""
    setting, groups, rounds = kind, [], False
    if kind == "fused":
        groups = list(optimizer.param_groups)
    elif kind == "host":
        setting, parameters = "foreach", [member.parameter for member in members_of(optimizer)]
        has_16_bits = any(each.dtype.itemsize == 2 for each in parameters)
        differs = FOREACH_DIFFERS_IN_16_BITS if has_16_bits else FOREACH_DIFFERS
        if arithmetic_of(type(optimizer)) in differs and takes_foreach(
            {device.type}, {*map(type, parameters)}
        ):
            groups = [group for group in optimizer.param_groups if group["foreach"] is None]
        by_foreach = groups or any(group.get("foreach") for group in optimizer.param_groups)
        rounds = has_16_bits and bool(by_foreach)
    captured = [group for group in optimizer.param_groups if kind != "device" and group.get("capturable")]
    rates = [group["lr"] for group in captured]
    has_check = FUSED_CHECK in vars(optimizer)
    scaling = [(name, vars(optimizer).get(name)) for name in _SCALING] if kind != "device" else []
    try:
        for name, value in scaling:
            if isinstance(value, Tensor):
                setattr(optimizer, name, value.cpu())
        for group in groups:
            group[setting] = True
        for group in captured:
            group.update(capturable=False, lr=float(group["lr"]))
        with _DeviceRounding() if rounds else contextlib.nullcontext():
            yield
    finally:
        for name, value in scaling:
            if isinstance(value, Tensor):
                setattr(optimizer, name, value)
        for group in groups:
            group[setting] = None
        for group, rate in zip(captured, rates, strict=True):
            group.update(capturable=True, lr=rate)
        if kind == "fused" and not has_check:
            vars(optimizer).pop(FUSED_CHECK, None)


class _DeviceRounding(LightDispatchMode):
    """Make the CPU's ``foreach`` round as CUDA's does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FOREACH_MUL and args[0][0].device.type == "cpu":
            return foreach_mul_(*args)
        return func(*args, **(kwargs or {}))


def check_room(optimizer: Optimizer, placement: ModelPlacement) -> None:
    """Raise if the state that a step is about to make for masters exceeds what the host has for it, or its cap.

    Raises:
        TierFullError: It does. Nothing was changed.
    """
    masters = placement.host_masters(with_disk_bound=False)
    if not masters or why_whole(optimizer) is not None:
        return  # what state it makes is not known
    with_gradient = {id(each) for each in masters if each.grad is not None}
    # Before a closure is evaluated there are none.
    ids = with_gradient or {id(each) for each in masters if each.requires_grad}
    new, layout = 0, NewState(optimizer)
    for member in members_of(optimizer):
        parameter, group = member.parameter, optimizer.param_groups[member.group]
        if id(parameter) in ids:
            quantized = placement.states.quantizes(optimizer, parameter)
            for name, like in layout.of(group, parameter).items():
                new += sum(part.nbytes for _, part in stored_layout(name, like, quantized=quantized))
    if not new:
        return
    capacity, used = placement.host_room(), 0
    for each in masters:
        gradient = each.nbytes if id(each) in ids else bytes_of_gradient(each.grad)
        used += each.nbytes + gradient + _tensor_bytes(optimizer.state.get(each))
    if used + new > capacity:
        raise TierFullError(
            f"This step of {type(optimizer).__name__} was not made, and no parameter was changed: its state needs "
            f"{format_bytes(new)} of host memory beside {format_bytes(used)} of parameters and gradients, and "
            f"{'free' if placement.host_capacity is None else 'the cap'} is {format_bytes(capacity)}. Raise "
            "Config(max_cpu_offload_gb=...), or give the optimizer to memscale.wrap(model, optimizer=optimizer), so "
            "that the plan reckons with its state."
        )


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    return value.nbytes if isinstance(value, Tensor) else 0
