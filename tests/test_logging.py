"""What `wrap` says and where: the user's handlers, stderr, a file, or nowhere; and nothing stays behind."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, Plan
from memscale._util.terminal import Terminal
from memscale.errors import ConfigError, WrapError
from memscale.execution_plan import Checkpointing, LayerPlan, Offloading, StepMemory
from memscale.execution_plan.explain import outline_plan
from memscale.hardware import detect
from memscale.observe.log import figures_of
from memscale.units import format_bytes
from support.wrapping import Stack

X = torch.ones(64, 8)
LOUD = Config(mode="aggressive", force_optimize=True)
LOGGER = logging.getLogger("memscale")


def wrapped(config: Config = LOUD) -> tuple[Stack, Plan]:
    model = memscale.wrap(Stack(), config, X)
    return model, model._memscale_executor.plan


def assert_says_all(text: str, plan: Plan) -> None:
    assert "hardware: " in text
    assert detect("cpu").device.name in text
    peaks = f"peak {format_bytes(plan.baseline_peak_bytes)} → {format_bytes(plan.predicted_peak_bytes)}"
    assert peaks in text
    assert f"step time × {plan.predicted_time_ratio:.2f}" in text
    assert plan.batch in text
    assert "(aggressive)" in text
    # The plan's table: what the layers get, and why.
    assert "checkpointing" in text
    assert re.search(r"layers\.0\b", text)
    assert "of parameters," in text
    for nbytes, where in ((plan.host_bytes, "host memory"), (plan.disk_bytes, "disk")):
        assert not nbytes or f"{format_bytes(nbytes)} of {where}" in text


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """Whatever a test of this file does, the loggers are as they were."""
    loggers = (LOGGER, logging.getLogger())
    before = [(list(each.handlers), list(each.filters), each.level, each.disabled) for each in loggers]
    yield
    now = [(list(each.handlers), list(each.filters), each.level, each.disabled) for each in loggers]
    assert now == before


@contextmanager
def alone() -> Iterator[None]:
    """As in a program that has not set up logging. Entered by the test: pytest puts its handlers there before."""
    LOGGER.propagate = False
    try:
        assert not LOGGER.hasHandlers()
        yield
        assert LOGGER.handlers == []
        assert LOGGER.level == logging.NOTSET
    finally:
        LOGGER.propagate = True


def test_the_users_handlers_hear_all_of_it(caplog, capsys):
    _, plan = wrapped()
    assert_says_all(caplog.text, plan)
    assert {record.name for record in caplog.records} == {"memscale"}
    assert {record.levelno for record in caplog.records if not plan.notes} <= {logging.INFO}
    assert capsys.readouterr().err == "", "stderr is for programs without handlers"


def test_without_handlers_it_goes_to_stderr(capsys):
    with alone():
        _, plan = wrapped()
    captured = capsys.readouterr()
    assert_says_all(captured.err, plan)
    assert "memscale: " in captured.err
    assert captured.out == ""


def test_notes_are_warnings(caplog):
    model = memscale.wrap(Stack(), Config(memory_budget=2048), X)
    plan = model._memscale_executor.plan
    assert plan.notes
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == list(
        plan.notes
    )


def test_without_a_sample_one_plan_is_logged_from_the_first_batch(caplog):
    model = memscale.wrap(Stack(), LOUD)
    (record,) = caplog.records
    assert record.getMessage() == "The plan is made from the first training batch; nothing is moved before."
    model(X)
    assert caplog.text.count("hardware: ") == 1
    assert "planned from the first training batch" in caplog.text
    assert_says_all(caplog.text, model._memscale_executor.plan)
    caplog.clear()
    model(X)
    assert caplog.records == []


def test_a_small_model_is_left_alone_with_one_line(caplog, monkeypatch):
    monkeypatch.setattr("memscale.planner.decide.UNTOUCHED_SHARE", 0.1)  # which conftest switches off
    model = memscale.wrap(Stack(), Config(), X)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "the model is left as it is" in record.getMessage()
    assert "force_optimize=True" in record.getMessage()
    assert model._memscale_executor.plan.does_nothing
    caplog.clear()
    model = memscale.wrap(Stack(), Config(force_optimize=True), X)
    assert not model._memscale_executor.plan.does_nothing
    assert "hardware: " in caplog.text


def test_a_log_file_is_written_and_let_go(tmp_path, caplog):
    path = tmp_path / "run.log"
    path.write_text("from before\n", encoding="utf-8")
    _, plan = wrapped(LOUD.replace(log_file=path))
    text = path.read_text(encoding="utf-8")
    assert text.startswith("from before\n"), "a log is added to"
    assert_says_all(text, plan)
    assert " INFO " in text
    assert_says_all(caplog.text, plan)
    if Path("/proc/self/fd").is_dir():
        opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert str(path.resolve()) not in opened
    size = path.stat().st_size
    LOGGER.warning("of somebody else, later")
    assert path.stat().st_size == size


@pytest.mark.parametrize("sample", [X, None], ids=["sample", "first batch"])
def test_silent_when_asked(sample, tmp_path, caplog, capfd):
    path = tmp_path / "run.log"
    config = LOUD.replace(enable_logging=False, log_file=path)
    with caplog.at_level(logging.DEBUG):
        model = memscale.wrap(Stack(), config, sample)
        model(X).sum().backward()
        assert any(layer.techniques for layer in model._memscale_executor.plan.layers)
        memscale.detach(model)
    assert [record for record in caplog.records if record.name.startswith("memscale")] == []
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert not path.exists()


def test_a_deep_model_takes_no_more_than_a_screenful(caplog):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x)

    model = nn.Sequential(*(Block() for _ in range(40)))
    memscale.wrap(model, LOUD, X)
    assert any(layer.techniques for layer in model._memscale_executor.plan.layers)
    assert len(caplog.text.splitlines()) <= 24


def test_layers_are_named_by_what_they_are_and_sizes_that_differ_by_the_largest():
    host = Offloading("host")
    sizes = {"wte": "73.62 MiB", "wpe": "1.5 MiB", "h.0": "13.5 MiB", "h.1": "13.5 MiB", "h.3": "13.5 MiB"}
    moved = [
        LayerPlan(
            name, (name,), ("offloading",), "r", f"{size} of parameters live on the host", offloading=host
        )
        for name, size in sizes.items()
    ]
    kept = LayerPlan("h.2", ("h.2",), ("checkpointing",), "r", "holds 1.0 GiB", checkpointing=Checkpointing())
    plan = Plan((*moved[:4], kept, moved[4], LayerPlan("ln", ("ln",), (), "r", "small")))
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in outline_plan(plan, terminal=Terminal(width=200)).splitlines()
        if line.startswith("│")
    ]
    assert [row[0] for row in rows[1:]] == ["wte, wpe, h.0–1, 3", "h.2", "ln"]
    assert rows[1][2] == "up to 73.62 MiB of parameters live on the host"
    assert rows[2][2] == "holds 1.0 GiB"


def test_a_plain_step_that_was_not_simulated_is_not_called_so():
    memory = StepMemory(("weights",), ((1,),), (), 0, ())
    deep = Plan((), baseline_peak_bytes=2, predicted_peak_bytes=1, predicted_memory=memory)
    assert "(simulated, of the plain step estimated)" in figures_of(deep)
    assert "(simulated)" in figures_of(dataclasses.replace(deep, baseline_memory=memory))


def test_silent_does_not_even_draw_the_table(monkeypatch):
    monkeypatch.setattr("memscale.observe.log.outline_plan", None)
    wrapped(LOUD.replace(enable_logging=False))


def test_silent_without_handlers_too(capfd):
    with alone():
        model, plan = wrapped(Config(enable_logging=False, memory_budget=2048))
        model(X).sum().backward()
    assert plan.notes, "there is something that would be said"
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_the_users_level_is_respected(caplog):
    LOGGER.setLevel(logging.ERROR)
    try:
        wrapped()
        assert LOGGER.level == logging.ERROR
    finally:
        LOGGER.setLevel(logging.NOTSET)
    assert caplog.records == []


def test_a_wrap_that_fails_leaves_no_handlers(tmp_path, monkeypatch):
    def refuse(self: object) -> None:
        raise WrapError("no")

    monkeypatch.setattr("memscale.executor.Executor.attach", refuse)
    with alone(), pytest.raises(WrapError, match="no"):
        wrapped(LOUD.replace(log_file=tmp_path / "run.log"))


def test_it_is_the_same_without_rich(caplog, monkeypatch):
    """Neither found nor importable, also where it would be painted with."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name.split(".")[0] == "rich" else find_spec(name, *rest),
    )
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, plan = wrapped()
    assert_says_all(re.sub(r"\x1b\[[0-9;]*m", "", caplog.text), plan)


