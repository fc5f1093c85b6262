"""A plan that does nothing although something was asked for warns once, with the reason, in every integration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memscale
from support.one_process import process_group
from support.wrapping import Stack, lossless

# Offloading is asked for, and there is nowhere to offload to.
CONFIG = lossless("aggressive", force_optimize=True).replace(
    enable_checkpointing=False, max_disk_offload_gb=0, enable_logging=True
)


def hugging_face(where: Path, callback: bool) -> None:
    pytest.importorskip("transformers")
    from memscale.integrations.huggingface import MemScaleCallback
    from support.trainers import make_trainer

    trainer = make_trainer("gpt2", where, max_steps=2, eval_strategy="no", save_strategy="no")
    trainer.add_callback(MemScaleCallback(CONFIG)) if callback else memscale.wrap(trainer, CONFIG)
    trainer.train()


def accelerate(where: Path) -> None:
    library = pytest.importorskip("accelerate")
    library.state.AcceleratorState._reset_state(True)
    accelerator = library.Accelerator(cpu=True)
    model: nn.Module = Stack()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    memscale.wrap(model, CONFIG)
    for _ in range(2):
        accelerator.backward(model(torch.ones(4, 8)).sum())
        optimizer.step()


def lightning(where: Path, callback: bool) -> None:
    library = pytest.importorskip("lightning")
    from memscale.integrations.lightning import MemScaleCallback

    class Module(library.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Stack()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    off = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    callbacks = [MemScaleCallback(CONFIG)] if callback else []
    trainer = library.Trainer(
        max_steps=3, accelerator="cpu", default_root_dir=where, callbacks=callbacks, **off
    )
    module = Module() if callback else memscale.wrap(Module(), CONFIG)
    trainer.fit(module, torch.ones(12, 4, 8))


def fsdp2(where: Path) -> None:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this torch is built without gloo")
    from torch.distributed.fsdp import fully_shard

    model = Stack()
    with process_group():
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        memscale.wrap(model, CONFIG)
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()


LOOPS: dict[str, Callable[[Path], None]] = {
    "Trainer": lambda where: hugging_face(where, callback=False),
    "MemScaleCallback of transformers": lambda where: hugging_face(where, callback=True),
    "Accelerate": accelerate,
    "Lightning": lambda where: lightning(where, callback=False),
    "MemScaleCallback of Lightning": lambda where: lightning(where, callback=True),
    "FSDP2": fsdp2,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_plan_that_does_nothing_is_warned_of(
    loop: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "memscale")
    LOOPS[loop](tmp_path)
    said = [message for message in caplog.messages if "The plan does nothing" in message]
    assert len(said) == 1
    assert "enable_checkpointing is off" in said[0]
