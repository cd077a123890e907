# Builds, tests and shows xsoftmax. On a fresh Debian with Python 3.10 or later, g++ and make, `make test` and `make demo` set up all
# they need: a virtual environment in .venv with torch, and for the tests GoogleTest from the distribution. Targets are incremental.
#
#   make build       the package, installed into .venv
#   make test        Python tests, C++ tests, and a C++ project on the installed package (12 minutes on two cores, set-up and build included)
#   make tutorials   the notebooks of docs/tutorials, from top to bottom (5 minutes)
#   make sanitize    the library and the C++ tests once more, built with AddressSanitizer and UBSan
#   make demo        trains a language model with sampled and with exact loss, then trains and completes in C++ (10 minutes)
#   make bench       benchmarks of speed, as tables (those of quality take hours and data: see docs/results.md)
#   make cuda-check  compiles and links the CUDA kernels, and refuses spilled registers; needs no GPU (CUDA_ARCH="75;80;90;100;120": for a release)
#   make cuda-emulate  runs the CUDA kernels on the CPU: threads in five orders, and under sanitizers (8 minutes); needs no CUDA either
#   make cuda-page   fills the tables of docs/cuda.md from what cuda-emulate and cuda-check built
#   make clean       removes all that make made
#
# Variables: PYTHON (interpreter), TORCH (pip requirement or wheel), VENV, JOBS (compilers and test processes at once), PYTEST_ARGS, and
# those of .ci/cuda_check.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
JOBS ?= $(shell nproc)
CUDA_ARCH ?= 90
PYTEST_ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := build
.PHONY: build test test-python exchange test-cpp test-consumer tutorials sanitize demo bench cuda-check cuda-emulate cuda-page clean gtest python-headers

# A developer's own build must not stand in for the one under test.
unexport XSOFTMAX_LIBRARY PYTHONPATH
export PATH := $(abspath $(VENV))/bin:$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CMAKE_GENERATOR := Ninja
export PIP_DISABLE_PIP_VERSION_CHECK := 1
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER := ccache
export CMAKE_CUDA_COMPILER_LAUNCHER := ccache
# What ccache must overlook to accept the precompiled header.
export CCACHE_SLOPPINESS := pch_defines,time_macros,include_file_mtime,include_file_ctime
endif

STAMPS := build/stamps
READY := $(STAMPS)/venv
INSTALLED := $(STAMPS)/installed
SOURCES := $(shell find CMakeLists.txt cmake csrc include python_bindings setup.py pyproject.toml -type f -not -name '*.pyc')
CPP_TESTS := $(shell find tests/cpp -type f)
TORCH_PREFIX = $$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')
XSOFTMAX_PREFIX = $$(python -c 'import xsoftmax; print(xsoftmax.cmake_prefix_path)')
# Where setup.py builds the library; tests/cpp is then built in the same folder, and nothing is compiled twice.
export XSOFTMAX_BUILD_DIR := $(abspath build/package)
# apt-get where a Debian package is missing, with sudo where that is needed.
APT = $$(test $$(id -u) = 0 || echo sudo) apt-get

build: $(INSTALLED)

$(STAMPS):
	mkdir -p $@

$(READY): pyproject.toml | $(STAMPS)
	$(PYTHON) -m venv $(VENV) || { $(APT) update && $(APT) install -y python3-venv && $(PYTHON) -m venv --clear $(VENV); }
	python -m pip install -q "$(TORCH)"
	python -m pip install -q "setuptools>=77" wheel ninja cmake numpy scipy "scikit-learn>=1.6" pytest pytest-xdist hypothesis matplotlib tqdm
	touch $@

# The stamp is as old as the start of the build: what is edited meanwhile is built the next time.
$(INSTALLED): $(READY) $(SOURCES)
	touch $@.begun
	CMAKE_ARGS=-DXSOFTMAX_TESTS=OFF python -m pip install -q --no-build-isolation --no-deps --force-reinstall .
	mv $@.begun $@

# ---------------------------------------------------------------------------------------------------------------------------- tests

test: test-python test-cpp test-consumer

# The tests of a file share what they set up, so a file stays in one process.
test-python: $(INSTALLED) exchange | python-headers
	python -m pytest tests/python -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

