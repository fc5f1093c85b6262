"""`python -m benchmarks.capacity`: what plans say that torch's allocator reserves, and must be able to, against torch.

Runs on a CUDA device, or without a GPU on the stand-in of `tests/fakecuda`, where kernels do nothing and the allocator
is torch's own. Exits with 1 if a prediction is off by more than its bound.

Note [Observed capacity]
~~~~~~~~~~~~~~~~~~~~~~~~
A model is put on the device, wrapped and trained for some steps of AdamW: first with plenty of memory, for what torch
reserves at most; then with torch's allocator limited to what the plan says it needs, with which the step must not run
out of memory; and with less and less of that, until it does. Each case has a process of its own: what a step that ran
out of memory leaves behind is not counted for the next one. The stand-in has no cuDNN: no model here has a convolution.
Torch allocates a workspace of cuBLAS there for few products, of these models in ViT's forward alone: only that one is
predicted. Nor does the stand-in compare values, by which transformers would look for packed sequences.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memscale
from benchmarks.tables import check_into, write_into
from memscale import Config
from memscale._torch import attribute
from memscale.benchmarks.models import quiet_transformers
from memscale.benchmarks.results import check_writable, command_line, write_document
from memscale.errors import MemScaleError
from memscale.execution_plan import Plan
from memscale.executor import executor_of
from memscale.memory.allocator import LARGE_SEGMENT
from memscale.simulator.device import DeviceTracker

__all__ = ["BOUND", "CASES", "CapacityCase", "CapacityRow", "main", "run_case"]

BOUND = 0.03
"""How far what torch reserves may be from the prediction, as a share of that."""
SHARES = (0.97, 0.94, 0.9, 0.85, 0.8)  # of the predicted capacity: with which of them a step still runs

_PROGRAM = "python -m benchmarks.capacity"
_TABLE = "capacity"
_MIB = 2**20
_STEPS = 4
_PATCH = 16
_WITH_WORKSPACE = ("ViT",)
_VOCABULARY = 16384
_EXACT = Config(
    enable_logging=False, use_mixed_precision=False, use_8bit_optimizer=False, overlap_optimizer=False
)


def _gpt2(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = {"vocab_size": _VOCABULARY, "n_positions": 256, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=512, n_head=8, **tokens))


def _bert(layers: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    size = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    return BertForMaskedLM(BertConfig(num_hidden_layers=layers, vocab_size=_VOCABULARY, **size))


def _llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1408}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=_VOCABULARY, **size))


class _Patches(nn.Linear):
    """The patch embedding of a ViT as a product, which it is: without cuDNN a convolution makes temporaries."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = nn.functional.pixel_unshuffle(pixels, _PATCH)  # (samples, features, rows, columns)
        return super().forward(patches.movedim(1, -1)).movedim(-1, 1)


