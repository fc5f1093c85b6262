"""What is installed and can be used, and why the rest can't."""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memscale.diagnosis import doctor, environment
from memscale.diagnosis.environment import LIBRARIES
from memscale.hardware import detect


def status_of(name: str) -> tuple[str, str]:
    (row,) = (row for row in doctor("cpu") if row.name == name)
    return row.status, row.detail


@pytest.fixture
def only_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is looked at but one that is imported quickly."""
    monkeypatch.setattr(environment, "LIBRARIES", [each for each in LIBRARIES if each.module == "rich"])


def test_every_optional_library_has_a_row_and_its_oldest_version_is_that_in_pyproject() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for library in LIBRARIES:
        oldest = ".".join(map(str, library.oldest))
        if library.distribution != "deepspeed":  # of no extra: it compiles what it needs
            assert f'"{library.distribution}>={oldest}"' in text


@pytest.mark.usefixtures("only_rich")
def test_a_library_is_there_missing_too_old_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    assert status_of("rich")[0] == "pass"

    def broken(name: str) -> Any:
        raise OSError("libfoo.so: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    status, detail = status_of("rich")
    assert status == "fail"
    assert "libfoo.so: cannot open" in detail

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2")
    assert status_of("rich") == (
        "fail",
        "1.2 is too old for tables that are drawn by rich: pip install --upgrade rich (at least 13)",
    )

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert status_of("rich") == (
        "skip",
        "not installed; pip install rich for tables that are drawn by rich",
    )


def test_quantizing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be installed and imported, and not work on the device."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(
        environment, "LIBRARIES", [each for each in LIBRARIES if each.module == "bitsandbytes"]
    )
    assert status_of("bitsandbytes")[0] == "pass"
    monkeypatch.setattr(
        "memscale.optimizer.eight_bit.Bitsandbytes.dequantize", lambda *args, **kwargs: args[1] * 0
    )
    status, detail = status_of("bitsandbytes")
    assert status == "fail"
    assert "bitsandbytes does not run on cpu" in detail or "wrong numbers" in detail


@pytest.mark.usefixtures("only_rich")
@pytest.mark.parametrize(
    ("change", "reason"), [({"writable": False}, "written"), ({"ram_backed": True}, "in RAM")]
)
def test_a_disk_tier_that_is_of_no_use(
    change: dict[str, bool], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable = detect("cpu")
    usable = replace(usable, disk=replace(usable.disk, writable=True, ram_backed=False))
    monkeypatch.setattr(environment, "detect", lambda *args, **kwargs: usable)
    assert status_of("disk tier")[0] == "pass"
    unusable = replace(usable, disk=replace(usable.disk, **change))
    monkeypatch.setattr(environment, "detect", lambda *args, **kwargs: unusable)
    status, detail = status_of("disk tier")
    assert status == "fail"
    assert reason in detail
    assert "MEMSCALE_OFFLOAD_DIR" in detail
