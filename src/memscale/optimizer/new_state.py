"""The state that a step of torch.optim is about to make: which tensors, before there are any.

Asked of the optimizer's own arithmetic: it steps one small parameter of as many dimensions, with the group's
settings (``amsgrad``, ``momentum``, ``centered``, ...), and the state of that is scaled to the real one.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memscale._torch import disable_current_modes
from memscale.optimizer.kinds import arithmetic_of

__all__ = ["NewState", "step_alone"]

_LENGTHS = (2, 3, 5, 7, 11, 13, 17, 19)  # of a small parameter's dimensions: no two are equal
_IMPLEMENTATION = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}


class NewState:
    """Says what state the next step makes.

    Args:
        optimizer: One whose arithmetic is torch.optim's, and splits (``why_whole``).

    Example:
        >>> weight = nn.Parameter(torch.ones(64, 32))
        >>> optimizer = torch.optim.AdamW([weight], amsgrad=True)
        >>> layout = NewState(optimizer).of(optimizer.param_groups[0], weight)
        >>> sorted(layout), layout["exp_avg"].shape, layout["exp_avg"].device.type
        (['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq'], torch.Size([64, 32]), 'meta')
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[Any, dict[str, tuple[tuple[bool, ...], torch.dtype]]] = {}

    def of(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """Return the tensors that a step makes for this parameter, by name, on the meta device; counters are left out.

        Args:
            group: The parameter's.
            parameter: The parameter; a gradient that it does not have is taken to be dense.
        """
        state = self._optimizer.state.get(parameter)
        if state and all(value is not None for value in state.values()):
            return {}
        shapes = tuple(min(size, length) for size, length in zip(parameter.shape, _LENGTHS, strict=False))
        if len(shapes) < parameter.dim():
            raise ValueError(f"a parameter of {parameter.dim()} dimensions, more than {len(_LENGTHS)}")
        sparse = parameter.grad is not None and parameter.grad.layout is torch.sparse_coo
        key = (id(group), shapes, parameter.dtype, sparse)
        if key not in self._known:
            small = torch.ones(shapes, dtype=parameter.dtype, device="cpu")
            gradient = small.to_sparse(1) if sparse else small.clone()
            self._known[key] = dict(self._tried(group, small, gradient))
        return {
            name: _scaled(parameter, whole, dtype)
            for name, (whole, dtype) in self._known[key].items()
            if not state or state.get(name) is None
        }

    def _tried(
        self, group: dict[str, Any], small: Tensor, gradient: Tensor
    ) -> Iterator[tuple[str, tuple[tuple[bool, ...], torch.dtype]]]:
        """Step a small parameter; for each state tensor, which of the parameter's dimensions it has."""
        owner = arithmetic_of(type(self._optimizer))
        assert owner is not None, "the arithmetic is not torch's"
        parameter = nn.Parameter(small)
        parameter.grad = gradient
        settings = {**group, **{name: value for name, value in _IMPLEMENTATION.items() if name in group}}
        with disable_current_modes():
            state = step_alone(owner, self._optimizer, settings, [parameter])
        for name, value in state[parameter].items():
            if isinstance(value, Tensor) and value.dim():
                if value.dim() != small.dim() or any(
                    size not in (1, own) for size, own in zip(value.shape, small.shape, strict=True)
                ):
                    raise ValueError(f"state {name!r} of {tuple(value.shape)} for {tuple(small.shape)}")
                yield name, (tuple(map(int.__eq__, value.shape, small.shape)), value.dtype)


def step_alone(
    owner: type[Optimizer],
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameters: Sequence[nn.Parameter],
    state: dict[Any, Any] | None = None,
) -> dict[Any, Any]:
    """Step other parameters by an optimizer's arithmetic, with one of its groups' settings; nobody hears of it.

    Args:
        owner: The class of torch.optim whose arithmetic it is.
        optimizer: The optimizer, which is not changed.
        group: The group.
        parameters: What to step.
        state: What an earlier call has returned for them.

    Returns:
        Their state.
    """
    # Not by its __init__, by which torch wraps the step of the class: hooks of a subclass would run twice.
    other = owner.__new__(owner)
    settings = {name: 0.01 if isinstance(value, Tensor) else value for name, value in group.items()}
    vars(other).update(
        defaults=dict(optimizer.defaults),
        state=defaultdict(dict) if state is None else state,
        param_groups=[{**settings, "params": list(parameters)}],
    )
    if owner is torch.optim.Adagrad and state is None:
        for parameter in parameters:  # made when the optimizer is
            counter = torch.tensor(0.0)
            other.state[parameter] = {
                "step": counter,
                "sum": torch.zeros_like(parameter, requires_grad=False),
            }
    with torch.no_grad():
        inspect.unwrap(owner.step)(other)
    made: dict[Any, Any] = other.state
    return made


def _scaled(parameter: Tensor, whole: tuple[bool, ...], dtype: torch.dtype) -> Tensor:
    if all(whole):
        return torch.empty_like(parameter, dtype=dtype, device="meta")
    shape = [size if has else 1 for size, has in zip(parameter.shape, whole, strict=True)]
    return torch.empty(shape, dtype=dtype, device="meta")
