# `make demo` and `make test` set up .venv on their own, once; a changed pyproject.toml sets it up again.
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2

.PHONY: venv demo test test-slow test-gpu lint format bench build clean

venv: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "elle needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: venv
	$(BIN)/elle demo

test: venv lint
	$(BIN)/pytest --numprocesses $(JOBS)

test-slow: venv
	$(BIN)/pytest -m slow

# On a GPU machine whose Python already has torch: make test-gpu BIN=/path/to/its/bin
test-gpu:
	PYTHONPATH=src $(BIN)/python -m pytest -m gpu

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv
	$(BIN)/elle bench

build: venv
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
