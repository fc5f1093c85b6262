"""What each of two processes does in the test of the Trainer and Accelerate with several, started by `torchrun`."""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from torch import nn

import memscale
from memscale.executor import executor_of
from memscale.integrations.huggingface import MemScaleCallback
from support.steps import AGGRESSIVE
from support.surfaces import Run, history, trained
from support.trainers import make_trainer
from support.wrapping import Stack

WAYS = {
    "Trainer": ("wrap(trainer)", "wrap(model)", "MemScaleCallback"),
    "Accelerate": ("wrap, prepare", "prepare, wrap"),
}


class Look(transformers.TrainerCallback):
    """Notes the plan at the end of each step."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.seen = planned(model)


def planned(model: nn.Module) -> dict[str, Any]:
    executor = executor_of(model)
    if executor is None:
        return {}
    used = {name for layer in executor.plan.layers for name in layer.techniques}
    return {"techniques": tuple(sorted(used)), "batch": executor.plan.batch}


def with_trainer(way: str, folder: Path) -> Run:
    options = {"max_steps": 3, "eval_strategy": "no", "save_strategy": "no", "ddp_backend": "gloo"}
    trainer = make_trainer("gpt2", folder, **options)
    if way == "wrap(trainer)":
        memscale.wrap(trainer, AGGRESSIVE)
    elif way == "wrap(model)":
        memscale.wrap(trainer.model, AGGRESSIVE)
    elif way == "MemScaleCallback":
        trainer.add_callback(MemScaleCallback(AGGRESSIVE))
    look = Look()
    trainer.add_callback(look)

    def train() -> list[float]:
        trainer.train()
        return history(trainer, "loss", "grad_norm")

    run = trained(trainer.model, train)
    # Only rank 0 logs: what training did on each.
    norms = [each.detach().double().norm().item() for each in trainer.model.parameters()]
    return replace(run, losses=run.losses + norms, **look.seen)


def with_accelerate(way: str, folder: Path) -> Run:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: nn.Module = Stack(layers=4, width=16)
    if way == "wrap, prepare":
        memscale.wrap(model, AGGRESSIVE)
    called, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if way == "prepare, wrap":
        memscale.wrap(called, AGGRESSIVE)
    batches = [torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]

    def train() -> list[float]:
        losses = []
        for batch in batches[accelerator.process_index :: 2]:
            with accelerator.accumulate(called):
                loss = called(batch).pow(2).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    losses.append(accelerator.clip_grad_norm_(called.parameters(), 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    run = trained(model, train)
    return replace(run, **planned(called if way == "prepare, wrap" else model))


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runs = {}
    for surface, function in (("Trainer", with_trainer), ("Accelerate", with_accelerate)):
        for way in ("plain", *WAYS[surface]):
            runs[surface, way] = asdict(function(way, folder / f"{surface} {way}"))
    torch.save(runs, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
