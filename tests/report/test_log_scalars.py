"""Scalars for TensorBoard, and for whoever else has `add_scalar`."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import memscale
from memscale import Config
from memscale.errors import WrapError, WrapTypeError
from support.observed import Stack, batch, recomputed_layers, train

QUIET = Config(mode="aggressive", enable_offloading=False, enable_logging=False)


class Recorder:
    def __init__(self) -> None:
        self.written: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written[tag, step] = value


def test_numbers_are_those_of_the_report() -> None:
    model = memscale.wrap(Stack(), QUIET, batch())
    recorder = Recorder()
    memscale.log_scalars(model, recorder, 0)
    train(model, 2)
    written = memscale.log_scalars(model, recorder, 7)
    report = model._memscale_executor.report()
    assert recorder.written["memscale/recomputations", 0] == 0
    assert (
        recorder.written["memscale/recomputations", 7]
        == 2 * recomputed_layers(model)
        == written["memscale/recomputations"]
    )
    assert recorder.written["memscale/forward_passes", 7] == 2
    assert recorder.written["memscale/recompute_flops", 7] == report.recompute_flops
    assert recorder.written["memscale/seconds_lost/recomputing", 7] > 0
    assert {tag for tag, step in recorder.written if step == 7} == set(written)


def test_the_step_is_that_of_the_forward_passes_if_none_is_given() -> None:
    model = memscale.wrap(Stack(), QUIET, batch())
    train(model, 3)
    recorder = Recorder()
    memscale.log_scalars(model, recorder)
    assert {step for _, step in recorder.written} == {3}


def test_a_tensorboard_writer(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    model = memscale.wrap(Stack(), QUIET, batch())
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        memscale.log_scalars(model, writer, 1)
    (file,) = tmp_path.iterdir()
    assert b"memscale/predicted_peak_bytes" in file.read_bytes()


def test_what_cannot_be_logged_is_said() -> None:
    with pytest.raises(WrapError, match=r"Linear is not wrapped.*memscale\.wrap"):
        memscale.log_scalars(nn.Linear(1, 1), Recorder())
    with pytest.raises(WrapTypeError, match="add_scalar"):
        memscale.log_scalars(nn.Linear(1, 1), "runs/")
    with pytest.raises(WrapTypeError, match=r"nn\.Module"):
        memscale.log_scalars("model", Recorder())
