# Builds, tests and shows xsoftmax. On a fresh Debian with Python 3.10 or later, g++ and make,
# `make test` and `make demo` set up all they need: a virtual environment in .venv with torch, and
# GoogleTest from the distribution. Targets are incremental.
#
#   make build       the package, in .venv: edits of Python need no build, of C++ compile what they
#                    touch
#   make test        Python tests, C++ tests, and a C++ project on the package; make test-all: the
#                    slow tests as well, and the notebooks
#   make tutorials   the notebooks of docs/tutorials (5 minutes)
#   make demo        trains a language model with sampled and with exact loss, then trains and
#                    completes in C++ (10 minutes)
#   make bench       benchmarks of speed, as tables
#   make experiments  lists the experiments of the papers; NAME=midx_words PARTS=ptb DATA=FOLDER
#                    BUDGET=60 runs one: data sets in FOLDER, 60 minutes on one core; RECORDS=FOLDER:
#                    from nothing, to this folder; RIVALS=FOLDER: environments of other libraries
#   make lint        format and style of C++ and Python, types, spelling, links; make format mends
#                    format
#   make sanitize    the C++ tests under AddressSanitizer and UBSan
#   make wheel       dist/xsoftmax-*.whl for all Pythons, for the torch in .venv; make sdist
#   make wheels      dist/wheels: a wheel for each of TORCH_VERSIONS, tested, with an index page;
#                    with kernels too where nvcc is; make check-wheels: those of TORCH_ENDS, only
#                    built
#   make release VERSION=1.2.3  checks versions and changelog, tests, compiles the CUDA kernels where
#                    nvcc is, builds wheels, sources and site, writes checksums and lists of
#                    components, and makes the tag
#   make docker      an image with torch, the library and the examples; make docker-cuda: with the
#                    CUDA kernels
#   make test-wheel  installs that wheel into a new environment and tests it there; make test-sdist
#   make test-wheel-bits  builds the wheel for TORCH_MINOR twice, in two folders, and compares them
#   make aarch64     compiles and links the library for 64-bit ARM; fetches torch's wheel (0.4 GB)
#   make cuda-check  compiles and links the CUDA kernels, refuses spilled registers; needs no GPU
#                    (CUDA_ARCH=release: for all devices of a release)
#   make cuda-emulate  runs the CUDA kernels on the CPU: five orders, under sanitizers (half
#                    an hour); make cuda-emulate-brief: one order (8 minutes)
#   make gpu         builds for the GPU of this machine, tests and measures: build/gpu/cuda.json
#   make cuda-page   fills the tables of docs/reference/kernels.md from cuda-emulate, cuda-check
#   make docs        the site, into build/docs/html, and its checks: warnings, links, spelling, a
#                    browser at two widths; XSOFTMAX_DOCS_EXECUTE=off: without notebooks' output
#   make docs-links  checks the site's links to other sites
#   make clean       removes what make built, but for the packages in dist
#
# Variables: PYTHON (interpreter), TORCH (pip requirement or wheel), VENV, JOBS (compilers and test
# processes at once), PYTEST_ARGS, WHEEL (make demo: a wheel to install instead of a build), MINUTES
# (limit of the measurements of make gpu), TORCH_VERSIONS (make wheels), TORCH_ENDS (make
# check-wheels), TORCH_MINOR (make test-wheel-bits), ORDERS (of threads: make cuda-emulate), and those
# of .ci/wheels and .ci/cuda_check.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
JOBS ?= $(shell nproc)
ORDERS ?= reverse 1 2 3
TORCH_VERSIONS ?= 2.11 2.12 2.13 2.14 2.15
TORCH_ENDS ?= $(firstword $(TORCH_VERSIONS)) $(lastword $(TORCH_VERSIONS))
TORCH_MINOR ?= $(basename $(patsubst torch==%,%,$(TORCH)))
PYTEST_ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := build
.PHONY: build test test-all test-python test-slow test-minutes test-cpp test-consumer exchange
.PHONY: cpp-tests
.PHONY: tutorials sanitize demo bench experiments gpu cuda-check cuda-emulate cuda-emulate-brief cuda-page
.PHONY: lint format clean gtest python-headers
.PHONY: docker docker-cuda
.PHONY: wheel wheels check-wheels release wheel-tools test-wheel test-wheel-bits sdist test-sdist aarch64 docs docs-links doxygen

