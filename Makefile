# `make test` and `make reproduce` need nothing but Python >= 3.11: each makes the environment once, then does its work.

BIN := .venv/bin
STAMP := .venv/.installed
DEV := .venv/.installed-dev
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: help env test test-slow reproduce results gpu lint types layout clean

help:
	@echo "make env        the environment alone, in .venv"
	@echo "make test       tests, a few minutes"
	@echo "make reproduce  train on short passkey inputs, ask in up to a million tokens, print the table"
	@echo "make gpu        the paper's sizes measured, and the tables at GPU scale (one GPU)"
	@echo "make test-slow  the tests that take longer"
	@echo "make results    the published tables, claims and figures again, from the published records"
	@echo "make lint       style"
	@echo "make types      types"
	@echo "make clean      remove the environment and the caches; records stay"

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 found (looked for python3 and python3.11 to python3.14)" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make environments: install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; exit 2; }
	$(PYTHON) -m venv --clear .venv
# Modules are compiled as they are imported; most never are.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e .
	@touch $@

# What the tests need beside that; a first table need not wait for it.
$(DEV): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

env: $(DEV)

# One process a core.
PARALLEL := --numprocesses=logical --maxprocesses=8

# Whole files a process: what a file's tests share is made once.
test: $(DEV)
	$(BIN)/python -m pytest $(PARALLEL) --dist=loadfile

test-slow: $(DEV)
	$(BIN)/python -m pytest -m slow -rP $(PARALLEL)

reproduce: $(STAMP)
	$(BIN)/infini reproduce report=table3_passkey scale=laptop

results: $(STAMP)
	$(BIN)/python -m infini.runs.renew

lint: $(DEV) layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd build/layout && $(CURDIR)/$(BIN)/lint-imports $(CURDIR)/pyproject.toml

# The packages as they are installed, `tasks` and `conf` inside `infini`, for checkers that read folders.
layout:
	@rm -rf build/layout && mkdir -p build/layout/infini
	@ln -s $(CURDIR)/infini/* $(CURDIR)/tasks $(CURDIR)/conf build/layout/infini/

types: $(DEV) layout
	$(BIN)/mypy

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Encoder-decoders need transformers, which is among what the tests need.
gpu: $(DEV)
	$(BIN)/infini bench suite=paper recipe.batch_size=1
	$(BIN)/infini bench suite=paper_models recipe.batch_size=1 recipe.segments_per_sequence=16
	$(BIN)/infini reproduce report=table2_lm scale=gpu
	$(BIN)/infini reproduce report=table3_passkey scale=gpu dims=paper_12l dims.segment_length=512 task.examples=50 \
		report.run=[linear_zero_shot,delta_zero_shot,linear_finetuned,delta_finetuned]
	$(BIN)/infini reproduce report=table4_booksum scale=gpu
