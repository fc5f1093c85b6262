"""`python -m benchmarks.step_times`: the planner's time model against step times that others have published.

Each row is a published measurement: whose, on which device, and what the time model (`memscale/techniques/cost.py`)
estimates for the same model and batch. Three rows, of the link and of torch's Adam on the host, are where constants of
the model come from; the page says which choices were made with the rows in view. Misses are shown as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.tables import check_into, write_into
from memscale.benchmarks.models import quiet_transformers
from memscale.benchmarks.results import check_writable, command_line, write_document
from memscale.config import Config
from memscale.errors import MemScaleError
from memscale.hardware import virtual_hardware
from memscale.planner.cost_model import PLAIN, CostModel, full_checkpointing
from memscale.planner.make_plan import profile_settings
from memscale.planner.predict import rehearsal
from memscale.planner.settings import Setting
from memscale.profiler import Sample
from memscale.techniques.cost import HOST_ADAM_FUSED, HOST_ADAM_LOOP, LINK_EFFICIENCY, PAGEABLE_BANDWIDTH

__all__ = ["TimeRow", "main", "rows"]

_PROGRAM = "python -m benchmarks.step_times"
HF_GUIDE = "transformers docs/source/performance.mdx, January 2022"
TORCHTUNE = "torchtune README, Llama-3.2-3B on an A100"
TORCHAO = "torchao torchao/optim/README.md, ViT-giant on a 4070 Ti SUPER"
GUIDE_STEPS = 512 / 4  # optimizer steps in the guide's figures, which are for 512 samples


@dataclass(frozen=True)
class TimeRow:
    """A published figure, and what the time model says.

    Attributes:
        source: who published it.
        what: was measured.
        unit: of both figures.
        published: the published figure.
        estimated: what the time model says.
    """

    source: str
    what: str
    unit: str
    published: float
    estimated: float

    @property
    def error(self) -> float:
        """What the estimate is above the published figure, as a share of that."""
        return self.estimated / self.published - 1


@dataclass(frozen=True)
class _Seconds:
    """The times of a step.

    Attributes:
        plain: of the plain step.
        checkpointed: with every layer recomputed whole.
        optimizer: of the optimizer's part of both.
        inputs_on_host: checkpointed, with the inputs of the layers on the host, which are prefetched.
        state_on_host: checkpointed, with all optimizer state on the host, stepped on the device after backward.
    """

    plain: float
    checkpointed: float
    optimizer: float
    inputs_on_host: float
    state_on_host: float

    @property
    def ratio(self) -> float:
        return self.checkpointed / self.plain


def _seconds(build: Callable[[], nn.Module], inputs: dict[str, torch.Tensor], device: str) -> _Seconds:
    hardware, config = virtual_hardware(device), Config(mode="conservative", enable_logging=False)
    with torch.device("meta"), quiet_transformers():
        model = build().train()
    with rehearsal(model), quiet_transformers():
        profile = profile_settings(model, Sample((), inputs), config, hardware).profile
    costs = CostModel(profile, hardware, config)
    prefetching = CostModel(profile, hardware, config, prefetch=1)
    in_buckets = CostModel(profile, hardware, config, Setting(bucketed=True))
    recomputed = full_checkpointing(costs.blocks)
    sent = tuple(each._replace(input_offloaded=each.recompute) for each in recomputed)
    return _Seconds(
        costs.point((PLAIN,) * len(costs.blocks)).seconds,
        costs.point(recomputed).seconds,
        costs.terms.rates.optimizer(profile.gradient_bytes),
        prefetching.point(sent).seconds,
        in_buckets.point(recomputed, len(costs.blocks)).seconds,
    )


@cache
def _bert_large(batch: int) -> _Seconds:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    words = torch.zeros(batch, 512, dtype=torch.long)
    labels = torch.zeros(batch, dtype=torch.long)
    inputs = {"input_ids": words, "labels": labels}
    return _seconds(lambda: BertForSequenceClassification(config), inputs, "V100")


@cache
def _llama_3b() -> _Seconds:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=3072,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128256,
        tie_word_embeddings=True,
    )
    words = torch.zeros(2, 4096, dtype=torch.long)
    inputs = {"input_ids": words, "labels": words}
    return _seconds(lambda: LlamaForCausalLM(config).bfloat16(), inputs, "A100-80GB")


@cache
def _vit_giant() -> _Seconds:
    from transformers import Dinov2Config, Dinov2ForImageClassification

    config = Dinov2Config(
        hidden_size=1536,
        num_hidden_layers=40,
        num_attention_heads=24,
        use_swiglu_ffn=True,
        image_size=224,
        num_labels=45,
    )
    images = torch.zeros(32, 3, 224, 224, dtype=torch.bfloat16)
    inputs = {"pixel_values": images, "labels": torch.zeros(32, dtype=torch.long)}
    return _seconds(lambda: Dinov2ForImageClassification(config).bfloat16(), inputs, "RTX 4070 Ti SUPER")


def rows() -> Iterator[TimeRow]:
    """Yield the rows of the table, one after the other."""
    whole, one = _bert_large(4), _bert_large(1)
    # Of four micro-batches the optimizer steps once.
    accumulated = 4 * (one.plain - one.optimizer) + one.optimizer
    recomputed = 4 * (one.checkpointed - one.optimizer) + one.optimizer
    step = "s a step"
    yield TimeRow(HF_GUIDE, "BERT-Large, V100, fp32, 4 × 512", step, 57.82 / GUIDE_STEPS, whole.plain)
    yield TimeRow(HF_GUIDE, "the same as four batches of 1", step, 66.03 / GUIDE_STEPS, accumulated)
    yield TimeRow(HF_GUIDE, "the same, checkpointed", step, 85.47 / GUIDE_STEPS, recomputed)
    yield TimeRow(HF_GUIDE, "checkpointing over none", "×", 85.47 / 66.03, recomputed / accumulated)
    llama = _llama_3b()
    yield TimeRow(TORCHTUNE, "2 × 4096 packed, bf16, eager", step, 8192 / 7075, llama.plain)
    yield TimeRow(TORCHTUNE, "checkpointing over none (compiled)", "×", 9174 / 7210, llama.ratio)
    sent = "inputs of checkpointed layers on the host over not (compiled)"
    yield TimeRow(TORCHTUNE, sent, "×", 7309 / 7301, llama.inputs_on_host / llama.checkpointed)
    vit = _vit_giant()
    yield TimeRow(TORCHAO, "batch 32, bf16, checkpointed, no offloading", step, 1.27, vit.checkpointed)
    yield TimeRow(TORCHAO, "the same, Adam's state on the host", step, 1.52, vit.state_on_host)
    over_none = vit.state_on_host / vit.checkpointed
    yield TimeRow(TORCHAO, "state on the host over none", "×", 1.52 / 1.27, over_none)
    yield TimeRow(
        "accelerate#4175", "checkpointing over none, 24 layers (model not named)", "×", 1.38 / 1.08, one.ratio
    )
    yield from constants()


def constants() -> Iterator[TimeRow]:
    """Yield the rows of rates that are constants of the time model."""
    pr = "DeepSpeed PR 735"
    yield TimeRow(pr, "Adam on the host, torch", "ns a parameter", 4.8, HOST_ADAM_LOOP * 4e9)
    yield TimeRow(pr, "Adam on the host, fused (DeepSpeed's)", "ns a parameter", 0.71, HOST_ADAM_FUSED * 4e9)
    titan = "torchtitan, PCIe 5 × 16"
    yield TimeRow(titan, "link, page-locked memory", "GB/s", 53.1, 64 * LINK_EFFICIENCY)
    yield TimeRow(
        titan, "link, memory that is page-locked for the copy", "GB/s", 11.2, PAGEABLE_BANDWIDTH / 1e9
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Make the table.

    Returns:
        0; 2 for arguments that are not allowed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="Estimated step times, against published ones."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="write the table (step_times)")
    options = parser.parse_args(arguments)
    try:
        check_writable(options.json)
        check_into(options.into, ("step_times",))
        found = []
        for row in rows():
            found.append(row)
            print(row, file=sys.stderr, flush=True)
        document = {
            "schema": 1,
            "command": command_line(_PROGRAM, arguments),
            "source": "estimated",
            "rows": [{**asdict(row), "error": round(row.error, 4)} for row in found],
        }
        if options.json is not None:
            write_document(options.json, document)
        if options.into is not None:
            write_into(options.into, tables(document))
        else:
            print(*tables(document).values())
    except MemScaleError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    return 0


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Return the rows as a Markdown table."""
    lines = ["| source | what | published | estimated | error |", "|---|---|---:|---:|---:|"]
    for row in document["rows"]:
        figures = f"{row['published']:.3g} {row['unit']} | {row['estimated']:.3g} {row['unit']}"
        lines.append(f"| {row['source']} | {row['what']} | {figures} | {row['error']:+.0%} |")
    made_by = f"Published by the sources named; estimated here. Made by `{document['command']}`."
    return {"step_times": "\n".join([*lines, "", made_by])}


if __name__ == "__main__":
    sys.exit(main())
