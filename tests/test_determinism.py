"""The same model, batch, Config and device give the same plan, byte for byte, in every process."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, Plan
from support.families import FAMILIES

CASES = ("tied", "cnn")
MODES = ("balanced", "aggressive")
SCRIPT = """
import sys

import memscale
from support.families import FAMILIES
from memscale import Config

for name in sys.argv[1].split(","):
    for mode in sys.argv[2].split(","):
        family, config = FAMILIES[name], Config(mode=mode, force_optimize=True)
        plan = memscale.plan(family.build(), family.batch(), config, hardware="RTX 3090")
        print(plan.to_json(), end="\\0")
print(" ".join({"a set", "of", "a few", "words"}), end="")
"""


@cache
def plans_of_a_process(hash_seed: int) -> tuple[list[str], str]:
    """The plans as JSON, and a set as that process orders it."""
    environment = {
        **os.environ,
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", SCRIPT, ",".join(CASES), ",".join(MODES)]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()
    *plans, order = done.stdout.decode().split("\0")
    return plans, order


@pytest.mark.slow
def test_plans_are_the_same_bytes_in_processes_of_different_hash_seeds():
    first, order = plans_of_a_process(1)
    second, other = plans_of_a_process(2)
    assert order != other, "the seeds must differ in what they order"
    assert len(first) == len(CASES) * len(MODES)
    for one, two in zip(first, second, strict=True):
        assert one == two
    assert len(set(first)) == len(first), "each case has a plan of its own"


@pytest.mark.slow
def test_plans_of_other_processes_read_back_and_equal_those_made_here():
    texts, _ = plans_of_a_process(1)
    cases = [(name, mode) for name in CASES for mode in MODES]
    for text, (name, mode) in zip(texts, cases, strict=True):
        plan = Plan.from_json(text)
        assert plan.to_json() == text
        family = FAMILIES[name]
        here = memscale.plan(
            family.build(), family.batch(), Config(mode=mode, force_optimize=True), hardware="RTX 3090"
        )
        assert here == plan
        assert hash(here) == hash(plan)
        assert here.to_json() == text
    assert any(layer.techniques for text in texts for layer in Plan.from_json(text).layers)


@pytest.mark.parametrize("name", CASES)
def test_planning_again_gives_the_same_plan_also_on_a_wrapped_model(name):
    family = FAMILIES[name]
    model, config = family.build(), Config(mode="aggressive", enable_logging=False)
    before = memscale.plan(model, family.batch(), config)
    memscale.wrap(model, config, family.batch())
    assert model._memscale_executor.plan.to_json() == before.to_json()
    assert memscale.plan(model, family.batch(), config).to_json() == before.to_json()
    memscale.detach(model)
    assert memscale.plan(model, family.batch(), config).to_json() == before.to_json()


def test_the_json_tells_all_of_a_plan():
    """Two plans that differ anywhere differ in their bytes."""
    family = FAMILIES["tied"]
    plans = {
        memscale.plan(family.build(), family.batch(batch_size=size), Config(mode=mode), hardware=gpu)
        for size, mode, gpu in (
            (1, "balanced", "T4"),
            (2, "balanced", "T4"),
            (1, "aggressive", "T4"),
            (1, "balanced", "RTX 3090"),
        )
    }
    assert len(plans) == 4
    assert len({plan.to_json() for plan in plans}) == 4
    for plan in plans:
        assert json.loads(plan.to_json())["mode"] == plan.mode
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_in_a_rehearsal(enabled: bool) -> None:
    seen: list[bool] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(gc.isenabled())
            return self.layer(x)

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        memscale.plan(Model(), torch.ones(2, 4), Config(enable_logging=False))
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen
    assert not any(seen)
