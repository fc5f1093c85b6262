"""Where does the memory of training go? A small GPT-2, trained here and simulated on a GPU that is not here.

    python examples/demo.py              # what `make demo` runs
    python examples/demo.py --help       # another size, more steps, another GPU

Nothing is downloaded: the model has random weights, and the text is one that comes with Python.
"""

from __future__ import annotations

import os

# Before transformers is imported, which reads these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
# Before torch is. Threads that wait in a busy loop are slow on a machine that has other things to do.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import bisect
import collections
import re
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memscale.errors import MemScaleError
from memscale.memory.record import Category, Phase, Snapshot, Timeline
from memscale.memory.tracker import MemoryTracker
from memscale.report.terminal import Column, Terminal, bar, table, timeline
from memscale.simulator import simulate
from memscale.units import format_bytes

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    sys.exit("The demo trains a model of transformers: `pip install open-memscale[hf]`.")

VOCABULARY = 8192
WHAT_IT_IS = {
    Category.WEIGHTS: "the parameters",
    Category.BUFFERS: "not trained",
    Category.GRADIENTS: "one for each parameter",
    Category.OPTIMIZER: "two for each parameter",
    Category.ACTIVATIONS: "kept for backward",
    Category.INPUTS: "the batch",
    Category.TEMPORARY: "needed for a moment",
    Category.WORKSPACE: "for the matrix library",
}


@dataclass(frozen=True)
class Seen:
    """What a tracker saw of one training step on one device."""

    peak_bytes: int
    at_peak: Snapshot
    timeline: Timeline


def main() -> None:
    start = time.perf_counter()
    options = parse_arguments()
    torch.manual_seed(0)

    chapter("1. A model, and something to learn")
    words, origin = text_with_python()
    model = make_model(options)
    batches = make_batches(words, options)
    say(
        f"GPT-2 with {options.layers} layers, {options.width} wide: {count(model):,} parameters, random to "
        f"begin with. The text is {origin}: {len(words):,} words, {VOCABULARY:,} different ones at most. "
        f"Each step takes {options.batch} pieces of {options.seq} words and learns to guess the next word."
    )

    chapter(f"2. Training, {options.steps} step{'s' if options.steps > 1 else ''} on this CPU")
    losses, seen = train(model, batches, options.steps)
    say(f"loss: {' '.join(f'{loss:.3f}' for loss in losses)}")
    if len(losses) > 2:
        say(f"It learns: guessing at random would give {torch.tensor(float(VOCABULARY)).log():.2f}.")

    chapter("3. Where the memory went (measured: every tensor of the last step, to the byte)")
    show_categories(seen)
    print()
    show_timeline(seen)
    print()
    show_largest(seen)

    chapter("4. The same step on a device that is not here (simulated: no GPU is used)")
    predicted = simulated_step(options, device="cpu")
    on_gpu = simulated_gpu(options)
    show_comparison(seen, predicted, on_gpu, options.gpu)
    print()
    say(verdict(seen, predicted, on_gpu))
    print()
    say(f"That took {time.perf_counter() - start:.0f} seconds.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT-2, and see where its memory goes.")
    parser.add_argument("--steps", type=positive, default=12, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--layers", type=positive, default=6, help="transformer blocks (default: %(default)s)"
    )
    parser.add_argument(
        "--width", type=positive, default=256, help="hidden size, a multiple of 4 (default: %(default)s)"
    )
    parser.add_argument("--batch", type=positive, default=4, help="pieces in a batch (default: %(default)s)")
    parser.add_argument("--seq", type=positive, default=128, help="words in a piece (default: %(default)s)")
    parser.add_argument("--gpu", default="RTX 3090", help="the GPU to simulate (default: %(default)s)")
    options = parser.parse_args()
    if options.width % 4:
        parser.error(f"--width {options.width} is not a multiple of 4, the number of attention heads")
    if options.seq < 2:
        parser.error("--seq 1 leaves no next word to guess: give at least 2")
    return options


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return number


# ---------------------------------------------------------------------- the model and the text


def make_model(options: argparse.Namespace) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=max(options.seq, 128),
        n_embd=options.width,
        n_layer=options.layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def text_with_python() -> tuple[list[str], str]:
    """Words of a text that is on every machine with Python, and what text it is."""
    try:
        from pydoc_data.topics import topics

        text, origin = "\n".join(topics[name] for name in sorted(topics)), "what Python's help() says"
    except ImportError:  # some systems leave it out to save space
        text, origin = "\n".join(str(sys.modules[name].__doc__) for name in sorted(sys.modules)), "docstrings"
    return re.findall(r"\w+|[^\w\s]|\n+", text), origin