# What .ci/passed notes with a pass of check-wheels.
export TORCH_ENDS
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
INSTALLED := $(STAMPS)/$(if $(WHEEL),wheel,installed)
LINT_READY := $(STAMPS)/lint
INTEGRATIONS := $(STAMPS)/integrations
SOURCES := $(shell find CMakeLists.txt cmake csrc include setup.py pyproject.toml -type f) \
  python_bindings/xsoftmax/__init__.py
# Python compiles what it imports; packages hold much that no test imports.
PIP_INSTALL := python -m pip install -q --no-compile
BUILD_TOOLS := "setuptools>=77" wheel ninja cmake numpy
CPP_TESTS := $(shell find tests/cpp -type f)
TORCH_PREFIX = $$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')
XSOFTMAX_PREFIX = $$(python -c 'import xsoftmax; print(xsoftmax.cmake_prefix_path)')
# $(call configure,SOURCES,NAME,OPTIONS): configures build/NAME, and shows the output if that fails.
configure = cmake -S $(1) -B build/$(2) $(3) >build/$(2).log 2>&1 || { cat build/$(2).log; exit 1; }
# Test programs find torch by a path in this folder, also after the build of a wheel (setup.py).
WITH_TESTS = -DXSOFTMAX_TESTS=ON -DCMAKE_BUILD_WITH_INSTALL_RPATH=OFF
CONFIGURE_CPP_APP = $(call configure,examples/cpp_app,cpp_app,\
  -DCMAKE_PREFIX_PATH="$(TORCH_PREFIX);$(XSOFTMAX_PREFIX)")
# setup.py builds the library here, and tests/cpp is built here too, so nothing is compiled twice.
export XSOFTMAX_BUILD_DIR := $(abspath build/package)
# apt-get where a Debian package is missing, with sudo where that is needed.
APT = $$(test $$(id -u) = 0 || echo sudo) apt-get

build: $(INSTALLED)

$(STAMPS):
	mkdir -p $@

$(READY): pyproject.toml | $(STAMPS)
	$(PYTHON) -m venv $(VENV) || { $(APT) update && $(APT) install -y python3-venv \
	  && $(PYTHON) -m venv --clear $(VENV); }
	$(PIP_INSTALL) "$(TORCH)" $(BUILD_TOOLS) scipy "scikit-learn>=1.6" pytest pytest-xdist hypothesis \
	  matplotlib tqdm
	touch $@

# Packages that tests of integrations and of ONNX models need, as pyproject.toml lists them. RecBole
# pins versions that nothing of it needs, so it comes without dependencies.
extra = $(shell sed -n 's/^$(1) = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
$(INTEGRATIONS): $(READY)
	$(PIP_INSTALL) "$(TORCH)" $(call extra,integrations) $(call extra,deployment) \
	  $(filter-out recbole==%,$(call extra,recbole))
	$(PIP_INSTALL) --no-deps $(filter recbole==%,$(call extra,recbole))
	touch $@

ifdef WHEEL
$(INSTALLED): $(READY) $(wildcard $(WHEEL))
	python -m pip install -q --no-deps --force-reinstall $(wildcard $(WHEEL))
	rm -f $(STAMPS)/installed
	touch $@
else
# The stamp carries the time the build started, so edits made during a build trigger another.
$(INSTALLED): $(READY) $(SOURCES)
	touch $@.begun
	CMAKE_ARGS="-DXSOFTMAX_TESTS=OFF -DXSOFTMAX_MANYLINUX=OFF" \
	  python -m pip install -q --no-build-isolation --no-deps -e .
	rm -f $(STAMPS)/wheel
	mv $@.begun $@
endif

# ----------------------------------------------------------------------------------------- packages

# The time of the files in wheels, so that two builds of a commit have the same bits.
wheel wheels test-wheel-bits release: export SOURCE_DATE_EPOCH := $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null || echo 1700000000))

