"""`--compare`: the same work in other ways, each a row, whatever becomes of it."""

from __future__ import annotations

import dataclasses
import io
import sys

import pytest

from benchmarks.tables import main as tables_main
from memscale._util.terminal import progress
from memscale.benchmarks import Case, Results, Row, compare, peers
from memscale.benchmarks import __main__ as cli
from memscale.benchmarks import run as run_module
from memscale.benchmarks.__main__ import main
from memscale.benchmarks.compare import tables
from memscale.benchmarks.run import measured_case, write_weights
from memscale.errors import ConfigError, ProfileError
from memscale.memory.process import ProcessMeasurement

ROW = Row(
    model="gpt2-tiny",
    params=172_288,
    batch=2,
    seq=64,
    steps=3,
    on="cpu",
    mode="plain",
    source="measured",
    peak_bytes=2 * 2**30,
    later_peak_bytes=2 * 2**30,
    host_bytes=0,
    disk_bytes=0,
    step_seconds=2.0,
    cpu_seconds=4.0,
    time_ratio=None,
    losses=(7.0, 6.5, 6.0),
)
SMALLER = dataclasses.replace(
    ROW, mode="bnb-adamw8bit", peak_bytes=2**30, step_seconds=3.0, losses=(7.0, 6.5, 6.25)
)
MODE = dataclasses.replace(ROW, mode="memscale-balanced", peak_bytes=3 * 2**29, later_peak_bytes=2**30)
FAILED = dataclasses.replace(
    ROW,
    mode="torchao-adamw8bit",
    peak_bytes=None,
    step_seconds=None,
    losses=(),
    note="failed: ValueError: no",
)


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "model.safetensors"
    write_weights(Case.of("gpt2-tiny"), path)
    return path


def test_every_exact_way_has_the_losses_of_the_plain_model(weights):
    case = Case.of("gpt2-tiny", steps=3)
    plain = measured_case(case, "plain", weights).losses
    assert len(plain) == 3
    assert plain[2] < plain[0]  # it learns: equal losses are not those of a model that stands still
    for way in ("hf-checkpointing", "save-on-cpu", "memscale-conservative"):
        assert measured_case(case, way, weights).losses == plain, way
    # Its loss is tiled, and its optimizer's step on the host is torch's fused one: the last bits of gradients differ,
    # of which AdamW's steps make more each time.
    tiled = measured_case(case, "memscale-aggressive", weights).losses
    assert tiled[:2] == pytest.approx(plain[:2], rel=1e-5)
    assert tiled[2] == pytest.approx(plain[2], rel=1e-4)


def in_this_process(function, *args, imports=()):
    """As `measure_in_fresh_process` does, but without a process."""
    try:
        return ProcessMeasurement(3 << 20, 1 << 20, 1.0, function(*args))
    except Exception as error:
        raise ProfileError(f"The process failed:\n  File ...\n{type(error).__name__}: {error}") from None


