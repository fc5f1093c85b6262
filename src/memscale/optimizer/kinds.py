"""What is known of the classes of torch.optim: which can be split, sliced, kept in 8 bits, and what state they make.

Note [Whose arithmetic is split]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The classes in :data:`ONE_BY_ONE` treat every parameter by itself: its new value depends on its gradient, its own
state and its group's settings, and they count nothing for a group or the optimizer. Calling their ``step`` for some
parameters, and then for the others, gives the same bits as one call for all.

Any other ``step`` may scale by the norm of all gradients, count its calls or update a moving average of the model, and
no inspection or trial run would show all of that. So code that is not torch's is called once per step, with all
parameters, and its state stays where it makes it. If it calls torch's own (``super().step()``, or the step of an
optimizer that it wraps), then that call is split, and nothing around it.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from memscale._torch import HAS_WARNED_OF_CAPTURABLE, disable_current_modes

_ADAMS = (optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam)
_OTHERS = (optim.ASGD, optim.Adadelta, optim.Adagrad, optim.RMSprop, optim.Rprop, optim.SGD)

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset((*_ADAMS, *_OTHERS))
"""The classes that treat every element of a parameter by itself: they can step a slice of it."""

ONE_BY_ONE: tuple[type[Optimizer], ...] = (*_ADAMS, *_OTHERS, optim.Adafactor, optim.Muon, optim.SparseAdam)
"""All classes of torch.optim but LBFGS, whose direction and step length come from all parameters together."""

FUSED_ON_CPU = frozenset({optim.Adam, optim.SGD, optim.Adagrad})
"""Those that have a fused implementation for parameters on a CPU; AdamW's arithmetic is Adam's."""

FOREACH_DIFFERS = frozenset({optim.ASGD, optim.NAdam, optim.RAdam})
"""Those whose ``foreach`` implementation rounds differently from the loop over parameters."""

FOREACH_DIFFERS_IN_16_BITS = FOREACH_DIFFERS | {optim.Adagrad}  # it stores the quotient's numerator

_LEAVES_GRADIENTS = frozenset({optim.Adam, optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD})
"""Those whose ``foreach`` implementation computes nothing in the memory of gradients, nesterov left out."""

MOMENTS: Mapping[str, bool] = {
    "exp_avg": True,
    "exp_avg_sq": False,
    "max_exp_avg_sq": False,
    "momentum_buffer": True,
    "square_avg": False,
    "sum": False,
}
"""The names of state that can be kept in 8 bits, and whether it has a sign."""

STATE_NAMES = frozenset(MOMENTS) | frozenset(
    ("acc_delta", "ax", "col_var", "exp_inf", "grad_avg", "prev", "row_var", "step_size", "variance")
)
"""The names of all state that these classes keep, counters left out."""

# The classes that bitsandbytes has 8-bit versions of; AdamW's arithmetic is Adam's.
_EIGHT_BIT = (optim.Adam, optim.SGD, optim.RMSprop, optim.Adagrad)

_OWNERS = {inspect.unwrap(vars(kind)["step"]): kind for kind in ONE_BY_ONE if "step" in vars(kind)}


def arithmetic_of(kind: type[Optimizer]) -> type[Optimizer] | None:
    """Return the class of torch.optim whose step this class has, or can call by ``super()``; None if there is none."""
    for each in kind.__mro__:
        owner = _OWNERS.get(inspect.unwrap(vars(each)["step"])) if "step" in vars(each) else None
        if owner is not None:
            # torch's steps call this one for each group: overridden, it is somebody else's code.
            own, torchs = (inspect.unwrap(getattr(each, "_init_group", len)) for each in (kind, owner))
            return owner if own is torchs else None
    return None


def has_own_step(kind: type[Optimizer]) -> bool:
    """Return whether a class has a step that is not torch's own, whatever that calls."""
    owner = arithmetic_of(kind)
    return owner is None or inspect.unwrap(kind.step) is not inspect.unwrap(owner.step)


def why_whole(optimizer: Optimizer) -> str | None:
    """Return why this optimizer's arithmetic is not split, or None if it can be."""
    kind = type(optimizer)
    if arithmetic_of(kind) is None:
        if isinstance(optimizer, optim.LBFGS):
            return "its direction and step length come from all parameters together"
        return (
            "its step is not one of torch.optim's, which are known to treat parameters one by one, so that it is "
            "called once, with all of them"
        )
    if vars(optimizer).get("param_groups") is not optimizer.param_groups:
        return "its param_groups are another object's"
    if any(group.get("differentiable") for group in (optimizer.defaults, *optimizer.param_groups)):
        return "differentiable=True: gradients flow through its state"
    return None


def leaves_gradients(optimizer: Optimizer) -> bool:
    """Return whether a step of this optimizer leaves gradients as they are."""
    nesterov = any(group.get("nesterov") for group in optimizer.param_groups)
    return arithmetic_of(type(optimizer)) in _LEAVES_GRADIENTS and not nesterov


