"""Metrics over HTTP: real requests, on the loopback interface."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re
import socket
import sys
import threading
import urllib.error
import urllib.request

import pytest

import memscale
from memscale import Config
from memscale.observe.counters import Meter
from memscale.observe.report import Lost, Moved, Recomputed, Report
from memscale.report import exporters
from memscale.report.exporters import Metrics
from support.observed import Stack, batch, recomputed_layers, train

SERVED = Config(mode="aggressive", enable_offloading=False, observability_port=0, enable_logging=False)
LINE = re.compile(r'(memscale_[a-z_]+)\{((?:[a-z]+="(?:[^"\\]|\\.)*",?)+)\} (-?[0-9.e+-]+)')


def wrapped(config: Config = SERVED) -> Stack:
    return memscale.wrap(Stack(), config, batch())


def url_of(model: Stack) -> str:
    url = model._memscale_executor.metrics.url
    assert url is not None
    return url


def read(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match, line
            key = f"{match[1]}{{{match[2]}}}"
            assert key not in found, f"{key} twice"
            found[key] = float(match[3])
    return found


class Source:
    """Has a report that is known."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def report(self) -> Report:
        return self._report


def served(report: Report) -> str:
    """The text that Prometheus reads of one report."""
    metrics, source = Metrics(0), Source(report)
    metrics.begin(source, logs=False)
    try:
        with urllib.request.urlopen(metrics.url, timeout=10) as answer:
            return answer.read().decode()
    finally:
        metrics.end(source)


def is_open(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=10).close()
    except urllib.error.URLError:
        return False
    return True


def test_numbers_are_those_of_the_report() -> None:
    model = wrapped()
    url = url_of(model)
    assert url.startswith("http://127.0.0.1:")
    assert read(url)['memscale_forward_passes_total{model="Stack"}'] == 0
    train(model, 2)
    report = model._memscale_executor.report()
    assert report.recomputations == 2 * recomputed_layers(model)
    found = read(url)
    assert found['memscale_forward_passes_total{model="Stack"}'] == 2
    assert found['memscale_backward_passes_total{model="Stack"}'] == 2
    assert found['memscale_recomputations_total{model="Stack"}'] == 2 * recomputed_layers(model)
    assert found['memscale_recompute_flops_total{model="Stack"}'] == report.recompute_flops > 0
    assert found['memscale_predicted_peak_bytes{model="Stack"}'] == report.predicted_peak_bytes > 0
    assert found['memscale_lost_seconds_total{model="Stack",technique="recomputing"}'] > 0
    memscale.detach(model)


def test_the_port_is_closed_by_detach() -> None:
    model = wrapped()
    url = url_of(model)
    executor = model._memscale_executor
    memscale.detach(model)
    assert not is_open(url)
    assert executor.metrics.url is None
    assert exporters._servers == []


def test_the_port_is_closed_when_the_model_is_dropped() -> None:
    model = wrapped()
    url = url_of(model)
    del model
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "memscale-metrics-close":
            thread.join(timeout=60)
    assert not is_open(url)
    assert exporters._servers == []


def test_models_share_a_port_until_the_last_is_gone() -> None:
    one, two = wrapped(), wrapped()
    url = url_of(one)
    assert url_of(two) == url
    three = wrapped(SERVED.replace(observability_port=int(url.split(":")[2].split("/")[0])))
    assert url_of(three) == url
    train(two, 1)
    found = read(url)
    passes = [
        found[f'memscale_forward_passes_total{{model="{name}"}}'] for name in ("Stack", "Stack#2", "Stack#3")
    ]
    assert passes == [0, 1, 0]
    memscale.detach(one)
    assert read(url)['memscale_forward_passes_total{model="Stack"}'] == 1
    memscale.detach(two)
    memscale.detach(three)
    assert not is_open(url)


def test_wrapping_again_and_new_plans_keep_the_port() -> None:
    model = wrapped()
    url = url_of(model)
    with model._memscale_executor.suspended():
        assert is_open(url)
    model(batch().repeat(2, 1)).backward()  # larger than planned for
    assert url_of(model) == url
    assert read(url)['memscale_forward_passes_total{model="Stack"}'] == 1
    memscale.wrap(model, SERVED.replace(observability_port=None), batch())
    assert not is_open(url)
    memscale.detach(model)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_not_served(copied) -> None:
    model = wrapped()
    url = url_of(model)
    other = copied(model)
    assert other._memscale_executor.metrics is None
    assert 'memscale_forward_passes_total{model="Stack#2"}' not in read(url)
    memscale.detach(other)
    assert is_open(url)
    memscale.detach(model)


def test_a_port_that_is_taken_is_named_in_the_log_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as taken, caplog.at_level(logging.INFO, "memscale"):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        model = wrapped(SERVED.replace(observability_port=port, enable_logging=True))
    (warning,) = [record for record in caplog.records if "metrics" in record.message]
    assert warning.levelno == logging.WARNING
    assert f"port {port}" in warning.message
    assert "observability_port" in warning.message
    train(model, 1)
    assert model._memscale_executor.report().forward_passes == 1
    assert model._memscale_executor.metrics.url is None
    memscale.detach(model)


def test_the_log_says_which_port(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memscale"):
        model = wrapped(SERVED.replace(enable_logging=True))
    assert f"metrics for Prometheus: {url_of(model)}" in [record.message for record in caplog.records]
    memscale.detach(model)


def test_no_port_no_thread() -> None:
    model = wrapped(SERVED.replace(observability_port=None))
    assert not any(thread.name.startswith("memscale-metrics") for thread in threading.enumerate())
    other = wrapped()
    assert any(thread.name.startswith("memscale-metrics") for thread in threading.enumerate())
    memscale.detach(other)
    assert not any(thread.name.startswith("memscale-metrics") for thread in threading.enumerate())
    assert model._memscale_executor.metrics.url is None
    memscale.detach(model)


def test_without_prometheus_client_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with caplog.at_level(logging.WARNING, "memscale"):
        model = wrapped(SERVED.replace(enable_logging=True))
    assert "pip install prometheus-client" in caplog.text
    train(model, 1)
    assert model._memscale_executor.metrics.url is None
    memscale.detach(model)


def test_labels_are_escaped_and_what_is_not_known_is_left_out() -> None:
    report = Report(
        model='a "model"\\',
        device="mps",
        forward_passes=None,
        backward_passes=None,
        predicted_peak_bytes=5,
        allowance_bytes=1,
        prediction_source="estimated",
        observed_peak_bytes=None,
        observed_peak_kind="not known",
        observed_since="",
        moved=(Moved("parameters", "host", "offloading", 3, 4),),
        recomputed=(Recomputed("layer", 2, 10),),
        lost=(Lost("recomputing", None), Lost("offloading", 0.25)),
    )
    lines = [line for line in served(report).splitlines() if not line.startswith("#")]
    name = 'model="a \\"model\\"\\\\"'
    assert all(LINE.fullmatch(line) for line in lines)
    assert f"memscale_predicted_peak_bytes{{{name}}} 5.0" in lines
    assert (
        f'memscale_moved_bytes_total{{direction="written",{name},tier="host",what="parameters"}} 4.0' in lines
    )
    assert f'memscale_lost_seconds_total{{{name},technique="offloading"}} 0.25' in lines
    assert not any("passes" in line or "observed" in line or "recomputing" in line for line in lines)


def test_the_meter_of_nothing_has_only_what_is_predicted() -> None:
    report = Report.of(memscale.Plan((), predicted_peak_bytes=7), Meter(), model="Net", device="cpu")
    assert 'memscale_predicted_peak_bytes{model="Net"} 7.0\n' in served(report)
