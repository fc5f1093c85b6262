"""A layer's function that notes its recomputations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memscale.observe.meter import Meter

__all__ = ["WatchedLayer"]


@dataclass(frozen=True)
class WatchedLayer:
    """A layer that is recomputed in backward.

    Attributes:
        meter: Counts it.
        name: The layer's name in the plan.
        flops: What computing it once more takes.
    """

    meter: Meter
    name: str
    flops: int

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A call of the layer: the first time it runs is forward, every other time is a recomputation.

        Example:
            >>> meter = Meter()
            >>> call = WatchedLayer(meter, "layer", 5).watched(abs)
            >>> call(-1), meter.recomputations(), call(-1), meter.recomputations()
            (1, {}, 1, {'layer': (1, 5)})
        """
        return _Watched(self, function)


class _Watched:
    __slots__ = ("_function", "_has_run", "_layer")

    def __init__(self, layer: WatchedLayer, function: Callable[..., Any]) -> None:
        self._layer = layer
        self._function = function
        self._has_run = False

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not self._has_run:
            self._has_run = True
            return self._function(*args, **kwargs)
        layer = self._layer
        layer.meter.recomputed(layer.name, layer.flops)
        with layer.meter.timing("recomputing"):  # it mostly ends early, by an exception
            return self._function(*args, **kwargs)