# What Python tests compare with, or load.
exchange: $(INSTALLED) | gtest
	cmake -S . -B build/package -DXSOFTMAX_TESTS=ON >build/package.log || { cat build/package.log; exit 1; }
	cmake --build build/package --target loss_exchange optim_exchange cuda_stand_in

# What the C++ that torch.compile writes includes.
python-headers: $(READY)
	test -f "$$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
	  || { $(APT) update && $(APT) install -y python3-dev; }

# Longer than a test may be: `make test` leaves them out.
tutorials: $(INSTALLED)
	python -m pytest tests/tutorials -s -q $(PYTEST_ARGS)

gtest:
	test -f /usr/include/gtest/gtest.h || { $(APT) update && $(APT) install -y libgtest-dev; }

# One process for all tests: a process a test, as ctest has it, spends nearly all its time on loading torch.
test-cpp: $(INSTALLED) | gtest
	cmake -S . -B build/package -DXSOFTMAX_TESTS=ON >build/package.log || { cat build/package.log; exit 1; }
	cmake --build build/package
	build/package/tests/cpp/xsoftmax_tests --gtest_brief=1

sanitize: $(READY) | gtest
	cmake -S . -B build/sanitize -DXSOFTMAX_TESTS=ON -DXSOFTMAX_SANITIZE=ON -DCMAKE_CXX_FLAGS_RELEASE=-O1 \
	  -DCMAKE_PREFIX_PATH="$(TORCH_PREFIX)" >build/sanitize.log || { cat build/sanitize.log; exit 1; }
	cmake --build build/sanitize
	build/sanitize/tests/cpp/xsoftmax_tests --gtest_brief=1

test-consumer: $(INSTALLED)
	cmake -S tests/consumer -B build/consumer -DCMAKE_PREFIX_PATH="$(TORCH_PREFIX);$(XSOFTMAX_PREFIX)" >build/consumer.log \
	  || { cat build/consumer.log; exit 1; }
	cmake --build build/consumer
	build/consumer/consumer
	build/consumer/consumer_by_name
	build/consumer/consumer_readme

cuda-check: $(INSTALLED)
	CUDA_ARCH="$(CUDA_ARCH)" bash .ci/cuda_check build/package/libxsoftmax.so

# Two builds, and what tests/cuda_emulation/suite runs with them.
cuda-emulate: $(INSTALLED) | python-headers
	for build in emulate emulate-sanitize; do \
	  cmake -S tests/cuda_emulation -B build/$$build -DCMAKE_PREFIX_PATH="$(TORCH_PREFIX);$(XSOFTMAX_PREFIX)" \
	    -DEMULATE_SANITIZE=$$([ $$build = emulate ] && echo OFF || echo ON) >build/$$build.log || { cat build/$$build.log; exit 1; }; \
	  cmake --build build/$$build; \
	done
	JOBS=$(JOBS) tests/cuda_emulation/suite all build/emulate
	for order in reverse 1 2 3; do JOBS=$(JOBS) tests/cuda_emulation/suite kernels build/emulate $$order; done
	JOBS=$(JOBS) tests/cuda_emulation/suite sanitized build/emulate-sanitize

cuda-page:
	tests/cuda_emulation/suite bytes build/emulate | .ci/fill_page docs/cuda.md bytes
	.ci/cuda_resources build/cuda | .ci/fill_page docs/cuda.md registers

# ---------------------------------------------------------------------------------------------------------------------- demo, bench

demo: $(INSTALLED)
	python examples/language_model/train.py --loss sampled exact --max-minutes 1.5 --output out/language_model
	cat out/language_model/table.md
	echo "Plot: out/language_model/perplexity.png"
	cmake -S examples/cpp_app -B build/cpp_app -DCMAKE_PREFIX_PATH="$(TORCH_PREFIX);$(XSOFTMAX_PREFIX)" >build/cpp_app.log 2>&1 \
	  || { cat build/cpp_app.log; exit 1; }
	cmake --build build/cpp_app
	build/cpp_app/train --steps 1000
	build/cpp_app/complete out/language_model/model.pt "def open(self, path" --words 30

bench: $(INSTALLED)
	for script in training_step output_layer midx trees; do echo "== $$script"; python "benchmarks/$$script.py"; done

clean:
	rm -rf build $(VENV) out
