"""Compile the stand-in for the CUDA build of torch that runs this, and print the environment to load it with.

`env $(python tests/fakecuda/build.py) python ...`: prints nothing on a machine with an NVIDIA driver. On stderr it says
which of the two is used.
"""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "fakecuda"
# A file of an NVIDIA driver: on Linux, and in WSL2, whose /dev/dxg is there with cards of other vendors as well.
DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia", "/usr/lib/wsl/lib/libcuda.so.1")


def driver_file() -> str | None:
    """Return a file of the machine's NVIDIA driver, if it has one."""
    return next((each for each in DRIVER_FILES if Path(each).exists()), None)


def cuda_version() -> str | None:
    """Return the CUDA version that the installed torch is built for, without importing torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    version: str | None = runpy.run_path(str(Path(found.origin).with_name("version.py"))).get("cuda")
    return version


def include_directories() -> list[Path]:
    """Return the directories of the headers that the CUDA packages of torch install; triton brings `crt/`."""
    packages = Path(sysconfig.get_path("purelib"))
    found = [*packages.glob("nvidia/*/include"), packages / "triton/backends/nvidia/include"]
    return sorted(each for each in found if each.is_dir())


def build() -> dict[str, str]:
    """Compile both libraries, and return the variables that a process needs to load them."""
    BUILD.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{each}" for each in include_directories()]
    drivers = ", ".join(f'"{each}"' for each in DRIVER_FILES)
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wno-unused", f"-DDRIVER_FILES={drivers}", *includes]
    for source, library in (("fakecuda.c", "libfakecuda.so"), ("driver.c", "libcuda.so.1")):
        command = ["gcc", *options, "-o", str(BUILD / library), str(HERE / source), "-ldl", "-lpthread"]
        if subprocess.run(command, check=False).returncode:
            sys.exit(
                "fakecuda: gcc failed. It needs the nvidia packages that the CUDA build of torch installs."
            )
    return {"LD_LIBRARY_PATH": str(BUILD), "LD_PRELOAD": str(BUILD / "libfakecuda.so")}


def main() -> None:
    """Print the environment, and on stderr which device the tests have."""
    if cuda_version() is None:
        sys.exit(
            f"fakecuda: the torch of {sys.executable} is not built for CUDA: `make setup-cuda` installs one."
        )
    driver = driver_file()
    if driver is not None:
        print(f"tests on CUDA use the card of this machine ({driver})", file=sys.stderr)
        return
    print("tests on CUDA use the stand-in of tests/fakecuda: no NVIDIA driver was found", file=sys.stderr)
    print(" ".join(f"{name}={value}" for name, value in build().items()))


if __name__ == "__main__":
    main()
