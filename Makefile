# Each target works from a bare clone: it makes .venv first, and a second run reuses it.
#
#   make demo     train, die at the worst moment, find out, mend, train on
#   make test     all tests            make check    lint, format, types
#   make bench    every figure that this project claims, measured on your machine
#
# PYTHON picks the interpreter (3.10 or newer), TORCH the torch that pip installs. Without a GPU the
# small build does:  make test TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check format bench fixtures venv clean FORCE

demo: $(STAMP)
	VENV=$(VENV) scripts/demo.sh

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks

fixtures: $(STAMP)
	$(BIN)/python fixtures/generate.py

venv: $(STAMP)

# Made again when the dependencies or the wished torch change.
$(STAMP): pyproject.toml $(VENV)/.torch
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[train,export,dev]'
	@touch $@

$(VENV)/.torch: FORCE
	@mkdir -p $(VENV)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

clean:
	rm -rf $(VENV) demo-run .mypy_cache .ruff_cache .pytest_cache .hypothesis
