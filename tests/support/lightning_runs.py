"""Lightning modules to train, and what each of two processes does in the test of the DDP strategy (`torchrun`)."""

from __future__ import annotations

import dataclasses
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist

import memscale
from memscale.executor import executor_of
from memscale.integrations.lightning import MemScaleCallback
from support.surfaces import Run, trained
from support.wrapping import Stack, lossless

QUIET = lossless("aggressive", force_optimize=True)
CALLS = ["self", "self.net"]


def silence() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    """Calls itself, its network, or its network's network."""

    def __init__(self, calls: str = "self", *, manual: bool = False) -> None:
        super().__init__()
        self.net = Stack(layers=4, width=16)
        self.calls = calls
        self.automatic_optimization = not manual
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self(batch) if self.calls == "self" else self.net(batch)).pow(2).mean()
        self.log("loss", loss)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.net(batch).pow(2).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(batch: int = 8) -> torch.utils.data.DataLoader:
    inputs = torch.randn(8 * batch, 16, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(inputs, batch)


def trainer_of(where: Path, **options: Any) -> Any:
    fixed = {"max_steps": 6, "accelerator": "cpu", "logger": False, "default_root_dir": where}
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return lightning.Trainer(**fixed | quiet | options)


def fitted(module: Module, where: Path, *, checkpoint: Path | None = None, **options: Any) -> Run:
    look = Look()

    def fit() -> list[float]:
        trainer = trainer_of(where, callbacks=[*options.pop("callbacks", ()), look], **options)
        trainer.fit(module, data(), ckpt_path=checkpoint)
        return module.losses

    run = trained(module, fit)
    return dataclasses.replace(run, techniques=look.seen[0], batch=look.seen[1])


class Look(lightning.pytorch.Callback):
    """Notes the plan at the end of the last batch."""

    def __init__(self) -> None:
        self.seen: tuple[tuple[str, ...], str] = ((), "")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        executor = executor_of(pl_module)
        if executor is not None:
            used = {name for layer in executor.plan.layers for name in layer.techniques}
            self.seen = tuple(sorted(used)), executor.plan.batch


def build(*args: Any, **options: Any) -> Module:
    torch.manual_seed(0)
    return Module(*args, **options)


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    silence()
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    results = {}
    for calls in CALLS:
        runs = {"plain": fitted(build(calls), folder, **options)}
        module = memscale.wrap(build(calls), QUIET)
        runs["wrap(module)"] = fitted(module, folder, **options)
        callbacks = [MemScaleCallback(QUIET)]
        runs["MemScaleCallback"] = fitted(build(calls), folder, callbacks=callbacks, **options)
        plan = executor_of(module).plan.to_json()
        results[calls] = {"plan": plan, "runs": {name: dataclasses.asdict(run) for name, run in runs.items()}}
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