def _vit(layers: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    model = ViTForImageClassification(ViTConfig(num_hidden_layers=layers, num_labels=1000, **size))
    model.vit.embeddings.patch_embeddings.projection = _Patches(3 * _PATCH**2, 512)
    return model


_MODELS: dict[str, Callable[[int], nn.Module]] = {"GPT-2": _gpt2, "BERT": _bert, "Llama": _llama, "ViT": _vit}


@dataclass(frozen=True)
class CapacityCase:
    """A model of a family, in a mode, with transfers that overlap with compute or not."""

    family: str
    mode: str
    is_async: bool
    layers: int = 8
    batch: int = 8

    @property
    def config(self) -> Config:
        """Return the settings."""
        if self.mode == "plain":
            return _EXACT.replace(enable_checkpointing=False, enable_offloading=False, enable_tiling=False)
        if self.mode == "conservative":  # which does not offload
            return _EXACT.replace(mode="conservative", force_optimize=True)
        return _EXACT.replace(mode=self.mode, force_optimize=True, async_offload=self.is_async)

    def build(self) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        """Return the model, on the device, and a batch."""
        with quiet_transformers():
            model = _MODELS[self.family](self.layers).cuda().train()
        if self.family == "ViT":
            pixels = torch.zeros(2 * self.batch, 3, 224, 224, device="cuda")
            return model, {
                "pixel_values": pixels,
                "labels": torch.zeros(2 * self.batch, device="cuda").long(),
            }
        ids = torch.zeros(self.batch, 256, dtype=torch.long, device="cuda")
        return model, {"input_ids": ids, "labels": ids.clone()}


CASES = tuple(
    CapacityCase(family, mode, is_async)
    for family in _MODELS
    for mode in ("plain", "conservative", "balanced", "aggressive")
    for is_async in ((False, True) if mode in ("balanced", "aggressive") else (False,))
)


@dataclass(frozen=True)
class CapacityRow:
    """What was predicted of a case, and what was observed; bytes.

    Attributes:
        family, mode, is_async: the case.
        predicted_peak_bytes, predicted_reserved_bytes, predicted_capacity_bytes: of the plan.
        allowance_bytes: of the plan, but at least a segment: by less than that the allocator does not grow.
        allocated_bytes: `torch.cuda.max_memory_allocated()`.
        reserved_bytes: `torch.cuda.max_memory_reserved()`.
        runs: whether the steps run within the predicted capacity and its allowance.
        least_share: of `SHARES` and 1 the least with which they run; 1 if they run with none of them.
    """

    family: str
    mode: str
    is_async: bool
    predicted_peak_bytes: int
    predicted_reserved_bytes: int
    predicted_capacity_bytes: int
    allowance_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    runs: bool
    least_share: float

    @property
    def error(self) -> float:
        """By how much more was reserved than predicted, as a share of that."""
        return self.reserved_bytes / self.predicted_reserved_bytes - 1

    @property
    def holds(self) -> bool:
        """Whether the step runs with what the plan says, and as much is reserved as it says."""
        enough = self.reserved_bytes <= self.predicted_reserved_bytes + self.allowance_bytes
        return self.runs and abs(self.error) <= BOUND and enough


def run_case(case: CapacityCase, shares: Sequence[float] = SHARES) -> CapacityRow:
    """Train a case, as in Note [Observed capacity]."""
    with _as_on_stand_in(case):
        plan, allocated, reserved, _ = _train(case, None)
        capacity = plan.predicted_capacity_bytes
        allowance = max(plan.allowance_bytes, LARGE_SEGMENT)
        *_, runs = _train(case, capacity + allowance)
        least = 1.0
        for share in shares:
            if not runs or not _train(case, int(share * capacity))[3]:
                break
            least = share
    return CapacityRow(
        *(case.family, case.mode, case.is_async, plan.predicted_peak_bytes, plan.predicted_reserved_bytes),
        *(capacity, allowance, allocated, reserved, runs, least),
    )


def _in_new_process(case: CapacityCase) -> CapacityRow:
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run_case, case).result()


def _train(case: CapacityCase, limit: int | None) -> tuple[Plan, int, int, bool]:
    """Return the plan, what was allocated and reserved at most, and whether the device had enough memory."""
    model, batch = case.build()
    memscale.wrap(model, case.config, batch)
    executor = executor_of(model)
    assert executor is not None, "it was wrapped"
    plan, total = executor.plan, torch.cuda.mem_get_info()[1]
    _release()
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(_STEPS):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        enough = executor.plan is plan  # after running out of memory, the step is repeated with another
    except torch.OutOfMemoryError:
        enough = False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    del optimizer, batch
    memscale.detach(model)
    del model, executor
    _release()
    return plan, *peaks, enough


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def _as_on_stand_in(case: CapacityCase) -> Iterator[None]:
    """Predict for the stand-in, if that is the device: Note [Observed capacity]."""
    with contextlib.ExitStack() as stack:
        if _is_stand_in():
            from transformers import masking_utils

            reserve = DeviceTracker._reserve_workspace

            def reserve_in_forward(tracker: DeviceTracker, result: torch.Tensor) -> None:
                if case.family in _WITH_WORKSPACE and not tracker._in_backward:
                    reserve(tracker, result)

            stack.enter_context(attribute(DeviceTracker, "_reserve_workspace", reserve_in_forward))
            stack.enter_context(
                attribute(masking_utils, "find_packed_sequence_indices", lambda *args, **kwargs: None)
            )
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, and write what was asked for; return 1 if a prediction is off by more than its bound."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="What torch reserves, predicted and observed."
    )
    parser.add_argument("--families", default=",".join(_MODELS), metavar="A,B")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="the file of rows; those it has are not run again"
    )
    parser.add_argument("--into", type=Path, metavar="FILE.md", help=f"write the table ({_TABLE}) there")
    options = parser.parse_args(arguments)
    os.environ["MEMSCALE_CALIBRATION"] = "none"  # plans that are the same on every machine
    try:
        check_writable(options.json)
        check_into(options.into, (_TABLE,))
        results = _Results.read(options.json, command_line(_PROGRAM, arguments))
        for case in CASES:
            if case.family in options.families.split(",") and not results.has(case):
                results.rows.append(_in_new_process(case))
                print(_line(_cells(results.rows[-1])), flush=True)
                results.write(options.json)
        if options.into is not None:
            write_into(options.into, {_TABLE: markdown(results)})
    except MemScaleError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    return 0 if all(row.holds for row in results.rows) else 1


