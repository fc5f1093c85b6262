"""Resident memory (RSS) of this process, and of a function in a fresh process.

Note [Malloc threshold]
glibc serves large blocks by mappings (unmapped when freed) and smaller ones from the heap (mostly kept for reuse). The
threshold starts at 128 KiB and *grows* to 32 MiB as large blocks are freed, so that after a while most tensors are on
the heap and RSS no longer follows what is in use: 6 to 20% too much, and different in every run. With a fixed
threshold every tensor is a mapping, and the peak of RSS is that of the tensors to 1 or 2%, repeatable to 1 MiB.
Setting it stops the growing for the rest of the process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar, cast

from memscale.errors import ConfigError, ConfigTypeError, ProfileError, shown

__all__ = [
    "ProcessMeasurement",
    "fix_malloc_threshold",
    "measure_in_fresh_process",
    "peak_rss_bytes",
    "reset_peak_rss",
    "restore_malloc_threshold",
    "rss_bytes",
]

T = TypeVar("T")

_THRESHOLD = 65536
_LARGEST_THRESHOLD = 32 * 2**20  # glibc refuses more, on 64-bit systems
_GLIBC_START_THRESHOLD = 128 * 2**10

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def fix_malloc_threshold(threshold: int = _THRESHOLD) -> bool:
    """Return every block of `threshold` bytes or more to the system when it is freed, from now on.

    See Note [Malloc threshold].

    Args:
        threshold: In bytes, at most 32 MiB. Up to 1 MiB is good for measuring.

    Returns:
        False where the C library is not glibc.

    Raises:
        ConfigError: The threshold is out of range.
        ConfigTypeError: The threshold is not a whole number.

    Example:
        >>> measure_in_fresh_process(fix_malloc_threshold).result  # it stays fixed where it is called
        True
    """
    if isinstance(threshold, bool) or not isinstance(threshold, int):
        raise ConfigTypeError(
            f"threshold={shown(threshold)} is not a whole number of bytes: give one such as {_THRESHOLD}."
        )
    if not 0 < threshold <= _LARGEST_THRESHOLD:
        raise ConfigError(
            f"threshold={shown(threshold)} is not allowed: threshold must be from 1 to {_LARGEST_THRESHOLD} "
            f"bytes, such as {_THRESHOLD}."
        )
    return _set_malloc_thresholds(threshold)


def restore_malloc_threshold() -> bool:
    """Set the thresholds back to what glibc starts with; return False where the C library is not glibc."""
    # The start values only: glibc's own adjusting can't be turned on again.
    return _set_malloc_thresholds(_GLIBC_START_THRESHOLD)


@functools.cache  # a library opened by ctypes is a reference cycle
def _mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's `mallopt`; None where the C library has none, as musl."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
        mallopt.restype = ctypes.c_int
    return mallopt


def _set_malloc_thresholds(threshold: int) -> bool:
    mallopt = _mallopt() if sys.platform.startswith("linux") else None
    if mallopt is None:
        return False
    # The second returns a free tail of the heap, as the first returns a mapping.
    results = [mallopt(option, threshold) for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)]
    return all(result == 1 for result in results)


def rss_bytes() -> int:
    """Return the physical memory of this process now.

    Raises:
        ProfileError: The system is not Linux.
    """
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """Return the largest physical memory of this process since it started or since `reset_peak_rss`.

    Accurate to a few hundred KiB: the kernel sums up its counters per core with a delay.

    Raises:
        ProfileError: The system is not Linux.
    """
    return _status_bytes("VmHWM")


def reset_peak_rss() -> bool:
    """Set the peak to the present RSS; return False where the system does not offer that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5: the peak only, see proc(5)
    except OSError:
        return False
    return True


def _status_bytes(key: str) -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError as error:
        raise ProfileError(
            "The memory of a process is read from /proc/self/status, which is not readable on this "
            f"{platform.system()}: measure on Linux, or count tensor bytes with torch.profiler instead."
        ) from error
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024  # "  123456 kB", and by kB it means KiB
    raise ProfileError(f"/proc/self/status of this kernel has no {key}: measure on another Linux host.")


