"""A port on which Prometheus finds the numbers of this process's models.

One server for a port, however many models are on it; on the loopback interface only. It ends when the last of its
models is detached or dropped.
"""

from __future__ import annotations

import contextlib
import logging
import socketserver
import threading
import weakref
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from memscale.errors import WrapError
from memscale.observe.prometheus import CONTENT_TYPE, metrics_text
from memscale.observe.report import Report
from memscale.offload.locks import LateLock

__all__ = ["HOST", "PATH", "Serving", "Source", "serve"]

HOST = "127.0.0.1"
PATH = "/metrics"
_LOOK = 0.1  # seconds between two looks whether it is to end

logger = logging.getLogger("memscale")


class Source(Protocol):
    """Something that is reported on."""

    def report(self) -> Report:
        """What it has done so far."""


class Serving:
    """A model whose numbers are served."""

    def __init__(self, server: _Server, source: Source) -> None:
        self._server = server
        self._leave = weakref.finalize(source, _lock.leave, server)  # also if the model is dropped
        self._leave.atexit = False

    @property
    def url(self) -> str:
        """Where they are."""
        return f"http://{HOST}:{self._server.port}{PATH}"

    def close(self, source: Source) -> None:
        """Serve this model no longer; the port is free again when this returns, if it was the last."""
        self._server.remove(source)
        self._leave()
        self._server.wait_until_closed()


def serve(source: Source, port: int) -> Serving:
    """Serve a model's numbers on a port; 0 for any that is free, the same one for all models that ask so.

    Raises:
        OSError: The port cannot be had.
    """
    with _lock:
        server = next((each for each in _servers if port in (each.asked_for, each.port)), None)
        if server is None:
            server = _Server(port)
            _servers.append(server)
        server.add(source)
    return Serving(server, source)


def _end_if_unused(server: _Server) -> None:
    if server in _servers and not any(True for _ in server.sources()):
        _servers.remove(server)
        server.stop()


_servers: list[_Server] = []
_lock: LateLock[_Server] = LateLock(_end_if_unused)  # models are dropped in finalizers, too


class _Server:
    """A thread that answers on a port."""

    def __init__(self, port: int) -> None:
        self.asked_for = port
        self._sources: list[weakref.ref[Source]] = []
        self._is_stopped = False
        self._http = _LoopbackServer((HOST, port), self)
        self.port: int = self._http.server_address[1]
        self._thread = threading.Thread(target=self._run, name=f"memscale-metrics-{self.port}", daemon=True)
        self._thread.start()

    def add(self, source: Source) -> None:
        self._sources = [*self._sources, weakref.ref(source)]

    def remove(self, source: Source) -> None:
        self._sources = [each for each in self._sources if each() not in (None, source)]

    def sources(self) -> Iterator[Source]:
        for reference in self._sources:
            source = reference()
            if source is not None:
                yield source

    def text(self) -> str:
        reports = []
        for source in self.sources():
            with contextlib.suppress(WrapError):  # its model was dropped while it was being asked
                reports.append(source.report())
        return metrics_text(reports)

    def stop(self) -> None:
        # Not `shutdown`, which waits: this may be called by a finalizer, and so in the very thread.
        self._is_stopped = True

    def wait_until_closed(self) -> None:
        if self._is_stopped and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        self._http.timeout = _LOOK
        while not self._is_stopped:
            self._http.handle_request()
        self._http.server_close()


class _LoopbackServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], server: _Server) -> None:
        self.metrics = weakref.ref(server)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # and no look-up of the host's name, which may take seconds
        self.server_name, self.server_port = HOST, self.server_address[1]


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0  # seconds, for a client that connects and says nothing: it would keep a thread

    def do_GET(self) -> None:
        assert isinstance(self.server, _LoopbackServer)
        server = self.server.metrics()
        if server is None or self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, f"The metrics are at {PATH}")
            return
        body = server.text().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("metrics: " + format, *args)
