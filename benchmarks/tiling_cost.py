"""What tiles cost and save: a head with its loss, and an MLP, whole and in tiles, on this machine.

    python -m benchmarks.tiling_cost

Times are processor time of one thread, the least of a few runs, whole and tiled in turn: only their ratio means
something. Memory is the peak of tensor bytes of a forward and a backward pass, exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from memscale.memory.tracker import MemoryTracker
from memscale.tiling import Head, lazy_logits, run_in_tiles
from memscale.units import format_bytes

TOKENS, WIDTH, WORDS = 2048, 768, 50257
ROUNDS = 3


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _compare(f"Head and cross-entropy, {TOKENS} tokens × {WORDS} words", _loss_steps((128, 256, 512)))
    _compare(
        f"MLP of width {WIDTH}, {2 * TOKENS} tokens, recomputed whole or in tiles", _mlp_steps((256, 512))
    )


Steps = dict[str, tuple[nn.Module, Callable[[], None]]]


def _loss_steps(rows: tuple[int, ...]) -> Steps:
    head = nn.Linear(WIDTH, WORDS, bias=False)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    target = torch.randint(0, WORDS, (TOKENS,))

    def step(size: int | None) -> None:
        head.zero_grad()
        hidden.grad = None
        tiled = Head(head.weight, None, torch.float32, size or TOKENS)
        logits = head(hidden) if size is None else lazy_logits(hidden, tiled)
        loss = nn.functional.cross_entropy(logits, target)
        del logits
        loss.backward()  # type: ignore[no-untyped-call]

    sizes: list[int | None] = [None, *rows]
    return {_name(size): (head, lambda size=size: step(size)) for size in sizes}  # type: ignore[misc]


def _mlp_steps(rows: tuple[int, ...]) -> Steps:
    mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    x = torch.randn(1, 2 * TOKENS, WIDTH, requires_grad=True)

    def step(size: int | None) -> None:
        mlp.zero_grad()
        x.grad = None
        run_in_tiles(mlp, x, size or x.shape[1], [mlp]).sum().backward()  # type: ignore[no-untyped-call]

    sizes: list[int | None] = [None, *rows]
    return {_name(size): (mlp, lambda size=size: step(size)) for size in sizes}  # type: ignore[misc]


def _name(rows: int | None) -> str:
    return "whole" if rows is None else f"{rows} rows"


def _compare(what: str, steps: Steps) -> None:
    print(what)
    seconds = dict.fromkeys(steps, float("inf"))
    for _ in range(ROUNDS):
        for name, (_, step) in steps.items():
            start = time.process_time()
            step()
            seconds[name] = min(seconds[name], time.process_time() - start)
    for name, (module, step) in steps.items():
        module.zero_grad()
        with MemoryTracker(module) as tracker:
            step()
        ratio = seconds[name] / seconds["whole"]
        print(f"  {name:>10}  time {ratio:4.2f}×  peak {format_bytes(tracker.peak_bytes())}")


if __name__ == "__main__":
    main()
