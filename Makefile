# Two commands for a fresh machine: `make demo` shows what Residua does, `make test` proves that it works.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
INSTALLED := $(VENV)/.installed
TEST_INSTALLED := $(VENV)/.test-installed
# FlashInfer's host code is tested without a GPU; its own dependencies would bring gigabytes of CUDA.
FLASHINFER := flashinfer-python apache-tvm-ffi einops ninja nvidia-ml-py tabulate

.PHONY: demo test lint kernels format install clean

demo: $(INSTALLED)
	$(BIN)/residua demo

test: lint $(TEST_INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile
ifeq ($(shell uname -s),Linux)
	$(MAKE) kernels
endif

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Compiles every GPU kernel for every architecture; needs no GPU.
kernels: $(TEST_INSTALLED)
	$(BIN)/residua doctor --compile-kernels

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(INSTALLED)

# Installed again when the package's metadata or its C++ sources change.
$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard src/residua/execution/native/src/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(PIP) --editable '.[all]'
	touch $@

$(TEST_INSTALLED): $(INSTALLED)
ifeq ($(shell uname -s),Linux)
	$(PIP) --no-deps $(FLASHINFER)
endif
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis residua-demo
