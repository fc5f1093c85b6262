"""Where does the memory of training go, and what does one line change? A small GPT-2, trained here both ways.

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
import itertools
import re
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

import memscale
from memscale.errors import MemScaleError
from memscale.memory.record import Category, Phase, Snapshot, Timeline
from memscale.memory.tracker import MemoryTracker
from memscale.report import Column, Terminal, table
from memscale.simulator import simulate
from memscale.units import format_bytes

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    sys.exit("The demo trains a model of transformers: pip install transformers.")

VOCABULARY = 8192
QUIET = memscale.Config(enable_logging=False, force_optimize=True)  # a small model, whose plan the demo shows
BLOCKS = " ▏▎▍▌▋▊▉█"
FILLS = "█▓▒░·#=+:x*&"
COLOURS = (34, 32, 35, 33, 36, 31)
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
    gpu_name = full_name(options.gpu)  # an unknown one is better refused now than after the training

    chapter("1. A model, and something to learn")
    words, origin = text_with_python()
    say(
        f"GPT-2 with {options.layers} layers, {options.width} wide: {count(make_model(options)):,} parameters, "
        f"random to begin with. The text is {origin}: {len(words):,} words, {VOCABULARY:,} different ones at "
        f"most. Each step takes {options.batch} pieces of {options.seq} words and learns to guess the next word."
    )

    chapter(f"2. Training, {options.steps} step{'s' if options.steps > 1 else ''} on this CPU")
    plain_losses, plain = train(words, options)
    say(f"loss: {' '.join(f'{loss:.3f}' for loss in plain_losses)}")
    if len(plain_losses) > 2:
        say(f"It learns: guessing at random would give {torch.tensor(float(VOCABULARY)).log():.2f}.")

    chapter("3. Where the memory went (measured: every tensor of the last step, to the byte)")
    show_categories(plain)
    print()
    show_timeline(plain)
    print()
    show_largest(plain)

    chapter("4. The same again with one line more: model = memscale.wrap(model)")
    plans: list[memscale.Plan] = []
    wrapped_losses, wrapped = train(words, options, plans)
    print(plans[-1].explain(trades=False))
    print()
    show_losses(plain_losses, wrapped_losses)
    print()
    show_before_and_after(plain, wrapped)
    print()
    show_timeline(wrapped)
    print()
    say(what_it_took(plain, wrapped, plain_losses, wrapped_losses, plans[-1]))

    chapter("5. The same step on a device that is not here (simulated: no GPU is used)")
    predicted = simulated_step(options, "1PiB", device="cpu")
    say(f"{options.gpu}: {gpu_name}.")
    on_gpu = simulated_gpu(options)
    show_comparison(plain, predicted, on_gpu, options.gpu)
    print()
    say(verdict(plain, predicted, on_gpu))
    there = plan_for_gpu(options)
    say(
        f"With memscale.wrap the {options.gpu} would need {format_bytes(there.predicted_peak_bytes)} instead of "
        f"{format_bytes(there.baseline_peak_bytes)} (simulated), and a step would take "
        f"{there.predicted_time_ratio:.2f} times as long (predicted)."
    )
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


def train(
    words: list[str], options: argparse.Namespace, plans: list[memscale.Plan] | None = None
) -> tuple[list[float], Seen]:
    """Train on the CPU, and follow the memory of the last step; with MemScale, and its plan noted, if asked to."""
    torch.manual_seed(0)  # the same weights, the same batches, the same dropout, with MemScale and without
    model = make_model(options)
    batches = make_batches(words, options)
    if plans is not None:
        sample = torch.zeros(options.batch, options.seq, dtype=torch.int64)
        model = memscale.wrap(model, QUIET, {"input_ids": sample, "labels": sample})
        plans.append(model._memscale_executor.plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = [step(model, optimizer, next(batches)).item() for _ in range(options.steps - 1)]
    ids = next(batches)
    with MemoryTracker(model, optimizer, ids) as tracker:
        last = step(model, optimizer, ids)
    return [*losses, last.item()], what_was_seen(tracker, "cpu")


def plan_for_gpu(options: argparse.Namespace) -> memscale.Plan:
    """What `wrap` would do on the GPU, and what it predicts of it."""
    with torch.device("meta"):
        model = make_model(options)
    sample = torch.zeros(options.batch, options.seq, dtype=torch.int64)
    return memscale.plan(model, {"input_ids": sample, "labels": sample}, QUIET, hardware=options.gpu)


def full_name(gpu: str) -> str:
    with simulate(gpu) as simulation:
        return f"{simulation.device_name}, {format_bytes(simulation.capacity)}"


def simulated_step(options: argparse.Namespace, on: str, device: str = "vgpu") -> Seen:
    """The last step again, with tensors that have a shape and no content."""
    with simulate(on, device=device) as simulation:
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
    try:
        return simulated_step(options, options.gpu)
    except torch.OutOfMemoryError as error:
        print(error)
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


def show_losses(plain: list[float], wrapped: list[float]) -> None:
    rows = [
        (number, f"{before:.6f}", f"{after:.6f}", "equal" if before == after else f"{after - before:+.1e}")
        for number, (before, after) in enumerate(zip(plain, wrapped, strict=True), start=1)
    ]
    columns = [Column("step", "right"), Column("plain", "right"), Column("with MemScale", "right"), "loss"]
    print(table("The losses, side by side", columns, rows))


def show_before_and_after(plain: Seen, wrapped: Seen) -> None:
    present = [each for each in Category if plain.at_peak.of(each) or wrapped.at_peak.of(each)]
    rows: list[tuple[object, ...]] = [
        (each, format_bytes(plain.at_peak.of(each)), format_bytes(wrapped.at_peak.of(each)))
        for each in present
    ]
    rows.append(("together", format_bytes(plain.peak_bytes), format_bytes(wrapped.peak_bytes)))
    columns = ["category at the peak", Column("plain", "right"), Column("with MemScale", "right")]
    print(table("Measured on this CPU", columns, rows))


def what_it_took(
    plain: Seen, wrapped: Seen, plain_losses: list[float], wrapped_losses: list[float], plan: memscale.Plan
) -> str:
    fell = 1 - wrapped.peak_bytes / plain.peak_bytes
    same = "to the last bit the same" if plain_losses == wrapped_losses else "the same to float error"
    return (
        f"The peak fell by {fell:.0%}, from {format_bytes(plain.peak_bytes)} to "
        f"{format_bytes(wrapped.peak_bytes)} (measured); the plan had predicted "
        f"{format_bytes(plan.predicted_peak_bytes)} (simulated). The losses are {same}."
    )


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
        f"{'more' if ratio > 0 else 'less'}: its attention keeps less for backward, but its allocator hands "
        "out whole blocks, and its matrix library wants scratch memory."
    )


# ---------------------------------------------------------------------- pictures


def bar(fraction: float, width: int) -> str:
    """Return a bar of `width` cells, filled from the left: full only for 1, empty only for 0."""
    fraction = min(max(fraction, 0.0), 1.0)
    eighths = round(fraction * width * 8)
    if 0 < fraction < 1:
        eighths = min(max(eighths, 1), width * 8 - 1)
    full, part = divmod(eighths, 8)
    drawn = BLOCKS[8] * full + (BLOCKS[part] if part else "")
    return drawn + "░" * (width - len(drawn))


def timeline(
    series: Mapping[str, Sequence[int]],
    marks: Sequence[tuple[int, str]] = (),
    *,
    height: int = 10,
    width: int = 78,
    title: str = "",
    terminal: Terminal | None = None,
) -> str:
    """Draw memory over time: the categories stacked, the peak named, the phases below.

    Each character column stands for a run of events and shows the one of them with the highest sum, so the peak is
    always in the picture. A cell shows the category that has most of it.

    Args:
        series: For each category its bytes at every event; the first one is drawn at the bottom.
        marks: `(event, name)` for each phase that begins.
        height: Rows of the picture.
        width: Cells in a line, labels included; a narrower terminal wins.
        title: The line above; empty for none.
        terminal: What to write for; by default what `Terminal.detect` finds.
    """
    terminal = terminal or Terminal.detect()
    stacks = list(zip(*series.values(), strict=True))
    lines = terminal.heading(title)
    if not stacks:
        return "\n".join([*lines, "(nothing recorded)"])
    totals = [sum(stack) for stack in stacks]
    peak = max(totals)
    peak_event = totals.index(peak)
    labels = {0: format_bytes(0), height: format_bytes(peak)}
    margin = max(map(len, labels.values()))
    columns = max(min(width, terminal.width) - margin - 2, 10)

    starts = [number * len(stacks) // columns for number in range(columns + 1)]
    runs = [range(start, max(end, start + 1)) for start, end in itertools.pairwise(starts)]

    def column(event: int) -> int:
        event = min(max(event, 0), len(stacks) - 1)
        return next(number for number, run in enumerate(runs) if run.stop > event)

    shown = [stacks[max(run, key=totals.__getitem__)] for run in runs]
    text, arrow = f"peak {format_bytes(peak)}", column(peak_event)
    pointer = f"▼ {text}" if arrow + len(text) + 2 <= columns else f"{text} ▼"
    lines.append(" " * (margin + 2 + arrow - (0 if pointer[0] == "▼" else len(text) + 1)) + pointer)
    for row in reversed(range(height)):
        fills = [_category(stack, row * peak, (row + 1) * peak, height) for stack in shown]
        drawn = "".join(" " if each is None else _painted(FILLS[each], each, terminal) for each in fills)
        lines.append(f"{labels.get(row + 1, ''):>{margin}} ┤{drawn}".rstrip())
    ticks = {column(event): name for event, name in marks}
    axis = "".join("┬" if number in ticks else "─" for number in range(columns))
    names = ""
    for start, name in sorted(ticks.items()):
        names = f"{names:<{start}}{name} " if len(names) <= start else f"{names}{name} "
    lines += [f"{labels[0]:>{margin}} ┼{axis}", " " * (margin + 2) + names[:columns].rstrip()]
    lines.append("at the peak:")
    for number, (name, size) in enumerate(zip(series, stacks[peak_event], strict=True)):
        lines.append(f"  {_painted(FILLS[number], number, terminal)} {name} {format_bytes(size)}")
    return "\n".join(lines)


def _category(stack: Sequence[int], low: int, high: int, scale: int) -> int | None:
    """Return which category has most of the bytes between `low` and `high`, both in 1/`scale` of a byte."""
    best, most, bottom = None, 0, 0
    for category, size in enumerate(stack):
        top = bottom + size * scale
        overlap = min(top, high) - max(bottom, low)
        if overlap > most:
            best, most = category, overlap
        bottom = top
    return best


def _painted(text: str, category: int, terminal: Terminal) -> str:
    return terminal.paint(text, COLOURS[category % len(COLOURS)])


if __name__ == "__main__":
    try:
        main()
    except MemScaleError as error:
        sys.exit(f"demo: {error}")
