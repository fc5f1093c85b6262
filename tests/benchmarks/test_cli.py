"""`python -m memscale.benchmarks`, called as a function."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys

import pytest
import torch

from memscale.benchmarks import MODELS, Results, run_suite
from memscale.benchmarks import __main__ as cli_module
from memscale.benchmarks import run as run_module
from memscale.benchmarks.__main__ import main
from memscale.benchmarks.models import Published
from memscale.errors import ProfileError


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")


def test_simulated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["--on", "1 GiB", "--models", "gpt2-tiny,bert-tiny", "--modes", "none", "--json", "out.json"]
    assert main(arguments) == 0
    results = Results.read(tmp_path / "out.json")
    assert [row.model for row in results.rows] == ["gpt2-tiny", "bert-tiny"]
    assert all(row.source == "simulated" and row.peak_bytes for row in results.rows)
    assert results.command == "python -m memscale.benchmarks " + shlex.join(arguments)

    import torch
    import transformers

    assert results.versions == {"torch": torch.__version__, "transformers": transformers.__version__}
    shown = capsys.readouterr()
    assert "Peak memory of training on a GPU of 1.0 GiB (simulated)" in shown.out
    for row in results.rows:
        assert f"│ {row.model} " in shown.out
        assert f"{row.peak_bytes / 2**20:.2f}" in shown.out
        assert f"{row.model}, none: " in shown.err  # as it goes
    tables = shown.out.replace("published rate", "")  # of the link
    assert "published" not in tables  # nobody published anything about these
    assert "Written to out.json." in shown.out


def test_a_case_that_does_not_fit(tmp_path, capsys):
    file = tmp_path / "out.json"
    assert main(["--on", "8MiB", "--models", "gpt2-tiny", "--modes", "none", "--json", str(file)]) == 3
    (row,) = json.loads(file.read_text())["rows"]
    assert row["peak_bytes"] is None
    assert "does not fit" in row["note"]
    shown = capsys.readouterr().out
    assert "│ does not fit │" in shown
    assert row["note"] in shown


def test_batch_seq_and_steps(tmp_path):
    file = tmp_path / "out.json"
    options = ["--on", "1GiB", "--models", "gpt2-tiny", "--batch", "3", "--seq", "32", "--steps", "1"]
    options += ["--modes", "none"]
    assert main([*options, "--json", str(file)]) == 0
    (row,) = Results.read(file).rows
    assert (row.batch, row.seq) == (3, 32)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.slow
def test_measured(tmp_path, capsys):
    file = tmp_path / "out.json"
    assert main(["--on", "cpu", "--models", "gpt2-tiny", "--modes", "none", "--json", str(file)]) == 0
    (row,) = Results.read(file).rows
    assert (row.source, row.on) == ("measured", "cpu")
    assert row.peak_bytes
    assert "on the CPU (measured)" in capsys.readouterr().out


@pytest.mark.parametrize("join", [False, True])
def test_the_command_names_no_place_on_this_machine(tmp_path, monkeypatch, join):
    """A file below the working directory by its place there, another one by its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_module, "run_suite", lambda *args, **kwargs: iter(()))
    monkeypatch.setattr(cli_module, "_table", lambda *args: "")
    (tmp_path / "inside").mkdir()
    (tmp_path / "work").mkdir()
    for place, shown in [
        (tmp_path / "inside" / "a.json", "inside/a.json"),
    ]:
        main([f"--json={place}"] if join else ["--json", str(place)])
        assert Results.read(place).command.endswith(f"--json{'=' if join else ' '}{shown}")
    monkeypatch.chdir(tmp_path / "work")
    main(["--json", str(tmp_path / "c.json")])
    assert Results.read(tmp_path / "c.json").command == "python -m memscale.benchmarks --json c.json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--models", "gpt2-mediun"],
            "no model 'gpt2-mediun'; did you mean gpt2-medium? Allowed: bert-base,",
        ),
        (["--models", "gpt2-tiny,"], None),
        (["--models", ","], "no model ','"),
        (["--modes", "turbo"], "no mode 'turbo'. Allowed: none"),
        (["--on", "RTX 3091"], "NVIDIA GeForce RTX 3090"),
        (["--on", "0GiB"], "more than zero bytes"),
        (["--batch", "0"], "batch=0 is not allowed"),
        (["--seq", "100000"], "seq=100000 is too long for bert-base"),
        (["--steps", "0"], "steps=0 is not allowed"),
        (["--json", "."], "is a directory"),
        (["--json", "absent/out.json"], "there is no directory absent"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if message is None:  # not an error
        assert main([*arguments, "--on", "1GiB"]) == 0
        return
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("python -m memscale.benchmarks: error: ")
    assert message in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("arguments", [["--batch", "many"], ["--colour"], ["gpt2-tiny"]])
def test_arguments_that_argparse_refuses(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m memscale.benchmarks: error: ")
    assert line.endswith("(--help lists the options)")


def test_a_run_that_fails_has_another_exit_code_and_writes_nothing(tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise ProfileError("The process failed.")

    monkeypatch.setattr(cli_module, "run_suite", fail)
    assert main(["--json", str(tmp_path / "out.json")]) == 1
    assert "The process failed." in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_the_default_run_shows_memscale_in_a_table_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    wide = ["--on", "RTX 3090", "--models", "gpt2-tiny"]
    small = dataclasses.replace(MODELS["gpt2-tiny"], published=Published(10.87, 2.61))
    monkeypatch.setitem(MODELS, "gpt2-tiny", small)
    assert main(wide) == 0
    shown = capsys.readouterr().out
    assert "Optimizer steps overlap with backward" in shown
    lines = shown.splitlines()
    assert [line.split("│")[3].strip() for line in lines if line.startswith("│ gpt2")] == ["none", "balanced"]
    assert max(map(len, lines)) <= 100
    # The longest cells that there are: with a budget, host and disk.
    rows = [
        dataclasses.replace(row, disk_bytes=2**33, mode="budget") for row in run_suite(wide[3:], ["none"])
    ]
    assert "│ gpt2-tiny" in cli_module._table(rows, "RTX 3090")


def test_a_case_that_fails_is_a_row_and_the_others_are_run(tmp_path, monkeypatch, capsys):
    def broken(batch, seq, device):
        raise RuntimeError("no kernel in /usr/lib/python/kernels.py")

    monkeypatch.setitem(MODELS, "broken", dataclasses.replace(MODELS["bert-tiny"], make_inputs=broken))
    file = tmp_path / "out.json"
    arguments = ["--on", "1GiB", "--models", "broken,gpt2-tiny", "--modes", "none", "--json", str(file)]
    assert main(arguments) == 1
    failed, other = Results.read(file).rows
    assert (failed.peak_bytes, failed.note) == (None, "failed: RuntimeError('no kernel in kernels.py')")
    assert other.peak_bytes
    shown = capsys.readouterr().out
    assert "│ failed │" in " ".join(shown.split())


def test_a_measured_case_that_fails_is_a_row(monkeypatch):
    def fail(*args, **kwargs):
        raise ProfileError("The process that measured it failed:\n  File ...\nValueError: no")

    monkeypatch.setattr(run_module, "measure_in_fresh_process", fail)
    (row,) = run_suite(["gpt2-tiny"], on="cpu")
    assert (row.peak_bytes, row.note) == (None, "failed: ValueError: no")


def test_a_run_that_was_interrupted_goes_on(tmp_path, monkeypatch, capsys):
    ran = []

    def simulated(case, mode, device):
        ran.append((case.model.name, mode, case.overlap))
        if mode == "aggressive" and len(ran) == 3:
            raise KeyboardInterrupt
        return run_module.Outcome(2**20 if mode == "none" else 2**19)

    monkeypatch.setattr(run_module, "simulated_mode", simulated)
    file = tmp_path / "out.json"
    arguments = ["--on", "1GiB", "--models", "gpt2-tiny", "--json", str(file)]
    arguments += ["--modes", "none,balanced,aggressive"]
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    assert [row.mode for row in Results.read(file).rows] == ["none", "balanced"]
    ran.clear()
    assert main(arguments) == 0
    assert ran == [("gpt2-tiny", "aggressive", True)]
    assert [row.reduction for row in Results.read(file).rows] == [0.0, 0.5, 0.5]
    assert capsys.readouterr().err.count("already there") == 2
    # Another loop is another case; the rows of the first one stay.
    ran.clear()
    assert main([*arguments[:-2], "--modes", "none", "--no-overlap"]) == 0
    assert ran == [("gpt2-tiny", "none", False)]
    assert len(Results.read(file).rows) == 4


@pytest.mark.parametrize("other", [{"versions": {"torch": "1.0"}}, {"machine": {"processor": "8086"}}])
def test_rows_of_other_versions_or_machines_are_not_gone_on_with(other, tmp_path, capsys):
    file = tmp_path / "out.json"
    now = Results("it", {"torch": torch.__version__}, ())
    dataclasses.replace(now, **other).write(file)
    before = file.read_text()
    assert main(["--on", "cpu", "--models", "gpt2-tiny", "--json", str(file)]) == 2
    assert re.search("has results of (torch 1.0|processor 8086)", capsys.readouterr().err)
    assert file.read_text() == before


def test_help_lists_models_and_modes(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for word in ("bert-base", "gpt2-xl", "gpt2-tiny", "none", "RTX 3090"):
        assert word in shown
