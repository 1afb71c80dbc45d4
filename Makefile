# Two commands for a fresh machine: `make demo` shows what Residua does, `make test` proves that it works.
# `make test-all` proves the rest: slow tests, every instruction set, the sanitizer.
PYTHON ?= python3
OLDEST_PYTHON ?= python3.10
NEWEST_PYTHON ?= python3.13
# For a machine whose package index lacks the newest torch: NEWEST_TORCH=torch==2.13.0, everything else still the newest.
NEWEST_TORCH ?= torch
# A package index with CPU builds of torch, if you have one; without it pip takes torch from where it takes the rest.
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PIP := $(BIN)/python -m pip install --quiet $(INDEX) --constraint constraints.txt
# LOCKED=1 installs the files of requirements-ci.txt, by their hashes, and no others: Linux on x86-64, Python 3.11.
LOCKED ?=
INSTALLED := $(VENV)/.installed
TEST_INSTALLED := $(VENV)/.test-installed
SOURCES := pyproject.toml setup.py $(shell find src/residua/ops/native -name '*.cpp' -o -name '*.h')
# FlashInfer's host code is tested without a GPU; its own dependencies would bring gigabytes of CUDA.
FLASHINFER := flashinfer-python apache-tvm-ffi einops ninja nvidia-ml-py tabulate
# Without the Triton kernels' tests: torch 2.8 fixes a Triton that is older than the one the kernels are written for.
OLDEST_TOOLS := pytest pytest-xdist hypothesis peft
CORE_TESTS := $(wildcard tests/test_*.py) tests/method tests/ops
# A floor against tests that silently stop running, well below what they reach. Kernels run in Triton's interpreter in
# processes of their own, and are not counted.
COVERAGE := --cov --cov-report=term --cov-fail-under=90

.PHONY: demo test test-slow test-all quick test-oldest test-newest lint kernels format install docs notebook dist fuzz sanitize load clean

demo: $(INSTALLED)
	$(BIN)/residua demo

# Every test that is not slow by nature; on two cores in less than five minutes.
test: lint $(TEST_INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# What `make test` leaves out: GPU kernels in Triton's interpreter, Ctrl-C, Ray, compiled graphs, whole walks, most of
# the fuzzer, the instruction sets between the best and the one without SIMD.
test-slow: $(TEST_INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

# Everything, with its coverage, and the native library under a sanitizer.
test-all: lint $(TEST_INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(COVERAGE)
	$(BIN)/python -m tests.fuzz.sanitize address

# The core alone: a minute on two cores.
quick: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 -m "not slow" $(CORE_TESTS)

# The claimed versions: the oldest of everything that pyproject.toml allows, and the newest there is.
test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest -n 2 --dist loadfile

test-newest: .venv-newest/.installed
	.venv-newest/bin/python -m pytest -n 2 --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Compiles every GPU kernel for every architecture; needs no GPU.
kernels: $(TEST_INSTALLED)
	$(BIN)/python -m dev.gate

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation site, in site/; a broken link or a missing docstring target is an error.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Runs the notebook from top to bottom and stores its outputs in it; a few minutes.
notebook: $(INSTALLED)
	$(PIP) nbconvert ipykernel
	TQDM_DISABLE=1 PYTHONWARNINGS=ignore $(BIN)/python -m nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False \
		--ExecutePreprocessor.timeout=1800 examples/first_hour.ipynb

# sdist, a wheel built from it, and a call on the native backend with that wheel; in environments of its own.
dist:
	$(PYTHON) tests/packaging/build_and_check.py $(INDEX)

# Random calls with other seeds than those of `make test`, for as long as you like.
SECONDS ?= 600
SEED ?= $(shell date +%s)
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz.run --seconds $(SECONDS) --first $(SEED)

# The native library under AddressSanitizer and UBSan; `make sanitize KIND=thread` for data races.
KIND ?= address
sanitize: $(INSTALLED)
	$(BIN)/python -m tests.fuzz.sanitize $(KIND)

# What docs/reliability.md says about load; takes some minutes.
load: $(INSTALLED)
	$(BIN)/python -m tests.fuzz.load

install: $(INSTALLED)

# Installed again when the package's metadata or its C++ sources change.
$(INSTALLED): $(SOURCES) constraints.txt
	$(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(BIN)/python -m pip install --quiet $(INDEX) --require-hashes --no-deps --requirement requirements-ci.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
else
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(PIP) --editable '.[all]'
endif
	touch $@

$(TEST_INSTALLED): $(INSTALLED)
ifeq ($(shell uname -s),Linux)
	$(PIP) --no-deps $(FLASHINFER)
endif
	touch $@

.venv-oldest/.installed: $(SOURCES) constraints-oldest.txt
	$(OLDEST_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet $(INDEX) --constraint constraints-oldest.txt \
		--editable '.[diffusers,lab]' $(OLDEST_TOOLS)
	touch $@

.venv-newest/.installed: $(SOURCES)
	$(NEWEST_PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade pip
	.venv-newest/bin/python -m pip install --quiet $(INDEX) --upgrade --upgrade-strategy eager \
		'$(NEWEST_TORCH)' --editable '.[all]'
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-newest build dist site .coverage* .pytest_cache .ruff_cache .mypy_cache .hypothesis residua-demo
