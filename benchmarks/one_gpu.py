"""Up to which size one GPU carries a model: `python -m benchmarks.one_gpu --into docs/multi_gpu.md`.

Llama-shaped models on the meta device, a batch of 1 × 2048 tokens, AdamW over all parameters in 32 bits, with
`Config(use_mixed_precision=True)`: what `memscale.plan` says for each GPU, in a host of 256 GiB. Peaks are
simulated, times estimated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.tables import check_into, write_into
from memscale.api import plan
from memscale.config import Config
from memscale.hardware import virtual_hardware
from memscale.planner.make_plan import fits
from memscale.units import format_bytes

HOST_BYTES = 256 * 2**30
GPUS = ("RTX 4090", "A100 80GB")
# Hidden size, layers, heads, key-value heads, intermediate size, vocabulary.
MODELS = {
    "1.2B": (2048, 16, 32, 8, 8192, 128256),
    "3.2B": (3072, 28, 24, 8, 8192, 128256),
    "8.0B": (4096, 32, 32, 8, 14336, 128256),
    "13.0B": (5120, 40, 40, 40, 13824, 32000),
}
RESULTS = Path(__file__).parent / "results" / "one_gpu.json"
_TABLE = "one_gpu"


def rows() -> list[dict[str, object]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    found = []
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    for name, (hidden, layers, heads, shared, inner, vocabulary) in MODELS.items():
        settings = LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=shared,
            intermediate_size=inner,
            vocab_size=vocabulary,
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(settings)
        for gpu in GPUS:
            config = Config(use_mixed_precision=True, enable_logging=False)
            hardware = virtual_hardware(gpu, host_bytes=HOST_BYTES)
            made = plan(model, {"input_ids": tokens, "labels": tokens}, config, hardware)
            found.append(
                {
                    "model": name,
                    "parameters": sum(each.numel() for each in model.parameters()),
                    "gpu": gpu,
                    "plain_bytes": made.baseline_peak_bytes,
                    "peak_bytes": made.predicted_peak_bytes,
                    "host_bytes": made.host_bytes,
                    "time_ratio": made.predicted_time_ratio,
                    "fits": fits(made, hardware, config),
                }
            )
            print(json.dumps(found[-1]), flush=True)
    return found


def tables(found: Sequence[dict[str, object]]) -> dict[str, str]:
    """Return the table of a file of results."""
    lines = [
        "| parameters | GPU | plain step | with MemScale | on the host | step time |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in found:
        sizes = [format_bytes(int(str(row[name]))) for name in ("plain_bytes", "peak_bytes", "host_bytes")]
        time = f"{row['time_ratio']:.2f} ×" if row["fits"] else "does not fit"
        lines.append(f"| {row['model']} | {row['gpu']} | {' | '.join(sizes)} | {time} |")
    return {_TABLE: "\n".join(lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, help="a page whose table is written anew")
    into = parser.parse_args().into
    check_into(into, [_TABLE])
    found = rows()
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(*tables(found).values())
    if into is not None:
        write_into(into, tables(found))


if __name__ == "__main__":
    main()
