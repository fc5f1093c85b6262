"""What a simulation costs: time and memory of simulating two AdamW steps of GPT-2 XL, 1 × 512, on this machine.

    python -m benchmarks.simulation_cost

Needs the ``hf`` extra. The figures are of the simulation alone: importing torch and transformers is not in the
time, and is in the memory.
"""

from __future__ import annotations

import time
from typing import Any, cast

import torch

from memscale.memory.process import peak_rss_bytes
from memscale.simulator.simulate import simulate
from memscale.units import format_bytes

CAPACITY = "64GiB"


def main() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=1600, n_layer=48, n_head=25)
    wall, processor = time.perf_counter(), time.process_time()
    with simulate(CAPACITY) as simulation:
        model = cast(Any, GPT2LMHeadModel)(config).to(simulation.device).train()
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(0, config.vocab_size, (1, 512), device=simulation.device)
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = simulation.peak_bytes
    print(
        f"GPT-2 XL, 1 × 512, two AdamW steps on a simulated device of {CAPACITY}: peak {format_bytes(peak)}\n"
        f"{time.process_time() - processor:.1f} s of processor time, {time.perf_counter() - wall:.1f} s in all, "
        f"{format_bytes(peak_rss_bytes())} of RSS at most"
    )


if __name__ == "__main__":
    main()
