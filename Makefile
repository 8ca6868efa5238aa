# Every target does its own set-up. Two variables change what is set up:
#   make setup TORCH="torch==2.6.0"   installs another torch than the pinned one
#   make setup VENV=/path/to/env      uses an environment that exists; what it already holds (torch above all) stays as it is
.DEFAULT_GOAL := help

VENV ?= .venv
STAMP = $(VENV)/.domino-lm-setup
PINNED_TORCH := torch==2.13.0
TORCH ?= $(or $(shell cat $(STAMP) 2>/dev/null),$(PINNED_TORCH))
PYTHON ?= $(shell command -v python3.11 || command -v python3)
FUZZ_EXAMPLES ?= 20000
# Two halves of the tests side by side, file by file: much of a test of several ranks is waiting. PYTEST="-n 0" runs them in one process.
SIDE_BY_SIDE := -n 2 --dist loadfile
# Not empty if somebody else chose the torch: then versions that the environment holds stay.
OWN := $(filter-out file,$(origin VENV))$(filter-out $(PINNED_TORCH),$(TORCH))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CODE := domino_lm tools tests $(wildcard benchmarks)

.PHONY: help setup demo test test-all fuzz bench chaos gpu-check walk check format clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1|/' | awk -F'|' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(STAMP)  ## build the environment (TORCH=... or VENV=... change what it holds)

demo: $(STAMP)  ## text to trained model on two CPU processes, in under four minutes
	$(BIN)/python tools/demo.py

test: $(STAMP)  ## run all tests (PYTEST="-k name" runs some)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(PYTEST)

test-all: $(STAMP)  ## run those too that try every combination and every example
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m '' $(SIDE_BY_SIDE) $(PYTEST)

fuzz: $(STAMP)  ## long run of the readers on random and damaged input
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit/data/test_fuzz.py

bench: $(STAMP)  ## compare with Megatron-core and DeepSpeed on a shaped network (root, iproute2; BENCH="--gbit 1" chooses)
	$(BIN)/python benchmarks/head_to_head.py $(BENCH)

chaos: $(STAMP)  ## an hour of kills, damage and full disks, each survived or named in docs/reliability.md (CHAOS="--only SIGKILL" takes some)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos $(CHAOS)

gpu-check: $(STAMP)  ## eight minutes on one GPU: correctness, MFU, overhead, overlap (GPU_CHECK=--rehearse tries it on a CPU)
	$(BIN)/python benchmarks/gpu_check.py $(GPU_CHECK)

walk:  ## type the README's commands into a fresh clone with a fresh environment, and record it (twenty minutes; WALK=--all: an hour)
	$(PYTHON) -m tests.readme_walk $(WALK)

check: $(STAMP)  ## format, lint and types, as CI runs them
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the code in the house format
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

clean:  ## remove what demo and tests left behind
	rm -rf runs build dist .mypy_cache .ruff_cache .hypothesis

# Set-up runs once; another TORCH on the command line runs it again.
ifneq ($(origin TORCH),file)
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(TORCH))
.PHONY: $(STAMP)
endif
endif

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)$(wildcard $(BIN)/python)" || { echo "no python3.11 on PATH; install it, or give PYTHON=/path/to/python"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, not " + sys.version.split()[0])'
	@echo "setting up $(VENV) (about a minute the first time)"
ifeq ($(OWN),)
	@cp constraints.txt $(VENV)/constraints.txt
else
	@$(if $(filter file,$(origin TORCH)),$(BIN)/python -c 'import torch' 2>/dev/null ||) $(PIP) install -q $(TORCH)
	@$(PIP) freeze --all | sed -E 's/[ =@].*//' | tr 'A-Z_' 'a-z-' > $(VENV)/held.txt
	@awk -F'==' 'NR == FNR { held[$$1]; next } { name = tolower($$1); gsub("_", "-", name); if (!(name in held)) print }' \
	  $(VENV)/held.txt constraints.txt > $(VENV)/constraints.txt
endif
	@$(PIP) install -q -c $(VENV)/constraints.txt -e '.[dev]'
	@echo '$(TORCH)' > $@
