"""The command `memscale`, as a person types it: in this process where that is the same, else in one of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from memscale import Config, Plan, find_batch_size
from memscale.cli.app import DOES_NOT_FIT, INTERRUPTED, WRONG_ARGUMENTS, run

TINY = ["gpt2-tiny", "--on", "RTX 3090"]


def in_a_process(*arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        # A shell starts background jobs with SIGINT ignored, and Python leaves it at that.
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from memscale.cli import main; sys.exit(main())",
        *arguments,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_plan_shows_the_plan_what_holds_the_peak_and_the_trades(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *TINY, "--batch", "2", "--seq", "64"]) == 0
    shown = capsys.readouterr()
    for part in ("Plan: ", "peak of device memory", "At the peak", "optimizer state", "● this plan"):
        assert part in shown.out
    assert re.search(r"when +│ backward +│ backward", shown.out)
    assert shown.err == ""  # no progress where nobody looks


def test_plan_as_json_is_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["plan", *TINY, "--json", "-", "--mode", "aggressive"]) == 0
    printed = Plan.from_json(capsys.readouterr().out)
    assert printed.mode == "aggressive"
    file = tmp_path / "plan.json"
    assert run(["plan", *TINY, "--json", str(file), "--mode", "aggressive"]) == 0
    assert Plan.from_json(file.read_text()) == printed


def test_the_optimizer_counts(capsys: pytest.CaptureFixture[str]) -> None:
    peaks = []
    for name in ("adamw", "sgd"):
        assert run(["plan", *TINY, "--json", "-", "--optimizer", name]) == 0
        peaks.append(Plan.from_json(capsys.readouterr().out).baseline_peak_bytes)
    assert peaks[1] < peaks[0]


def test_a_plan_that_does_not_fit_has_an_exit_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "gpt2-tiny", "--on", "9MiB"]) == DOES_NOT_FIT
    assert "It does not fit" in capsys.readouterr().out


def test_a_config_of_transformers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=256, architectures=["LlamaForCausalLM"], **sizes)
    config.save_pretrained(tmp_path)
    arguments = ["--on", "RTX 3090", "--batch", "3", "--seq", "32", "--json", "-"]
    found = []
    for path in (tmp_path, tmp_path / "config.json"):
        assert run(["plan", str(path), *arguments]) == 0
        found.append(Plan.from_json(capsys.readouterr().out))
    assert found[0] == found[1]
    assert "input_ids=int64[3, 32]" in found[0].batch


def test_a_function_that_builds_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import torch\ndef build():\n    return torch.nn.Linear(8, 8), torch.ones(4, 8)\n"
    (tmp_path / "factory_for_tests.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert run(["plan", "factory_for_tests:build", "--on", "RTX 3090", "--batch", "16", "--json", "-"]) == 0
    assert "[16, 8]" in Plan.from_json(capsys.readouterr().out).batch


BROKEN_CODE = """
import torch

value = 3

def raises():
    raise RuntimeError("no weights\\nof that name")

def takes(argument):
    return argument

def nothing():
    return None

def without_a_batch():
    return torch.nn.Linear(3, 3)