@dataclass(frozen=True)
class ProcessMeasurement(Generic[T]):
    """The memory and time of a function in a process of its own.

    Attributes:
        peak_bytes: The largest physical memory of the process while the function ran.
        baseline_bytes: Its memory just before: Python, torch and the other imports.
        seconds: How long the function ran, without imports.
        result: What it returned.
    """

    peak_bytes: int
    baseline_bytes: int
    seconds: float
    result: T

    @property
    def peak_above_import_bytes(self) -> int:
        """The peak above the imports."""
        return max(0, self.peak_bytes - self.baseline_bytes)


def measure_in_fresh_process(
    function: Callable[..., T], *args: object, imports: Sequence[str] = (), **kwargs: object
) -> ProcessMeasurement[T]:
    """Run `function(*args, **kwargs)` in a new Python process and measure its memory there.

    The malloc threshold is fixed in that process (Note [Malloc threshold]), which makes the peak repeatable. Pages of
    memory-mapped files count, as they do in RSS.

    Args:
        function: A function at the top level of a module or of a class in it, which the new process imports by name
            from this process's `sys.path`, or from its file.
        args: Arguments, passed as JSON: None, bool, int, float, str, lists, dicts with str keys.
        imports: Modules to import before the baseline is read, besides torch and the function's own.
        kwargs: Keyword arguments, passed as JSON.

    Returns:
        The measurement; its `result` is passed as JSON as well.

    Raises:
        ConfigTypeError: The function cannot be found by name, or an argument or the result is not plain JSON
            data.
        ProfileError: The process failed (the message ends with what it printed), or the system is not Linux.

    Example:
        >>> import math
        >>> measured = measure_in_fresh_process(math.factorial, 5)
        >>> measured.result, measured.peak_bytes >= measured.baseline_bytes
        (120, True)
    """
    rss_bytes()  # fails here, with its reason, where the new process would fail after seconds of imports
    module, qualname = _importable_name(function)
    _refuse_not_json("args", list(args))
    _refuse_not_json("kwargs", kwargs)
    request: dict[str, object] = {
        "path": [entry for entry in sys.path if isinstance(entry, str)],
        "module": module,
        "file": _file_of(sys.modules[function.__module__]),
        "qualname": qualname,
        "imports": [imports] if isinstance(imports, str) else list(imports),
        "args": args,
        "kwargs": kwargs,
    }
    answer = _run_in_child(request, name=f"{module}:{qualname}")
    if "not_json" in answer:
        raise ConfigTypeError(f"{module}:{qualname} ran, and its result is lost: {answer['not_json']}")
    return ProcessMeasurement(
        peak_bytes=cast(int, answer["peak_bytes"]),
        baseline_bytes=cast(int, answer["baseline_bytes"]),
        seconds=cast(float, answer["seconds"]),
        result=cast(T, answer["result"]),
    )


def _importable_name(function: Callable[..., object]) -> tuple[str, str]:
    """Return the module and qualified name by which another process can import the function."""
    module_name = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    module = sys.modules.get(module_name) if isinstance(module_name, str) else None
    found: object = module
    for part in qualname.split(".") if isinstance(qualname, str) else ("",):
        found = getattr(found, part, None)
    if module is None or found is not function:
        raise ConfigTypeError(
            f"function={shown(function)} cannot be found by name in another process: give a function at the "
            "top level of a module (no lambda, closure, bound method or functools.partial), and give it what "
            "it needs as arguments."
        )
    # Under `python -m package.module` the name is "__main__" only in this process.
    spec = getattr(module, "__spec__", None)
    name = spec.name if module.__name__ == "__main__" and spec is not None else module.__name__
    if name == "__main__" and _file_of(module) is None:
        raise ConfigTypeError(
            f"function={shown(function)} was typed into a session, where another process cannot find it: "
            "put it in a file, and import it from there."
        )
    return name, cast(str, qualname)


def _file_of(module: ModuleType) -> str | None:
    """Return the path of its source; None for "<stdin>" and the cells of a notebook."""
    file = getattr(module, "__file__", None)
    return file if file is not None and os.path.isfile(file) else None