def is_fused_on_cpu(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether a group's parameters on a CPU can be stepped by torch's fused implementation, unless told so."""
    return (
        arithmetic_of(type(optimizer)) in FUSED_ON_CPU
        and not isinstance(group["lr"], Tensor)
        and group.get("foreach", False) is None
        and group.get("fused", False) is None
        and not group.get("capturable")
    )


def has_moments(optimizer: Optimizer) -> bool:
    """Return whether an optimizer keeps moments at all: SGD without momentum has no state."""
    return not isinstance(optimizer, optim.SGD) or any(
        group.get("momentum") for group in optimizer.param_groups
    )


def why_32_bits(optimizer: Optimizer) -> str | None:
    """Return why the moments of this optimizer stay in 32 bits, or None if they can be kept in 8."""
    if type(optimizer).__module__.startswith("bitsandbytes"):
        return "it keeps its state as it was told to itself"
    whole = why_whole(optimizer)
    if whole is None and arithmetic_of(type(optimizer)) not in _EIGHT_BIT:
        return "only Adam, AdamW, SGD, RMSprop, Adagrad and what derives from them are known to bear 8 bits"
    if any(group.get("centered") for group in optimizer.param_groups):
        return "centered=True takes the root of a difference, which coarse numbers would make negative"
    return whole


_LENGTHS = (2, 3, 5, 7, 11, 13, 17, 19)  # of a small parameter's dimensions: no two are equal
_IMPLEMENTATION = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}


class NewState:
    """Says which state tensors a step is about to make, before there are any.

    It asks the optimizer's own arithmetic, which steps one small parameter of as many dimensions with the group's
    settings (``amsgrad``, ``momentum``, ``centered``, ...), and scales the state of that to the real one.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[Any, dict[str, tuple[tuple[bool, ...], torch.dtype]]] = {}

    def of(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """Return the tensors that a step makes for this parameter, by name, on the meta device; counters are left out.

        A gradient that the parameter does not have is taken to be dense.
        """
        state = self._optimizer.state.get(parameter)
        if state and all(value is not None for value in state.values()):
            return {}
        # Of more than 8 dimensions, the others stay as they are.
        small = (*map(min, parameter.shape, _LENGTHS), *parameter.shape[len(_LENGTHS) :])
        sparse = parameter.grad is not None and parameter.grad.layout is torch.sparse_coo
        key = (id(group), small, parameter.dtype, sparse)
        if key not in self._known:
            ones = torch.ones(small, dtype=parameter.dtype, device="cpu")
            self._known[key] = self._state_of_small(group, ones, sparse)
        layout = {}
        for name, (kept, dtype) in self._known[key].items():
            if state and state.get(name) is not None:
                continue
            if all(kept):
                layout[name] = torch.empty_like(parameter, dtype=dtype, device="meta")
            else:  # Adafactor's rows and columns
                shape = [size if is_kept else 1 for size, is_kept in zip(parameter.shape, kept, strict=True)]
                layout[name] = torch.empty(shape, dtype=dtype, device="meta")
        return layout

    def _state_of_small(
        self, group: dict[str, Any], small: Tensor, sparse: bool
    ) -> dict[str, tuple[tuple[bool, ...], torch.dtype]]:
        """Step a small parameter; for each state tensor, which of the parameter's dimensions it has."""
        parameter = nn.Parameter(small)
        parameter.grad = small.to_sparse(1) if sparse else small.clone()
        settings = {**group, **{name: value for name, value in _IMPLEMENTATION.items() if name in group}}
        with disable_current_modes():
            state = step_alone(self._optimizer, settings, [parameter])
        return {
            name: (tuple(map(int.__eq__, value.shape, small.shape)), value.dtype)
            for name, value in state[parameter].items()
            if isinstance(value, Tensor) and value.dim()
        }


def step_alone(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameters: Sequence[nn.Parameter],
    state: dict[Any, Any] | None = None,
) -> dict[Any, Any]:
    """Step other parameters by an optimizer's arithmetic, with one of its groups' settings, and no hooks.

    Return their state, which another call can go on from. The optimizer is not changed.
    """
    owner = arithmetic_of(type(optimizer))
    assert owner is not None, "the arithmetic is not torch's"
    # Not by its __init__, by which torch wraps the step of the class: hooks of a subclass would run twice.
    other = owner.__new__(owner)
    settings = {name: 0.01 if isinstance(value, Tensor) else value for name, value in group.items()}
    setattr(other, HAS_WARNED_OF_CAPTURABLE, True)
    vars(other).update(
        defaults=dict(optimizer.defaults),
        state=defaultdict(dict) if state is None else state,
        param_groups=[{**settings, "params": list(parameters)}],
    )
    if owner is torch.optim.Adagrad and state is None:  # whose state is made when the optimizer is
        for parameter in parameters:
            new = torch.zeros_like(parameter, requires_grad=False)
            other.state[parameter] = {"step": torch.tensor(0.0, device="cpu"), "sum": new}
    with torch.no_grad():
        inspect.unwrap(owner.step)(other)
    made: dict[Any, Any] = other.state
    return made