"""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "broken_for_tests:raises",
            "failed on the meta device: RuntimeError: no weights (broken_for_tests.py:7)",
        ),
        ("broken_for_tests:takes", "TypeError: takes() missing 1 required positional argument"),
        ("broken_for_tests:value", "value is 3: name a function"),
        ("broken_for_tests:nothing", "returned None: it must return an nn.Module"),
        ("broken_for_tests:without_a_batch", "return (module, batch)"),
        ("broken_for_tests:absent", "has no attribute 'absent'"),
        ("no_python_for_tests:build", "cannot be imported: SyntaxError: "),
        ("text.json", "text.json is not a config of transformers: "),
        ("list.json", "list.json is not a config of transformers: "),
        ("unknown.json", "unknown.json is not a config of transformers: "),
        ("wrong.json", "wrong.json"),
        (".", "there is no config.json"),
    ],
)
def test_models_that_cannot_be_built_are_one_line(
    model: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {
        "broken_for_tests.py": BROKEN_CODE,
        "no_python_for_tests.py": "def (",
        "text.json": "no JSON",
        "list.json": "[1, 2]",
        "unknown.json": '{"model_type": "zebra"}',
        "wrong.json": '{"model_type": "gpt2", "n_embd": "wide", "architectures": ["GPT2LMHeadModel"]}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_for_tests", raising=False)
    assert run(["plan", model, "--on", "RTX 3090"]) == WRONG_ARGUMENTS
    shown = capsys.readouterr()
    assert shown.err.startswith("memscale: error: ")
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1


def test_files_that_cannot_be_written_are_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import memscale

    def work(*_: object, **__: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(memscale, "plan", work, raising=False)
    monkeypatch.setattr(memscale, "calibrate", work, raising=False)
    monkeypatch.setattr(memscale, "selftest", work, raising=False)
    for path, reason in (
        (tmp_path, "it is a directory"),
        (tmp_path / "no" / "file", "there is no directory"),
    ):
        for command in (
            ["plan", *TINY, "--json"],
            ["report", *TINY, "-o"],
            ["report", *TINY, "--trace"],
            ["doctor", "--selftest", "--device", "cpu", "--json"],
            ["calibrate", "--device", "cpu", "--path"],
        ):
            assert run([*command, str(path)]) == WRONG_ARGUMENTS
            assert f"{path} can't be written: {reason}" in capsys.readouterr().err


def test_the_plain_step_is_shown_beside_a_deep_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "gpt2-small", "--on", "RTX 3060", "--batch", "1", "--seq", "64"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"used for +│ plain +│ with this plan", shown)
    assert "was not simulated" not in shown


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    import memscale

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"memscale {memscale.__version__}\n"


def test_fit_says_which_gpu_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "gpt2-tiny", "--gpus", "RTX 3090,RTX 3060", "--seq", "32"]) == 0
    shown = capsys.readouterr().out
    assert "The smallest that is enough: NVIDIA GeForce RTX 3060" in shown
    assert "gpt2-tiny, 2 × 32" in shown
    assert re.search(r"│ +\d\.\d\d × │ +\d\.\d\d × │", shown)  # not broken before its sign
    assert "Optimizer steps are counted after backward" in " ".join(shown.split())


def test_fit_and_bench_agree_on_where_the_plain_step_fits() -> None:
    from memscale.benchmarks.run import Case, simulated_mode
    from memscale.cli.target import find_target
    from memscale.hardware import virtual_hardware
    from memscale.planner.predict import plain_step
    from memscale.profiler import Place

    target, case = find_target("gpt2"), Case.of("gpt2")
    optimizer = torch.optim.AdamW(target.model.parameters())
    place = Place.of(virtual_hardware("8GiB").device)
    needed = plain_step(target.model, target.sample, place, Config(), optimizer)
    least = needed.capacity_bytes  # found to half a per cent
    assert needed.peak_bytes < 0.99 * least
    for size in (int(0.99 * least), least):
        does_fit = simulated_mode(case, "none", size).peak_bytes is not None
        assert does_fit == (least <= size), size


def test_fit_shows_what_the_plain_step_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "gpt2-tiny", "--gpus", "11MiB,1GiB"]) == 0
    shown = capsys.readouterr().out
    small, large = [line for line in shown.splitlines() if "GPU of" in line][:2]
    assert "needs " in small
    assert "needs" not in large
    assert run(["fit", "gpt2-tiny", "--gpus", "RTX 3090", "--on", "RTX 3060"]) == WRONG_ARGUMENTS
    assert "give one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("plan gpt2-t", "gpt2-tiny"),
        ("plan gpt2 --on 3090", "3090 3090-ti"),
        ("plan gpt2 --on RTX3090", "RTX3090 RTX3090-ti"),
        ("fit gpt2 --gpus rtx3060,a100-sxm", "rtx3060,a100-sxm4-40gb rtx3060,a100-sxm4-80gb"),
        ("plan gpt2 --optimizer adam", "adam adamw adamax"),
        ("bench --no", "--no-overlap"),
        ("bench --no-overlap --models bert-t", "bert-tiny"),
    ],
)
def test_the_shell_completes(words: str, expected: str) -> None:
    typed = f"memscale {words}"
    environment = {
        **os.environ,
        "_MEMSCALE_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    code = "import sys; from memscale.cli import main; sys.argv = ['memscale']; sys.exit(main())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert sorted(done.stdout.split()) == sorted(expected.split())


def test_names_that_complete_are_those_of_gpus() -> None:
    from memscale.cli.app import _gpus
    from memscale.hardware import find_gpu, list_gpus

    found = {find_gpu(name) for name in _gpus("") if name != "cpu"}
    assert found == set(list_gpus())
    assert not any(" " in name for name in _gpus(""))


@pytest.mark.slow
def test_without_arguments_it_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    shown = capsys.readouterr()
    assert "Usage: " in shown.out
    assert shown.err == ""


@pytest.mark.slow
def test_fit_takes_sizes_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "gpt2-tiny", "--gpus", "RTX 3090,8GiB"]) == 0
    assert "The smallest that is enough: GPU of 8.0 GiB." in capsys.readouterr().out


@pytest.mark.slow
def test_batches_depend_on_the_optimizer() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = Config(enable_checkpointing=False, enable_offloading=False, enable_logging=False)
    batches = [
        find_batch_size(model, torch.ones(8, 1024), plain, "160MiB", optimizer=each).batch_size
        for each in (None, sgd)
    ]
    assert 0 < batches[0] < batches[1]  # SGD keeps no state


def test_a_config_without_a_class_says_what_was_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from transformers import BertConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertConfig(vocab_size=256, **sizes).save_pretrained(tmp_path)
    assert run(["plan", str(tmp_path), "--on", "RTX 3090", "--batch", "2", "--seq", "32", "--json", "-"]) == 0
    assert "names no class in architectures: this is BertLMHeadModel" in capsys.readouterr().err
    BertConfig(vocab_size=256, architectures=["MyFancyBert"], **sizes).save_pretrained(tmp_path)
    assert run(["plan", str(tmp_path), "--on", "RTX 3090", "--batch", "2", "--seq", "32", "--json", "-"]) == 0
    assert "names MyFancyBert, which transformers has not" in capsys.readouterr().err


def test_a_config_that_says_too_little_of_the_batch(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from transformers import T5Config

    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    T5Config(vocab_size=64, architectures=["T5ForConditionalGeneration"], **sizes).save_pretrained(tmp_path)
    assert run(["plan", str(tmp_path), "--on", "RTX 3090"]) == WRONG_ARGUMENTS
    shown = capsys.readouterr().err
    assert "MemScale derived this batch from the config" in shown
    assert len(shown.splitlines()) == 1


def test_fit_on_a_device_says_which_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "gpt2-tiny", "--on", "64MiB"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("largest", "longest", "fastest", "aggressive"))


def test_gpus_by_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpus", "3090 ti"]) == 0
    shown = capsys.readouterr().out
    assert "RTX 3090 Ti" in shown
    assert "RTX 4090" not in shown


def test_bench_is_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--models", "gpt2-tiny", "--on", "RTX 3090"]) == 0
    assert "Peak memory of training" in capsys.readouterr().out
    assert run(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: memscale bench ")
    assert '--on "RTX 3090"' in shown.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "gpt2-tinny"], "did you mean gpt2-tiny?"),
        (["plan", "./nowhere.json"], "no such file"),
        (
            ["plan", "no_such_module:build"],
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'\n",
        ),
        (["plan", "gpt2-tiny", "--on", "RTX 9999"], "RTX 9999"),
        (["plan", "gpt2-tiny", "--on", "cuda"], "leave it out to plan for this machine"),
        (["plan", "gpt2-tiny", "--batch", "0"], "--batch 0 is not allowed"),
        (["plan", "gpt2-tiny", "--seq", "100000"], "100000"),
        (["plan", "gpt2-tiny", "--budget", "lots"], "lots"),
        (["plan", "gpt2-tiny", "--optimizer", "magic"], "one of adamw"),
        (["plan", "gpt2-tiny", "--mode", "wild"], "wild"),
        (["report", "gpt2-tiny", "-o", "/no/such/directory/page.html"], "can't be written"),
        (["gpus", "abacus"], "abacus"),
        (["no-such-command"], "no-such-command"),
        (["bench", "--models", "gpt2-tinny"], "did you mean gpt2-tiny?"),
        (["bench", "--no-such-option"], "unrecognized arguments: --no-such-option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == WRONG_ARGUMENTS
    shown = capsys.readouterr()
    assert message in shown.err
    assert re.match(r"memscale( bench)?: error: ", shown.err)
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(
    "command", [[], ["plan"], ["report"], ["fit"], ["gpus"], ["doctor"], ["calibrate"], ["bench"]]
)
def test_help_answers_without_torch(command: list[str]) -> None:
    code = (
        "import sys\nfrom memscale.cli.app import run\ncode = run(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules or sys.argv[1] == 'bench'\nsys.exit(code)"
    )
    arguments = [sys.executable, "-c", code, *command, "--help"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Example" in done.stdout or command in ([], ["bench"])


def test_an_interrupt_ends_it_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "slow_factory.py").write_text(
        "import time\ndef build():\n    print('building', flush=True)\n    time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = in_a_process("plan", "slow_factory:build", cwd=tmp_path, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert errors.strip() == "memscale: interrupted"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_an_interrupt_of_a_measured_run_is_one_line(tmp_path: Path) -> None:
    arguments = ["bench", "--on", "cpu", "--models", "gpt2-tiny", "--modes", "none", "--steps", "1000000"]
    process = in_a_process(*arguments, start_new_session=True)  # Ctrl-C goes to all of a terminal's processes
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    measuring: list[Path] = []
    while process.poll() is None and not measuring:
        time.sleep(0.05)
        places = [Path("/proc") / pid / "cmdline" for pid in children.read_text().split()]
        measuring = [place for place in places if b"spawn_main" in place.read_bytes()]
    time.sleep(0.5)  # anywhere in its imports or its steps
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert errors.strip() == "memscale: interrupted"
    assert not any(place.exists() for place in measuring)


def test_without_typer_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = in_a_process("gpus", env={**os.environ, "PYTHONPATH": paths})
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "pip install typer rich" in errors


def test_doctor_says_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    process = in_a_process("doctor", "--device", "cpu")  # where no library is imported yet
    shown, errors = process.communicate(timeout=300)
    assert process.returncode == 0
    assert all(word in shown for word in ("device", "transformers", "disk tier"))
    assert "Failed to load" not in errors
    assert run(["doctor", "--json", "x.json"]) == WRONG_ARGUMENTS


def test_doctor_fails_if_a_check_of_the_selftest_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import memscale
    from memscale.diagnosis import Finding, SelfTest

    row = Finding("offloading", "fail", "the loss differs")
    tried = SelfTest("a device", (row,), (), {}, {})
    monkeypatch.setattr(memscale, "selftest", lambda device, progress: tried, raising=False)
    file = tmp_path / "found.json"
    assert run(["doctor", "--selftest", "--device", "cpu", "--json", str(file)]) == 1
    assert "the loss differs" in capsys.readouterr().out
    assert json.loads(file.read_text())["passed"] is False


def test_calibrate_writes_the_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import memscale
    from memscale.hardware import calibrate

    parts: list[tuple[int, int]] = []

    def small(path: object, *, device: object, progress: object) -> object:
        def both(done: int, total: int) -> None:
            parts.append((done, total))
            progress(done, total)  # type: ignore[operator]

        return calibrate.calibrate(path, device=device, nbytes=2**20, side=64, progress=both)  # type: ignore[arg-type]

    monkeypatch.setattr(memscale, "calibrate", small, raising=False)
    file = tmp_path / "rates.json"
    assert run(["calibrate", "--path", str(file), "--device", "cpu"]) == 0
    assert json.loads(file.read_text())["rates"]["fp32"] > 0
    assert parts == [(done, 8) for done in range(1, 8)]  # the disk is the eighth
    shown = capsys.readouterr().out
    assert "products in fp32" in shown
    assert f"Written to {file}" in shown.replace("\n", " ")