@dataclass
class _Results:
    """The rows of a file, and what made them."""

    command: str
    torch: str
    device: str
    rows: list[CapacityRow]

    @classmethod
    def read(cls, path: Path | None, command: str) -> _Results:
        if path is not None and path.exists() and path.stat().st_size:
            found = json.loads(path.read_text(encoding="utf-8"))
            rows = [CapacityRow(**row) for row in found["rows"]]
            return cls(found["command"], found["torch"], found["device"], rows)
        stand_in = " (stand-in)" if _is_stand_in() else ""
        return cls(command, torch.__version__, f"{torch.cuda.get_device_name()}{stand_in}", [])

    def has(self, case: CapacityCase) -> bool:
        key = (case.family, case.mode, case.is_async)
        return any((row.family, row.mode, row.is_async) == key for row in self.rows)

    def write(self, path: Path | None) -> None:
        if path is not None:
            document = {"schema": 1, **asdict(self)}
            write_document(path, document)


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Return the table of a file of results."""
    rows = [CapacityRow(**row) for row in document["rows"]]
    return {_TABLE: markdown(_Results(document["command"], document["torch"], document["device"], rows))}


def _is_stand_in() -> bool:
    return "libfakecuda" in os.environ.get("LD_PRELOAD", "")


def markdown(results: _Results) -> str:
    """Return a summary, and a table with a line for each case."""
    rows = results.rows
    errors = [row.error for row in rows]
    enough = sum(row.runs for row in rows)
    heads = ["family", "mode", "copies", "peak", "allocated", "reserved: predicted", "observed", "error"]
    heads += ["capacity", "runs", "runs with at least"]
    return "\n".join(
        [
            f"- {len(rows)} cases: reserved memory is predicted to {max(map(abs, errors)):.1%} at worst (bound "
            f"{BOUND:.0%}); at most {max(0.0, *errors):.1%} more was reserved than predicted.",
            f"- {enough} of {len(rows)} run with torch's allocator limited to the predicted capacity and allowance.",
            "",
            _line(heads),
            _line(["---"] * 3 + ["---:"] * (len(heads) - 3)),
            *(_line(_cells(row)) for row in rows),
            "",
            f"MiB; predictions are simulated, observations are of torch's allocator. Made by `{results.command}` "
            f"(torch {results.torch}, {results.device}).",
        ]
    )


def _cells(row: CapacityRow) -> list[str]:
    sizes = (row.predicted_peak_bytes, row.allocated_bytes, row.predicted_reserved_bytes, row.reserved_bytes)
    return [
        *(row.family, row.mode, "async" if row.is_async else "sync"),
        *(f"{size / _MIB:.1f}" for size in sizes),
        f"{row.error:+.1%}",
        f"{row.predicted_capacity_bytes / _MIB:.1f}",
        "yes" if row.runs else "no",
        f"{row.least_share:.0%}",
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
