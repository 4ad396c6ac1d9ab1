PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-
PIP_INSTALL := $(BIN)/pip install --quiet --no-compile  # modules are compiled when they are imported, and few are

unexport PYTHONDONTWRITEBYTECODE  # or every process would compile all modules, ten seconds of importing torch and this

.DEFAULT_GOAL := help
.PHONY: help train test lint types test-cpu test-matrix test-gpu field fuzz accept format clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

$(STAMP)%: pyproject.toml
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "import sys; assert sys.version_info >= (3, 11), 'Python 3.11 or newer is needed'"
	@$(BIN)/python -c "import torch" 2>/dev/null || $(PIP_INSTALL) "torch==$(TORCH)" $(TRITON)
	$(PIP_INSTALL) --editable ".[$*]"
	@touch $@

TORCH ?= 2.13.0
TRITON ?= "triton>=3.6,<3.7"  # the one that this torch was built for

train: $(STAMP)examples ## the main job: train a language model in BF16 and in FP8, and compare (ARGS="--size 120m")
	$(BIN)/python examples/train_lm.py $(ARGS)

test: $(STAMP)dev lint ## what runs without a GPU: lint, then types beside the tests (ARGS="--all-cases" for every case)
	@$(MAKE) --no-print-directory --jobs 2 types test-cpu

lint: $(STAMP)dev ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)dev ## static types
	$(BIN)/pyright --pythonpath $(BIN)/python

# A room among ARGS is a folder of tests: ARGS="passes/save" runs tests/passes/save.
ROOMS = $(foreach word,$(ARGS),$(if $(wildcard tests/$(word)),tests/$(word),$(word)))

test-cpu: $(STAMP)dev ## the tests alone, two at a time (ARGS="passes/save" or ARGS="-k name")
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ROOMS)

test-matrix: ## the tests under each torch from 2.11 on, an environment each, and a table (ARGS="--torch 2.15 -- tests/optimizer")
	$(PYTHON) -m tests.matrix $(ARGS)

test-gpu: ## every GPU test, with the python on the path; prints what failed
	$(PYTHON) -m pytest tests/gpu tests/distributed --on-gpus $(ARGS)

field: $(STAMP)dev $(STAMP)field ## gradients of small versions of all rows of the field suite (ARGS="-k T5")
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/benchmarks/test_field.py -m "field or not field" -n 2 --dist worksteal $(ARGS)

fuzz: ## random models, with the python on the path (ARGS="--models 5000 --device cuda --jobs 32"; docs/fuzzing.md)
	$(PYTHON) -m tests.fuzz $(ARGS)

accept: $(STAMP)dev ## renew the golden graphs, outputs in the docs, docs/api.md and docs/imports.md, after reading their differences
	FP8COMPILE_ACCEPT=1 $(BIN)/python -m pytest tests/passes tests/project/test_docs.py tests/project/test_imports.py $(ARGS)

format: $(STAMP)dev ## let ruff lay out the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove environments and what runs left behind
	rm -rf $(VENV) .venv-torch-* runs .pytest_cache .ruff_cache *.egg-info