# What a build of wheels needs in the Python that runs it: .venv, or a container's.
wheel-tools:
	python -m pip install -q "$(TORCH)"
	python -m pip install -q -r .ci/wheel-requirements.txt

# From the objects of `make build`, linked anew.
wheel: $(READY) wheel-tools
	rm -rf build/wheel dist/xsoftmax-*.whl
	umask 022; XSOFTMAX_LOCAL_VERSION=1 CMAKE_ARGS="-DXSOFTMAX_TESTS=OFF -DXSOFTMAX_MANYLINUX=ON" \
	  python -m pip wheel -q --no-build-isolation --no-deps -w build/wheel .
	.ci/repair_wheel build/wheel/xsoftmax-*.whl dist

wheels:
	PYTHON="$(PYTHON)" .ci/wheels $(TORCH_VERSIONS)

# Without tests, which need several GB of libraries for each torch.
check-wheels:
	PYTHON="$(PYTHON)" CUDA=0 TEST=0 .ci/wheels $(TORCH_ENDS)
	.ci/passed record $@

# Checks first, so that nothing is built for a release that cannot be.
release:
	$(PYTHON) .ci/release.py "$(VERSION)" check
	rm -rf dist
	$(MAKE) lint test
	. .ci/cuda_toolkit; test -z "$$(find_nvcc)" \
	  || CUDA_ARCH=release .ci/cuda_check build/package/libxsoftmax.so
	$(MAKE) wheels sdist docs
	build/lint-venv/bin/python .ci/release.py "$(VERSION)" finish $(TORCH_VERSIONS)

# Two builds of the wheel for one torch, which must not differ.
test-wheel-bits:
	PYTHON="$(PYTHON)" .ci/wheel_bits $(TORCH_MINOR)

test-wheel: wheel
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" tests/wheel/run dist/xsoftmax-*.whl

sdist: $(READY)
	rm -f dist/xsoftmax-*.tar.gz
	python -c 'from setuptools import build_meta; print(build_meta.build_sdist("dist"))'

# pip must find it by its name, too. It is built in a folder of its own, so all of it is compiled.
test-sdist: sdist wheel-tools
	rm -rf build/sdist
	mkdir -p build/sdist
	python -m pip download -q --no-deps --no-build-isolation --no-index --find-links dist \
	  --no-binary xsoftmax -d build/sdist xsoftmax
	cmp dist/xsoftmax-*.tar.gz build/sdist/xsoftmax-*.tar.gz
	tar -xzf dist/xsoftmax-*.tar.gz -C build/sdist --strip-components=1
	make -C build/sdist test-wheel VENV="$(abspath $(VENV))" READY="$(abspath $(READY))"

# With docker or podman, whichever is there.
ENGINE = $(or $(shell command -v docker podman 2>/dev/null | head -1),$(error make docker: expected docker or podman))
IMAGE_ARGS = --build-arg TORCH="$(TORCH)" $(if $(PIP_EXTRA_INDEX_URL),--build-arg PIP_EXTRA_INDEX_URL)
# $(call image,NAME,FILE,OPTIONS): builds an image and starts it.
define image
$(ENGINE) build $(IMAGE_ARGS) $(3) -t $(1) -f packaging/docker/$(2) .
$(ENGINE) run --rm $(1) examples/language_model/train.py --help >/dev/null
endef
docker:
	$(call image,xsoftmax,Dockerfile)

docker-cuda:
	$(call image,xsoftmax-cuda,Dockerfile.cuda,$(if $(CUDA_ARCHITECTURES),--build-arg CUDA_ARCHITECTURES="$(CUDA_ARCHITECTURES)"))

aarch64: $(READY)
	command -v aarch64-linux-gnu-g++ >/dev/null \
	  || { $(APT) update && $(APT) install -y g++-aarch64-linux-gnu; }
	.ci/aarch64_check

# -------------------------------------------------------------------------------------------- tests

# Packages are installed while the library compiles.
test:
	$(MAKE) -j3 $(INSTALLED) $(INTEGRATIONS) $(LINT_READY)
	$(MAKE) test-python test-cpp test-consumer

