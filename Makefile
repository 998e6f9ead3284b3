# Each target is a whole job: it installs what is missing (scripts/setup.sh), builds, runs.
.DEFAULT_GOAL := help
.PHONY: help demo test build bench lint format asan tsan fuzz cuda-check clean
MAKEFLAGS += --no-print-directory

FUZZ_SECONDS ?= 60
export JOBS ?= $(shell nproc)

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: build ## The main job: audit a captured transformer layer and the order test
	@scripts/demo.sh

test: build ## All tests: C++, Python, consumer project, house rules
	@scripts/setup.sh build test
	@scripts/test.sh

build: ## build/bin/sparsemla and everything beside it
	@scripts/setup.sh build
	@scripts/build.sh release

bench: build ## Speed of forward and backward, and of the rivals that are installed
	@scripts/bench.sh

lint: ## Formatting, include arrows, repository rules
	@scripts/setup.sh lint
	@scripts/lint.sh

format: ## Rewrites C++ files as .clang-format says
	@scripts/setup.sh lint
	@scripts/lint.sh --fix

asan: ## The C++ tests under AddressSanitizer and UBSan (EXCLUDE=regex: but for these)
tsan: ## The C++ tests under ThreadSanitizer (the same)
asan tsan:
	@scripts/setup.sh build
	@scripts/build.sh $@
	@scripts/ctest.sh $@ $(if $(EXCLUDE),-E '$(EXCLUDE)')

fuzz: ## FUZZ_SECONDS (60) of fuzzing the safetensors reader
	@scripts/setup.sh build fuzz
	@tests/fuzz/run.sh $(FUZZ_SECONDS)

cuda-check: ## Compiles every CUDA file; spills and local memory are errors
	@scripts/check_cuda.sh

clean: ## Removes build/ (not .venv/)
	rm -rf build
