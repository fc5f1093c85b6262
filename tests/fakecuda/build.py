"""Compile the stand-in for the CUDA build of torch that runs this, and print the environment to load it with.

`env $(python tests/fakecuda/build.py) python ...`: prints nothing on a machine with an NVIDIA driver.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "fakecuda"


def include_directories() -> list[Path]:
    """Return the directories of the headers that the CUDA packages of torch install; triton brings `crt/`."""
    packages = Path(sysconfig.get_path("purelib"))
    found = [*packages.glob("nvidia/*/include"), packages / "triton/backends/nvidia/include"]
    return sorted(each for each in found if each.is_dir())


def build() -> dict[str, str]:
    """Compile both libraries, and return the variables that a process needs to load them."""
    BUILD.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{each}" for each in include_directories()]
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wno-unused", *includes]
    for source, library in (("fakecuda.c", "libfakecuda.so"), ("driver.c", "libcuda.so.1")):
        command = ["gcc", *options, "-o", str(BUILD / library), str(HERE / source), "-ldl", "-lpthread"]
        if subprocess.run(command, check=False).returncode:
            sys.exit(
                "fakecuda: gcc failed. It needs gcc, and the CUDA build of torch with its nvidia packages."
            )
    return {"LD_LIBRARY_PATH": str(BUILD), "LD_PRELOAD": str(BUILD / "libfakecuda.so")}


if __name__ == "__main__":
    if not any(Path(each).exists() for each in ("/dev/nvidiactl", "/proc/driver/nvidia")):
        print(" ".join(f"{name}={value}" for name, value in build().items()))
