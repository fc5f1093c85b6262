"""A model in all that can be told of it, to show that nothing has changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Same:
    """Equal to itself only, and kept alive, so that no other object can get its id."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__} at {id(self.value):#x}>"


def picture(value: Any) -> Any:
    """A value in all that can be told of it: containers opened, order included, all else by identity."""
    if isinstance(value, dict):
        return type(value), Same(value), [(key, picture(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [picture(inner) for inner in value]
    if isinstance(value, set):
        return type(value), Same(value), set(value)
    if isinstance(value, torch.Tensor):
        facts = (value.dtype, value.device, value.shape, value.stride(), value.requires_grad, value.is_leaf)
        # What comes back to an accelerator has other memory there.
        return Same(value), facts, Same(value.grad), value.data_ptr() if value.device.type == "cpu" else None
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if hasattr(value, "to_dict") and not isinstance(value, nn.Module):  # the configs of Hugging Face
        return Same(value), [(key, picture(inner)) for key, inner in vars(value).items()]
    return Same(value)


def pictures(model: nn.Module) -> dict[str, Any]:
    """Everything about a model and each of its modules."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        seen[f"{name}: class"] = type(module)
        seen[f"{name}: dict"] = [(key, picture(value)) for key, value in vars(module).items()]
        seen[f"{name}: forward"] = getattr(module, "forward", None) if "forward" in vars(module) else None
    seen["state"] = [(key, value.clone()) for key, value in model.state_dict().items()]
    seen["parameters"] = [(name, Same(parameter)) for name, parameter in model.named_parameters()]
    return seen


def assert_as_before(now: dict[str, Any], before: dict[str, Any], *, values: bool = True) -> None:
    now, before = dict(now), dict(before)
    state, old = now.pop("state"), before.pop("state")
    assert [key for key, _ in state] == [key for key, _ in old]
    assert not values or all(torch.equal(a, b) for (_, a), (_, b) in zip(state, old, strict=True))
    assert list(now) == list(before)
    for key in now:
        assert now[key] == before[key], key
