# Everything below needs Python >= 3.10, g++ and a package index; nothing else.
PYTHON ?= python3
# The build environment needs torch on the CPU only; a CUDA build of torch pins other toolkit parts.
TORCH ?= torch==2.13.0
ARCHS ?= sm_90a sm_100a
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARCH_FLAGS := $(foreach arch,$(ARCHS),--arch $(arch))

.PHONY: help build test test-gpu check format wheel clean
.DEFAULT_GOAL := help

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml hatch_build.py $(wildcard tkbuild/launcher/*.cc tkbuild/launcher/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

build: $(STAMP)  ## compile the default profile for both archs and write all wheels to dist/
	$(BIN)/tkbuild doctor --install-toolchain --no-device
	$(BIN)/tkbuild compile $(ARCH_FLAGS)
	$(BIN)/tkbuild package $(ARCH_FLAGS) --out dist
	$(MAKE) wheel

wheel: $(STAMP)  ## write tkbuild's own wheel to dist/, for x86_64 and aarch64 hosts
	TKBUILD_LAUNCHER_ARCH=x86_64 $(BIN)/python -m build --wheel --outdir dist .
	TKBUILD_LAUNCHER_ARCH=aarch64 $(BIN)/python -m build --wheel --outdir dist .

test: $(STAMP)  ## run the tests that need no GPU
	$(BIN)/tkbuild doctor --install-toolchain --no-device
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not gpu" --timeout 600

check: $(STAMP)  ## lint, types and the tests without markers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not gpu and not toolchain" --timeout 300

test-gpu:  ## on a GPU machine with torch, apache-tvm-ffi, pytest and the built wheels; the checkout itself is not imported
	cd tests/gpu && $(PYTHON) -m pytest -c ../../pyproject.toml -m gpu -p no:cacheprovider .

format: $(STAMP)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what builds made; the store goes with `tkbuild clean`
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache tkbuild/launcher/*.so tkbuild/launcher/*.stamp $(STAMP)
