# Two commands on a fresh machine: `make demo` trains, `make test` tests. Both install what they need into .venv.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

export FLWR_TELEMETRY_ENABLED = 0
export FLWR_DISABLE_UPDATE_CHECK = 1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test test-slow test-all test-deployment deploy-demo lint clean

demo: $(READY)
	$(BIN)/coterie run

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow and not deployment'

test-slow: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'slow and not deployment'

test-all: test test-slow

# Needs Docker. WHEELS: a folder with PyTorch's CPU wheel; or TORCH_INDEX, an index of such wheels.
test-deployment: $(READY)
	$(BIN)/python -m pytest -m deployment -rs tests/deployment

deploy-demo:
	docker/demo.sh

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find coterie tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@echo "installing Coterie and what it needs into $(VENV) (a few minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
