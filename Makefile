# Two commands on a fresh machine: `make demo` trains, `make test` tests. Both install what they need into .venv.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Versions and hashes of all that is installed, but for PyTorch; LOCK= takes the newest that pyproject.toml allows.
LOCK   ?= requirements-dev.lock

NEWEST       := build/newest
TIER         ?= and not slow
# `make test ROOM=guard` runs the tests of tests/guard alone.
ROOM         ?=
# Slow tests wait for the processes that they start, so there is one worker more than cores.
SLOW_WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
FLOWER_TESTS := tests/flower tests/deploy tests/fuzz tests/engine tests/test_golden.py

export FLWR_TELEMETRY_ENABLED = 0
export FLWR_DISABLE_UPDATE_CHECK = 1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Tests start many processes, and pytest rewrites every test file: keep the bytecode of both.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-all test-newest test-deployment deploy-demo gpu-check lint settings docs lock licences sbom \
  release-check clean

demo: $(READY)
	$(BIN)/coterie run

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow and not deployment' $(ROOM:%=tests/%)

test-slow: $(READY)
	$(BIN)/python -m pytest -n $(SLOW_WORKERS) --dist worksteal -m 'slow and not deployment' $(ROOM:%=tests/%)

test-all: test test-slow

# With the newest Flower that is supported: what depends on it, in an environment over $(VENV). TIER= adds slow tests.
test-newest: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m pytest -n auto --dist worksteal -m 'not deployment $(TIER)' $(FLOWER_TESTS)

# Needs Docker. FLOWER=newest: with that Flower. WHEELS: a folder with PyTorch's CPU wheel; or TORCH_INDEX, an index of such wheels.
test-deployment: $(READY) $(if $(filter newest,$(FLOWER)),$(NEWEST)/.ready)
	$(if $(filter newest,$(FLOWER)),$(NEWEST)/bin,$(BIN))/python -m pytest -n 2 -m deployment -rsP tests/deployment

# KEYS=delete or KEYS=keep: what becomes of the keys that were made for it; a terminal is asked.
deploy-demo:
	docker/demo.sh

# Needs a GPU. DATA: folder of the data sets.
gpu-check: $(READY)
	$(BIN)/python benchmarks/gpu_check.py $(if $(DATA),--data-dir $(DATA))

settings: $(READY)
	$(BIN)/python -m tests.generated
	$(BIN)/python -m tests.odds

# Into build/site; warnings are errors.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --cache-dir build/imports
	$(BIN)/mypy

# Renews the lock files, once a month and before a release; needs a package registry. PyTorch has other files for every device, so it is not locked.
UNLOCKED := torch torchvision triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cccl \
  nvidia-cuda-cupti nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand \
  nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx
COMPILE   = $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
  --no-emit-index-url --no-header $(UNLOCKED:%=--no-emit-package %) pyproject.toml
DEPLOYED  = --extra deploy --extra excel --extra images --extra metrics --extra parquet

lock: $(READY)
	mkdir -p build
	echo 'flwr<1.40' > build/flower.txt
	$(COMPILE) $(DEPLOYED) --constraint build/flower.txt --output-file build/requirements.lock
	$(COMPILE) --extra dev --constraint build/requirements.lock --output-file build/requirements-dev.lock
	cp build/requirements.lock build/newest.lock && $(filter-out --upgrade,$(COMPILE)) $(DEPLOYED) --upgrade-package flwr --output-file build/newest.lock
	$(BIN)/python -m tests.lock_difference build/requirements.lock build/newest.lock > build/requirements-newest.lock
	for each in requirements.lock requirements-dev.lock requirements-newest.lock; do \
	  { echo "# Renewed by make lock on $$(date -u +%F)."; cat build/$$each; } > $$each || exit; done
	@echo "now: make clean, make licences lint test, and commit the lock files with docs/dependencies.md"

licences: $(READY)
	$(BIN)/python -m tests.licences

# Of what is installed in $(VENV), in CycloneDX; the tool has an environment of its own.
sbom: $(READY)
	$(PYTHON) -m venv build/cyclonedx
	build/cyclonedx/bin/python -m pip install --quiet 'cyclonedx-bom>=7,<8'
	build/cyclonedx/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file build/sbom.cdx.json $(BIN)/python
	@echo "build/sbom.cdx.json"

# Builds the wheel and the source archive, and runs the demo from the wheel, outside the repository. Quick: with the
# packages of $(VENV). FULL=1 installs all from a package index; TORCH: what pip installs first, such as a CPU wheel.
release-check: $(READY)
	rm -rf build/release build/dist
	$(PYTHON) -m venv build/release
	build/release/bin/python -m pip install --quiet 'build>=1.2' 'twine>=6'
	build/release/bin/python -m build --outdir build/dist .
	build/release/bin/twine check --strict build/dist/*
	$(BIN)/python -m tests.release build/dist $(if $(FULL),--full) $(if $(TORCH),--torch '$(TORCH)')

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find coterie tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(NEWEST)/.ready: requirements-newest.lock $(READY)
	$(PYTHON) -m venv $(NEWEST)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(NEWEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/over.pth
	$(NEWEST)/bin/python -m pip install --quiet --require-hashes --no-deps --requirement requirements-newest.lock
	$(NEWEST)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

$(READY): pyproject.toml $(LOCK)
	@echo "installing Coterie and what it needs into $(VENV) (a few minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(if $(LOCK),$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement $(LOCK))
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
