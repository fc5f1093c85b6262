"""`Config.observability_port`: a model's report on a port while its plan is attached."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memscale.report.prometheus import Server, Source

__all__ = ["Metrics"]

logger = logging.getLogger("memscale")


class Metrics:
    """Serve a model's report to Prometheus. A copy, by ``deepcopy`` or pickle, serves nothing.

    Args:
        port: The port; 0 for any free one, None for no server.
    """

    def __init__(self, port: int | None) -> None:
        self._port = port
        self._server: Server | None = None

    @property
    def url(self) -> str | None:
        """Return the address of the metrics; None if they are not served."""
        return None if self._server is None else self._server.url

    def begin(self, source: Source, *, logs: bool = True) -> None:
        """Serve the report, unless it is served already. What prevents it is logged, and training goes on."""
        if self._port is None or self._server is not None:
            return
        try:
            from memscale.report.prometheus import serve  # imports an HTTP server

            self._server = serve(source, self._port)
        except ImportError as error:
            if logs:
                logger.warning(
                    "No metrics on port %d: %s is not installed (pip install prometheus-client). "
                    "Training goes on without them.",
                    self._port,
                    error.name,
                )
            return
        except OSError as error:
            if logs:
                logger.warning(
                    "No metrics on port %d of the loopback interface (%s). Training goes on without them; give "
                    "another Config(observability_port=...), or 0 for any free one.",
                    self._port,
                    error.strerror or error,
                )
            return
        if logs:
            logger.info("metrics for Prometheus: %s", self.url)

    def end(self, source: Source) -> None:
        """Stop serving the report."""
        server, self._server = self._server, None
        if server is not None:
            server.remove(source)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None)  # type: ignore[misc]  # the port is the original's