test-all: test test-slow test-minutes tutorials

# The tests of a file share what they set up, so a file stays in one process.
test-python: $(INSTALLED) $(INTEGRATIONS) exchange $(LINT_READY) | python-headers
	python -m pytest tests/python -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

# What Python tests compare with, or load.
exchange: $(INSTALLED) | gtest
	$(call configure,.,package,$(WITH_TESTS))
	cmake --build build/package --target loss_exchange optim_exchange tools_exchange cuda_stand_in
	$(CONFIGURE_CPP_APP)
	cmake --build build/cpp_app --target serve

# What the C++ that torch.compile writes includes.
python-headers: $(READY)
	test -f "$$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
	  || { $(APT) update && $(APT) install -y python3-dev; }

# Tests that take longer than five seconds.
test-slow: $(INSTALLED) $(INTEGRATIONS) exchange $(LINT_READY) | python-headers
	python -m pytest tests/python -m "slow and not minutes" -n $(JOBS) --dist loadfile -q $(PYTEST_ARGS)

# Tests that take minutes: everything of a kind instead of a sample.
test-minutes: $(INSTALLED) $(INTEGRATIONS) exchange $(LINT_READY) | python-headers
	python -m pytest tests/python -m minutes -n $(JOBS) --dist loadfile -q $(PYTEST_ARGS)

tutorials: $(INSTALLED)
	python -m pytest tests/tutorials -s -q $(PYTEST_ARGS)

gtest:
	test -f /usr/include/gtest/gtest.h || { $(APT) update && $(APT) install -y libgtest-dev; }

cpp-tests: $(INSTALLED) | gtest
	$(call configure,.,package,$(WITH_TESTS))
	cmake --build build/package

# One process for all tests: one process per test, as in ctest, would spend most of its time on
# loading torch.
test-cpp: cpp-tests
	build/package/tests/cpp/xsoftmax_tests --gtest_brief=1

# What touches memory is compiled anew, the other objects are those of the tests' build.
sanitize: cpp-tests
	$(call configure,.,sanitize,-DXSOFTMAX_TESTS=ON -DXSOFTMAX_SANITIZE=ON \
	  -DXSOFTMAX_CXX_OBJECTS="$(abspath build/package)" -DCMAKE_CXX_FLAGS_RELEASE=-O0 \
	  -DCMAKE_PREFIX_PATH="$(TORCH_PREFIX)")
	cmake --build build/sanitize
	build/sanitize/tests/cpp/xsoftmax_tests --gtest_brief=1
	.ci/passed record $@

test-consumer: $(INSTALLED)
	$(call configure,tests/consumer,consumer,\
	  -DCMAKE_PREFIX_PATH="$(TORCH_PREFIX);$(XSOFTMAX_PREFIX)")
	cmake --build build/consumer
	build/consumer/consumer
	build/consumer/consumer_by_name
	build/consumer/consumer_readme
	build/consumer/consumer_documented

cuda-check: $(INSTALLED)
	.ci/cuda_check build/package/libxsoftmax.so

# What it installs has kernels, so the next `make build` installs anew.
gpu: $(READY) | python-headers
	JOBS=$(JOBS) .ci/gpu $(INSTALLED)

EMULATION = $(call configure,tests/cuda_emulation,$(1),-DEMULATE_SANITIZE=$(2) \
  -DCMAKE_PREFIX_PATH="$(TORCH_PREFIX);$(XSOFTMAX_PREFIX)"); cmake --build build/$(1)

cuda-emulate-brief: $(INSTALLED) | python-headers
	$(call EMULATION,emulate,OFF)
	tests/cuda_emulation/suite tool build/emulate
	JOBS=$(JOBS) tests/cuda_emulation/suite kernels build/emulate forward
	.ci/passed record $@

cuda-emulate: cuda-emulate-brief
	JOBS=$(JOBS) tests/cuda_emulation/suite all build/emulate
	for order in $(ORDERS); do \
	  JOBS=$(JOBS) tests/cuda_emulation/suite kernels build/emulate $$order; \
	done
	$(call EMULATION,emulate-sanitize,ON)
	JOBS=$(JOBS) tests/cuda_emulation/suite sanitized build/emulate-sanitize

