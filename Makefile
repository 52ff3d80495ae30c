# `make help` lists the targets. GPU machines: make CONSTRAINTS=my-constraints.txt ... with the torch build you want.
VENV ?= .venv
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
# Workers of one thread each: the matrices of the tests are too small to gain from threads.
WORKERS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(subst /,_,$(CONSTRAINTS))
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --root-user-action=ignore
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help demo test test-slow lint gpu-check kernels venv clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: venv ## convert, calibrate, generate and evaluate a small real model
	$(BIN)/python scripts/demo.py

test: venv ## run the tests
	$(PYTEST) -m "not slow"

test-slow: venv ## run the long tests
	$(PYTEST) -m slow

lint: venv ## check style and types
	$(BIN)/ruff check .
	$(BIN)/mypy

# Needs no environment of its own: a GPU machine's Python has the torch and triton that suit it.
gpu-check: ## check and time the kernels on this machine's GPU (PYTHON has torch and triton)
	$(PYTHON) scripts/gpu_check.py

kernels: venv ## compile all kernels for all machines, and write docs/kernels/aot.json
	$(BIN)/python scripts/compile_kernels.py

venv: $(STAMP) ## make the environment in .venv (again when pyproject.toml or constraints.txt changed)

# torch comes first, with its pin: asked for by another package, a newer build with gigabytes of CUDA could come.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@echo "venv: $(VENV) with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "venv: installing torch (1 of 2)"
	@$(PIP) --constraint $(CONSTRAINTS) torch
	@echo "venv: installing mla and its development tools (2 of 2)"
	@$(PIP) --constraint $(CONSTRAINTS) --editable '.[dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@

clean: ## remove the environment, builds and caches
	rm -rf $(VENV) build dist *.egg-info demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
