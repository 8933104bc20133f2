# make demo and make test set everything up by themselves: they need Python 3.11 or newer, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PEERS := .venv-bench
TRUTH := .venv-truth
INTEGRATIONS := .venv-integrations
LOWEST := .venv-lowest
PACKAGING := .venv-package
# The extras that the tests use, and below those of the benchmarks; a comma in a call would divide it.
TESTED := frames,report,pyhessian,bayes
TRAINERS := $(TESTED),lightning,huggingface
COMPARED := pyhessian,report
# Old packages use what newer ones of their own dependencies deprecate; elsewhere every warning is an error.
OUTDATED := -W ignore::DeprecationWarning -W ignore::PendingDeprecationWarning

# The tests start many processes, which would compile the package each time where this is set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test browser test-all test-integrations test-lowest battery-huggingface ordinary-uses truth figures figures-smoke bench bench-smoke gpu fuzz chaos lint docs coverage package clean

demo: $(READY)  ## train on the bundled digits, and draw the landscape around the results
	$(BIN)/landscape demo -o demo

test: $(READY)  ## the tests that CI runs
	$(BIN)/python -m pytest -n auto

# A slow test, but of what a reader of a report does first: surfaces are turned together.
browser: $(READY)  ## turn the surfaces of a report in Chromium, if it is installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "" -n 0 tests/test_report_browser.py -k cameras

test-all: $(READY)  ## all tests, also the slow ones
	$(BIN)/python -m pytest -n auto -m ""

test-integrations: $(INTEGRATIONS)/ready  ## the callbacks, with the real Lightning and Hugging Face packages
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest -m "" tests/integrations

battery-huggingface: $(INTEGRATIONS)/ready  ## GPT-2, BERT, ViT, Llama, T5, CLIP against dense references; nothing is downloaded
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest -m "" tests/battery/test_huggingface.py

ordinary-uses: $(INTEGRATIONS)/ready  ## run scripts that a new user would write, and compare their results with references; writes tests/ordinary/uses.md
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m tests.ordinary > ordinary-uses.tmp
	mv ordinary-uses.tmp tests/ordinary/uses.md

truth: $(TRUTH)/peers  ## products of this and other packages against float64 references; writes their tables in docs/
	OMP_NUM_THREADS=1 $(TRUTH)/bin/python -m benchmarks.truth

figures: $(READY)  ## the papers' figures and tables at laptop scale, into figures/ (hours; LANDSCAPE_DATA, BUDGET=6h, JOBS=1)
	$(BIN)/landscape figures --all --jobs $(or $(JOBS),2) $(if $(BUDGET),--budget $(BUDGET))

# All runs first: with --jobs 2 alone each figure would start two processes, which take longer than its runs.
figures-smoke: $(READY)  ## the papers' figures with tiny runs on bundled data (minutes)
	OMP_NUM_THREADS=1 $(BIN)/landscape figures --all --scale smoke --share 1/1 --jobs 2 -o build/figures --runs build/runs
	OMP_NUM_THREADS=1 $(BIN)/landscape figures --all --scale smoke -o build/figures --runs build/runs

fuzz: $(READY)  ## 20,000 damaged and hostile files for every function that reads files, half with forged checksums (half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.harm files

docs: $(READY)  ## the documentation, into build/docs; a warning is an error
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -b html -E -W --keep-going -q docs build/docs
	$(BIN)/python docs/check_search.py build/docs

bench: $(PEERS)/ready  ## side-by-side timings, as ratios, in an environment with the peers
	$(PEERS)/bin/python -m benchmarks -o docs/benchmarks.json

bench-smoke: $(READY)  ## run every benchmark once, in its smallest size
	LANDSCAPE_BENCH=smoke OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks
	LANDSCAPE_BENCH=smoke OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gpu --device cpu -o build/gpu

# It sets nothing up: a machine with a GPU has a PyTorch of its own.
gpu:  ## check results and measure speed on a GPU, in at most six minutes, into gpu.json and gpu.md; ROW=NAME for one row
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu $(if $(ROW),--only $(ROW))

chaos: $(READY)  ## 500 kills and signals at random moments over all commands (about half an hour; Linux)
	$(BIN)/python -m tests.harm commands

lint: $(READY)  ## style, types and spelling
	$(BIN)/ruff format --check landscape tests benchmarks docs
	$(BIN)/ruff check landscape tests benchmarks docs
	$(BIN)/mypy
	$(BIN)/codespell $$(git ls-files)

