"""An HTTP server that Prometheus reads the reports of this process's models from.

One server per port, however many models share it, on the loopback interface only. The format is
`prometheus_client`'s; the server is ours because it must end with the last of its models.
"""

from __future__ import annotations

import contextlib
import logging
import socketserver
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from memscale.errors import WrapError
from memscale.report.report import Report

__all__ = ["HOST", "Server", "Source", "metrics_text", "serve"]

HOST = "127.0.0.1"
POLL_SECONDS = 0.1  # between two checks whether a model is left
CLIENT_TIMEOUT_SECONDS = 5.0  # a client that sends nothing for so long is disconnected

logger = logging.getLogger("memscale")


class Source(Protocol):
    """Something with a report, such as an executor."""

    def report(self) -> Report:
        """Return what it has done so far."""


def metrics_text(reports: Sequence[Report]) -> str:
    """Return reports in Prometheus's text format; models of one class are told apart by a number.

    Example:
        >>> from memscale.execution_plan import Plan
        >>> from memscale.observe.meter import Meter
        >>> report = Report.of(Plan((), predicted_peak_bytes=7), Meter(), model="Net", device="cpu")
        >>> print(metrics_text([report]).splitlines()[2])
        memscale_predicted_peak_bytes{model="Net"} 7.0
    """
    registry = CollectorRegistry()
    registry.register(_Reports(lambda: reports))
    return generate_latest(registry).decode()


def serve(source: Source, port: int) -> Server:
    """Serve a model's report on a port; 0 means any free one, shared by all models that ask for 0.

    Raises:
        OSError: The port is taken.
    """
    with _lock:
        server = next((each for each in _servers if port in (each.requested_port, each.port)), None)
        if server is None:
            server = Server(port)
            _servers.append(server)
        server.add(source)
        server.start()
    return server


class Server:
    """A thread that answers on a port until its last model is removed or garbage-collected."""

    def __init__(self, port: int) -> None:
        self.requested_port = port
        self._sources: list[weakref.ref[Source]] = []
        registry = CollectorRegistry()
        registry.register(_Reports(self._reports))
        self._http = _LoopbackServer((HOST, port), _Handler)
        self._http.set_app(make_wsgi_app(registry))
        self._http.timeout = POLL_SECONDS
        self.port: int = self._http.server_address[1]
        self._thread = threading.Thread(target=self._run, name=f"memscale-metrics-{self.port}", daemon=True)

    @property
    def url(self) -> str:
        """Return the address that Prometheus reads."""
        return f"http://{HOST}:{self.port}/metrics"

    def add(self, source: Source) -> None:
        """Serve a model's report as well; the caller holds the lock of the servers."""
        self._sources = [*self._sources, weakref.ref(source)]

    def start(self) -> None:
        """Start answering, unless it does already."""
        if self._thread.ident is None:
            self._thread.start()

    def remove(self, source: Source) -> None:
        """Stop serving a model's report. The port is free when this returns, if the model was the last."""
        with _lock:
            self._sources = [each for each in self._sources if each() not in (None, source)]
            is_last = not self._sources
        if is_last:
            self.join()

    def join(self) -> None:
        """Wait until the port is closed."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with _lock:  # nobody adds a model between the check and the removal
                if not any(each() is not None for each in self._sources):
                    _servers.remove(self)
                    break
            self._http.handle_request()
        self._http.server_close()

    def _reports(self) -> list[Report]:
        reports = []
        for reference in self._sources:
            source = reference()
            if source is not None:
                with contextlib.suppress(WrapError):  # its model was dropped while it was asked
                    reports.append(source.report())
        return reports


_servers: list[Server] = []
_lock = threading.Lock()


class _LoopbackServer(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(
            self
        )  # without the look-up of the host's name, which may take seconds
        self.server_name, self.server_port = HOST, self.server_address[1]
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("metrics: " + format, *args)


class _Reports(Collector):
    """Turn reports into metrics whenever Prometheus asks."""

    def __init__(self, reports: Any) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        seen: Counter[str] = Counter()
        named = []
        for report in self._reports():
            seen[report.model] += 1
            number = seen[report.model]
            named.append((report.model if number == 1 else f"{report.model}#{number}", report))
        for metric, labels, samples in _METRICS:
            family = _family(metric, labels)
            for model, report in named:
                for *values, number in samples(report):
                    if number is not None:
                        family.add_metric([model, *values], number)
            if family.samples:
                yield family


def _family(metric: tuple[str, str], labels: tuple[str, ...]) -> GaugeMetricFamily | CounterMetricFamily:
    name, help_text = metric
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(f"memscale_{name}", help_text, labels=("model", *labels))


# Name and help text, labels besides `model`, and what a report has for each: the labels' values, then the number.
_METRICS: tuple[tuple[tuple[str, str], tuple[str, ...], Any], ...] = (
    (
        ("predicted_peak_bytes", "Peak of a training step by the plan (predicted)."),
        (),
        lambda r: [(r.predicted_peak_bytes,)],
    ),
    (
        ("allowance_bytes", "What a step may need beyond the predicted peak."),
        (),
        lambda r: [(r.allowance_bytes,)],
    ),
    (
        ("observed_peak_bytes", "Most memory in use since the plan was attached (measured)."),
        ("of",),
        lambda r: [(r.observed_peak_kind, r.observed_peak_bytes)],
    ),
    (("forward_passes_total", "Forward passes in training."), (), lambda r: [(r.forward_passes,)]),
    (("backward_passes_total", "Backward passes of the model."), (), lambda r: [(r.backward_passes,)]),
    (
        ("moved_bytes_total", "Bytes moved to and from the tier below."),
        ("what", "below", "direction"),
        lambda r: [
            (each.what, each.below, direction, number)
            for each in r.moved
            for direction, number in (("up", each.up_bytes), ("down", each.down_bytes))
        ],
    ),
    (("recomputations_total", "Layers computed again in backward."), (), lambda r: [(r.recomputations,)]),
    (
        ("recompute_flops_total", "Recomputations times their profiled FLOPs."),
        (),
        lambda r: [(r.recompute_flops,)],
    ),
    (
        ("lost_seconds_total", "Time lost to each technique (measured)."),
        ("technique",),
        lambda r: [(each.to, each.seconds) for each in r.lost],
    ),
    (("disk_bytes", "Bytes on disk now."), (), lambda r: [(r.disk_bytes,)]),
)
