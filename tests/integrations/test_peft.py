"""PEFT: adapters on a frozen base that is streamed; they are added, merged and saved while the model is wrapped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from support.surfaces import Run, assert_gains, trained
from support.wrapping import lossless

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

QUIET = lossless("aggressive", force_optimize=True)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
IDS = torch.randint(1, 64, (4, 24), generator=torch.Generator().manual_seed(1))
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
KINDS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", **LORA),
    "DoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", use_dora=True, **LORA),
    "IA3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    # Draws a number to decide whether the adapter takes part, also without dropout.
    "LoKr": lambda: peft.LoKrConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=32
    ),
}


def base() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def build(kind: str, model: nn.Module | None = None) -> Any:
    model = base() if model is None else model
    torch.manual_seed(1)
    return peft.get_peft_model(model, KINDS[kind]()).train()


def train(model: nn.Module, steps: int = 3, seed: int = 2) -> list[float]:
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(model: nn.Module) -> Run:
    return trained(model, lambda: train(model))


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_alike_over_a_base_that_is_streamed(kind: str) -> None:
    plain, model = build(kind), build(kind)
    memscale.wrap(model, QUIET)
    assert_gains("PEFT", kind, run(plain), run(model))
    executor = model._memscale_executor
    assert executor.report().bytes_read > 0
    frozen = [each for each in model.parameters() if not each.requires_grad]
    on_disk = {id(each) for each in executor.placement.on_disk}
    streamed = [each for each in frozen if id(each) in on_disk]
    assert len(streamed) > len(frozen) / 2
    assert all(each.grad is None for each in frozen)
    # Weights alone: neither gradients nor moments of the base are anywhere.
    trained_bytes = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    assert executor.bytes_on_disk <= sum(each.nbytes for each in streamed) + 4 * trained_bytes
    memscale.detach(model)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_around_a_base_that_is_wrapped(kind: str) -> None:
    """Those that are inputs of the base (prompts, a prefix) reach it as tensors from a graph."""
    plain, model = build(kind), base()
    memscale.wrap(model, QUIET)
    outside = build(kind, model)
    expected = run(plain)
    wrapped = trained(model, lambda: train(outside))
    assert_gains("PEFT", f"{kind}, the base wrapped", expected, wrapped)
    assert model._memscale_executor.report().recomputations > 0
    memscale.detach(model)
    assert all(map(torch.equal, outside.parameters(), plain.parameters()))


def quantised(bits: int) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    model = base()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            sizes = (module.in_features, module.out_features)
            if bits == 4:
                linear = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
                linear.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            else:
                linear = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
                linear.weight = bnb.nn.Int8Params(
                    module.weight.data, requires_grad=False, has_fp16_weights=False
                )
            model.set_submodule(name, linear.to("cpu"))
    setattr(model, f"is_loaded_in_{bits}bit", True)
    return peft.prepare_model_for_kbit_training(model)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base(bits: int) -> None:
    plain, model = build("LoRA", quantised(bits)), build("LoRA", quantised(bits))
    memscale.wrap(model, QUIET)
    # Its own checkpointing, which `prepare_model_for_kbit_training` switches on, is replaced.
    without = build("LoRA", quantised(bits))
    without.base_model.model.gradient_checkpointing_disable()
    wrapped = run(model)
    assert wrapped.losses == run(plain).losses
    assert_gains("PEFT", f"LoRA on a {bits}-bit base (bitsandbytes)", run(without), wrapped)


def change(model: Any, how: str) -> None:
    if how == "added":
        torch.manual_seed(3)
        model.add_adapter("second", KINDS["LoRA"]())
        model.set_adapter("second")
    elif how == "merged and unmerged":
        model.merge_adapter()
        with torch.no_grad():
            model(input_ids=IDS)
        model.unmerge_adapter()
    else:
        model.disable_adapter_layers()
        model.enable_adapter_layers()


@pytest.mark.parametrize("how", ["added", "merged and unmerged", "disabled and enabled"])
def test_adapters_change_while_the_model_is_wrapped(how: str) -> None:
    plain, model = build("LoRA"), build("LoRA")
    memscale.wrap(model, QUIET)
    for each in (plain, model):
        train(each)
        change(each, how)
    expected = run(plain)
    assert_gains("PEFT", f"LoRA, {how} while wrapped", expected, run(model))
    memscale.detach(model)
    assert plain.state_dict().keys() == model.state_dict().keys()
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))


def test_merging_for_good_gives_the_plain_model() -> None:
    plain, model = build("LoRA"), build("LoRA")
    memscale.wrap(model, QUIET)
    for each in (plain, model):
        train(each)
    merged = model.merge_and_unload()
    memscale.detach(model)
    expected = plain.merge_and_unload()
    for (name, value), (other, got) in zip(
        expected.state_dict().items(), merged.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(value, got), name


RESUME = """
import sys
sys.path[:0] = ["tests", "tests/integrations"]
import conftest
from test_peft import *

bits = int(sys.argv[2])
model = peft.PeftModel.from_pretrained(quantised(bits) if bits else base(), sys.argv[1], is_trainable=True).train()
memscale.wrap(model, QUIET)
print(train(model, seed=4))
assert model._memscale_executor.report().recomputations > 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_saved_adapters_train_on_in_a_new_process(bits: int, tmp_path: Path) -> None:
    plain, model = (build("LoRA", quantised(bits) if bits else None) for _ in range(2))
    memscale.wrap(model, QUIET)
    for each in (plain, model):
        train(each)
    model.save_pretrained(tmp_path)
    expected = train(plain, seed=4)
    command = [sys.executable, "-c", RESUME, str(tmp_path), str(bits)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(expected)
