"""Kill a training with SIGKILL again and again, and resume it from its last checkpoint in a new process.

    python -m faults.kills DIRECTORY KILLS SEED [--async-offload]

A kill falls into a phase of a step (forward, backward, step, checkpoint, in turn), after a delay that is drawn. One
process imports torch, and forks one for each life of the training. Beside it, another training has its layers in the
same directory all the time. Prints as JSON the losses of both, those of the plain model, and where the kills fell.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import memscale
from memscale import Config
from support.steps import plan_of
from support.wrapping import Stack, lossless

PHASES = ("forward", "backward", "step", "checkpoint")
LONGEST_DELAY = 0.005  # seconds after the beginning of a phase; each takes some milliseconds
WIDTH = 64
fork = multiprocessing.get_context("fork")


def config_of(directory: Path, async_offload: bool) -> Config:
    return lossless("aggressive", force_optimize=True, offload_dir=directory, async_offload=async_offload)


def train(
    steps: int, config: Config | None, where: Path | None, announce: Callable[[str], object]
) -> list[float]:
    """Return the losses of a training that goes on from its checkpoint, if there is one."""
    torch.manual_seed(0)
    model = Stack(layers=3, width=WIDTH)
    if config is not None:
        memscale.wrap(model, config, torch.ones(8, WIDTH))
        plan = plan_of(model)
        assert plan.optimizer is not None
        assert plan.optimizer.state == "disk"
        assert any("offloading" in layer.techniques for layer in plan.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start, losses = 0, []
    if where is not None and where.exists():
        saved = torch.load(where, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start, losses = saved["step"], saved["losses"]
    for step in range(start, steps):
        torch.manual_seed(step)
        announce("forward")
        loss = model(torch.randn(8, WIDTH)).pow(2).mean()
        announce("backward")
        loss.backward()
        announce("step")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if where is not None:
            announce("checkpoint")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1, "losses": losses}, where.with_suffix(".new"))
            where.with_suffix(".new").replace(where)
    return losses


def _live(pipe: Connection, steps: int, config: Config | None, where: Path | None, waits: bool) -> None:
    """Train in a forked process; one that `waits` asks before each phase whether to go on."""

    def announce(phase: str) -> None:
        pipe.send(phase)
        if waits:
            pipe.recv()

    torch.set_num_threads(1)
    pipe.send(train(steps, config, where, announce))


class Life:
    """One process of a training."""

    def __init__(self, *arguments: Any, waits: bool = False) -> None:
        self.pipe, other = fork.Pipe()
        self.process = fork.Process(target=_live, args=(other, *arguments, waits))
        self.process.start()
        other.close()

    def losses(self) -> list[float]:
        """Let it train to its end."""
        while not isinstance(message := self.pipe.recv(), list):
            pass
        self.process.join()
        assert self.process.exitcode == 0
        return message

    def kill_in(self, phase: str, step: int, delay: float) -> None:
        """Kill it some time after the beginning of a phase, in the given step of this life."""
        for _ in range(step):
            while self.pipe.recv() != phase:
                pass
        time.sleep(delay)
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL


def run(directory: Path, kills: int, seed: int, async_offload: bool) -> dict[str, Any]:
    draw = random.Random(seed)
    steps = 2 * kills + 2
    offloaded, where = directory / "offloaded", directory / "checkpoint"
    config = config_of(offloaded, async_offload)
    memscale.plan(Stack(layers=3, width=WIDTH), torch.ones(8, WIDTH), config)  # once: forks find it
    plain = Life(steps, None, None).losses()
    neighbour = Life(3, config, None, waits=True)
    for _ in range(4):  # up to its second forward: parameters and state are on disk
        neighbour.pipe.recv()
        neighbour.pipe.send("go on")
    fell: list[str] = []
    for number in range(kills):
        phase = PHASES[number % len(PHASES)]
        Life(steps, config, where).kill_in(phase, draw.randint(1, 2), draw.uniform(0, LONGEST_DELAY))
        fell.append(phase)
        assert os.listdir(offloaded) == []
    killed = Life(steps, config, where).losses()
    for _ in range(5):
        neighbour.pipe.send("go on")
    found = {"plain": plain, "killed": killed, "neighbour": neighbour.losses(), "kills": fell}
    assert os.listdir(offloaded) == []
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("kills", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--async-offload", action="store_true")
    options = parser.parse_args()
    print(json.dumps(run(options.directory, options.kills, options.seed, options.async_offload)))


if __name__ == "__main__":
    main()
