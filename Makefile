# Two commands for a newcomer: `make demo` and `make test`. Each sets up .venv first, once.
#
#   PYTHON=python3.12        the interpreter .venv is made with (default: python3)
#   TORCH="torch==2.14.1"     another torch than the default (tools/setup.sh says which one that is)
#   VENV=.venv-2.14           another environment beside the first one
#   JOBS=4                   test processes at a time
#   PYTEST_ARGS="-k frozen"  more arguments for pytest; a path replaces the whole suite
#   CASES=1000 SEED=0        how many random models `make soak` trains, and from which seed on

PYTHON ?=
TORCH ?=
VENV ?= .venv
# A test process holds torch and transformers in memory, so four are enough on a large machine.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ "$$n" -lt 4 ] && echo "$$n" || echo 4)
PYTEST_ARGS ?=
CASES ?= 1000
SEED ?= 0

python := $(VENV)/bin/python
marker := -m "not slow"

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all setup-cuda test-cuda soak check format clean distclean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: export SETUP_PYTHON := $(PYTHON)
setup: export SETUP_TORCH := $(TORCH)
setup: export SETUP_VENV := $(VENV)
setup: ## Create or update .venv (the other commands do it by themselves)
	@bash tools/setup.sh

demo: setup ## Train a small model and show where its memory goes
	$(python) examples/demo.py

# One thread for each test process: the processes already fill the cores.
test: setup ## Run the test suite, doctests included, without the slow matrices
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(python) -m pytest -n $(JOBS) --dist worksteal $(marker) $(PYTEST_ARGS)

test-all: marker :=
test-all: test ## Run the whole test suite, the slow matrices included

# The newest CUDA build of torch, in an environment of its own (some 8 GB).
CUDA_VENV ?= .venv-cuda
setup-cuda: export SETUP_PYTHON := $(PYTHON)
setup-cuda: export SETUP_TORCH := torch>=2.13,<3
setup-cuda: export SETUP_VENV := $(CUDA_VENV)
setup-cuda: ## Create or update .venv-cuda
	@bash tools/setup.sh

# Without a GPU on the stand-in of tests/fakecuda.
test-cuda: setup-cuda ## Run the tests that need CUDA: on a card, or on a stand-in for the CUDA runtime
	settings=$$($(CUDA_VENV)/bin/python tests/fakecuda/build.py) && env $$settings OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
		$(CUDA_VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal tests/cuda $(PYTEST_ARGS)

# Exit code 1 if a wrapped model trains other than the plain one in any of the cases.
soak: setup ## Search for wrong numbers in random models: CASES=1000 SEED=0
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(python) -m properties.search --cases $(CASES) --seed $(SEED)

check: setup ## Lint, formatting, types, layers
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m mypy
	$(VENV)/bin/lint-imports --no-cache

format: setup ## Apply the formatter and the linter's safe fixes
	$(python) -m ruff check --fix
	$(python) -m ruff format

clean: ## Remove caches and build products (.venv stays)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests examples tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## The same, and .venv
	rm -rf $(VENV)
