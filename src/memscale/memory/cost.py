"""What tracking costs: the time of a training step with the tracker over one without, on this machine.

    python -m memscale.memory.cost

Plain and tracked steps of a small GPT-2 take turns, so that whatever else the machine does meets both. Needs the
``hf`` extra.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch

from memscale.memory.tracker import MemoryTracker

LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, LENGTH = 4, 256, 4, 8192, 4, 128


def small_gpt2() -> tuple[Any, Callable[[], None]]:
    """A model, its optimizer, and a function that trains it for one step."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS,
        n_embd=WIDTH,
        n_head=HEADS,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = cast(Any, GPT2LMHeadModel)(config).train()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return (model, optimizer), step


def measure(rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of processor time of plain and of tracked steps, taken in turns."""
    watched, step = small_gpt2()
    step()
    step()
    plain, tracked = [], []
    tracker = MemoryTracker(*watched)
    for _ in range(rounds):
        plain.append(_seconds(step))
        with tracker:
            tracked.append(_seconds(step))
    return plain, tracked


def _seconds(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m memscale.memory.cost", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=30, help="steps of each kind (default: 30)")
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    plain, tracked = measure(rounds)
    ratios = sorted(with_it / without for with_it, without in zip(tracked, plain, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"GPT-2, {LAYERS} layers, width {WIDTH}, batch {BATCH} × {LENGTH}, {torch.get_num_threads()} threads, "
        f"{rounds} rounds, processor time\n"
        f"plain step    {statistics.median(plain) * 1e3:7.1f} ms (median)\n"
        f"tracked step  {statistics.median(tracked) * 1e3:7.1f} ms (median)\n"
        f"ratio         {middle:7.3f} (median of pairs; middle half {low:.3f} to {high:.3f})"
    )


if __name__ == "__main__":
    main()
