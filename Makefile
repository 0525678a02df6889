# Each target starts from a fresh clone: it makes the virtual environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-

.PHONY: example test test-all lint docs notebooks wheel bench clean check-python

example: $(STAMP)example
	$(BIN)/python examples/epilepsy.py

test: $(STAMP)test
	$(BIN)/python -m pytest -m "not slow" --numprocesses=logical --dist=worksteal

test-all: $(STAMP)bench
	$(BIN)/python -m pytest --numprocesses=logical --dist=worksteal

lint: $(STAMP)test
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

docs: $(STAMP)docs
	$(BIN)/python -m sphinx --fresh-env --write-all --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

notebooks: $(STAMP)notebooks
	$(BIN)/python examples/notebooks.py

wheel: $(STAMP)wheel
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python tests/packaging/check.py dist

bench: $(STAMP)bench
	$(BIN)/python tests/benchmarks/compare.py --help

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache examples/output docs/_build docs/examples

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "pymc_ngvi needs Python 3.12 or newer; " + sys.executable + " is " + sys.version.split()[0] + ". Install one, or point to it: make PYTHON=python3.12 ...")'

$(STAMP)%: pyproject.toml | check-python
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --group $*
	@touch $@
