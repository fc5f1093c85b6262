"""Attention that is written out, handed to torch's own where that is the same function.

Models of Hugging Face have their attention in two forms and a setting that chooses. `"eager"` makes all scores, queries
× keys, and keeps two or three tensors of that size for backward; `"sdpa"` is torch's `scaled_dot_product_attention`,
whose kernels never have them whole. By structure: no class of that library is known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["AttentionHandedOver", "eager_attention"]

_SETTING = "_attn_implementation_internal"

# Settings of models that make eager attention another function than torch's.
_OTHER_FUNCTIONS = ("attn_logit_softcapping", "reorder_and_upcast_attn", "output_attentions")


def eager_attention(model: nn.Module) -> list[Any]:
    """The configurations inside a model that ask for eager attention and could ask for torch's."""
    found: dict[int, Any] = {}
    refused: set[int] = set()
    for module, config in _configured(model):
        found[id(config)] = config
        can_choose = getattr(type(module), "_can_set_attn_implementation", None)
        is_supported = (
            getattr(module, "_supports_sdpa", False) is True and callable(can_choose) and can_choose()
        )
        if not is_supported or any(getattr(config, name, None) for name in _OTHER_FUNCTIONS):
            refused.add(id(config))
    return [config for key, config in found.items() if key not in refused]


def _configured(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    for module in model.modules():
        config = getattr(module, "config", None)
        is_model = hasattr(type(module), "_supports_sdpa")  # a layer has the configuration of its model
        if is_model and getattr(config, "__dict__", {}).get(_SETTING) == "eager":
            yield module, config


class AttentionHandedOver:
    """A change of a model: its attention is torch's; see `memscale.techniques.undo_log.Change`.

    In a copy of the model it is about the copy's configuration, which is copied with it.
    """

    def __init__(self, configs: list[Any]) -> None:
        self._configs = configs
        for config in configs:
            vars(config)[_SETTING] = "sdpa"

    def undo(self) -> None:
        for config in self._configs:
            if vars(config).get(_SETTING) == "sdpa":
                vars(config)[_SETTING] = "eager"
        self._configs = []
