"""A model's report for dashboards: on a port for Prometheus, and as scalars for a TensorBoard writer."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from memscale.errors import WrapError, WrapTypeError, shown
from memscale.executor import executor_of
from memscale.observe.report import Report

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["Metrics", "log_scalars"]

HOST = "127.0.0.1"
PREFIX = "memscale/"

logger = logging.getLogger("memscale")


class ReportSource(Protocol):
    """Something with a report, such as an executor."""

    def report(self) -> Report:
        """Return what it has done so far."""


class Metrics:
    """Serve a model's report to Prometheus while its plan is attached: `Config.observability_port`.

    Args:
        port: The port; 0 for any free one, None for no server.
    """

    def __init__(self, port: int | None) -> None:
        self._port = port
        self._server: _Server | None = None

    @property
    def url(self) -> str | None:
        """Return the address of the metrics; None if they are not served."""
        return None if self._server is None else f"http://{HOST}:{self._server.port}/metrics"

    def begin(self, source: ReportSource, *, logs: bool = True) -> None:
        """Serve the report, unless it is served already. What prevents it is logged, and training goes on."""
        if self._port is None or self._server is not None:
            return
        problem = None
        try:
            self._server = _serve(source, self._port)
        except ImportError as error:
            problem = (
                f"No metrics on port {self._port}: {error.name} is not installed (pip install prometheus-client). "
                "Training goes on without them."
            )
        except OSError as error:
            problem = (
                f"No metrics on port {self._port} of the loopback interface ({error.strerror or error}). Training goes "
                "on without them; give another Config(observability_port=...), or 0 for any free one."
            )
        if logs and problem is not None:
            logger.warning("%s", problem)
        elif logs:
            logger.info("metrics for Prometheus: %s", self.url)

    def end(self, source: ReportSource) -> None:
        """Stop serving the report. The port is free when this returns, if no other model is on it."""
        server, self._server = self._server, None
        if server is not None:
            server.remove(source)


_servers: list[_Server] = []
_lock = threading.Lock()  # of the servers and their sources


def _serve(source: ReportSource, port: int) -> _Server:
    with _lock:
        server = next((each for each in _servers if port in (each.requested_port, each.port)), None)
        if server is None:
            server = _Server(port)
            _servers.append(server)
        server.add(source)
        return server


class _Server:
    """One port, however many models share it, on the loopback interface only, until the last of them is gone."""

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self.requested_port = port
        self._sources: list[weakref.ref[ReportSource]] = []
        registry = CollectorRegistry()
        registry.register(self)  # it calls `collect`
        self._http, self._thread = start_http_server(port, HOST, registry)
        self.port: int = self._http.server_port
        self._thread.name = f"memscale-metrics-{self.port}"

    def add(self, source: ReportSource) -> None:
        """Serve a model's report as well; the caller holds the lock."""
        self._sources.append(weakref.ref(source, self._on_dropped))

    def remove(self, source: ReportSource | None = None) -> None:
        """Stop serving a model's report, and those of models that are gone; close the port after the last."""
        with _lock:
            self._sources = [each for each in self._sources if each() not in (None, source)]
            if self._sources or self not in _servers:
                return
            _servers.remove(self)
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()

    def _on_dropped(self, reference: weakref.ref[ReportSource]) -> None:
        # The garbage collector may be running in a thread that holds the lock, or in the server's own.
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
            threading.Thread(target=self.remove, name="memscale-metrics-close", daemon=True).start()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; prometheus_client calls this for each request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        reports = self._named_reports()
        for name, help_text, labels, samples in _METRICS:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"memscale_{name}", help_text, labels=("model", *labels))
            for model, report in reports.items():
                for *values, number in samples(report):
                    if number is not None:
                        family.add_metric([model, *values], number)
            if family.samples:
                yield family

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


# Name, help text, labels besides `model`, and what a report has for each: the labels' values, then the number.
_METRICS: tuple[tuple[str, str, tuple[str, ...], Callable[[Report], list[Any]]], ...] = (
    (
        "predicted_peak_bytes",
        "Peak of a training step by the plan (predicted).",
        (),
        lambda r: [(r.predicted_peak_bytes,)],
    ),
    (
        "allowance_bytes",
        "What a step may need beyond the predicted peak.",
        (),
        lambda r: [(r.allowance_bytes,)],
    ),
    (
        "observed_peak_bytes",
        "Most memory in use since the plan was attached (measured).",
        ("of",),
        lambda r: [(r.observed_peak_kind, r.observed_peak_bytes)],
    ),
    ("forward_passes_total", "Forward passes in training.", (), lambda r: [(r.forward_passes,)]),
    ("backward_passes_total", "Backward passes of the model.", (), lambda r: [(r.backward_passes,)]),
    (
        "moved_bytes_total",
        "Bytes read from and written to the tier that they are kept on.",
        ("what", "tier", "direction"),
        lambda r: [
            (each.what, each.tier, direction, number)
            for each in r.moved
            for direction, number in (("read", each.read_bytes), ("written", each.written_bytes))
        ],
    ),
    ("recomputations_total", "Layers computed again in backward.", (), lambda r: [(r.recomputations,)]),
    (
        "recompute_flops_total",
        "Recomputations times their profiled FLOPs.",
        (),
        lambda r: [(r.recompute_flops,)],
    ),
    (
        "lost_seconds_total",
        "Time lost to each technique (measured).",
        ("technique",),
        lambda r: [(each.to, each.seconds) for each in r.lost],
    ),
    ("disk_bytes", "Bytes on disk now.", (), lambda r: [(r.disk_bytes,)]),
)


# ---------------------------------------------------------------------- TensorBoard


class Writer(Protocol):
    """What is used of a ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None, /) -> Any:
        """Note a number at a step."""


def log_scalars(model: nn.Module, writer: Writer, step: int | None = None) -> dict[str, float]:
    """Write what a wrapped model's plan has done so far to a TensorBoard writer, and return what was written.

    Call it as often as the curves are to have points, once in a hundred steps say. All counts are totals since
    ``wrap``; what is not known (a peak that was higher before) is left out.

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
            f"log_scalars takes a writer with add_scalar(tag, value, step), such as a SummaryWriter, got "
            f"{shown(writer, 60)}."
        )
    executor = executor_of(model)
    if executor is None:
        raise WrapError(
            f"{type(model).__name__} is not wrapped, so that there is nothing to log. Call memscale.wrap(model) first."
        )
    report = executor.report()
    written = {f"{PREFIX}{name}": value for name, value in report.scalars().items()}
    at = report.forward_passes if step is None else step
    for tag, value in written.items():
        writer.add_scalar(tag, value, at)
    return written