cuda-page:
	tests/cuda_emulation/suite bytes build/emulate | .ci/fill_page.py docs/reference/kernels.md bytes
	.ci/cuda_resources.py build/cuda | .ci/fill_page.py docs/reference/kernels.md registers

# --------------------------------------------------------------------------------------------- lint

# The tools have an environment of their own and do not change .venv, whose torch mypy reads.
LINT_PATH = PATH="$(abspath build/lint-venv)/bin:$$PATH"

$(LINT_READY): .ci/lint-requirements.txt | $(READY)
	python -m venv --clear build/lint-venv
	build/lint-venv/bin/python -m pip install -q --no-compile -r $<
	touch $@

lint: $(LINT_READY)
	$(LINT_PATH) .ci/lint "$(abspath $(VENV))/bin/python"

format: $(LINT_READY)
	git ls-files -- '*.h' '*.cpp' '*.cu' '*.cuh' | $(LINT_PATH) xargs clang-format -i
	git ls-files -- '*.py' | $(LINT_PATH) xargs yapf -i -p
	$(LINT_PATH) ruff check --quiet --fix-only .

# -------------------------------------------------------------------------------------- demo, bench

demo: $(INSTALLED)
	python examples/language_model/train.py --loss sampled exact --max-minutes 1.5 \
	  --output out/language_model
	cat out/language_model/table.md
	echo "Plot: out/language_model/perplexity.png"
	$(CONFIGURE_CPP_APP)
	cmake --build build/cpp_app
	build/cpp_app/train --steps 1000
	build/cpp_app/complete out/language_model/model.pt "def open(self, path" --words 30

bench: $(INSTALLED)
	for script in training_step host_cost output_layer midx topk trees; do \
	  echo "== $$script"; python "benchmarks/$$script.py"; \
	done

experiments: $(INSTALLED)
	python benchmarks/experiments.py $(NAME) $(if $(PARTS),--parts $(PARTS)) \
	  $(if $(DATA),--data "$(DATA)") $(if $(RIVALS),--rivals "$(RIVALS)") \
	  $(if $(BUDGET),--budget "$(BUDGET)") $(if $(RECORDS),--records "$(RECORDS)")

# --------------------------------------------------------------------------------------------- docs

# The tools of the site have an environment of their own, which also sees what is in $(VENV).
DOCS_VENV := build/docs-venv
DOCS_READY := $(STAMPS)/docs-venv
SITE := build/docs/html
PURELIB = 'import sysconfig; print(sysconfig.get_path("purelib"))'

$(DOCS_READY): docs/requirements.txt $(READY)
	python -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -q -r docs/requirements.txt
	echo "import site; site.addsitedir('$$(python -c $(PURELIB))')" \
	  >"$$($(DOCS_VENV)/bin/python -c $(PURELIB))/xsoftmax.pth"
	touch $@

doxygen:
	command -v doxygen >/dev/null || { $(APT) update && $(APT) install -y doxygen; }

# From nothing: Sphinx would keep the C++ names of all earlier builds, and take longer each time.
docs: $(INSTALLED) $(INTEGRATIONS) $(DOCS_READY) | doxygen
	rm -rf $(SITE) build/docs/doctrees
	$(DOCS_VENV)/bin/python -m sphinx -W --keep-going -q -j $(JOBS) -b html -d build/docs/doctrees \
	  docs $(SITE)
	$(DOCS_VENV)/bin/python docs/check_site.py $(SITE)

docs-links: $(INSTALLED) $(INTEGRATIONS) $(DOCS_READY) | doxygen
	XSOFTMAX_DOCS_EXECUTE=off $(DOCS_VENV)/bin/python -m sphinx -q -b linkcheck \
	  -d build/docs/doctrees docs build/docs/links

clean:
	rm -rf build $(VENV) out $(addprefix python_bindings/xsoftmax/,lib include share)
	rm -rf docs/reference/generated $(addprefix docs/reference/,operators.md command_line.md papers.md)
	rm -f $(filter-out %/index.md,$(wildcard docs/benchmarks/*.md))
