"""A model's numbers on a port, for as long as its plan is attached."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memscale.observe.server import Serving, Source

__all__ = ["Metrics"]

logger = logging.getLogger("memscale")


class Metrics:
    """What `Config.observability_port` asks for. A copy, by ``deepcopy`` or pickle, serves nothing.

    Args:
        port: The port; 0 for any that is free.
    """

    def __init__(self, port: int | None) -> None:
        self._port = port
        self._serving: Serving | None = None

    @property
    def url(self) -> str | None:
        """Where they are; None if they are not served."""
        return None if self._serving is None else self._serving.url

    def begin(self, source: Source, *, logs: bool = True) -> None:
        """Serve them, if they are not yet. A port that can't be had is logged, and nothing else."""
        if self._port is None or self._serving is not None:
            return
        from memscale.observe.server import HOST, serve  # not free to import

        try:
            self._serving = serve(source, self._port)
        except OSError as error:
            if logs:
                logger.warning(
                    "No metrics on port %d of %s (%s). Training goes on without them; give another "
                    "Config(observability_port=...), or 0 for any that is free.",
                    self._port,
                    HOST,
                    error.strerror or error,
                )
            return
        if logs:
            logger.info("metrics for Prometheus: %s", self.url)

    def end(self, source: Source) -> None:
        """Serve them no longer."""
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.close(source)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None)  # type: ignore[misc]  # the port is the original's
