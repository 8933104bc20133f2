# make demo and make test set everything up by themselves: they need Python 3.11 or newer, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PEERS := .venv-bench
INTEGRATIONS := .venv-integrations
DOCS := .venv-docs

.PHONY: demo test test-all test-integrations battery-huggingface figures figures-smoke bench fuzz chaos lint docs clean

demo: $(READY)  ## train on the bundled digits and draw the landscape around what comes out
	$(BIN)/landscape demo -o demo

test: $(READY)  ## the tests that CI runs
	$(BIN)/python -m pytest -n auto

test-all: $(READY)  ## the slow ones, too
	$(BIN)/python -m pytest -n auto -m ""

test-integrations: $(INTEGRATIONS)/ready  ## the callbacks, with the real Lightning and Hugging Face packages
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest -m "" tests/integrations

battery-huggingface: $(INTEGRATIONS)/ready  ## GPT-2, BERT, ViT, Llama, T5, CLIP against dense references; nothing is downloaded
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest -m "" tests/battery/test_huggingface.py

figures: $(READY)  ## every figure and table of the papers at laptop scale, into figures/ (hours; LANDSCAPE_DATA)
	$(BIN)/landscape figures --all --nproc 2

figures-smoke: $(READY)  ## the same with bundled data, to see that each can be made
	OMP_NUM_THREADS=1 $(BIN)/landscape figures --all --scale smoke --nproc 2 -o build/figures --runs build/runs

fuzz: $(READY)  ## 10,000 damaged and hostile files for every reader, in processes with limits (15 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz

docs: $(DOCS)/ready  ## the documentation, into build/docs; a warning is an error
	OMP_NUM_THREADS=1 $(DOCS)/bin/python -m sphinx -b html -E -W --keep-going -q docs build/docs
	$(DOCS)/bin/python docs/check_search.py build/docs

bench: $(PEERS)/ready  ## side-by-side timings, as ratios, in an environment with the peers
	$(PEERS)/bin/python -m tests.benchmarks

chaos: $(READY)  ## 500 kills and signals at random moments over all commands (about half an hour; Linux)
	$(BIN)/python -m tests.chaos

lint: $(READY)  ## style and types
	$(BIN)/ruff format --check landscape tests docs
	$(BIN)/ruff check landscape tests docs
	$(BIN)/mypy

# torch comes first and pinned, so that nothing else draws in another build of it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'landscape needs Python 3.11 or newer')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(READY)

$(PEERS)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt torch
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	touch $(PEERS)/ready

$(INTEGRATIONS)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet -c constraints.txt torch
	$(INTEGRATIONS)/bin/python -m pip install --quiet -c constraints.txt -e ".[dev,lightning,huggingface]"
	touch $(INTEGRATIONS)/ready

$(DOCS)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt torch
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $(DOCS)/ready

clean:
	rm -rf $(VENV) $(PEERS) $(INTEGRATIONS) $(DOCS) build dist *.egg-info demo
