"""Which optimizers can be stepped a few parameters at a time, and why the others can't.

Most optimizers treat every parameter by itself: its new value depends on its gradient, its own state and its
group's settings. Some look at all parameters at once. Those that can be recognised are left alone:

- by name, the ones that are known (:data:`COUPLED`), and by class, the ones that were registered;
- a step that needs its closure, because it evaluates it as often as it likes;
- one that holds another optimizer, or parameters or state in lists of its own;
- one that clips by the norm of all gradients.

No test finds a coupling that an optimizer keeps to itself, such as a mean over a group that it computes in
between. For such a class there is :func:`register_coupled`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["COUPLED", "register_coupled", "why_left_alone"]

_GLOBAL_ESTIMATE = "it estimates one step size from all parameters together"
_GLOBAL_NORM = "it scales by the norm of all gradients together"
_OWN_PLACEMENT = "it places the state of its parameters itself"

# By the name of the class or of one that it derives from: most of these are not installed where this runs.
COUPLED: Mapping[str, str] = {
    "LBFGS": "its direction and step length come from all parameters together",
    "SAM": "it moves all parameters and evaluates the loss again within a step",
    "Prodigy": _GLOBAL_ESTIMATE,
    "DAdaptAdaGrad": _GLOBAL_ESTIMATE,
    "DAdaptAdam": _GLOBAL_ESTIMATE,
    "DAdaptAdan": _GLOBAL_ESTIMATE,
    "DAdaptLion": _GLOBAL_ESTIMATE,
    "DAdaptSGD": _GLOBAL_ESTIMATE,
    "FusedLAMB": _GLOBAL_NORM,
    "Lamb": _GLOBAL_NORM,
    "NVLamb": _GLOBAL_NORM,
    "ZeroRedundancyOptimizer": _OWN_PLACEMENT,
    "DistributedOptimizer": _OWN_PLACEMENT,
    "PostLocalSGDOptimizer": "its steps take the parameters' average over processes",
    "DeepSpeedCPUAdam": _OWN_PLACEMENT,
    "CPUOffloadOptimizer": _OWN_PLACEMENT,
}

_registered: weakref.WeakKeyDictionary[type[Optimizer], str] = weakref.WeakKeyDictionary()

# What every optimizer has; looking into it says nothing about this one.
_COMMON = frozenset({"defaults", "state", "param_groups"})


def register_coupled(kind: type[Optimizer], reason: str) -> None:
    """Say that this class (and what derives from it) looks at all parameters at once: it is then left alone.

    Example:
        >>> class Centred(torch.optim.SGD):
        ...     pass
        >>> register_coupled(Centred, "it subtracts the mean of all gradients")
        >>> why_left_alone(Centred([torch.nn.Parameter(torch.ones(2))], lr=0.1))
        'it subtracts the mean of all gradients'
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"register_coupled takes a class of optimizers, got {kind!r}.")
    _registered[kind] = reason


def why_left_alone(optimizer: Optimizer) -> str | None:
    """Why this optimizer's steps can't be split by parameters, or None if they can."""
    for kind in type(optimizer).__mro__:
        reason = COUPLED.get(kind.__name__)
        if issubclass(kind, Optimizer):
            reason = _registered.get(kind, reason)
        if reason is not None:
            return reason
    return _by_signature(type(optimizer)) or _by_settings(optimizer) or _by_attributes(optimizer)


def _by_signature(kind: type[Optimizer]) -> str | None:
    taken = list(inspect.signature(kind.step).parameters.values())[1:]
    for parameter in taken:
        optional = parameter.default is not parameter.empty
        several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not optional and not several:
            return f"its step can't do without {parameter.name!r}"
    return None


def _by_settings(optimizer: Optimizer) -> str | None:
    for settings in (optimizer.defaults, *optimizer.param_groups):
        if settings.get("differentiable"):
            return "differentiable=True: gradients flow through its state"
        # Adan, Lamb and others: over all groups, not in each.
        if settings.get("max_grad_norm"):
            return f"max_grad_norm={settings['max_grad_norm']}: {_GLOBAL_NORM}"
    if type(optimizer).__module__.startswith("bitsandbytes"):
        # Overrides are found by a parameter's position in its group, which a bucket changes.
        manager = getattr(optimizer, "mng", None)
        if getattr(manager, "module_weight_config_triple", None):
            return "some of its modules have settings of their own, by position in the group"
    return None


def _by_attributes(optimizer: Optimizer) -> str | None:
    attributes = vars(optimizer)
    if attributes.get("param_groups") is not optimizer.param_groups:
        return "its groups are another object's"
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {id(parameter) for parameter in parameters}
    shapes = {parameter.shape for parameter in parameters if parameter.dim()}
    if type(optimizer).__module__.startswith("bitsandbytes"):
        shapes = set()  # its tables of quantiles may be as large as a parameter
    for name, value in attributes.items():
        if name in _COMMON:
            continue
        if isinstance(value, Optimizer):
            return f"it wraps another optimizer ({name}: {type(value).__name__}), whose own step is looked at"
        for each in _elements(value):
            if isinstance(each, Optimizer):
                return f"it wraps other optimizers ({name}), whose own steps are looked at"
            if isinstance(each, torch.Tensor) and id(each) in own:
                return f"it keeps parameters of its own beside its groups ({name})"
            if isinstance(each, torch.Tensor) and each.shape in shapes:
                return f"it keeps state of its own beside optimizer.state ({name})"
    return None


def _elements(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()  # keyed by parameters it only says something about them
    return value if isinstance(value, (list, tuple, set, frozenset)) else ()
