# Every target that needs the environment makes it first; `make setup` runs again only when its inputs change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Compiled modules are kept (build folders are ignored by git): without them every process that a test starts compiles
# the package again, and every worker rewrites the assertions of all test files.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest -q -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-newest test-ci-newest faults test-gpu test-ci-slow test-slow check docs tutorials fmt bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv with qsdk and its tools (does nothing when it is up to date)
	@:

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "qsdk needs Python 3.11 or newer, found " + sys.version.split()[0] + "; name one: make setup PYTHON=python3.11")'
	@echo "Making $(VENV) with qsdk and its tools (a minute or two; torch is the largest part)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: setup ## quantize, export and compare a real model on real data (one to two minutes)
	@$(BIN)/qsdk demo

test: setup ## run the tests, except the slow ones
	@$(PYTEST) -m "not slow and not gpu"

test-newest: ## run the default tests on the newest versions of all packages, and on the oldest ones allowed (an hour)
	@$(PYTHON) scripts/try_versions.py newest oldest

test-ci-newest: ## run the default tests on the newest versions, if a package registry can be reached
	@$(PYTHON) scripts/try_versions.py --if-reachable newest

test-gpu: setup ## run the tests that need a CUDA device (they skip without one)
	@$(BIN)/python -m pytest -q -n0 -m gpu tests/gpu

test-ci-slow: setup ## run the slow tests that CI runs (minutes)
	@$(PYTEST) -m "slow and not nightly"

test-slow: setup ## run every slow test, the nightly ones too (hours)
	@$(PYTEST) -m slow

faults: setup ## plant 300 faults in the package, and say which the default tests do not see (hours)
	@$(PYTEST) -m "not slow and not gpu" -p scripts.function_calls --note-calls build/calls
	@$(BIN)/python scripts/plant_faults.py --calls build/calls

check: setup ## lint, format, types, import contracts, architecture
	@$(BIN)/ruff check -q
	@$(BIN)/ruff format -q --check
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@$(BIN)/python -m pytest -q tests/house/test_architecture.py tests/house/test_size.py

docs: setup ## build the documentation site into build/site; warnings and broken links are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

tutorials: setup ## make and run the notebooks of docs/tutorials from the sources beside them
	@$(BIN)/python scripts/make_notebooks.py

fmt: setup ## format and fix what can be fixed
	@$(BIN)/ruff check -q --fix
	@$(BIN)/ruff format -q

bench: setup ## run every benchmark; ends with goals beside what was measured, and writes that table into the docs
	@set -e; for file in $$($(BIN)/python benchmarks/goals.py --others); do echo "$$file"; $(BIN)/python $$file; done
	@$(BIN)/python benchmarks/goals.py