# make test does not run the code of the figures; .ci/run does, too.
coverage: $(READY)  ## measure the share of lines and branches that make test and make figures-smoke run; fails below the shares in pyproject.toml
	rm -rf build/coverage build/coverage-figures .coverage*
	$(BIN)/python -m pytest -n auto --cov --cov-report=
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m landscape figures --all --scale smoke --jobs 2 -o build/coverage-figures --runs build/coverage-figures/runs
	$(BIN)/coverage combine --append --quiet
	$(BIN)/coverage html --quiet -d build/coverage
	$(BIN)/coverage json --quiet -o build/coverage.json
	$(BIN)/coverage report --skip-covered
	$(BIN)/python tests/coverage_limits.py build/coverage.json

test-lowest: $(LOWEST)/ready  ## make test with the lowest versions that pyproject.toml allows
	$(LOWEST)/bin/python -m pytest -n auto $(OUTDATED)

# The wheel is built from the sdist, which shows that nothing is missing there.
package: $(PACKAGING)/ready  ## sdist and wheel into dist/, their contents, and the demo from the wheel in a fresh environment
	rm -rf dist build/wheel
	$(PACKAGING)/bin/sp-repo-review . --show errskip
	$(PACKAGING)/bin/check-sdist --inject-junk
	$(PACKAGING)/bin/python -m build
	$(PACKAGING)/bin/twine check --strict dist/*
	$(PACKAGING)/bin/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet --no-compile -c constraints.txt torch
	build/wheel/venv/bin/python -m pip install --quiet -c constraints.txt "$$(ls dist/*.whl)[report]"
	build/wheel/venv/bin/python -m pip check
	cd build/wheel && venv/bin/landscape demo -o demo

# $(1): the folder of an environment; $(2): what pip installs there. torch comes first and pinned, so that
# nothing else draws in another build of it. Dependency groups need a newer pip than Python brings.
# pip would compile every module of every package, which takes longer than installing them; Python compiles
# those that are imported, once. Its warnings, such as twelve lines on an editable installation, are no news.
UNLESS_IT_FAILS = > $(1)/pip.log 2>&1 || { cat $(1)/pip.log >&2; exit 1; }
define environment
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'landscape needs Python 3.11 or newer')"
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet -c constraints.txt --upgrade pip $(UNLESS_IT_FAILS)
	$(1)/bin/python -m pip install --quiet --no-compile -c constraints.txt torch $(UNLESS_IT_FAILS)
	$(1)/bin/python -m pip install --quiet --no-compile -c constraints.txt $(2) $(UNLESS_IT_FAILS)
	touch $(1)/ready
endef

$(READY): pyproject.toml constraints.txt
	$(call environment,$(VENV),-e ".[$(TESTED)]" --group dev)

$(PEERS)/ready: pyproject.toml constraints.txt
	$(call environment,$(PEERS),-e ".[$(COMPARED)]" --group bench)

$(TRUTH)/ready: pyproject.toml constraints.txt
	$(call environment,$(TRUTH),-e ".[pyhessian]" --group truth)

# Parts of curvlinops ask for torchvision, which these products do not need and which has a torch of its own.
$(TRUTH)/peers: $(TRUTH)/ready
	$(TRUTH)/bin/python -m pip install --quiet --no-compile --no-deps -c constraints.txt --group truth-alone
	touch $@

$(INTEGRATIONS)/ready: pyproject.toml constraints.txt
	$(call environment,$(INTEGRATIONS),-e ".[$(TRAINERS)]" --group integrations)

$(PACKAGING)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/python -m pip install --quiet -c constraints.txt --upgrade pip
	$(PACKAGING)/bin/python -m pip install --quiet -c constraints.txt --group package
	touch $(PACKAGING)/ready

# pip has no resolution to the lowest versions; uv has. UV_TORCH_BACKEND=cpu brings PyTorch's CPU build;
# LOWEST_TORCH takes another version, where that build cannot be reached.
$(LOWEST)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet -c constraints.txt uv
	$(LOWEST)/bin/uv pip install --python $(LOWEST)/bin/python --resolution lowest-direct \
		$(if $(LOWEST_TORCH),"torch==$(LOWEST_TORCH)") -e ".[$(TESTED)]" --group test
	touch $(LOWEST)/ready

clean:
	rm -rf $(VENV) $(PEERS) $(TRUTH) $(INTEGRATIONS) $(LOWEST) $(PACKAGING) build dist docs/gallery .coverage* *.egg-info demo
