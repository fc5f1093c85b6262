# Two commands for a newcomer: `make demo` and `make test`. Each sets up .venv first, once.
#
#   PYTHON=python3.12        the interpreter .venv is made with (default: python3)
#   TORCH="torch==2.14.1"     another torch than the default (tools/setup.sh says which one that is)
#   VENV=.venv-2.14           another environment beside the first one
#   JOBS=4                   test processes at a time
#   DEVICE=cuda              where tests of devices train: cpu, virtual or cuda (tests/support/devices.py)
#   PYTEST_ARGS="-k frozen"  more arguments for pytest; a path replaces the whole suite
#   CASES=1000 SEED=0        how many random models `make search` and `make soak` train, and from which seed on
#   STEPS=2000 CYCLES=200    how long `make soak` trains, and how often it wraps and detaches
#   MUTANTS=8                how many `make mutants` makes of each package

PYTHON ?=
TORCH ?=
VENV ?= .venv
# A test process holds torch and transformers in memory, so four are enough on a large machine.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ "$$n" -lt 4 ] && echo "$$n" || echo 4)
PYTEST_ARGS ?=
DEVICE ?= cpu
CASES ?= 1000
SEED ?= 0
STEPS ?= 2000
CYCLES ?= 200
MUTANTS ?= 8

python := $(VENV)/bin/python
marker := -m "not slow"

.DEFAULT_GOAL := help
.PHONY: help setup demo tables test test-slow test-all setup-cuda test-cuda setup-oldest test-oldest coverage search soak mutants docs check format clean distclean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: export SETUP_PYTHON := $(PYTHON)
setup: export SETUP_TORCH := $(TORCH)
setup: export SETUP_VENV := $(VENV)
setup: ## Create or update .venv (the other commands do it by themselves)
	@bash tools/setup.sh

demo: setup ## Train a small model and show where its memory goes
	$(python) examples/demo.py

# One thread for each test process: the processes already fill the cores. With another DEVICE, only what depends on it.
pytest = -m pytest -n $(JOBS) --dist worksteal
ifeq ($(DEVICE),cuda)
test: setup-cuda
	$(with_cuda) $(pytest) $(on_card) --device cuda $(marker) $(PYTEST_ARGS)
else
test: setup ## Run the test suite, doctests included, without the slow matrices
	@bash tools/setup_browser.sh || echo "browser: tests/browser are skipped"
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(python) $(pytest) $(if $(filter-out cpu,$(DEVICE)),--device $(DEVICE)) $(marker) $(PYTEST_ARGS)
endif

test-slow: marker := -m slow --maxfail=1
test-slow: test ## Run the slow matrices alone, up to the first failure

test-all: marker :=
test-all: test ## Run the whole test suite, the slow matrices included

# The newest CUDA build of torch, in an environment of its own (some 8 GB). For another one:
# make test-cuda CUDA_TORCH="torch==2.14.1" CUDA_VENV=.venv-cuda-2.14
CUDA_TORCH ?= torch>=2.13,<3
CUDA_VENV ?= .venv-cuda
setup-cuda: export SETUP_PYTHON := $(PYTHON)
setup-cuda: export SETUP_TORCH := $(CUDA_TORCH)
setup-cuda: export SETUP_VENV := $(CUDA_VENV)
setup-cuda: ## Create or update .venv-cuda
	@bash tools/setup.sh

# Without a GPU on the stand-in of tests/fakecuda.
with_cuda = settings=$$($(CUDA_VENV)/bin/python tests/fakecuda/build.py) && \
	env $$settings OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(CUDA_VENV)/bin/python
# On a card one process, as tests measure what it holds.
on_card = $$([ -n "$$settings" ] || printf %s "-n 1")
test-cuda: setup-cuda ## Run the tests that need CUDA: on a card, or on a stand-in for the CUDA runtime
	$(with_cuda) $(pytest) $(on_card) tests/cuda $(marker) $(PYTEST_ARGS)

# The oldest torch, transformers, accelerate, peft and lightning that pyproject.toml allows, in an environment of its own.
OLDEST_VENV ?= .venv-oldest
setup-oldest: export SETUP_PYTHON := $(PYTHON)
setup-oldest: export SETUP_TORCH := torch==2.13.0
setup-oldest: export SETUP_VENV := $(OLDEST_VENV)
setup-oldest: export SETUP_OLDEST := 1
setup-oldest: ## Create or update .venv-oldest
	@bash tools/setup.sh

test-oldest: setup-oldest ## Run tests/integrations and tests/pains with the oldest libraries that are allowed
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(OLDEST_VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal \
		$(if $(PYTEST_ARGS),$(PYTEST_ARGS),tests/integrations tests/pains)

# Backward passes of an accelerator run in threads that Python 3.11 and older do not trace.
coverage: setup ## Run the test suite and print the branch coverage of src/; exit code 1 below 93%
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(python) $(pytest) $(marker) --cov --cov-report=term-missing:skip-covered $(PYTEST_ARGS)

# Exit code 1 if a wrapped model trains other than the plain one in any of the cases. With LOG=FILE a run that was
# stopped goes on where it was.
search: setup ## Search for wrong numbers in random models, plans and loops: CASES=1000 SEED=0
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(python) -m properties.search --cases $(CASES) --seed $(SEED) $(if $(LOG),--log $(LOG))

# Exit code 1 if tensors, resident memory, file handles, threads or temporary files grow.
soak: setup ## Train for STEPS=2000 and wrap CYCLES=200 times: nothing may grow; then `make search`
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(python) -m properties.soak --steps $(STEPS) --cycles $(CYCLES)
	$(MAKE) search

# Each mutant runs the tests of its package: minutes for one that lives. With LOG=FILE a run that was stopped goes on.
mutants: setup ## Change one thing in the source at a time, MUTANTS=8 times a package: which changes no test notices
	$(python) tools/mutate.py --mutants $(MUTANTS) --seed $(SEED) $(if $(LOG),--json $(LOG))

# From benchmarks/results, which the commands below each table write; a test checks that no page is out of date.
tables: setup ## Write the tables of README.md and docs/ anew
	$(python) -m benchmarks.tables

docs: setup ## Build the documentation into site/, warnings as errors
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict

check: setup ## Lint, formatting, types, layers
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m mypy
	$(VENV)/bin/lint-imports --no-cache

format: setup ## Apply the formatter and the linter's safe fixes
	$(python) -m ruff check --fix
	$(python) -m ruff format

clean: ## Remove caches and build products (.venv stays)
	rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests examples tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## The same, and .venv
	rm -rf $(VENV)
