"""``import memscale`` brings in nothing that is optional."""

import json
import subprocess
import sys
from typing import Any

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
    # These exist for the library they need; a __main__ runs when imported.
    if not module.name.startswith("memscale.integrations.")
    and not module.name.endswith("__main__")
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


def test_public_names_bring_in_nothing_optional() -> None:
    result = fresh(PUBLIC_NAMES)
    assert "memscale" in result["new"], "it was there before: what follows would prove nothing"
    assert roots(result["new"]).isdisjoint({*OPTIONAL, "numpy"})


def test_every_module_imports_with_torch_alone() -> None:
    assert "memscale.version" in fresh(EVERY_MODULE)["names"]
