"""`nn.DataParallel` is refused: its replicas shared the overrides, and computed with the original's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import memscale
from memscale.errors import WrapError
from support.steps import AGGRESSIVE
from support.wrapping import Stack

REFUSED = "DataParallel.*torchrun.*CUDA_VISIBLE_DEVICES=0"


@pytest.mark.parametrize("training", [True, False])
def test_a_replica_of_a_wrapped_model_is_refused(training: bool) -> None:
    model = memscale.wrap(Stack(), AGGRESSIVE, torch.ones(2, 8))
    replica = model._replicate_for_data_parallel()  # as torch.nn.parallel.replicate does
    with torch.set_grad_enabled(training), pytest.raises(WrapError, match=REFUSED):
        replica(torch.ones(2, 8))
    model(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("around", [lambda model: model, nn.Sequential])
def test_a_parallel_model_is_refused(around: type) -> None:
    model = nn.DataParallel(Stack())
    model.device_ids = [0, 1]  # as on two GPUs
    with pytest.raises(WrapError, match=REFUSED):
        memscale.wrap(around(model), AGGRESSIVE, torch.ones(2, 8))
    model.device_ids = []  # as on a CPU, where it calls the model alone
    memscale.detach(memscale.wrap(model, AGGRESSIVE, torch.ones(2, 8)))


@pytest.mark.parametrize("how", ["wrap", "callback"])
def test_a_trainer_that_would_use_it_is_refused(how: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from memscale.integrations.huggingface import MemScaleCallback
    from support.trainers import make_trainer

    trainer = make_trainer("gpt2", tmp_path, max_steps=1, eval_strategy="no", save_strategy="no")
    trainer.args._n_gpu = 2
    if how == "callback":
        trainer.add_callback(MemScaleCallback(AGGRESSIVE))
    with pytest.raises(WrapError, match=REFUSED):
        trainer.train() if how == "callback" else memscale.wrap(trainer, AGGRESSIVE)
