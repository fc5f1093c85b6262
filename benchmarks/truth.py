"""The simulator against measurements that others published: `python -m benchmarks.truth`.

Nothing was fitted to these figures. Each row trains what the source describes on the virtual GPU and compares the
peak in the kind of memory that the source read: allocated, reserved, or the driver's figure (NVML) with the CUDA
context that the source states. Misses stay in the table, with the reason where it is known.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.tables import check_into, write_into
from benchmarks.truth_models import (
    GptShape,
    bert_large,
    head_and_loss,
    llama_3b,
    lora,
    operator,
    vision_transformer,
)
from memscale.benchmarks.results import check_writable, command_line, write_document
from memscale.errors import ConfigError, MemScaleError
from memscale.simulator import simulate

__all__ = ["FIGURES", "Figure", "main", "simulated_bytes", "tables"]

_PROGRAM = "python -m benchmarks.truth"
_TABLE = "truth"
_UNITS = {"MiB": 2**20, "GiB": 2**30, "GB": 10**9}
_BERT_CONTEXT = 1343  # MiB of the CUDA context and kernels, as the source states

Kind = Literal["allocated", "active", "reserved", "NVML"]


@dataclass(frozen=True)
class Figure:
    """A published peak, and how to simulate it."""

    source: str
    what: str
    on: str
    kind: Kind
    published: float
    unit: str
    run: Callable[[torch.device], None] | None  # None: can't be simulated, and `reason` says why
    context_mib: int = 0  # of the CUDA context, in the figure
    reason: str = ""

    @property
    def published_bytes(self) -> int:
        return round(self.published * _UNITS[self.unit])


LIGER = "Liger-Kernel"
LITGPT = "LitGPT"
HF = "transformers"
RASCHKA = "Raschka"
TORCHTUNE = "torchtune"

SOURCES = {
    LIGER: "Liger-Kernel, `benchmark/data/all_benchmark_data.csv`, rows of the torch baseline, forward and backward",
    LITGPT: "LitGPT, `tutorials/resource-tables.md` (October 2023, torch 2.1): LoRA r 8, bf16-true, A100 40 GB",
    HF: "transformers, `docs/source/performance.mdx` (January 2022): bert-large-uncased, 512 tokens, V100 16 GB; "
    f"the CUDA context of {_BERT_CONTEXT:,} MiB that it states is added to what is simulated as reserved",
    RASCHKA: "Sebastian Raschka, pytorch-memory-optim (torch 2.1): torchvision's ViT-L/16, 224 × 224, Adam",
    TORCHTUNE: "torchtune, README: Llama 3.2 3B, 2 × 4096 tokens, bf16, A100 80 GB, peak active memory",
}

_PHI = GptShape(24, 2048, 32, 51200, 8192, rotary=0.5, shares_norm=True, head_bias=True)
_STABLELM = GptShape(16, 4096, 32, 50688, 16384, rotary=0.25)
_LLAMA_7B = GptShape(32, 4096, 32, 32000, 11008, is_llama=True)
_LLAMA_13B = GptShape(40, 5120, 40, 32000, 13824, is_llama=True)

_EIGHT_BIT = "not simulated: bitsandbytes' kernels do not run on fake tensors"
_COMPILED = "not simulated: compiled code has other kernels, and fuses them"
_OLD_ATTENTION = "torch 2.1's attention kernels, which kept other layouts; not verified"


def _liger(tokens: int, published: float) -> Figure:
    run = functools.partial(head_and_loss, tokens=tokens)
    return Figure(
        LIGER, f"linear and cross entropy, {tokens:,} tokens", "A100", "allocated", published, "MiB", run
    )


def _operators(name: str, what: str, on: str, smallest: int, published: Sequence[float]) -> list[Figure]:
    """Return a figure for each size: the smallest, twice that, and so on."""
    sizes = [smallest * 2**power for power in range(len(published))]
    return [
        Figure(
            LIGER,
            f"{name}, {what} {size:,}",
            on,
            "allocated",
            figure,
            "MiB",
            functools.partial(operator, name=name, size=size),
        )
        for size, figure in zip(sizes, published, strict=True)
    ]


def _litgpt(name: str, shape: GptShape, batch: int, length: int, published: float) -> Figure:
    run = functools.partial(lora, shape=shape, batch=batch, length=length)
    what = f"{name}, {batch} × {length:,} tokens"
    return Figure(LITGPT, what, "A100-SXM4-40GB", "allocated", published, "GB", run)


def _hf(what: str, published: int, run: Callable[[torch.device], None] | None, reason: str = "") -> Figure:
    return Figure(HF, what, "V100", "NVML", published, "MiB", run, _BERT_CONTEXT, reason)


def _vit(what: str, published: float, run: Callable[[torch.device], None], reason: str) -> Figure:
    return Figure(RASCHKA, what, "A100", "reserved", published, "GB", run, reason=reason)


def _tune(
    what: str, published: float, run: Callable[[torch.device], None] | None, reason: str = ""
) -> Figure:
    return Figure(TORCHTUNE, what, "A100 80GB", "active", published, "GiB", run, reason=reason)


FIGURES = (
    _liger(4096, 6092.28),
    _liger(8192, 9162.31),
    _liger(16384, 15302.38),
    _liger(32768, 27582.5),
    *_operators(
        "cross entropy",
        "vocabulary",
        "A100-80GB",
        4096,
        (1280.126, 2560.126, 5120.126, 10240.126, 20480.125, 40960.125),
    ),
    *_operators("KL divergence", "vocabulary", "H100", 4096, (1792, 3584, 7168, 14336, 28672, 57344)),
    *_operators(
        "Jensen-Shannon divergence",
        "vocabulary",
        "H100",
        4096,
        (1664.001, 3328.001, 6656.001, 13312.001, 26624, 53248),
    ),
    *_operators("GEGLU", "length", "A100-80GB", 1024, (1992.25, 3452.25, 6372.25, 12212.25)),
    *_operators("SwiGLU", "length", "A100-80GB", 1024, (1294.25, 1992.25, 3452.25, 6372.25)),
    *_operators("layer norm", "width", "A100-80GB", 1024, (80.063, 160.094, 320.156, 640.281, 1280.531)),
    *_operators("RMS norm", "width", "A100-80GB", 1024, (80.516, 160.531, 320.563, 640.625, 1280.75, 2561)),
    *_operators(
        "rotary embedding", "length", "A100-80GB", 1024, (121.133, 234.141, 460.157, 912.188, 1816.250)
    ),
    *_operators(
        "attention written out, fp32",
        "RTX 3090, length",
        "RTX 3090",
        64,
        (32.531, 36.805, 53.336, 110.523, 321.273, 1128.273, 4284.273),
    ),
    *_operators(
        "attention written out, fp32",
        "H100, length",
        "H100",
        64,
        (80.281, 84.555, 101.086, 158.273, 369.023, 1176.023, 4332.023),
    ),
    _litgpt("phi-1.5", _PHI, 1, 1044, 4.82),
    _litgpt("phi-1.5", _PHI, 2, 1044, 6.76),
    _litgpt("phi-1.5", _PHI, 4, 1044, 10.68),
    _litgpt("StableLM Alpha 3B", _STABLELM, 1, 1034, 9.69),
    _litgpt("StableLM Alpha 3B", _STABLELM, 2, 1034, 12.10),
    _litgpt("StableLM Alpha 3B", _STABLELM, 4, 1034, 16.92),
    _litgpt("Llama 2 7B", _LLAMA_7B, 1, 1304, 21.30),
    _litgpt("Llama 2 7B", _LLAMA_7B, 2, 1304, 29.07),
    _litgpt("Llama 2 13B", _LLAMA_13B, 1, 1304, 38.12),
    _hf("batch 4, fp32", 14949, functools.partial(bert_large, batch=4)),
    _hf("batch 1, 4 accumulated", 8681, functools.partial(bert_large, batch=1, accumulate=4)),
    _hf(
        "batch 1, 4 accumulated, checkpointing",
        6775,
        functools.partial(bert_large, batch=1, accumulate=4, checkpointing=True),
    ),
    _hf("batch 4, fp16", 13939, functools.partial(bert_large, batch=4, half=True)),
    _hf("batch 4, Adafactor", 12295, functools.partial(bert_large, batch=4, adafactor=True)),
    _hf("batch 4, 8-bit Adam", 13085, None, _EIGHT_BIT),
    _hf("batch 1, 4 accumulated, checkpointing, fp16, 8-bit Adam", 5363, None, _EIGHT_BIT),
    _vit("batch 64, fp32", 26.79, functools.partial(vision_transformer, batch=64), ""),
    _vit(
        "batch 64, fp16 autocast",
        18.21,
        functools.partial(vision_transformer, batch=64, mixed=True),
        _OLD_ATTENTION,
    ),
    _vit("batch 64, bf16", 13.82, functools.partial(vision_transformer, batch=64, bf16=True), _OLD_ATTENTION),
    _vit("batch 16, bf16", 5.69, functools.partial(vision_transformer, batch=16, bf16=True), _OLD_ATTENTION),
    _tune("eager", 60.0, llama_3b),
    _tune("compiled", 51.0, None, _COMPILED),
    _tune("compiled, cross entropy in chunks", 42.9, None, _COMPILED),
    _tune("compiled, in chunks, activation checkpointing", 24.9, None, _COMPILED),
    _tune("the same, optimizer steps in backward", 23.1, None, _COMPILED),
    _tune("the same, activations offloaded", 21.8, None, _COMPILED),
    _tune("the same, 8-bit AdamW", 17.6, None, _COMPILED),
)


@dataclass(frozen=True)
class Row:
    source: str
    what: str
    on: str
    kind: Kind
    unit: str
    published: float
    simulated: float | None
    error: float | None  # simulated over published, less one
    reason: str

    @classmethod
    def of(cls, figure: Figure) -> Row:
        found = simulated_bytes(figure)
        return cls(
            figure.source,
            figure.what,
            figure.on,
            figure.kind,
            figure.unit,
            figure.published,
            None if found is None else round(found / _UNITS[figure.unit], 2),
            None if found is None else round(found / figure.published_bytes - 1, 4),
            figure.reason,
        )


def simulated_bytes(figure: Figure) -> int | None:
    """Run a figure's training on its device; None if it can't be simulated."""
    if figure.run is None:
        return None
    try:
        with simulate(figure.on) as simulation:
            figure.run(simulation.device)
        is_in_use = figure.kind in ("allocated", "active")
        peak = simulation.peak_bytes if is_in_use else simulation.peak_reserved_bytes
        return peak + figure.context_mib * 2**20
    finally:
        gc.collect()


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Return the table of a file of results."""
    rows = [Row(**row) for row in document["rows"]]
    lines = [
        "| source | run | memory | published | simulated | error | reason |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        simulated = "–" if row.simulated is None else f"{row.simulated:,.2f} {row.unit}"
        error = "–" if row.error is None else f"{row.error:+.2%}"
        reason = row.reason or ("not known" if abs(row.error or 0) > 0.01 else "")
        lines.append(
            f"| {row.source} | {row.what} | {row.kind} | {row.published:,.2f} {row.unit} | {simulated} | {error} | "
            f"{reason} |"
        )
    errors = [abs(row.error) for row in rows if row.error is not None]
    summary = f"{len(errors)} of {len(rows)} figures simulated"
    if errors:
        within = sum(error <= 0.01 for error in errors)
        summary += f"; {within} within 1%, the worst {max(errors):.1%} off"
    sources = [f"- {SOURCES[name]}." for name in dict.fromkeys(row.source for row in rows)]
    text = "\n".join(
        [
            *lines,
            "",
            f"Published by the sources below, simulated here without a GPU: {summary}.",
            "",
            *sources,
            "",
            f"Made by `{document['command']}` (torch {document['torch']}).",
        ]
    )
    return {_TABLE: text}


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate the rows, and print and write the table; return 2 for what is not allowed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="The simulator against published measurements."
    )
    parser.add_argument("--only", metavar="TEXT", help="rows whose source and run have this in them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument(
        "--into", type=Path, metavar="FILE.md", help="write the table between its markers there"
    )
    options = parser.parse_args(arguments)
    wanted = (options.only or "").lower()
    figures = [each for each in FIGURES if wanted in f"{each.source} {each.what}".lower()]
    command = command_line(_PROGRAM, arguments)
    try:
        if not figures:
            raise ConfigError(f"--only {options.only}: no row has that. Sources: {', '.join(SOURCES)}.")
        check_writable(options.json)
        check_into(options.into, [_TABLE])
        rows = []
        for number, figure in enumerate(figures, start=1):
            start = time.perf_counter()
            rows.append(Row.of(figure))
            error = "–" if rows[-1].error is None else f"{rows[-1].error:+.2%}"
            seconds = time.perf_counter() - start
            print(
                f"{number} of {len(figures)}: {figure.source}, {figure.what}: {error} ({seconds:.0f} s)",
                file=sys.stderr,
            )
        document = {
            "schema": 1,
            "command": command,
            "torch": torch.__version__,
            "rows": [*map(asdict, rows)],
        }
        if options.json is not None:
            write_document(options.json, document)
        if options.into is not None:
            write_into(options.into, tables(document))
    except MemScaleError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    print(*tables(document).values())
    return 0


if __name__ == "__main__":
    sys.exit(main())
