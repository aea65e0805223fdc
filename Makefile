# `make demo` and `make test` install everything they need, on a fresh machine too.
PYTHON ?= python3
BIN := .venv/bin
# Coverage makes Python code about twice as slow. `make test COV=` leaves it out.
COV ?= --cov=fmsdata

.PHONY: setup demo test test-lowest check docs fuzz bench bench-own growth clean

setup: .venv/.ready .swift/.ready .azurite/.ready .trainers/.ready

.venv/.ready: pyproject.toml constraints.txt binaries.txt fmsdata/core/_native.c
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r binaries.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# A storage server for the tests, with packages of its own.
.swift/.ready: swift.txt
	$(PYTHON) -m venv .swift
	.swift/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --no-deps -r swift.txt
	touch $@

# Another one, which needs node.
.azurite/.ready: azurite.txt
	npm install --silent --prefix .azurite --no-package-lock --no-save --no-audit --no-fund $$(cat azurite.txt)
	touch $@

# The trainers of the integration tests, on top of the packages of .venv.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
TRAINERS_PIP := .trainers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps
.trainers/.ready: trainers.txt .venv/.ready
	$(PYTHON) -m venv .trainers
	echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" > $$(.trainers/bin/python $(PURELIB))/beside.pth
	$(TRAINERS_PIP) -c trainers.txt setuptools wheel
	$(TRAINERS_PIP) --no-build-isolation -r trainers.txt
	touch $@

demo: .venv/.ready
	$(BIN)/fmsdata demo
	$(BIN)/python examples/kill_and_rescale.py
	$(BIN)/python examples/kill_rl_prompts.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(MAKE) --no-print-directory docs

test: check
	$(BIN)/python benchmarks/guard.py
	$(BIN)/python -m pytest -n 2 $(COV)

# The website, in site/. Broken links and unknown names are errors.
docs: .venv/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# The tests with the lowest versions of the dependencies that pyproject.toml allows. Not part of `make test`.
test-lowest: .lowest/.ready .swift/.ready .azurite/.ready .trainers/.ready
	.lowest/bin/python -m pytest -n 2

.lowest/.ready: pyproject.toml lowest.txt binaries.txt
	$(PYTHON) -m venv .lowest
	.lowest/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r binaries.txt
	.lowest/bin/python -m pip install --quiet --disable-pip-version-check -c lowest.txt -e ".[dev]"
	touch $@

# Damaged files of every kind, for longer than the tests do it. The seed is random and printed.
FUZZ_SECONDS ?= 600
fuzz: .venv/.ready
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

# fmsdata beside other loaders, in about 10 minutes: tables and plots in docs/benchmarks.md.
# `make bench BENCH=--quick` takes less, on a small corpus.
# A loader that can't be installed is a row with its error.
bench: .venv/.ready
	-$(MAKE) --no-print-directory --keep-going .bench/peers/.ready .bench/mosaic/.ready
	$(BIN)/python benchmarks/peers/run.py $(BENCH)

# How cost grows with sources, lanes, shards, windows and lengths, in about 15 minutes: docs/growth.md.
growth: .venv/.ready
	$(BIN)/python benchmarks/growth.py

# The other loaders, on top of the packages of .venv. MosaicML Streaming needs an older numpy.
.bench/peers/.ready: benchmarks/peers/requirements.txt
.bench/mosaic/.ready: benchmarks/peers/requirements-mosaic.txt
.bench/%/.ready: .venv/.ready
	$(PYTHON) -m venv .bench/$*
	echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" > $$(.bench/$*/bin/python $(PURELIB))/beside.pth
	.bench/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(filter %.txt,$^)
	touch $@

bench-own: setup
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/cloud.py

clean:
	rm -rf .venv .swift .azurite .trainers .lowest .bench build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
