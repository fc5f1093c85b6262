"""Running cases: simulated, measured, and in modes of the future."""

from __future__ import annotations

import dataclasses
import gc
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from memscale.benchmarks import Case, Results, Row, run_suite
from memscale.benchmarks import run as run_module
from memscale.benchmarks.models import DEFAULT_MODELS, MODELS, Published, find_device
from memscale.errors import ConfigError, ConfigTypeError, HardwareError
from memscale.hardware import GpuSpec, HostSpec
from memscale.memory.tracker import MemoryTracker

MIB = 2**20
GIB = 2**30
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def run_case(model: str, **arguments) -> Row:
    (row,) = run_suite([model], **arguments)
    return row


@pytest.fixture(scope="module")
def tiny():
    return run_case("gpt2-tiny", on="1GiB")


def test_a_simulated_row(tiny):
    assert (tiny.model, tiny.batch, tiny.seq) == ("gpt2-tiny", 2, 64)
    assert (tiny.mode, tiny.on, tiny.source) == ("none", "1GiB", "simulated")
    # Weights, gradients, two moments and their temporaries: five times the weights is the least.
    assert 5 * 4 * tiny.params < tiny.peak_bytes < 64 * MIB
    assert tiny.baseline_bytes == tiny.peak_bytes
    assert (tiny.reduction, tiny.time_ratio, tiny.disk_bytes, tiny.note) == (0.0, 1.0, 0, None)
    assert tiny.host_bytes < 4096  # AdamW counts its steps on the host


def test_the_same_row_every_time(tiny):
    assert run_case("gpt2-tiny", on=" 1GiB ") == tiny


def test_a_larger_batch_takes_more(tiny):
    assert run_case("gpt2-tiny", on="1GiB", batch=8, seq=128).peak_bytes > 2 * tiny.peak_bytes


def test_a_case_that_does_not_fit(tiny):
    row = run_case("gpt2-tiny", on="8MiB")
    assert row.peak_bytes is None
    assert row.baseline_bytes is None
    assert row.params == tiny.params
    assert (row.reduction, row.time_ratio) == (0.0, 1.0)
    assert row.note == f"does not fit: needs {tiny.peak_bytes / MIB:.2f} MiB, has 8.0 MiB"


def test_a_case_that_does_not_fit_for_gaps_alone(tiny):
    # Whole segments of 2 and 20 MiB are taken, so just the bytes in use are too few.
    row = run_case("gpt2-tiny", on=str(tiny.peak_bytes))
    assert row.peak_bytes is None
    assert "with the gaps" in row.note


@pytest.mark.slow
def test_nothing_of_a_case_stays():
    def fake_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), FakeTensor) for each in gc.get_objects())

    before = fake_tensors()  # other tests may have left some
    for on in ("1GiB", "8MiB"):
        run_case("bert-tiny", on=on)
        assert fake_tensors() <= before


def test_a_mode_is_compared_to_the_plain_model(tiny):
    plain, aggressive = run_suite(["gpt2-tiny"], ["none", "aggressive"], on="1GiB")
    assert plain == tiny
    assert aggressive.mode == "aggressive"
    assert aggressive.baseline_bytes == tiny.peak_bytes
    assert aggressive.peak_bytes < tiny.peak_bytes
    assert aggressive.reduction == round(1 - aggressive.peak_bytes / tiny.peak_bytes, 4)
    assert aggressive.time_ratio > 1  # predicted: a simulation has no clock
    assert aggressive.host_bytes > 0
    assert aggressive.time_ratio == round(aggressive.step_time.total / tiny.step_time.total, 3)
    assert aggressive.step_time.host_step > 0
    assert tiny.step_time.host_step == 0

    (alone,) = run_suite(["gpt2-tiny"], ["aggressive"], on="1GiB")
    assert alone == aggressive


def test_a_budget_is_the_published_peak(monkeypatch):
    with pytest.raises(ConfigError, match="gpt2-tiny has none"):
        run_suite(["gpt2-tiny"], ["budget"])
    assert run_module.config_of(Case.of("gpt2-xl"), "budget").memory_budget_bytes == 9.25 * GIB
    small = dataclasses.replace(MODELS["gpt2-tiny"], published=Published(None, 20 * MIB / GIB))
    monkeypatch.setitem(MODELS, "gpt2-tiny", small)
    plain, row = run_suite(["gpt2-tiny"], ["none", "budget"], on="1GiB")
    assert row.mode == "budget"
    assert row.peak_bytes <= 20 * MIB < plain.peak_bytes


@pytest.mark.slow
def test_a_mode_that_fits_where_the_plain_model_does_not():
    (row,) = run_suite(["gpt2-small"], ["aggressive"], on="1900MiB")
    assert row.baseline_bytes is None
    assert row.peak_bytes is not None
    assert row.peak_bytes < 1900 * MIB
    assert row.reduction is None


