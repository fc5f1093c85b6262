#!/usr/bin/env bash
# Sets up the project's own environment; called by make, which explains the SETUP_* variables.
#
# torch goes in first and by exact version, so that nothing that follows can choose it. A torch that
# is already there (in the environment itself, or in the Python that makes it) is used as it is,
# unless SETUP_TORCH names one. The stamp is written last: an interrupted set-up starts again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

default_torch="torch==2.13.0"
extras="hf,trl,peft,lightning,bnb,rich,cli,metrics,docs,dev"
# With SETUP_OLDEST, the oldest versions of these that pyproject.toml allows, and tests that need no others.
oldest=""
if [ -n "${SETUP_OLDEST:-}" ]; then
    extras="hf,peft,lightning,dev"
    oldest="transformers accelerate peft lightning"
fi
requested_python=${SETUP_PYTHON:-}
requested_torch=${SETUP_TORCH:-}
venv=${SETUP_VENV:-.venv}
host_python=${requested_python:-python3}
venv_python=$venv/bin/python
stamp=$venv/memscale-setup

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: error: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '       %s\n' "$@" >&2
    exit 1
}

# What this set-up depends on. The path is part of it: an editable install points at it.
wanted() {
    printf 'root %s\nextras %s\npyproject %s\ntorch %s\n' \
        "$PWD" "$extras" "$(sha256sum <pyproject.toml | cut -d' ' -f1)" "${requested_torch:-default}"
}

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

# Prints the version of the torch that a Python imports; fails if there is none, or one too old for us.
torch_version() {
    local floor
    floor=$(sed -n 's/^dependencies = \["torch>=\([0-9]*\.[0-9]*\)".*/\1/p' pyproject.toml)
    "$1" - "${floor:-0.0}" 2>/dev/null <<'PYTHON'
import sys

import torch

major, minor = torch.__version__.split(".")[:2]
if (int(major), int(minor)) < tuple(map(int, sys.argv[1].split("."))):
    sys.exit(1)
print(torch.__version__)
PYTHON
}

# Quiet unless something is wrong. A local index without a page for a package makes pip say
# "Location ... is ignored" for each package it looks up; those lines alone are dropped.
pip_install() {
    { "$venv_python" -m pip install --quiet --disable-pip-version-check "$@" 2>&1 >&3 |
        sed -u '/^WARNING: Location .* is ignored/d' >&2; } 3>&1
}

check_host_python() {
    command -v "$host_python" >/dev/null ||
        fail "$host_python is not there." "Install Python 3.10 or newer, or name one: make test PYTHON=/path/to/python3"
    "$host_python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$host_python is Python $(python_version "$host_python"); MemScale needs 3.10 or newer." \
            "Name another one: make test PYTHON=python3.11"
    "$host_python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$host_python cannot make virtual environments (its venv or ensurepip module is missing)." \
            "On Debian and Ubuntu: apt install python3-venv"
}

# A virtual environment made from another one sees that one's base, not that one: a path file does the rest.
borrow_site_packages() {
    local target
    target=$("$venv_python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$host_python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$target/borrowed-torch.pth"
}

make_venv() {
    check_host_python
    local options=() found=""
    [ ! -f "$venv/pyvenv.cfg" ] || options+=(--clear) # a broken one: its Python is gone
    if [ -z "$requested_torch" ] && found=$(torch_version "$host_python"); then
        options+=(--system-site-packages)
        say "creating $venv with Python $(python_version "$host_python"), sharing its torch $found (no download)"
    else
        say "creating $venv with Python $(python_version "$host_python")"
    fi
    "$host_python" -m venv "${options[@]}" "$venv" || fail "$host_python -m venv $venv failed (see above)."
    if [ -n "$found" ] && ! torch_version "$venv_python" >/dev/null; then
        borrow_site_packages
    fi
}

install_torch() {
    local found=""
    # A torch that an earlier TORCH= put there is not kept once TORCH= is gone.
    if [ -z "$requested_torch" ] && { [ ! -f "$stamp" ] || grep -q '^torch default$' "$stamp"; } &&
        found=$(torch_version "$venv_python"); then
        say "torch $found is already there"
        return
    fi
    printf 'torch %s\n' "${requested_torch:-default}" >"$stamp" # not yet a whole stamp
    say "installing ${requested_torch:-$default_torch} (the largest download; a few minutes on a slow line)"
    pip_install "${requested_torch:-$default_torch}" ||
        fail "pip could not install ${requested_torch:-$default_torch} for Python $(python_version "$venv_python") (see above)." \
            'Another version: make test TORCH="torch==X.Y.Z"; another Python: make test PYTHON=python3.11'
    found=$(torch_version "$venv_python") ||
        fail "${requested_torch:-$default_torch} is installed but cannot be used: it does not import, or it is too old." \
            "Try: $venv_python -c 'import torch; print(torch.__version__)'"
}

install_project() {
    say "installing MemScale (editable) with its extras $extras"
    # The constraint: nothing below may exchange the torch chosen above.
    "$venv_python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$venv/constraints.txt"
    local name
    for name in $oldest; do
        sed -n "s/.*\"$name>=\([0-9.]*\)\".*/$name==\1.*/p" pyproject.toml >>"$venv/constraints.txt"
    done
    pip_install --constraint "$venv/constraints.txt" --editable ".[$extras]" ||
        fail "pip could not install the project's dependencies (see above)."
}

[ -f pyproject.toml ] || fail "no pyproject.toml in $PWD"

if [ -x "$venv_python" ] && [ -n "$requested_python" ]; then
    have=$(python_version "$venv_python")
    asked=$(python_version "$requested_python") || fail "$requested_python does not run."
    [ "$have" = "$asked" ] ||
        fail "$venv has Python $have, and PYTHON=$requested_python is $asked." \
            "Keep both: make test PYTHON=$requested_python VENV=.venv-$asked; or begin again: make distclean"
fi

if [ -x "$venv_python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(wanted)" ]; then
    exit 0
fi

"$venv_python" -c '' 2>/dev/null || make_venv
"$venv_python" -m pip --version >/dev/null 2>&1 || "$venv_python" -m ensurepip >/dev/null ||
    fail "$venv has no pip, and its Python cannot install one." "Begin again: make distclean"
install_torch
install_project
wanted >"$stamp"
say "done: Python $("$venv_python" -c 'import platform; print(platform.python_version())'), torch $(torch_version "$venv_python"), in $venv"
