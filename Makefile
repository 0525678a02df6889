# Each target starts from a fresh clone: it makes the virtual environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-
# One worker for each core, each with one thread of linear algebra; a worker that crashes ends the run.
PARALLEL := --numprocesses=logical --max-worker-restart=0
export OPENBLAS_NUM_THREADS ?= 1
# Workers, and processes that tests start, read what one of them has compiled: five seconds of each.
unexport PYTHONDONTWRITEBYTECODE
# Notebooks that run at a time.
JOBS ?= 1
# Tests whose outcome could hang on rounding, and those of what the package takes from PyMC.
OF_KERNELS := $(foreach name,linalg gaussian filled_family normals updates positive_definite,\
	$(wildcard tests/*/test_$(name).py))
OF_PYMC := $(foreach name,approximation export guide interaction layout minibatch model persistence predict \
	register samplers,$(wildcard tests/*/test_$(name).py))
# The supported minor version that $(VENV) has not.
OTHER_PYMC = $(shell $(BIN)/python -c 'import importlib.metadata as m; print("6.3" if m.version("pymc").startswith("6.4.") else "6.4")')

.PHONY: installed example test test-all battery test-kernels test-pymc record lint docs notebooks wheel bench clean check-python

# What all of the targets below need: for `make -j`, since pip can do one thing at a time.
installed: $(STAMP)test $(STAMP)notebooks $(STAMP)docs $(STAMP)wheel

example: $(STAMP)example
	$(BIN)/python examples/epilepsy.py

test: $(STAMP)test
	$(BIN)/python -m pytest -m "not slow and not battery" $(PARALLEL) --dist=loadfile

test-all: $(STAMP)bench
	$(BIN)/python -m pytest $(PARALLEL) --dist=worksteal

# Outcomes against references that are independent of the package: tests/battery/README.md.
battery: $(STAMP)test
	$(BIN)/python -m pytest tests/battery $(PARALLEL) --dist=loadgroup

test-kernels: $(STAMP)test
	$(BIN)/python tests/kernels.py $(OF_KERNELS)

test-pymc: $(STAMP)test
	@$(MAKE) --no-print-directory test-pymc-$(OTHER_PYMC)

test-pymc-%: $(VENV)-pymc-%/.installed
	$(VENV)-pymc-$*/bin/python -m pytest -m "not slow" -k "not goes_on and not in_parts" --numprocesses=logical \
		--dist=loadfile $(OF_PYMC)

# What tests/golden/test_golden.py compares with, anew: read what differs before it is committed.
record: $(STAMP)test
	cd tests && ../$(BIN)/python -m golden --make

lint: $(STAMP)test
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

docs: $(STAMP)docs
	$(BIN)/python -m sphinx --fresh-env --write-all --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	$(BIN)/python tests/packaging/site_check.py docs/_build/html
	@echo "docs/_build/html/index.html"

notebooks: $(STAMP)notebooks
	$(BIN)/python examples/notebooks.py --jobs $(JOBS)

wheel: $(STAMP)wheel
	rm -rf dist
	$(BIN)/python -m build --sdist --wheel --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/packaging/check.py dist

bench: $(STAMP)bench
	$(BIN)/python tests/benchmarks/compare.py --help
	@mkdir -p build && rm -f build/functionals.csv
	$(BIN)/python tests/benchmarks/functionals.py --out build/functionals.csv --table build/functionals.md

clean:
	rm -rf $(VENV) $(VENV)-pymc-* build dist .pytest_cache .mypy_cache .ruff_cache examples/output docs/_build docs/examples

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "pymc_ngvi needs Python 3.12 or newer; " + sys.executable + " is " + sys.version.split()[0] + ". Install one, or point to it: make PYTHON=python3.12 ...")'

$(STAMP)%: pyproject.toml | check-python
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --group $*
	@touch $@

$(VENV)-pymc-%/.installed: pyproject.toml | check-python
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable . --group tools "pymc==$*.*"
	@touch $@
.PRECIOUS: $(VENV)-pymc-%/.installed
