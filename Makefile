# `make demo` and `make test` work on a fresh clone: each makes its own .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
DEMO := demo-checkpoint

# One thread a worker: the tests run many small operations, which threads only slow down.
TEST_ENV := OMP_NUM_THREADS=1

.PHONY: demo test test-full lint compile ci docs clean

demo: $(VENV)/installed
	rm -rf $(DEMO)
	$(BIN)/dsv41 make-checkpoint $(DEMO) --small
	$(BIN)/dsv41 run $(DEMO) --requests 2 --prompt 200 --chunk 64 --decode 16 --verify

test: $(VENV)/installed
	$(TEST_ENV) $(BIN)/python -m pytest -n auto -q

# Every record, placement, dialect and head count with every other, instead of each pair once.
test-full: $(VENV)/installed
	$(TEST_ENV) DSV41_FULL=1 $(BIN)/python -m pytest -n auto -q tests/backends/portable tests/backends/cuda

# mypy sees the packages that pyproject maps to other folders only once they are installed.
lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(VENV)/typed build
	$(BIN)/pip install -q --no-deps --target $(VENV)/typed .
	cd $(VENV)/typed && $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p dsv41

# Ahead of time and without a GPU, for every target that CI holds to ci/compile-budget.json.
compile: $(VENV)/installed
	$(BIN)/dsv41 compile

# Every job of ci/matrix.yaml that needs no GPU: compiled with each Triton, played back, tested.
ci: $(VENV)/installed
	$(BIN)/dsv41 ci run

docs: $(VENV)/installed
	$(BIN)/python -m dsv41.layouts_cli > docs/layouts.md
	$(BIN)/python -m dsv41.capabilities docs/backends-cuda.md
	$(BIN)/python -m dsv41.testing.docs docs/conformance.md
	$(BIN)/dsv41 ci emit

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(DEMO) build *.egg-info
