# The two commands of the README are `make demo` and `make test`; both set up all they need.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test check bench clean

setup: .venv/.ready .swift/.ready

.venv/.ready: pyproject.toml constraints.txt binaries.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r binaries.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# A server for the tests; its packages are apart from ours.
.swift/.ready: swift.txt
	$(PYTHON) -m venv .swift
	.swift/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --no-deps -r swift.txt
	touch $@

demo: .venv/.ready
	$(BIN)/fmsdata demo
	$(BIN)/python examples/kill_and_rescale.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -n 2

bench: setup
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/cloud.py

clean:
	rm -rf .venv .swift build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