def make_batches(words: list[str], options: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Batch after batch of random pieces of the text, as numbers."""
    frequent = [word for word, _ in collections.Counter(words).most_common(VOCABULARY - 1)]
    number = {word: index for index, word in enumerate(frequent, start=1)}
    tokens = torch.tensor([number.get(word, 0) for word in words])  # 0: a rare word
    while True:
        starts = torch.randint(len(tokens) - options.seq, (options.batch,))
        yield torch.stack([tokens[start : start + options.seq] for start in starts])


# ---------------------------------------------------------------------- training, for real and simulated


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    """An ordinary training step; MemScale has no part in it."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(model: torch.nn.Module, batches: Iterator[torch.Tensor], steps: int) -> tuple[list[float], Seen]:
    """Train on the CPU, and follow the memory of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = [step(model, optimizer, next(batches)).item() for _ in range(steps - 1)]
    ids = next(batches)
    with MemoryTracker(model, optimizer, ids) as tracker:
        last = step(model, optimizer, ids)
    return [*losses, last.item()], what_was_seen(tracker, "cpu")


def simulated_step(options: argparse.Namespace, device: str = "vgpu") -> Seen:
    """The last step again, with tensors that have a shape and no content."""
    with simulate(options.gpu, device=device) as simulation:
        model = make_model(options).to(simulation.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ids = torch.zeros(options.batch, options.seq, dtype=torch.int64, device=simulation.device)
        # The first step is another: the optimizer makes its state at its end.
        if options.steps > 1:
            step(model, optimizer, ids)
        simulation.tracker.reset_peak()
        step(model, optimizer, ids)
        return what_was_seen(simulation.tracker, simulation.device)


def simulated_gpu(options: argparse.Namespace) -> Seen | None:
    """The step on the GPU; None if it does not fit."""
    with simulate(options.gpu) as simulation:
        say(f"{options.gpu}: {simulation.device_name}, {format_bytes(simulation.capacity)}.")
    try:
        return simulated_step(options)
    except torch.OutOfMemoryError as error:
        say(str(error))
        return None


def what_was_seen(tracker: MemoryTracker, device: str | torch.device) -> Seen:
    return Seen(tracker.peak_bytes(device), tracker.at_peak(device), tracker.timeline(device))


# ---------------------------------------------------------------------- tables and pictures


def chapter(title: str) -> None:
    print()
    print("\n".join(Terminal.detect().heading(title)))


def say(text: str) -> None:
    print("\n".join(textwrap.wrap(text, min(Terminal.detect().width, 100))))


def show_categories(seen: Seen) -> None:
    most = {category: max(values) for category, values in seen.timeline.series}
    rows = []
    for category, what in WHAT_IT_IS.items():
        if most.get(category):
            size = seen.at_peak.of(category)
            share = size / seen.peak_bytes
            own = format_bytes(most[category])
            rows.append((category, format_bytes(size), f"{share:.0%}", bar(share, 12), own, what))
    peak = format_bytes(seen.peak_bytes)
    rows.append(("together", peak, "100%", "", peak, f"the peak is in {seen.at_peak.phase}"))
    columns = [
        "category",
        Column("at the peak", "right"),
        Column("share", "right"),
        "",
        Column("its own most", "right"),
        "what it is",
    ]
    print(table("", columns, rows))


def show_timeline(seen: Seen) -> None:
    """The step from its first forward operation on, and how many bytes of what were alive."""
    line = seen.timeline
    begin = next(mark.tick for mark in line.marks if mark.phase is Phase.FORWARD)
    first = bisect.bisect_right(line.ticks, begin)
    series = {str(category): values[first:] for category, values in line.series}
    marks = [
        (bisect.bisect_left(line.ticks, mark.tick) - first, str(mark.phase))
        for mark in line.marks
        if mark.tick >= begin and mark.phase is not Phase.SETUP
    ]
    print(timeline(series, marks, title="Memory in the course of that step", height=10, width=90))


def show_largest(seen: Seen, most: int = 6) -> None:
    rows = [
        (format_bytes(tensor.nbytes), tensor.category, tensor.description)
        for tensor in seen.at_peak.top[:most]
    ]
    columns = [Column("memory", "right"), "category", "tensor, and the operation and module that made it"]
    print(table("The largest tensors at the peak", columns, rows))


def show_comparison(seen: Seen, predicted: Seen, on_gpu: Seen | None, gpu: str) -> None:
    def sizes(each: Seen | None, category: Category) -> str | None:
        return None if each is None else format_bytes(each.at_peak.of(category))

    everything = [each for each in (seen, predicted, on_gpu) if each is not None]
    rows: list[tuple[object, ...]] = [
        (category, *(sizes(each, category) for each in (seen, predicted, on_gpu)))
        for category in Category
        if any(each.at_peak.of(category) for each in everything)
    ]
    total = [None if each is None else format_bytes(each.peak_bytes) for each in (seen, predicted, on_gpu)]
    rows.append(("together", *total))
    columns = [
        "category",
        Column("this CPU, measured", "right"),
        Column("this CPU, simulated", "right"),
        Column(f"{gpu}, simulated", "right"),
    ]
    print(table("", columns, rows))


def verdict(seen: Seen, predicted: Seen, on_gpu: Seen | None) -> str:
    if predicted.peak_bytes == seen.peak_bytes:
        cpu = (
            f"The simulation computes nothing, and predicts the {seen.peak_bytes:,} bytes of this CPU exactly"
        )
    else:
        error = predicted.peak_bytes / seen.peak_bytes - 1
        cpu = f"The simulation computes nothing and is {error:+.2%} off the memory measured on this CPU"
    if on_gpu is None:
        return f"{cpu}; on the GPU the step does not fit."
    ratio = on_gpu.peak_bytes / seen.peak_bytes - 1
    return (
        f"{cpu}; the GPU would need {format_bytes(on_gpu.peak_bytes)}, {abs(ratio):.0%} "
        f"{'more' if ratio > 0 else 'less'}, as its attention keeps less for backward, its allocator hands "
        "out whole blocks, and its matrix library takes some scratch memory."
    )


if __name__ == "__main__":
    try:
        main()
    except MemScaleError as error:
        sys.exit(f"demo: {error}")
