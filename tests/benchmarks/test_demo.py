"""`examples/demo.py`, small, as a newcomer starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memscale.units import format_bytes

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
SMALL = ["--steps", "1", "--layers", "2", "--width", "64"]
# Token and position embeddings; two blocks of 12 width² + 13 width; the last norm.
PARAMETERS = (8192 + 128) * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64
WITHOUT_RICH = (
    f"import runpy, sys; sys.modules['rich'] = None; runpy.run_path({str(DEMO)!r}, run_name='__main__')"
)


def run_demo(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    names = ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "TRANSFORMERS_VERBOSITY", "HF_HUB_OFFLINE")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=clean | {"PYTHONIOENCODING": "utf-8"} | environment,
        timeout=300,
        check=False,
    )


def check_numbers(text: str) -> None:
    assert f"{PARAMETERS:,} parameters" in text
    losses = re.search(r"loss: ([\d. ]+)", text)
    assert losses is not None
    assert 8 < float(losses[1]) < 10  # one step; ln 8192 is 9.01
    for category in ("weights", "gradients", "optimizer state", "activations", "temporary", "workspace"):
        assert re.search(rf"{category} +[│|]", text), category
    assert re.search(rf"weights +[│|] +{re.escape(format_bytes(4 * PARAMETERS))} ", text)
    for phase in ("forward", "backward", "optimizer"):
        assert phase in text
    assert "▼ peak" in text
    assert "The largest tensors at the peak" in text
    # The simulated CPU foretells the real one, in every category; the GPU has its own kernels.
    assert "RTX 3090: NVIDIA GeForce RTX 3090, 24.0 GiB." in text
    assert "RTX 3090, simulated" in text
    compared = text.partition("RTX 3090, simulated")[2]
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in compared.splitlines() if "iB │" in line
    ]
    assert [row[0] for row in rows][-1] == "together"
    for category, measured, simulated, _ in rows:
        assert measured == simulated, category
    assert {"weights", "activations", "temporary", "workspace"} <= {row[0] for row in rows}
    sentence = " ".join(text.split())
    assert "The losses are to the last bit the same." in sentence
    fell = re.search(r"The peak fell by (\d+)%", sentence)
    assert fell is not None
    assert int(fell[1]) > 0
    assert "With memscale.wrap the RTX 3090 would need" in sentence
    assert re.search(r"predicts the [\d,]+ bytes of this CPU exactly", sentence)
    assert re.search(r"the GPU would need [\d.]+ MiB", sentence)


def test_the_demo_shows_its_numbers():
    done = run_demo(str(DEMO), *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    check_numbers(done.stdout)


@pytest.mark.slow
def test_the_demo_without_rich():
    done = run_demo("-c", WITHOUT_RICH, *SMALL, FORCE_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert "\x1b" in done.stdout
    check_numbers(re.sub(r"\x1b\[\d+m", "", done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "65"], "not a multiple of 4"),
        (["--gpu", "RTX 3091"], "nearest names are NVIDIA GeForce RTX 3090"),
    ],
)
def test_bad_arguments(arguments, message):
    done = run_demo(str(DEMO), *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "Training" not in done.stdout


@pytest.mark.slow
def test_a_gpu_on_which_the_step_does_not_fit():
    done = run_demo(str(DEMO), *SMALL, "--gpu", "40MiB")
    assert done.returncode == 0, done.stderr
    assert "out of memory" in done.stdout
    assert "on the GPU the step does not fit" in " ".join(done.stdout.split())
