PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: quickstart test test-slow check clean

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): PyTorch, Ray, MLflow and the rest, a few minutes once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

quickstart: $(READY)  ## Find the fastest configuration that fits, on this machine
	$(BIN)/brimful run experiments/quickstart.yaml

test: $(READY)  ## All tests; those that need a Debian package say its name and are skipped without it
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not (slow or trains or ray or browser)'
	$(BIN)/python -m pytest -n 2 --dist loadfile -m '(trains or ray or browser) and not slow'

test-slow: $(READY)  ## The tests that `make test` leaves out since they take minutes
	$(BIN)/python -m pytest -m slow

check: $(READY)  ## Format, lint, strict types, import layers, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