def test_a_way_that_fails_or_is_missing_is_a_row_and_a_second_run_runs_nothing(tmp_path, monkeypatch, capsys):
    def broken(model):
        raise RuntimeError("no such device in /usr/lib/python/driver.py")

    monkeypatch.setattr(run_module, "measure_in_fresh_process", in_this_process)
    monkeypatch.setattr(run_module, "reset_peak_rss", lambda: False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(peers.PEERS, "broken", peers.Peer("broken", "a broken one", broken))
    monkeypatch.setitem(
        peers.PEERS, "absent", peers.Peer("absent", "an absent one", broken, package="no_such_package")
    )
    file = tmp_path / "out.json"
    arguments = ["--on", "cpu", "--models", "gpt2-tiny", "--compare", "--json", str(file), "--steps", "2"]
    arguments += ["--peers", "broken,absent", "--modes", "conservative"]
    assert main(arguments) == 0
    plain, failed, missing, ours = Results.read(file).rows
    assert (plain.mode, plain.source, plain.note) == ("plain", "measured", None)
    assert len(plain.losses) == 2
    assert plain.step_seconds > 0
    assert failed.peak_bytes is None
    assert failed.note == "failed: RuntimeError: no such device in driver.py"
    assert missing.note == "not installed: pip install no_such_package"
    assert (ours.mode, ours.losses) == ("memscale-conservative", plain.losses)
    shown = capsys.readouterr()
    assert "MemScale, conservative" in shown.out
    assert "gpt2-tiny, broken: failed: " in shown.err
    assert "left)" in shown.err

    monkeypatch.setattr(run_module, "measure_in_fresh_process", None)
    before = file.read_text()
    assert main(arguments) == 0
    assert file.read_text() == before
    assert capsys.readouterr().err.count("already there") == 4
    # Rows that a later run does not ask for stay in the file.
    assert main([*arguments[:-4], "--peers", "plain", "--modes", "none"]) == 0
    assert len(Results.read(file).rows) == 4


@pytest.mark.parametrize(
    ("notes", "code"),
    [
        ({"memscale-balanced": "failed: ValueError: no"}, 1),
        ({"plain": "failed: ValueError: no"}, 1),
        ({"save-on-cpu": "failed: ValueError: no"}, 0),
        ({"plain": "not run: too large"}, 0),
        ({"plain": "not run: too large", "memscale-balanced": "does not fit"}, 3),
    ],
)
def test_the_exit_code_is_that_of_plain_and_own_rows(notes, code, monkeypatch):
    def rows(cases, ways, on, known):
        for way in ways:
            note = notes.get(way)
            peak = ROW.peak_bytes if note is None else None
            yield dataclasses.replace(ROW, mode=way, note=note, peak_bytes=peak)

    monkeypatch.setattr(cli, "compare", rows)
    arguments = ["--compare", "--on", "cpu", "--models", "gpt2-tiny", "--peers", "save-on-cpu"]
    assert main([*arguments, "--modes", "balanced"]) == code


def test_rows_of_other_versions_are_not_gone_on_with(tmp_path, capsys):
    file = tmp_path / "out.json"
    Results("it", {"torch": "1.0"}, (ROW,), is_comparison=True).write(file)
    assert main(["--on", "cpu", "--models", "gpt2-tiny", "--compare", "--json", str(file)]) == 2
    assert "has results of torch 1.0" in capsys.readouterr().err
    Results("it", {}, (ROW,), {"processor": "8086"}, is_comparison=True).write(file)
    assert main(["--on", "cpu", "--models", "gpt2-tiny", "--compare", "--json", str(file)]) == 2
    assert "has results of processor 8086" in capsys.readouterr().err
    file.write_text("{}")
    assert main(["--on", "cpu", "--models", "gpt2-tiny", "--compare", "--json", str(file)]) == 2
    assert "Not results of python -m memscale.benchmarks" in capsys.readouterr().err
    Results("it", {}, ()).write(file)
    assert main(["--on", "cpu", "--models", "gpt2-tiny", "--compare", "--json", str(file)]) == 2
    assert "is of another kind" in capsys.readouterr().err


def test_simulated_ways():
    case = Case.of("gpt2-tiny", batch=16, seq=128)
    names = ["plain", "hf-checkpointing", "save-on-cpu", "compile-budget-0.5", "memscale-aggressive"]
    rows = {row.mode: row for row in compare.compare([case], names, "1GiB")}
    plain = rows["plain"]
    assert {row.source for row in rows.values()} == {"simulated"}
    for way in ("hf-checkpointing", "save-on-cpu", "memscale-aggressive"):
        assert rows[way].peak_bytes < plain.peak_bytes, way
    assert rows["save-on-cpu"].host_bytes > rows["hf-checkpointing"].host_bytes
    assert rows["compile-budget-0.5"].note == "not simulated: it compiles code for the device"
    assert rows["memscale-aggressive"].time_ratio > 1
    (small,) = compare.compare([case], ["save-on-cpu"], "8MiB")
    assert small.peak_bytes is None
    assert small.note.startswith("does not fit: needs ")


def test_the_least_of_a_column_is_marked_whoever_has_it():
    ((title, table),) = tables([ROW, SMALLER, MODE, FAILED])
    assert title == "gpt2-tiny, 0.2 M parameters, 2 × 64 tokens, 3 steps on the CPU (measured)"
    headers = [column.header for column in table.columns]
    by_way = {row[0]: dict(zip(headers, row, strict=True)) for row in table.rows}
    eight_bit, ours = by_way["bitsandbytes AdamW8bit"], by_way["MemScale, balanced"]
    assert eight_bit["peak (GiB)"] == "*1.00*"
    assert ours["peak (GiB)"] == "1.50"
    assert ours["later steps (GiB)"] == "*1.00*"
    assert (ours["step time"], eight_bit["step time"]) == ("1.00 ×", "1.50 ×")
    assert ours["CPU time"] == "*1.00 ×*"
    assert (ours["loss difference"], eight_bit["loss difference"]) == ("none", "2.5e-01")
    failed = by_way["torchao AdamW8bit"]
    assert (failed["peak (GiB)"], failed["step time"], failed["loss difference"]) == ("failed", "–", "–")
    assert "torchao AdamW8bit: failed: ValueError: no." in table.remarks
    assert len(tables([ROW, dataclasses.replace(ROW, model="bert-tiny")])) == 2


def test_a_comparison_is_a_table_in_markdown(tmp_path):
    results, page = tmp_path / "comparison.json", tmp_path / "page.md"
    described = {"processor": "A CPU", "cores": 2, "ram_bytes": 2**34, "threads": 2}
    Results("it", {"torch": "2.13.0"}, (ROW, SMALLER), described, is_comparison=True).write(results)
    page.write_text("<!-- table: comparison -->\n<!-- /table -->\n")
    assert tables_main([str(results), "--into", str(page)]) == 0
    text = page.read_text()
    assert "| bitsandbytes AdamW8bit | **1.00** | **2.00** | 1.50 × | **1.00 ×** | 2.5e-01 |" in text
    assert "Machine: A CPU, 2 cores, 16.0 GiB RAM, 2 threads." in text
    assert tables_main([str(results), "--into", str(page), "--check"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "--peers", "turbo"], "no peer 'turbo'"),
        (["--compare", "--modes", "budget"], "no mode 'budget'"),
        (["--peers", "plain"], "give --compare as well"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    assert main([*arguments, "--models", "gpt2-tiny", "--on", "1GiB"]) == 2
    assert message in capsys.readouterr().err


def test_progress_says_what_is_left():
    out = io.StringIO()
    with progress(["first", "second"], out) as advance:
        advance("first")
        advance("second")
    first, second = out.getvalue().splitlines()
    assert first.startswith("first (1 of 2, ")
    assert first.endswith(" s left)")
    assert second == "second (2 of 2)"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_each_case_in_a_process_of_its_own():
    rows = {
        row.mode: row
        for row in compare.compare([Case.of("gpt2-tiny")], ["plain", "fsdp2-cpu-offload"], "cpu")
    }
    for row in rows.values():
        assert row.peak_bytes >= row.later_peak_bytes > 4 * 4 * row.params
        assert row.cpu_seconds > 0
    assert rows["fsdp2-cpu-offload"].losses == rows["plain"].losses


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("way", ["compile-budget-0.5", "bnb-adamw8bit", "torchao-adamw8bit"])
def test_a_peer_trains(way, weights):
    peer = peers.PEERS[way]
    if peer.package is not None:
        pytest.importorskip(peer.package)
    case = Case.of("gpt2-tiny", steps=3)
    found = run_module.measured(case, way, weights)
    assert found.note == peer.remark, found.note
    assert found.peak_bytes >= found.later_peak_bytes > 0
    plain = measured_case(case, "plain", weights).losses
    assert found.losses == pytest.approx(plain, rel=0.01)  # other dropout masks, quantised state
    assert found.losses[2] < found.losses[0]


def test_a_comparison_that_was_cut_off_can_be_read(tmp_path):
    file = tmp_path / "out.json"
    comparison = Results("it", {"torch": "2.13.0"}, (ROW, FAILED), {"cores": 2}, is_comparison=True)
    comparison.write(file)
    assert Results.read(file) == comparison
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]
    with pytest.raises(ConfigError, match=r"absent\.json"):
        Results.read(tmp_path / "absent.json")
