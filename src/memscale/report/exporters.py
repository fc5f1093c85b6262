"""A model's report for dashboards: on a port for Prometheus, and as scalars for a TensorBoard writer."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from torch import nn

from memscale.errors import WrapError, WrapTypeError, shown
from memscale.executor import Executor, executor_of
from memscale.observe.report import Report

if TYPE_CHECKING:
    from prometheus_client.core import Metric

HOST = "127.0.0.1"
TIMEOUT = 10.0  # seconds in which a request must be made and answered
PREFIX = "memscale/"

logger = logging.getLogger("memscale")


class Metrics:
    """Serve a model's report to Prometheus while its plan is attached, on a port; 0 for any free one, None for none."""

    def __init__(self, port: int | None) -> None:
        self._port = port
        self._server: _Server | None = None

    @property
    def url(self) -> str | None:
        """Return the address of the metrics; None if they are not served."""
        return None if self._server is None else f"http://{HOST}:{self._server.port}/metrics"

    def begin(self, source: Executor, *, logs: bool = True) -> None:
        """Serve the report, unless it is served already. What prevents it is logged, and training goes on."""
        if self._port is None or self._server is not None:
            return
        try:
            with _lock:
                server = next((each for each in _servers if self._port in each.ports), None)
                if server is None:
                    server = _Server(self._port)
                    _servers.append(server)
                server.add(source)
        except (ImportError, OSError) as error:
            if isinstance(error, ImportError):
                problem = f"{error.name} is not installed (pip install prometheus-client)"
            else:
                reason = error.strerror or error
                problem = f"{reason}; give another Config(observability_port=...), or 0 for any free one"
            if logs:
                logger.warning("No metrics on port %d, training goes on: %s.", self._port, problem)
            return
        self._server = server
        if logs:
            logger.info("metrics for Prometheus: %s", self.url)

    def end(self, source: Executor) -> None:
        """Stop serving the report. The port is free when this returns, if no other model is on it."""
        server, self._server = self._server, None
        if server is not None:
            server.remove(source)


_servers: list[_Server] = []
_lock = threading.Lock()  # of the servers and their sources


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    """Closes a connection whose request is not made and answered in `TIMEOUT` seconds, as it holds a thread."""

    def handle(self) -> None:
        deadline = threading.Timer(TIMEOUT, self._close)
        deadline.daemon = True
        deadline.start()
        try:
            with contextlib.suppress(OSError):  # the client has gone away, or was closed
                super().handle()
        finally:
            deadline.cancel()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # it has just been answered
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class _Server:
    """One port, however many models share it, on the loopback interface only, until the last of them is gone."""

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        self._sources: list[weakref.ref[Executor]] = []
        registry = CollectorRegistry()
        registry.register(self)  # it calls `collect`
        self._http = make_server(HOST, port, make_wsgi_app(registry), _ThreadingServer, _Handler)
        self.port: int = self._http.server_port
        self.ports = {port, self.port}  # asked for (0 for any), and had
        name = f"memscale-metrics-{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, name=name, daemon=True)
        self._thread.start()

    def add(self, source: Executor) -> None:
        """Serve a model's report as well; the caller holds the lock."""
        self._sources.append(weakref.ref(source, self._on_dropped))

    def remove(self, source: Executor | None = None) -> None:
        """Stop serving a model's report, and those of models that are gone; close the port after the last."""
        with _lock:
            self._sources = [each for each in self._sources if each() not in (None, source)]
            if self._sources or self not in _servers:
                return
            _servers.remove(self)
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()

    def _on_dropped(self, reference: weakref.ref[Executor]) -> None:
        # The garbage collector may be running in a thread that holds the lock, or in the server's own.
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
            threading.Thread(target=self.remove, name="memscale-metrics-close", daemon=True).start()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; prometheus_client calls this for each request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for model, report in self._named_reports().items():
            for name, labels, number in _samples(report):
                if number is not None:
                    if name not in families:
                        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                        families[name] = kind(f"memscale_{name}", _HELP[name], labels=("model", *labels))
                    families[name].add_metric([model, *labels.values()], number)
        yield from families.values()

    def _named_reports(self) -> dict[str, Report]:
        """Return the reports by the names of their models; those of one class are told apart by a number."""
        seen: Counter[str] = Counter()
        reports = {}
        for source in [reference() for reference in self._sources]:
            with contextlib.suppress(WrapError):  # its model was dropped meanwhile
                if source is not None:
                    report = source.report()
                    seen[report.model] += 1
                    number = seen[report.model]
                    reports[report.model if number == 1 else f"{report.model}#{number}"] = report
        return reports


