"""The engine of one model: made when it is first needed, and one for all that is moved for that model."""

from __future__ import annotations

import dataclasses
import os
import threading

from memscale.config import AsyncOffloadConfig, Config
from memscale.errors import ConfigError, shown
from memscale.execution_plan import Plan
from memscale.tiers.engine import AsyncEngine, Engine, SyncEngine
from memscale.tiers.pinned import PinnedPool

__all__ = ["ENVIRONMENT", "SharedEngine", "async_settings"]

_GRADIENTS_SHARE = 8  # of the page-locked memory, an eighth is for gradients on their way home
_GRADIENTS_BYTES = 256 * 2**20  # where its size is left to us


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
        self._pool: PinnedPool | None = None
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

    @property
    def pool(self) -> PinnedPool:
        """Page-locked memory for gradients on their way home."""
        with self._making:
            if self._pool is None:
                pinned = None if self._config is None else self._config.pinned_pool_bytes
                self._pool = PinnedPool(_GRADIENTS_BYTES if pinned is None else pinned // _GRADIENTS_SHARE)
            return self._pool

    def _make(self) -> Engine:
        config = self._config
        if config is None:
            return SyncEngine()
        pinned = config.pinned_pool_gb
        return AsyncEngine(
            dataclasses.replace(
                config,
                # A tier counts the layer that computes among its groups, and the user does not.
                prefetch_depth=self.depth + 1,
                pinned_pool_gb=None if pinned is None else pinned * (1 - 1 / _GRADIENTS_SHARE),
            )
        )

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.close()  # what was locked is unlocked before its memory goes

    def __getstate__(self) -> dict[str, object]:
        return {"config": self._config}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]


ENVIRONMENT = "MEMSCALE_ASYNC_OFFLOAD"
"""Set to 1, transfers overlap with compute wherever a Config does not say."""

_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def async_settings(plan: Plan, config: Config | None) -> AsyncOffloadConfig | None:
    """How transfers run beside the computation; None if they do not.

    What the user has set in the Config wins; else the environment or the plan can switch it on.

    Raises:
        ConfigError: The environment's variable is none of the words for yes and no.
    """
    config = config or Config()
    said = "async_offload" in config.explicit_fields
    wanted = config.async_offload if said else plan.async_offload or _environment_wants_it()
    return (config.async_config or AsyncOffloadConfig()) if wanted else None


def _environment_wants_it() -> bool:
    value = os.environ.get(ENVIRONMENT, "").strip().lower()
    if value not in (*_ON, *_OFF):
        raise ConfigError(
            f"{ENVIRONMENT}={shown(value)} in the environment is not allowed: set it to 1 or 0."
        )
    return value in _ON