SCRIPT = """
import sys

sys.modules["rich"] = None  # any import of it fails
import logging

import torch

import memscale
from memscale import Config
from support.wrapping import Stack

silent = sys.argv[1] == "silent"
memscale.wrap(Stack(), Config(mode="aggressive", force_optimize=True, enable_logging=not silent), torch.ones(64, 8))
for each in (logging.getLogger("memscale"), logging.getLogger()):
    assert each.handlers == [], each
assert logging.getLogger("memscale").level == logging.NOTSET
assert logging.getLogger().level == logging.WARNING
"""


@pytest.mark.parametrize("how", ["aloud", "silent"])
@pytest.mark.matrix(2)
def test_a_program_that_set_up_nothing(how):
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, how]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    said = done.stderr.decode()
    assert done.returncode == 0, said
    assert done.stdout == b""
    if how == "silent":
        assert said == ""
    else:
        assert "memscale: hardware: " in said
        assert re.search(r"peak \S+ \S+ → \S+ \S+ \(simulated\), step time × \d", said)
        assert "checkpointing" in said


# A log file that can't be written


@pytest.mark.parametrize("kind", ["a directory", "below a file", "in no directory", "too long", "a loop"])
def test_a_log_file_that_cannot_be_opened_is_refused_by_wrap(kind, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = {
        "a directory": tmp_path,
        "below a file": tmp_path / "file" / "log",
        "in no directory": tmp_path / "no" / "log",
        "too long": tmp_path / ("x" * 300),
        "a loop": tmp_path / "loop",
    }[kind]
    model = Stack()
    before = dict(vars(model))
    with pytest.raises(
        ConfigError, match=r"log_file=.*can't be opened for writing: .*Give the path of a file"
    ):
        memscale.wrap(model, LOUD.replace(log_file=path), X)
    assert vars(model) == before


def test_a_log_file_that_is_gone_does_not_end_a_step(tmp_path, caplog):
    directory = tmp_path / "logs"
    directory.mkdir()
    model, plan = wrapped(LOUD.replace(log_file=directory / "run.log"))
    shutil.rmtree(directory)
    with caplog.at_level(logging.WARNING, "memscale"):
        for size in (128, 512, 1024):  # each is larger than what was planned for
            model(torch.ones(size, 8)).sum().backward()
    assert model._memscale_executor.plan.batch != plan.batch
    said = [text for text in caplog.messages if "run.log" in text]
    assert len(said) == 1
    assert "going on without it" in said[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_log_file_does_not_end_a_step(caplog, capsys):
    with caplog.at_level(logging.INFO, "memscale"):
        model, plan = wrapped(LOUD.replace(log_file="/dev/full"))
        model(torch.ones(256, 8)).sum().backward()
    assert model._memscale_executor.plan.batch != plan.batch
    assert len([text for text in caplog.messages if "/dev/full" in text]) == 1
    assert "Traceback" not in capsys.readouterr().err
