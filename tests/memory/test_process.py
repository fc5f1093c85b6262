"""The memory of a process: read, reset, and measured for a function on its own."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from memscale.errors import ProfileError
from memscale.memory import process
from memscale.memory.process import (
    fix_malloc_threshold,
    measure_in_fresh_process,
    peak_rss_bytes,
    reset_peak_rss,
    restore_malloc_threshold,
    rss_bytes,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

MIB = 2**20


# Functions for the other process. It finds them by name, in this file.


def one_after_the_other(mib, times):
    for _ in range(times):
        torch.ones(mib * MIB // 4)


def many_small_ones(mib):
    """As much, in tensors of 256 KiB, twice: glibc as it is would keep them on the heap."""
    for _ in range(2):
        tensors = [torch.ones(64 * 1024) for _ in range(mib * 4)]
        del tensors
    return rss_bytes()


def together(mib, times):
    return len([torch.ones(mib * MIB // 4) for _ in range(times)])


def echo(*args, **kwargs):
    print("this goes nowhere")
    return [list(args), kwargs]


def surroundings():
    return {"pid": os.getpid(), "imported": "wave" in sys.modules}


def fail():
    raise KeyError("the reason for it")


def kill_itself():
    os.kill(os.getpid(), 9)


def exit_early():
    os._exit(0)


class TestMeasure:
    def test_freed_between_counts_once(self):
        measured = measure_in_fresh_process(one_after_the_other, 200, times=2)
        assert measured.peak_above_import_bytes / MIB == pytest.approx(200, abs=25)

    def test_held_together_counts_twice(self):
        measured = measure_in_fresh_process(together, 100, times=2)
        assert measured.result == 2
        assert measured.peak_above_import_bytes / MIB == pytest.approx(200, abs=25)
        assert measured.peak_bytes - measured.baseline_bytes == measured.peak_above_import_bytes
        assert measured.baseline_bytes > 50 * MIB, "torch is in it"
        assert 0 < measured.seconds < 60

    @pytest.mark.slow
    def test_small_tensors_go_back_to_the_system_too(self):
        measured = measure_in_fresh_process(many_small_ones, 200)
        assert measured.peak_above_import_bytes / MIB == pytest.approx(200, abs=25)
        assert (measured.result - measured.baseline_bytes) / MIB < 25

    def test_arguments_and_result_come_through(self):
        value = {"a": [1, 2.5, None, True, "é"], "b": {}}
        measured = measure_in_fresh_process(echo, value, -1, key=[value])
        assert measured.result == [[value, -1], {"key": [value]}]

    def test_a_fresh_process(self):
        seen = measure_in_fresh_process(surroundings, imports=["wave"]).result
        assert seen == {"pid": seen["pid"], "imported": True}
        assert seen["pid"] != os.getpid()

    @pytest.mark.slow
    def test_a_module_on_this_process_path(self, tmp_path, monkeypatch):
        (tmp_path / "only_on_this_path.py").write_text("def answer(): return 42\n")
        monkeypatch.syspath_prepend(tmp_path)
        import only_on_this_path

        assert measure_in_fresh_process(only_on_this_path.answer).result == 42

    @pytest.mark.slow
    def test_a_script_without_running_it_again(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            "from memscale.memory.process import measure_in_fresh_process\n"
            "def double(n): return 2 * n\n"
            "if __name__ == '__main__': print(measure_in_fresh_process(double, 21).result)\n"
        )
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
        assert done.stdout == "42\n", done.stderr

    def test_not_on_linux(self, monkeypatch):
        def no_such_file(self):
            raise FileNotFoundError

        monkeypatch.setattr(process.Path, "read_text", no_such_file)
        for measure in (rss_bytes, peak_rss_bytes, lambda: measure_in_fresh_process(math.sqrt, 4)):
            with pytest.raises(ProfileError, match="measure on Linux"):
                measure()


class TestFailures:
    def test_an_exception_there_is_shown_here(self):
        with pytest.raises(ProfileError, match=r"(?s)fail failed:.*KeyError: 'the reason for it'"):
            measure_in_fresh_process(fail)

    def test_a_kill_says_what_it_mostly_is(self):
        with pytest.raises(ProfileError, match="SIGKILL, which is mostly the system running out of memory"):
            measure_in_fresh_process(kill_itself)

    def test_an_exit_before_the_end(self):
        with pytest.raises(ProfileError, match="ended with exit code 0 before the function returned"):
            measure_in_fresh_process(exit_early)

    def test_an_import_that_is_not_there(self):
        with pytest.raises(ProfileError, match="No module named 'no_such_module_here'"):
            measure_in_fresh_process(echo, imports=["no_such_module_here"])


class TestThisProcess:
    def test_the_peak_stays_until_it_is_reset(self):
        held = torch.ones(64 * MIB // 4)
        high = peak_rss_bytes()
        assert high >= rss_bytes() - MIB
        del held
        assert peak_rss_bytes() >= high - MIB, "to what the kernel's late counters allow"
        assert reset_peak_rss()
        assert peak_rss_bytes() <= high - 32 * MIB

    def test_reset_says_when_it_cannot(self, monkeypatch):
        def denied(self, text):
            raise PermissionError

        monkeypatch.setattr(process.Path, "write_text", denied)
        assert reset_peak_rss() is False


class TestThreshold:
    # In processes of their own: fixing the threshold cannot be undone wholly, see Note [Malloc threshold].
    @pytest.mark.slow
    def test_fixed_and_restored_there(self):
        assert measure_in_fresh_process(fix_malloc_threshold, 2**20).result is True
        assert measure_in_fresh_process(restore_malloc_threshold).result is True

    def test_elsewhere_there_is_nothing_to_fix(self, monkeypatch):
        monkeypatch.setattr(process.sys, "platform", "darwin")
        assert fix_malloc_threshold() is False
        assert restore_malloc_threshold() is False
