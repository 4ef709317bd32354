# Two commands do everything, set-up included: `make demo` and `make test`. They need python3 (3.10 or newer) only.
#
#   make demo      train an example in one process and under pp=2 on two: a minute, and a picture of both; in a small
#                  environment of its own, .venv-demo
#   make test      lint, types, import contracts, then the tests      (PYTEST_ARGS="-k mesh" selects, HALF=0 or 1 runs
#                  half of the long files, as CI does at each commit)
#   make quick     a minute of tests that start no process, for every commit
#   make test-all  the same with every combination of models, layouts and settings
#   make lint      the checks of `make test` without the tests
#   make format    let ruff rewrite the files
#   make matrix    run the parity tests and write the support matrix (README.md, docs/support_matrix.md)
#   make proofs    prove 30 model classes under ten layouts, plain, packed and with LoRA, and the scripts of tests/outside
#                  (three hours; what is known stays), and write docs/reference/proofs.md
#   make gpu       what only a GPU can show, in 45 minutes at most, and the page outputs/gpu/gpu.md; its parts: make gpu-links
#                  gpu-speed gpu-memory gpu-syncs gpu-context gpu-layouts gpu-parity gpu-checkpoints; no network:
#                  WHEELS=folder has the packages; see docs/check.md
#   make site      build docs/ into outputs/site, with a search
#   make clean     remove the virtual environment, caches and outputs

PYTHON      ?= python3
TORCH       ?= torch==2.13.0
EXTRAS      ?= dev,docs,data,lora,qlora,trl,rollouts,sentences,plots,fp8
PYTEST_ARGS ?=
# Two at a time: a test with four ranks waits for its messages half of the time.
WORKERS     ?= 2
# A machine that CI shares may stall for seconds: a failure is tried once more there, and said to have been.
RERUNS      := $(if $(CI),--reruns 1 -raR)
# CI runs half of the long test files at each commit: which half, its name says. 0 or 1 is a half, nothing is all.
HALF        ?= $(if $(CI),commit)
VENV        := .venv
BIN         := $(VENV)/bin
STAMP       := $(VENV)/.hf_parallel_installed
DEMO_VENV   := .venv-demo
DEMO_STAMP  := $(DEMO_VENV)/.hf_parallel_installed

.DEFAULT_GOAL := help
GPU_PARTS   := links speed memory syncs context layouts parity checkpoints
WHEELS      ?=
#: What has torch for CUDA: an environment that is here, else the machine's own Python.
GPU_PYTHON  ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: help install demo test quick test-all lint format matrix proofs site clean gpu $(GPU_PARTS:%=gpu-%)

help:
	@sed -n 's/^#   //p' $(MAKEFILE_LIST)

install: $(STAMP)

# torch goes first and alone: it is the one package whose build (CPU, CUDA) a machine may have to choose.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("$(PYTHON) is Python %d.%d; 3.10 or newer is needed" % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	@test -x $(BIN)/python || { echo "==> making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(BIN)/python -m ensurepip --upgrade
	@echo "==> installing $(TORCH) (the largest download)"
	$(BIN)/python -m pip install --disable-pip-version-check "$(TORCH)"
	@echo "==> installing hf-parallel with its extras [$(EXTRAS)]"
	$(BIN)/python -m pip install --disable-pip-version-check "$(TORCH)" --editable ".[$(EXTRAS)]"
	@touch $@

demo: $(DEMO_STAMP)
	PYTHONPATH=. $(DEMO_VENV)/bin/python examples/demo.py

# What this package and its extra [plots] need, and no build of the package itself: the demo runs from the sources.
DEMO_NEEDS  := "transformers>=5.16" "accelerate>=1.12" "rich>=13.0" "matplotlib>=3.9"

$(DEMO_STAMP): pyproject.toml
	@test -x $(DEMO_VENV)/bin/python || $(PYTHON) -m venv $(DEMO_VENV)
	@echo "==> installing $(TORCH), transformers, accelerate and matplotlib into $(DEMO_VENV)"
	@$(DEMO_VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check "$(TORCH)" $(DEMO_NEEDS)
	@touch $@

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(RERUNS) $(if $(HALF),--half $(HALF)) $(PYTEST_ARGS)

quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quick -q -n $(WORKERS)

test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --all $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

matrix: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/parity tests/outside --record-support
	$(BIN)/python -m tests.support_matrix

proofs: $(STAMP)
	for kind in plain packed lora scripts bf16 clean; do $(BIN)/python -m tests.prove.table --kind $$kind || exit 1; done
	$(BIN)/python -m tests.prove.table --write

gpu:
	$(GPU_PYTHON) -m benchmarks.gpu $(if $(WHEELS),--wheels $(WHEELS))

$(GPU_PARTS:%=gpu-%): gpu-%:
	$(GPU_PYTHON) -m benchmarks.gpu $* $(if $(WHEELS),--wheels $(WHEELS))

site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

clean:
	rm -rf $(VENV) $(DEMO_VENV) outputs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
