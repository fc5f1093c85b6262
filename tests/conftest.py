"""What every test stands on: no network, few threads, known seeds, quiet libraries."""

import os

# Before anything imports them: these libraries read their environment once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("COLUMNS", None)  # which newer versions of xdist set: tables are as wide as without a terminal
os.environ["MEMSCALE_CALIBRATION"] = "none"  # plans must not depend on what was measured of this machine
# Virtual machines that announce AMX and do not let a process use it end it at its first 16-bit product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import contextlib
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

from support import devices

torch.set_num_threads(min(2, torch.get_num_threads()))

# No deadline: a first example pays for lazy imports, and a busy machine is not a bug.
hypothesis.settings.register_profile("memscale", deadline=None, print_blob=True)
hypothesis.settings.register_profile("memscale-ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("memscale-ci" if os.environ.get("CI") else "memscale")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=devices.DEVICES, default="cpu", help="where tests of devices train")


def pytest_configure(config: pytest.Config) -> None:
    devices.chosen = config.getoption("--device")
    if devices.chosen == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: there is none; `make test DEVICE=cuda` brings a stand-in")


LEAST_INJECTIONS = 500  # where all of tests/faults runs


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if injections := _injections(terminalreporter)[0]:
        terminalreporter.write_line(f"tests/faults: {injections} faults injected")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if the whole fault suite has run, and injected less than it says."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    injections, is_whole = (0, False) if reporter is None else _injections(reporter)
    if is_whole and injections < LEAST_INJECTIONS:
        reporter.write_line(
            f"\ntests/faults: {injections} faults injected, {LEAST_INJECTIONS} wanted", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _injections(reporter: Any) -> tuple[int, bool]:
    """Return how many faults were injected, and whether the slow tests of all scenarios were among it."""
    reports = [each for kind in ("passed", "failed") for each in reporter.stats.get(kind, ())]
    reports = [each for each in reports if each.when == "call"]
    scenarios = sum("test_many_faults[" in each.nodeid for each in reports)
    return sum(dict(each.user_properties).get("injections", 0) for each in reports), scenarios >= 20


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _select_by_device(config, items)
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


def _select_by_device(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that are the same on every device, unless it is the default; skip those of another one."""
    if devices.chosen == "cpu":
        return
    left_out: list[pytest.Item] = []
    selected: list[pytest.Item] = []
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        on_accelerator = item.get_closest_marker("accelerator") is not None
        pinned = "" if on_accelerator or item.get_closest_marker("cpu_only") is None else "cpu_only"
        if item.get_closest_marker("virtual_only") is not None:
            pinned, on_accelerator = "virtual_only" if devices.chosen == "cuda" else "", True
        if pinned:
            item.add_marker(pytest.mark.skip(reason=f"{pinned}: it says something of that device alone"))
        is_of_cuda = devices.chosen == "cuda" and "tests/cuda/" in item.nodeid
        is_of_devices = "chosen_device" in fixtures or on_accelerator or is_of_cuda
        (selected if is_of_devices or pinned else left_out).append(item)
    items[:] = selected
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def chosen_device() -> Iterator[torch.device]:
    with devices.training_device() as found:
        yield found


@pytest.fixture
def device(chosen_device: torch.device) -> torch.device:
    """Where the models of a test train, by `--device`. See support/devices.py."""
    return chosen_device


@pytest.fixture(autouse=True)
def computing_on_the_accelerator(request: pytest.FixtureRequest) -> Iterator[None]:
    is_on_cuda = devices.chosen == "cuda" and request.node.get_closest_marker("accelerator") is not None
    with devices.computing() if is_on_cuda else contextlib.nullcontext():
        yield


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
    """What the tests leave in the system's directory for temporary files goes with their own."""
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