def tensor_bytes(case: Case, mode: str) -> int:
    """The peak of the bytes of all tensors, to the byte, of what is measured otherwise."""
    with MemoryTracker() as tracker:
        run_module.measured_case(case, "plain" if mode == "none" else f"memscale-{mode}")
    return tracker.peak_bytes("cpu")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_measured_mode_needs_less_than_the_plain_model():
    _, wrapped = run_suite(["gpt2-tiny"], ["none", "aggressive"], on="cpu", batch=8)
    assert wrapped.time_ratio is not None
    case = Case.of("gpt2-tiny", batch=8)
    assert tensor_bytes(case, "aggressive") < tensor_bytes(case, "none")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_measured_row():
    row = run_case("gpt2-tiny", on="cpu")
    assert (row.on, row.source, row.mode) == ("cpu", "measured", "none")
    assert row.baseline_bytes == row.peak_bytes
    assert (row.host_bytes, row.disk_bytes, row.reduction, row.time_ratio) == (0, 0, 0.0, 1.0)
    # Resident memory has all tensors in it, and some MiB of what kernels and threads take at first use.
    tracked = tensor_bytes(Case.of("gpt2-tiny"), "none")
    assert tracked < row.peak_bytes < tracked + 64 * MIB
    # The simulated CPU foretells the tensors to the byte.
    assert run_module.predicted_on_cpu(Case.of("gpt2-tiny")) == tracked


def test_what_the_host_has_no_room_for_is_not_tried(monkeypatch):
    monkeypatch.setattr(run_module, "read_host", lambda: HostSpec(16 * GIB, 8 * MIB, 2))
    monkeypatch.setattr(run_module, "measure_in_fresh_process", None)
    row = run_case("gpt2-tiny", on="cpu")
    assert row.peak_bytes is None
    assert row.note.startswith("not run: the plain step needs ")
    assert row.note.endswith("8.0 MiB free")


def test_devices_as_people_write_them():
    assert find_device("24GiB") == find_device(" 24 gib ") == find_device(str(24 * GIB)) == 24 * GIB
    assert find_device("24GB") == 24 * 10**9
    assert find_device("cpu") is find_device("CPU") is None
    for name in ("RTX 3090", "rtx3090", "3090", "NVIDIA GeForce RTX 3090"):
        device = find_device(name)
        assert isinstance(device, GpuSpec)
        assert device.name == "NVIDIA GeForce RTX 3090"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"models": ["gpt2-huge"]}, ConfigError, "no model 'gpt2-huge'.*Allowed: bert-base"),
        ({"models": ["gpt2-tiny", "x"]}, ConfigError, "no model 'x'"),
        ({"modes": ["nones"]}, ConfigError, "no mode 'nones'; did you mean none"),
        ({"on": "RTX 3091"}, HardwareError, "RTX 3090"),
        ({"on": ""}, HardwareError, "No GPU is known as ''"),
        ({"on": "0GiB"}, ConfigError, "more than zero"),
        ({"on": "-1GiB"}, ConfigError, "more than zero"),
        ({"on": 24}, ConfigTypeError, "on=24 is a int"),
        ({"batch": 0}, ConfigError, "batch=0 is not allowed"),
        ({"batch": True}, ConfigError, "batch=True is not allowed"),
        ({"seq": -1}, ConfigError, "seq=-1 is not allowed"),
        ({"seq": 129}, ConfigError, "seq=129 is too long for gpt2-tiny"),
        ({"steps": 0}, ConfigError, "steps=0 is not allowed"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(arguments, error, message):
    with pytest.raises(error, match=message):
        run_suite(**({"models": ["gpt2-tiny"], "modes": ["none"], "on": "1GiB"} | arguments))


@pytest.mark.slow
def test_published_baselines():
    """The plain models on an RTX 3090: within 1% of what others published, and the last does not fit."""
    rows = list(run_suite(DEFAULT_MODELS, on="RTX 3090"))
    for row in rows:
        published = MODELS[row.model].published
        assert published is not None
        if published.baseline_gib is None:
            assert row.peak_bytes is None
            assert row.note is not None
        else:
            assert row.peak_bytes / GIB == pytest.approx(published.baseline_gib, rel=0.01), row.model

    kept = Results.read(RESULTS / "rtx3090_plain.json")
    if kept.versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]:
        figures = [(row.model, row.params, row.batch, row.seq, row.peak_bytes, row.note) for row in rows]
        assert figures == [
            (row.model, row.params, row.batch, row.seq, row.peak_bytes, row.note) for row in kept.rows
        ], f"out of date; make it anew: {kept.command}"