_HELP = {
    "predicted_peak_bytes": "Peak of a training step by the plan (predicted).",
    "allowance_bytes": "What a step may need beyond the predicted peak.",
    "forward_passes_total": "Forward passes in training.",
    "backward_passes_total": "Backward passes of the model.",
    "recomputations_total": "Layers computed again in backward.",
    "recompute_flops_total": "Recomputations times their profiled FLOPs.",
    "disk_bytes": "Bytes on disk now.",
    "observed_peak_bytes": "Most memory in use since the plan was attached (measured).",
    "moved_bytes_total": "Bytes read from and written to the tier that they are kept on.",
    "lost_seconds_total": "Time lost to each technique (measured).",
}


def _samples(report: Report) -> Iterator[tuple[str, dict[str, str], float | None]]:
    """Yield each metric with its labels besides `model` and its number."""
    for name in tuple(_HELP)[:7]:
        yield name, {}, getattr(report, name.removesuffix("_total"))
    yield "observed_peak_bytes", {"of": report.observed_peak_kind}, report.observed_peak_bytes
    for each in report.moved:
        labels = {"what": each.what, "tier": each.tier}
        yield "moved_bytes_total", {**labels, "direction": "read"}, each.read_bytes
        yield "moved_bytes_total", {**labels, "direction": "written"}, each.written_bytes
    for lost in report.lost:
        yield "lost_seconds_total", {"technique": lost.to}, lost.seconds


class Writer(Protocol):
    """What is used of a ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None, /) -> Any:
        """Note a number at a step."""


def log_scalars(model: nn.Module, writer: Writer, step: int | None = None) -> dict[str, float]:
    """Write what a wrapped model's plan has done so far to a TensorBoard writer, and return what was written.

    All counts are totals since ``wrap``; what is not known (a peak that was higher before) is left out.

    Args:
        model: a model that is wrapped.
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or another with ``add_scalar(tag, value, step)``.
        step: where on the axis; by default the forward passes that were counted.

    Raises:
        WrapError: the model is not wrapped.
        WrapTypeError: ``model`` is no module, or ``writer`` has no ``add_scalar``.

    Example:
        >>> import memscale, torch
        >>> class Printer:
        ...     def add_scalar(self, tag, value, step):
        ...         if tag == "memscale/forward_passes":
        ...             print(tag, value, step)
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> model = memscale.wrap(model, memscale.Config(enable_logging=False), torch.ones(2, 4))
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> written = log_scalars(model, Printer())
        memscale/forward_passes 1 1
        >>> memscale.detach(model)
    """
    if not isinstance(model, nn.Module):
        raise WrapTypeError(f"log_scalars takes the wrapped nn.Module first, got {shown(model, 60)}.")
    if not callable(getattr(writer, "add_scalar", None)):
        raise WrapTypeError(
            f"log_scalars takes a writer with add_scalar(tag, value, step), got {shown(writer, 60)}."
        )
    executor = executor_of(model)
    if executor is None:
        name = type(model).__name__
        raise WrapError(f"{name} is not wrapped: there is nothing to log. Call memscale.wrap(model) first.")
    report = executor.report()
    written = {f"{PREFIX}{name}": value for name, value in report.scalars().items()}
    at = report.forward_passes if step is None else step
    for tag, value in written.items():
        writer.add_scalar(tag, value, at)
    return written
