# make demo and make test set everything up by themselves: they need Python 3.11 or newer, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test test-all bench lint clean

demo: $(READY)  ## train on the bundled digits and draw the landscape around what comes out
	$(BIN)/landscape demo -o demo

test: $(READY)  ## the tests that CI runs
	$(BIN)/python -m pytest

test-all: $(READY)  ## the slow ones, too
	$(BIN)/python -m pytest -m ""

bench: $(READY)  ## side-by-side timings, as ratios
	$(BIN)/python -m tests.benchmarks

lint: $(READY)  ## style and types
	$(BIN)/ruff format --check landscape tests
	$(BIN)/ruff check landscape tests
	$(BIN)/mypy

# torch comes first and pinned, so that nothing else draws in another build of it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'landscape needs Python 3.11 or newer')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info demo
