# The few verbs of this repository. Every one of them first sets up what it needs in .venv:
#   .venv          everything, with the training build of ONNX Runtime: coordinator, export, tests, checks
#   .venv/device   what a device holds, with stock ONNX Runtime (the two builds cannot share an environment)

PYTHON ?= python3.11
ARGS ?=

BIN := .venv/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# The same pins for what builds the package (hatchling): newer pips read the second name for that.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
INSTALLED := .venv/.installed .venv/device/.installed

BENCHMARKS := step rounds connections simulator
STUDIES := hospitals fedprox dropout

.PHONY: help demo test test-all check bench studies clean

help:
	@echo 'make demo       a fleet of devices trains a model, some die, the run goes on   (ARGS="--devices 40 --rounds 60")'
	@echo 'make test       the fast tests                                                  (ARGS="tests/protocol -k name")'
	@echo 'make test-all   all tests'
	@echo 'make check      lint, format, types, import walls'
	@echo 'make bench      the benchmarks'
	@echo 'make studies    the studies of docs/ again: more than an hour'
	@echo 'make clean      remove everything that was made here'

demo: $(INSTALLED)
	@$(BIN)/python -m examples.demo $(ARGS)

# Two processes, each with whole files of tests: most of the time goes into exporting, on one core.
test: $(INSTALLED)
	@$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile $(ARGS)

test-all: $(INSTALLED)
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

check: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy --package examples
	@MYPYPATH=benchmarks:tests/support $(BIN)/mypy benchmarks/*.py
	@$(BIN)/lint-imports

bench: $(INSTALLED)
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py $(ARGS); done

studies: $(INSTALLED)
	@set -e; for name in $(STUDIES); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py $(ARGS); done

clean:
	rm -rf .venv demo-output fedprox.runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .test-cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo >&2 \
	  'make: $(PYTHON) is not here, or older than Python 3.11. Install that, or name another: make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python'; exit 1; }
	@echo 'setting up .venv (some minutes the first time) ...'
	@$(PYTHON) -m venv .venv
	@$(BIN)/python $(PIP_INSTALL) --editable '.[all,dev]'
	@touch $@

.venv/device/.installed: pyproject.toml constraints.txt | .venv/.installed
	@echo 'setting up .venv/device ...'
	@$(BIN)/python -m venv .venv/device
	@.venv/device/bin/python $(PIP_INSTALL) --editable '.[device]'
	@touch $@
