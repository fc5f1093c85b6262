"""``import memscale`` is cheap and brings in nothing that is optional."""

import json
import statistics
import subprocess
import sys
from typing import Any

import pytest

OPTIONAL = (
    "accelerate",
    "bitsandbytes",
    "datasets",
    "hypothesis",
    "lightning",
    "mkdocs",
    "peft",
    "prometheus_client",
    "pytest",
    "rich",
    "safetensors",
    "transformers",
)
RUNS = 9

IMPORT = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import memscale
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - before)}))
"""

PUBLIC_NAMES = """
import json, sys
import torch
before = set(sys.modules)
import memscale
names = list(getattr(memscale, "__all__", []))
for name in names:
    getattr(memscale, name)
print(json.dumps({"names": names, "new": sorted(set(sys.modules) - before)}))
"""

EVERY_MODULE = f"""
import importlib, json, pkgutil, sys
sys.modules.update(dict.fromkeys({OPTIONAL!r}))  # None: importing it raises ImportError
import memscale
names = [
    module.name
    for module in pkgutil.walk_packages(memscale.__path__, "memscale.")
    # An integration exists for its library; a __main__ runs when imported.
    if not module.name.startswith("memscale.integrations.") and not module.name.endswith("__main__")
]
for name in names:
    importlib.import_module(name)
print(json.dumps({{"names": names}}))
"""


def fresh(script: str) -> Any:
    """Run ``script`` in a new interpreter; what it printed last, as JSON."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def roots(modules: list[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.fixture(scope="module")
def imports() -> list[Any]:
    return [fresh(IMPORT) for _ in range(RUNS)]


@pytest.mark.slow
def test_import_adds_less_than_100_ms_to_torch(imports: list[Any]) -> None:
    seconds = sorted(run["seconds"] for run in imports)
    assert statistics.median(seconds) < 0.100, f"seconds of each run: {seconds}"


@pytest.mark.slow
def test_import_brings_in_nothing_optional(imports: list[Any]) -> None:
    for run in imports:
        assert "memscale" in run["new"], "it was there before: what follows would prove nothing"
        assert roots(run["new"]).isdisjoint({*OPTIONAL, "numpy"})


def test_public_names_bring_in_nothing_optional() -> None:
    result = fresh(PUBLIC_NAMES)
    assert "memscale" in result["new"]
    assert roots(result["new"]).isdisjoint({*OPTIONAL, "numpy"})


def test_every_module_imports_with_torch_alone() -> None:
    assert "memscale.version" in fresh(EVERY_MODULE)["names"]
