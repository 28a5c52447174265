# Two commands for a newcomer: `make demo` and `make test`. Each target sets up first what it needs.
.DEFAULT_GOAL := help
.PHONY: help setup packages demo test test-slow test-without test-oldest test-tensorflow test-mxnet test-orphans test-pythons test-compilers \
  test-wheel test-native test-gpu lint fmt docs bench check tsan asan wheel release \
  release-notes test-matrix test-arm clean

BIN := .venv/bin
CXX_SOURCES = $(shell find native tests/native bench -name '*.cc' -o -name '*.h')
ARGS ?=
# More than two cores, as tests wait for a third of their time.
JOBS ?= 4
WITHOUT ?= pyspark tensorflow keras jax jaxlib
ONLY ?=
PYTHONS ?=
COMPILERS ?=
ROWS ?=
PROGRAMS ?=
TAG ?=
VERSIONS ?= 2.17.1 2.19.1
MXNETS ?= 1.9.1 2.0.0b1

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## make .venv and build farandole into it; does only what has changed
	@tools/setup.sh

packages:  ## install the packages of Debian or Ubuntu that the tests need and this machine lacks
	@tools/packages.sh --install

demo:  ## train on two Spark tasks and show what happens (needs Java 17 or newer)
	@tools/check_java.sh
	@tools/setup.sh
	@$(BIN)/python -m examples.demo $(ARGS)

test: test-native  ## run the tests, but for test-slow; make test ARGS='-k name' runs some of the Python ones
	@tools/tests.sh $(JOBS) -m "not slow" $(ARGS)

test-slow: setup  ## run long jobs of Spark, Ray and several hosts, and every program of README, guides and examples
	@tools/tests.sh $(JOBS) -m slow $(ARGS)

test-without: setup  ## run the Python tests where Spark, TensorFlow, Keras and JAX, or WITHOUT=..., are not installed
	@$(BIN)/python tools/without.py $(WITHOUT) -- --ignore=tests/system/programs $(ARGS)

test-oldest: setup  ## run tests with the oldest versions that pyproject.toml promises; ONLY='jax torch' runs some, spark only so
	@$(BIN)/python tools/oldest.py $(ONLY) -- $(ARGS)

test-tensorflow: setup  ## run the tests of TensorFlow and Keras with VERSIONS=... of TensorFlow, which are downloaded
	@$(BIN)/python tools/oldest.py $(VERSIONS:%=tensorflow==%) -- $(ARGS)

test-mxnet: setup  ## run the tests of MXNet 1.9.1 and 2.0.0b1, or MXNETS=..., in environments of their own
	@$(BIN)/python tools/oldest.py $(MXNETS:%=mxnet==%) -- $(ARGS)

test-orphans: setup  ## run programs that others wrote for Horovod, or PROGRAMS='returnn deepmd-kit', in environments of their own
	@$(BIN)/python tools/orphans.py $(PROGRAMS)

test-pythons: setup  ## build with each Python from 3.11 on, or PYTHONS=..., and run the core suite with it, without a framework
	@tools/pythons.sh $(PYTHONS)

test-compilers: setup  ## build with the oldest compilers that are promised, or COMPILERS=..., and run the native tests
	@tools/compilers.sh $(COMPILERS)

test-wheel: wheel  ## install the wheel alone into an environment, and run the conformance tests there
	@tools/wheel.sh $(ARGS)

test-gpu: setup  ## run the tests of CUDA tensors; needs a GPU and make setup TORCH=cuda
	@$(BIN)/python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "test-gpu: PyTorch finds no GPU")'
	@$(BIN)/python -m pytest -k "cuda and not stand" $(ARGS) tests/conformance tests/ranks/test_torch_on_devices.py \
	  tests/ranks/test_torch_group_on_devices.py tests/ranks/test_other_frameworks_on_cuda.py

test-native: setup  ## run the native tests
	@tools/native.sh plain

lint: setup  ## look for what is wrong without running it
	@tools/lint.sh

fmt: setup  ## format Python and C++
	@$(BIN)/ruff check --select I --fix -q
	@$(BIN)/ruff format
	@$(BIN)/clang-format -i $(CXX_SOURCES)

docs: setup  ## build the documentation site; a warning is an error
	@tools/docs.sh

bench: setup  ## measure; make bench ONLY='launch native_reduce' runs some
	@tools/bench.sh $(ONLY)

check: lint test test-slow  ## all that has to pass before a merge

tsan: setup  ## run the native tests under the thread sanitizer
	@tools/native.sh thread

test-arm: setup  ## run the native tests for aarch64, with the compiler of the release, by qemu-user
	@tools/native.sh aarch64

asan: setup  ## run the native tests under the address sanitizer
	@tools/native.sh address

wheel: setup  ## build the wheels for this machine's architecture into dist/; needs CPython 3.11 and one from 3.12 on
	@$(BIN)/python tools/release.py --here

release: setup  ## build wheels for x86_64 and aarch64 and the sdist into dist/, and check them; TWICE=1 compares a second build
	@$(BIN)/python tools/release.py $(if $(TWICE),--twice)

release-notes:  ## print the notes of the version TAG=v1.2.3, or say why it cannot be released
	@python3 tools/changelog.py "$(TAG)"

test-matrix: setup  ## try the wheel of dist/ beside many Pythons and frameworks, or ROWS='torch-2.13'; writes the table of the documents
	@$(BIN)/python tools/matrix.py $(ROWS)

clean:  ## remove what was built; .venv stays
	@rm -rf build .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
