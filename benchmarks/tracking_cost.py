"""What tracking costs: the time of a training step with the tracker over one without, on this machine.

    python -m benchmarks.tracking_cost

Plain and tracked steps of a small GPT-2 take turns, so that whatever else the machine does meets both; a mode
that does nothing takes its turn as well, as the part of the cost that is torch's own. Needs the ``hf`` extra.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memscale.memory.tracker import MemoryTracker

LAYERS, WIDTH, VOCABULARY, BATCH, LENGTH = 4, 256, 8192, 4, 128


class _Idle(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its `__init_subclass__`
    """A mode that passes every operation on: what no tracker written in Python can be cheaper than."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in MemoryTracker

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


def gpt2(layers: int, width: int, batch: int, length: int) -> tuple[tuple[Any, ...], Callable[[], None]]:
    """A model and its optimizer, and a function that trains it for one step."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=width // 64,
        vocab_size=VOCABULARY,
        n_positions=length,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = cast(Any, GPT2LMHeadModel)(config).train()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, VOCABULARY, (batch, length))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return (model, optimizer), step


def measure(watched: tuple[Any, ...], step: Callable[[], None], rounds: int) -> dict[str, list[float]]:
    """Seconds of processor time of each kind of step, taken in turns."""
    kinds: dict[str, AbstractContextManager[Any]] = {
        "plain": contextlib.nullcontext(),
        "idle mode": cast(Any, _Idle)(),
        "tracked": MemoryTracker(*watched),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 2):
        for kind, block in kinds.items():
            with block:
                start = time.process_time()
                step()
                took = time.process_time() - start
            if number >= 2:  # the first ones allocate, and make the optimizer's state
                seconds[kind].append(took)
    return seconds


def report(seconds: dict[str, list[float]]) -> str:
    lines = []
    for kind, values in seconds.items():
        ratios = [value / plain for value, plain in zip(values, seconds["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        spread = f"{middle:.3f} (middle half {low:.3f} to {high:.3f})" if kind != "plain" else "1"
        lines.append(f"{kind:10} {statistics.median(values) * 1e3:8.1f} ms   ratio {spread}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tracking_cost", description=(__doc__ or "").split("\n")[0]
    )
    for name, default in (("layers", LAYERS), ("width", WIDTH), ("batch", BATCH), ("length", LENGTH)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each kind (default: 30)")
    options = parser.parse_args()
    torch.manual_seed(0)
    watched, step = gpt2(options.layers, options.width, options.batch, options.length)
    print(
        f"GPT-2, {options.layers} layers, width {options.width}, batch {options.batch} × {options.length}, "
        f"{torch.get_num_threads()} threads, {options.rounds} rounds, processor time (median)"
    )
    print(report(measure(watched, step, options.rounds)))


if __name__ == "__main__":
    main()
