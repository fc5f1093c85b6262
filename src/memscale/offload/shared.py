"""The engine of one model: made when it is first needed, and one for all that is moved for that model."""

from __future__ import annotations

import dataclasses
import threading

from memscale.config import AsyncOffloadConfig
from memscale.offload.engine import AsyncEngine, Engine, SyncEngine

__all__ = ["SharedEngine"]


class SharedEngine:
    """Who moves the tensors of one model. A copy of the model, by ``deepcopy`` or pickle, makes an engine of its own.

    It is closed by being dropped: whoever still has something below, as a graph whose backward is to come, keeps it.

    Args:
        config: How transfers run beside the computation; None if they do not.

    Attributes:
        depth: How many layers ahead of the one that computes are fetched; 0 if none are.

    Example:
        >>> SharedEngine(None).is_async, SharedEngine(AsyncOffloadConfig(prefetch_depth=3)).depth
        (False, 3)
    """

    def __init__(self, config: AsyncOffloadConfig | None) -> None:
        self._config = config
        self.depth = 0 if config is None else config.prefetch_depth
        self._engine: Engine | None = None
        self._making = threading.Lock()

    @property
    def is_async(self) -> bool:
        return self._config is not None

    @property
    def engine(self) -> Engine:
        with self._making:
            if self._engine is None:
                self._engine = self._make()
            return self._engine

    def _make(self) -> Engine:
        if self._config is None:
            return SyncEngine()
        # A tier counts the layer that computes among its groups, and the user does not.
        return AsyncEngine(dataclasses.replace(self._config, prefetch_depth=self.depth + 1))

    def __getstate__(self) -> dict[str, object]:
        return {"config": self._config}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]