def _refuse_not_json(where: str, value: object) -> None:
    """Raise unless the value passes through JSON unchanged."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if type(value) is list:
        for index, item in enumerate(value):
            _refuse_not_json(f"{where}[{index}]", item)
    elif type(value) is dict and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            _refuse_not_json(f"{where}[{key!r}]", item)
    else:
        raise ConfigTypeError(
            f"{where}={shown(value)} ({type(value).__name__}) does not pass through JSON unchanged: use "
            "None, bool, int, float, str, lists, and dicts with str keys (a list for a tuple, a shape for a "
            "tensor)."
        )


# The first lines of the new process; memscale itself may be importable only from the path they set.
_BOOTSTRAP = """
import json, sys
with open(sys.argv[1], encoding="utf-8") as file:
    request = json.load(file)
sys.path[:] = request["path"]
from memscale.memory.process import _serve
_serve(request, sys.argv[2])
"""


def _run_in_child(request: dict[str, object], name: str) -> dict[str, object]:
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": str(_THRESHOLD),
        "MALLOC_TRIM_THRESHOLD_": str(_THRESHOLD),
    }
    with tempfile.TemporaryDirectory(prefix="memscale-measure-") as folder:
        # By files, as the function may print.
        request_file, answer_file = Path(folder, "request.json"), Path(folder, "answer.json")
        request_file.write_text(json.dumps(request), encoding="utf-8")
        child = subprocess.run(
            [sys.executable, "-c", _BOOTSTRAP, str(request_file), str(answer_file)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if child.returncode != 0 or not answer_file.exists():
            raise ProfileError(_failure_message(name, child.returncode, child.stderr))
        answer: dict[str, object] = json.loads(answer_file.read_text(encoding="utf-8"))
        return answer


def _failure_message(name: str, returncode: int, stderr: str) -> str:
    if returncode == -signal.SIGKILL:
        how = "was killed by SIGKILL, which is mostly the system running out of memory: try a smaller case"
    elif returncode < 0:
        how = f"was killed by signal {-returncode}"
    elif returncode == 0:
        how = "ended before the function returned: it must not exit the process"
    else:
        how = f"failed with exit code {returncode}: call the function in this process to debug it"
    tail = "\n".join(stderr.strip().splitlines()[-20:]) or "(nothing)"
    return f"The process that measured {name} {how}. The last of its stderr:\n{tail}"


def _serve(request: dict[str, object], answer_file: str) -> None:
    """Import, read the baseline, call the function and write the answer, in the new process."""
    importlib.import_module("torch")
    for name in cast("list[str]", request["imports"]):
        importlib.import_module(name)
    found: object = _import(cast(str, request["module"]), cast("str | None", request["file"]))
    for part in cast(str, request["qualname"]).split("."):
        found = getattr(found, part)
    function = cast("Callable[..., object]", found)
    args, kwargs = cast("list[object]", request["args"]), cast("dict[str, object]", request["kwargs"])

    reset_peak_rss()  # imports have a peak of their own
    baseline = rss_bytes()
    start = time.perf_counter()
    result = function(*args, **kwargs)
    seconds = time.perf_counter() - start
    peak = peak_rss_bytes()

    answer: dict[str, object] = {
        "peak_bytes": peak,
        "baseline_bytes": baseline,
        "seconds": seconds,
        "result": result,
    }
    try:
        _refuse_not_json("result", result)
    except ConfigTypeError as error:
        answer = {"not_json": str(error)}
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


def _import(name: str, file: str | None) -> ModuleType:
    """Import by name, or else from the file: a script, or a module that is on no path."""
    if file is None:
        return importlib.import_module(name)
    if name != "__main__":
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Only where this module is what is missing, and not one that it imports in turn.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    # Not "__main__": a script's own `if __name__ == "__main__"` must not run here.
    alias = "__memscale_main__" if name == "__main__" else name
    spec = importlib.util.spec_from_file_location(alias, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{file} is not a Python module", name=name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module
