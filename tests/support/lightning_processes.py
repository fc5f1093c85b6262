"""What each of two processes does in the test of Lightning's DDP strategy, started by `torchrun`."""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import memscale
from integrations.test_lightning import CALLS, QUIET, MemScaleCallback, build, fitted, silence
from memscale.executor import executor_of


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
        results[calls] = {"plan": plan, "runs": {name: asdict(run) for name, run in runs.items()}}
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
