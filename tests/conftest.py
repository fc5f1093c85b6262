"""What every test stands on: no network, few threads, known seeds, quiet libraries."""

import os

# Before anything imports them: these libraries read their environment once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MEMSCALE_CALIBRATION"] = "none"  # plans must not depend on what was measured of this machine
# Virtual machines that announce AMX and do not let a process use it end it at its first 16-bit product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import gc
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

torch.set_num_threads(min(2, torch.get_num_threads()))

# No deadline: a first example pays for lazy imports, and a busy machine is not a bug.
hypothesis.settings.register_profile("memscale", deadline=None, print_blob=True)
hypothesis.settings.register_profile("memscale-ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("memscale-ci" if os.environ.get("CI") else "memscale")


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    for item in items:
        matrix = item.get_closest_marker("matrix")
        if matrix is not None:
            test = item.nodeid.partition("[")[0]
            if cases[test] % matrix.args[0]:
                item.add_marker("slow")
            cases[test] += 1
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_plans() -> None:
    """No test finds the plan of another."""
    planning = sys.modules.get("memscale.planner.make_plan")
    if planning is not None:
        planning.plans_made.clear()


@pytest.fixture(autouse=True)
def small_models_are_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests need little of any device, and are planned for all the same."""
    from memscale.planner import decide

    monkeypatch.setattr(decide, "UNTOUCHED_SHARE", 0.0)


@pytest.fixture(autouse=True, scope="module")
def only_new_objects_are_searched() -> None:
    """The garbage collector leaves out what earlier modules imported: half a second each time, for 600,000 objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests leave in the system's directory for temporary files, such as dumps, goes with their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("system")))
        yield


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every checkpointed region that runs forward."""
    from memscale.checkpointing.region import Region

    seen: list[object] = []
    run = Region.run_forward

    def noted(self: Region, *args: Any) -> Any:
        seen.append(self)
        return run(self, *args)

    monkeypatch.setattr(Region, "run_forward", noted)
    return seen
